"""GPUs by their drivers' C interfaces, which are NVIDIA's and AMD's: memory, streams, events, launches and graphs."""
