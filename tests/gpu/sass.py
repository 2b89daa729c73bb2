"""Reads the machine code of a cubin: NVIDIA's nvdisasm lists it, of which the instructions of each function are taken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

_FUNCTION = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)
_BRANCH = re.compile(r"BRA (?:`\()?(\.L_x_\d+)")


@dataclass(frozen=True)
class Code:
    """The instructions of a function in order, with all of their suffixes, and its listing."""

    instructions: tuple[str, ...]
    text: str

    def count(self, prefix: str) -> int:
        """Instructions whose names begin so."""
        return sum(one.startswith(prefix) for one in self.instructions)

    def loop(self) -> Code:
        """The innermost loop that multiplies the most: from a label to the last branch back to it."""
        labels = {one[1]: one.end() for one in _LABEL.finditer(self.text)}
        spans = [
            (labels[one[1]], one.start())
            for one in _BRANCH.finditer(self.text)
            if labels.get(one[1], len(self.text)) < one.start()
        ]
        bodies = [code_of(self.text[begin:end]) for begin, end in spans]
        return max(bodies, key=lambda one: (sum(map(one.count, ("HMMA", "HGMMA", "IMMA"))), -len(one.instructions)))

    def kinds(self) -> Counter[str]:
        """How many there are of each instruction, without suffixes."""
        return Counter(one.partition(".")[0] for one in self.instructions)


def code_of(text: str) -> Code:
    return Code(tuple(_INSTRUCTION.findall(text)), text)


def disassemble(cubin: bytes, folder: Path) -> dict[str, Code]:
    """The functions of a cubin by name. The test is skipped where there is no nvdisasm (PyPI: nvidia-cuda-nvdisasm)."""
    path = folder / "kernels.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([_nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    parts = _FUNCTION.split(text)
    return {name: code_of(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _nvdisasm() -> str:
    packaged = (Path(folder, "nvidia", "cu13", "bin", "nvdisasm") for folder in sys.path)
    found = shutil.which("nvdisasm") or next((str(path) for path in packaged if path.is_file()), "")
    return found or pytest.skip("nvdisasm is absent: pip install nvidia-cuda-nvdisasm")
