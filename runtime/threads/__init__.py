"""Worker threads of a thread that calls programs: their memory, their start and their end."""
