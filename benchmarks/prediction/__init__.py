"""How far predictions of programs are from the programs."""
