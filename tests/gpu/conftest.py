"""Fixtures of the GPU tests."""

from .simulator import simulated_gpu

__all__ = ["simulated_gpu"]
