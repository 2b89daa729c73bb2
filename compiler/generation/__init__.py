"""From a causal language model to the programs that generate text with it."""
