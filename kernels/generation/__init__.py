"""Kernels of text generation that no graph has."""
