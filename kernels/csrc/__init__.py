"""CUDA sources, compiled on first use."""
