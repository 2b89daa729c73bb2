"""Attention as exporters spell it: its core, and what around it can be read and written by the same kernel."""
