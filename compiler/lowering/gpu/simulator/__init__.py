"""A GPU on the CPU: CUDA C becomes a shared library by g++. Slow, and strict: it finds races, and reads of what nobody wrote."""
