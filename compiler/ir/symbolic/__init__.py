"""Sizes that a call decides, in graphs."""
