"""`precision="mixed"`: the format of each product that makes a program fastest, or smallest, within an error.

| file | holds |
|---|---|
| `formats` | the formats a product can have, and the graph that says which it has |
| `metrics` | how far outputs are from those of the float model |
| `plan` | an assignment of formats as a file, and what users say of it |
| `costs` | what each format of each product takes: from programs of one format, step by step |
| `choice` | the assignment by costs, damages and a budget; what to do where it misses the budget. Numbers alone |
| `trials` | programs that are compiled, measured and compared in turns |
| `search` | all of these together |
| `findings` | what was found, as tables and sentences |
| `quantizer` | `precision="mixed"` of `prefuse.compile` |
"""
