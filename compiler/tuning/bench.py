"""The buffers of a program that launches kernels of one group alone, and what lies in them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from math import ceil

import numpy as np

from ...kernels.groups.group import Group
from ...kernels.template.contract import BuiltKernel, Operand
from ...runtime.plan import ALIGNMENT, ARENA, CALLER, CONSTANTS, Buffer, Copy, Launch, Port, Region, Role, Step, TensorType

_MOST_COPIES = 16
_CONSTANT_BYTES = 256 << 20  # of all copies
_BLOCK_ELEMENTS = 1 << 18  # of random numbers, which long constants repeat


class Bench:
    """What the launches of several kernels of one group read and write: one set of activations, `copies` of all constants.

    Activations come from the caller, to whom the kernels write when they are checked.
    """

    def __init__(self, group: Group, kernels: Mapping[int, BuiltKernel], wanted_constant_bytes: int) -> None:
        self.group, self.kernels = group, kernels
        self.buffers: dict[str, Buffer] = {}
        self.ends = {ARENA: 0, CONSTANTS: 0}
        self.random = np.random.default_rng(0)
        read = {operand.name for kernel in kernels.values() for operand in kernel.operands}
        given = [name for name in self.group.inputs if name in read and name not in self.group.constants]
        self.inputs = {name: self._array(name) for name in given}
        self.packed = dict(self._packed_constants())
        size_bytes = sum(array.nbytes for array in self.packed.values())
        self.copies = min(max(min(wanted_constant_bytes, _CONSTANT_BYTES) // max(size_bytes, 1), 1), _MOST_COPIES)

    def _array(self, name: str) -> np.ndarray:
        """A literal itself; normal floats, integers that are safe as indices."""
        kind, literal = self.group.types[name], self.group.literals.get(name)
        if literal is not None:
            return np.ascontiguousarray(literal)
        if np.dtype(kind.dtype).kind in "biu":
            return np.zeros(kind.shape, kind.dtype)
        block = self.random.normal(size=min(kind.elements, _BLOCK_ELEMENTS)).astype(kind.dtype)
        return np.resize(block, kind.shape)

    def _packed_constants(self) -> Iterator[tuple[str, np.ndarray]]:
        """The constants as kernels read them, by the names that `_constant` gives them; equal ones once."""
        operands = [operand for kernel in self.kernels.values() for operand in kernel.operands]
        for name in dict.fromkeys(operand.name for operand in operands if operand.name in self.group.constants):
            array = self._array(name)
            for operand in {_constant(one): one for one in operands if one.name == name}.values():
                yield _constant(operand), array if operand.pack is None else operand.pack(array)

    def constants(self) -> np.ndarray:
        """The bytes of all copies, on small pages as those of a program file are."""
        memory = mmap.mmap(-1, max(self.ends[CONSTANTS], 1))
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        content = np.frombuffer(memory, np.uint8)
        for name, array in self.packed.items():
            for copy in range(self.copies):
                offset = self.buffers[f"{name}:{copy}"].offset
                assert offset is not None
                content[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return content

    def place_all(self) -> list[Step]:
        """Give everything a place but what the caller gets; the steps that bring the inputs there."""
        steps: list[Step] = []
        for name in self.inputs:
            size_bytes = self.buffers[f"{name}/caller"].size_bytes
            steps.append(Copy(Region(f"{name}/caller", 0, size_bytes), self.place(name, ARENA, size_bytes)))
        for name, array in self.packed.items():
            for copy in range(self.copies):
                self.place(f"{name}:{copy}", CONSTANTS, array.nbytes)
        for name in self.group.outputs:
            self.place(name, ARENA, self.group.types[name].size_bytes)
        self.place("/workspace", ARENA, max(kernel.workspace_bytes for kernel in self.kernels.values()))
        return steps

    def port(self, name: str, role: Role, kind: TensorType) -> Port:
        """Something of the caller's."""
        self.buffers[f"{name}/caller"] = Buffer(f"{name}/caller", role, kind.size_bytes, CALLER)
        return Port(name, kind, f"{name}/caller")

    def place(self, name: str, space: str, size_bytes: int) -> Region:
        """A buffer behind those that are there."""
        role = Role.CONSTANT if space == CONSTANTS else Role.ACTIVATION
        self.buffers[name] = Buffer(name, role, size_bytes, space, self.ends[space])
        self.ends[space] += ceil(size_bytes / ALIGNMENT) * ALIGNMENT
        return Region(name, 0, size_bytes)

    def launch(self, number: int, copy: int, label: str = "", *, is_checked: bool = False) -> Launch:
        """A call of a kernel with a copy of the constants; one whose results are checked gives them to the caller."""
        kernel, group = self.kernels[number], self.group
        reads = [f"{_constant(one)}:{copy}" if one.name in group.constants else one.name for one in kernel.operands]
        writes = [f"{name}:{number}/caller" if is_checked else name for name in group.outputs]
        scratch = (Region("/workspace", 0, kernel.workspace_bytes),) if kernel.workspace_bytes else ()
        whole = {name: Region(name, 0, self.buffers[name].size_bytes) for name in (*reads, *writes)}
        return Launch(
            symbol_of(number),
            tuple(whole[name] for name in reads),
            tuple(whole[name] for name in writes),
            scratch,
            label=label,
        )


def symbol_of(number: int) -> str:
    """The name of a kernel in the program."""
    return f"kernel{number}"


def argument_count(kernel: BuiltKernel, group: Group) -> int:
    """Pointers that a kernel takes."""
    return len(kernel.operands) + len(group.outputs) + bool(kernel.workspace_bytes)


def _constant(operand: Operand) -> str:
    return f"{operand.name}|{operand.pack or ''}"
