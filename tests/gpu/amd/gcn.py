"""Reads the assembly of AMD's kernels: the instructions of functions, their registers, and how far loads are from their waits."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_FUNCTION = re.compile(r"^(\w+):[^\n]*\n(.*?)^\s+s_endpgm", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s+([a-z]\w+)([^;\n]*)", re.MULTILINE)
_LABEL = re.compile(r"^(\.LBB\w+):", re.MULTILINE)
_BRANCH = re.compile(r"^\s+s_c?branch\w*\s+(\.LBB\w+)", re.MULTILINE)
_FACT = re.compile(r"^    \.(\w+): +(\w+)$", re.MULTILINE)  # those of arguments are deeper
_OUTSTANDING = re.compile(r"vmcnt\((\d+)\)")
_MEMORY = ("global_load", "global_store", "buffer_load", "buffer_store", "flat_load", "flat_store", "scratch_")  # count in vmcnt


@dataclass(frozen=True)
class Code:
    """The instructions of a function in order, each with its operands, and what the code object says of it."""

    instructions: tuple[tuple[str, str], ...]
    text: str
    facts: dict[str, str]

    def count(self, prefix: str) -> int:
        """Instructions whose names begin so."""
        return sum(name.startswith(prefix) for name, _ in self.instructions)

    def kinds(self) -> Counter[str]:
        return Counter(name for name, _ in self.instructions)

    def fact(self, name: str) -> int:
        """A number of the kernel's metadata, such as "vgpr_spill_count"."""
        return int(self.facts[name])

    def loop(self) -> Code:
        """The innermost loop that multiplies the most: from a label to the last branch back to it."""
        labels = {one[1]: one.end() for one in _LABEL.finditer(self.text)}
        spans = [
            (labels[one[1]], one.start())
            for one in _BRANCH.finditer(self.text)
            if labels.get(one[1], len(self.text)) < one.start()
        ]
        bodies = [code_of(self.text[begin:end], self.facts) for begin, end in spans]
        return max(bodies, key=lambda one: (one.count("v_mfma"), -len(one.instructions)))

    def load_distances(self) -> list[int]:
        """For each load of memory in a loop, the matrix instructions between it and the wait that needs it.

        Loads return in order, so that a wait for at most n outstanding accesses ends all but the last n. The loop is run through
        twice: a wait may stand before the load.
        """
        distances, outstanding, multiplied = [], list[tuple[bool, int]](), 0
        for name, operands in self.instructions * 2:
            multiplied += name.startswith("v_mfma")
            if name.startswith(_MEMORY):
                outstanding.append(("load" in name, multiplied))
            elif name == "s_waitcnt" and (found := _OUTSTANDING.search(operands)):
                ended = outstanding[: len(outstanding) - int(found[1])]
                distances += [multiplied - began for is_load, began in ended if is_load]
                outstanding = outstanding[len(ended) :]
        return distances


def code_of(text: str, facts: dict[str, str]) -> Code:
    return Code(tuple((one[1], one[2].strip()) for one in _INSTRUCTION.finditer(text)), text, facts)


def read_assembly(text: str) -> dict[str, Code]:
    """The kernels of an assembly by name."""
    kernels = [dict(_FACT.findall("    " + one)) for one in text.partition("amdhsa.kernels:")[2].split("\n  - ")[1:]]
    facts = {kernel["name"]: kernel for kernel in kernels if "name" in kernel}
    return {one[1]: code_of(one[2], facts[one[1]]) for one in _FUNCTION.finditer(text) if one[1] in facts}
