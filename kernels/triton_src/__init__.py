"""Triton kernels, launched by the modules beside this package. Importing one needs Triton: do it lazily."""
