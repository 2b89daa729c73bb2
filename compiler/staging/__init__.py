"""Models whose shapes or control flow only a run decides: cut into stages that each compile to a program."""
