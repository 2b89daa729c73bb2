"""Numbers that a model should give, from engines that are not ours, and inputs to run them on."""
