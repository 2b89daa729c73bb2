"""Configurations of kernels found by measuring: where they are kept, how they are searched for and timed."""
