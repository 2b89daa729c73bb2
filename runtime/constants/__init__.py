"""Constants that several programs share: each once in memory, and once on disk."""
