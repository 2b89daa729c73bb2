"""Text generation: the programs of a language model, and the sessions that run them."""
