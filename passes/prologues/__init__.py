"""How groups read their operands, for fuse-prologue."""
