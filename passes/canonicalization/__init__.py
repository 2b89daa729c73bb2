"""The local rewrites of `canonicalize`, by what they do."""
