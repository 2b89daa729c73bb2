"""What programs take on a GPU of another machine: `prepare` compiles what is carried there, `run` measures it there."""
