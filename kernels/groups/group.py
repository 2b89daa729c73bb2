"""The input of a kernel template: one fused group, independent of ONNX files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...runtime.plan import TensorType
from ...runtime.precision import TOLERANCES, Precision, Tolerance
from ...runtime.symbolic.sizes import SizeLike
from ..formats.format import Storage
from .configuration import Configuration


@dataclass(frozen=True)
class Op:
    """One operator of a group. `inputs` and `outputs` are value names, "" where an optional one is absent."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0  # the opset that gives op_type its meaning

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


@dataclass(frozen=True)
class Group:
    """Operators in topological order that become one kernel.

    Invariant: every value has a type; `outputs` are produced inside; whatever is read and not produced is in `inputs`.
    `constants` are the inputs whose bytes never change; `literals` small constants whose values are known at compile time, and
    may be immediates in a kernel's code. `precision` bounds the errors of its results; `configuration` names tuned choices among
    the legal ones. With `is_on_branch` the result is added to a residual stream, so that its errors are a part of the sum only.
    `formats`: the storage of operands with scales, which their types do not tell. `zero_points`: the names of
    the scalars that anchors are to subtract from operands of 8 bits, by the names of those. `weights`: the DequantizeLinear of
    constant operands that anchors read as integers, by the names of these. With `shares_weights` kernels for other sizes read the
    constant operands of products, too, so that their packing must not depend on sizes. With `updates_state` it reads a state or
    a part of one, in whose place the new value might be made: its kernel must say where that may be, and pays with what LLVM
    knows of its pointers.
    `enclosing`: the shapes of the tensors as parts of which outputs are stored, by the names of these: equal but for one
    dimension. A kernel then gets a pointer to the part's first element.
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType]
    constants: frozenset[str] = frozenset()
    literals: Mapping[str, np.ndarray] = field(default_factory=dict)
    precision: Precision = "float32"
    configuration: Configuration = field(default_factory=dict)
    is_on_branch: bool = False
    formats: Mapping[str, Storage] = field(default_factory=dict)
    zero_points: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, Op] = field(default_factory=dict)
    shares_weights: bool = False
    updates_state: bool = False
    enclosing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def producers(self) -> dict[str, Op]:
        return {name: op for op in self.ops for name in op.outputs if name}

    @cached_property
    def reader_counts(self) -> dict[str, int]:
        """How often each value is read inside the group; being an output counts as one reader."""
        counts: dict[str, int] = {}
        for name in [*(name for op in self.ops for name in op.inputs), *self.outputs]:
            counts[name] = counts.get(name, 0) + 1
        return counts

    def literal(self, name: str) -> np.ndarray | None:
        """Value of a small constant; None for an absent input or one not known while compiling."""
        return self.literals.get(name) if name else None

    @property
    def tolerance(self) -> Tolerance:
        """The errors that the group's precision allows."""
        return TOLERANCES[self.precision]

    def memory_shape(self, name: str) -> tuple[int, ...]:
        """The shape whose row-major places the elements of a value have."""
        return self.enclosing.get(name, self.types[name].shape)

    def row_pitch(self, name: str, columns: SizeLike) -> SizeLike | None:
        """The elements from a row of the outputs, which have the shape of `name`, to the next, where these are rows of `columns`
        and within others; 0 where they are no such rows. None: the outputs are no parts."""
        wide, shape = next(iter(self.enclosing.values()), None), self.types[name].shape
        if wide is None:
            return None
        return wide[-1] if shape[-1:] == (columns,) and wide[:-1] == shape[:-1] else 0

    def storage(self, name: str) -> Storage:
        """How a value is stored."""
        kind = self.types[name]
        return self.formats.get(name) or Storage(kind.dtype, is_packed=kind.is_packed)

    def key(self) -> str:
        """Equal for groups that can share one kernel: same structure, types, formats, attributes, literals, precision, branch."""
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers)) if name else -1

        ops = [
            (op.op_type, op.version, _frozen(op.attributes), [number(n) for n in op.inputs], [number(n) for n in op.outputs])
            for op in self.ops
        ]
        outputs = [number(name) for name in self.outputs]
        zeros = [(number(name), number(zero)) for name, zero in self.zero_points.items()]
        facts = [
            (str(self.types[name]), self.formats.get(name), name in self.constants, _frozen(self.literals.get(name)))
            for name in numbers
            if name
        ]
        flags = self.is_on_branch, self.shares_weights, self.updates_state, list(self.enclosing.values())
        return repr((ops, outputs, sorted(zeros), facts, self.precision, *flags))

    def value_order(self) -> dict[str, int]:
        """Names to the numbers that `key` gave them, so that a kernel built for an equal group can be bound to this one."""
        numbers: dict[str, int] = {}
        for op in self.ops:
            for name in (*op.inputs, *op.outputs):
                if name:
                    numbers.setdefault(name, len(numbers))
        for zero in self.zero_points.values():
            numbers.setdefault(zero, len(numbers))
        return numbers

    @property
    def label(self) -> str:
        return "_".join(op.op_type.lower() for op in self.ops[:6]) + (f"_and_{len(self.ops) - 6}" if len(self.ops) > 6 else "")


def literal_ints(group: Group, name: str) -> tuple[int, ...] | None:
    """A small constant as Python integers."""
    value = group.literal(name)
    return None if value is None else tuple(int(v) for v in np.ravel(value))


def _frozen(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == object:  # of sizes
        return (value.shape, tuple(map(str, value.flat)))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    return repr(value)
