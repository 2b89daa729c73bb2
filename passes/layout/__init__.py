"""Layouts of activations: what nodes permit, the choice on the whole graph, and the rewriting that carries it out."""
