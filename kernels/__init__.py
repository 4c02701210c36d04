"""Computes: tensors in, tensors out. Knows no process and imports none of the other packages."""
