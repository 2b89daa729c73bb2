"""`python -m prefuse` is the command `prefuse`."""

from .compiler.cli import main

if __name__ == "__main__":
    main()
