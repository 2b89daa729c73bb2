"""Loops of known length: how often they run, and what their iterations become."""
