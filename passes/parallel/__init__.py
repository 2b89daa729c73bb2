"""What merge-parallel-matmul asks before it merges."""
