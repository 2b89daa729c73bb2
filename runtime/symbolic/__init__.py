"""Sizes that a call decides."""
