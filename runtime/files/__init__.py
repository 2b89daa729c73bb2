"""Where a user's files are, how several processes write them, and what says that bytes are whole."""
