"""Triton kernels, launched by the modules beside this package. Importing one needs Triton: do it lazily.

Sizes of a model are compile-time constants. Counts of rows, which differ from call to call, are not even
specialised: a compilation in the middle of a prompt would stall it, and a count of 1 would become a constant.
"""
