"""Several programs of one model, for different sizes of its inputs, that are called as one."""
