"""Which format each unit of a program is computed in: the problem, its exact solver, and what each choice would damage."""
