"""Pointwise groups that read parts of their operands where they lie, and what NumPy makes of them."""

from __future__ import annotations

import numpy as np
from prefuse.kernels.groups.group import Group, Op

from ..harness import OPSET, Case, type_of

SHAPES = ((5,), (37,), (3, 40), (7, 9), (2, 3, 19), (4, 1, 33), (2, 3, 4, 16), (1, 5, 1, 8), (3, 17, 1), (2, 2, 70), (9, 2, 0))
TYPES = ("float32", "float32", "float64", "int32", "int8")


class Parts:
    """A group under construction: values by their names, views of them, and sums of what these give."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.values: dict[str, np.ndarray] = {}
        self.literals: dict[str, np.ndarray] = {}
        self.inputs: list[str] = []
        self.ops: list[Op] = []

    def input(self, shape: tuple[int, ...], dtype: str) -> str:
        name = f"x{len(self.values)}"
        self.values[name] = (self.rng.standard_normal(shape) * 20).astype(dtype)
        self.inputs.append(name)
        return name

    def op(self, op_type: str, names: tuple[str, ...], *results: np.ndarray, **attributes: object) -> str:
        outputs = tuple(f"v{len(self.values) + number}" for number in range(len(results)))
        self.values |= dict(zip(outputs, results, strict=True))
        self.ops.append(Op(op_type, names, outputs, attributes, OPSET))
        return outputs[-1]

    def integers(self, *numbers: int, is_scalar: bool = False) -> str:
        name = f"i{len(self.values)}"
        self.values[name] = np.array(numbers[0] if is_scalar else numbers, np.int64)
        self.literals[name] = self.values[name]
        self.inputs.append(name)
        return name

    def slice(self, source: str, begins: tuple[int, ...], steps: tuple[int, ...], shape: tuple[int, ...]) -> str:
        """The part of a source of a shape, from some places on."""
        ends = [begin + step * extent for begin, step, extent in zip(begins, steps, shape, strict=True)]
        ends = [end if end >= 0 else -(2**31) for end in ends]
        cut = tuple(slice(begin, None if end < 0 else end, step) for begin, end, step in zip(begins, ends, steps, strict=True))
        names = (self.integers(*begins), self.integers(*ends), self.integers(*range(len(shape))), self.integers(*steps))
        return self.op("Slice", (source, *names), self.values[source][cut])

    def part(self, shape: tuple[int, ...], dtype: str) -> str:
        """A value of a shape: a tensor, or what lies in one."""
        match self.rng.integers(6):
            case 0:
                return self.input(shape, dtype)
            case 1:
                axis = int(self.rng.integers(len(shape) + 1))
                source = self.input((*shape[:axis], 5, *shape[axis:]), dtype)
                at = int(self.rng.integers(-5, 5))
                index = self.integers(at, is_scalar=True)
                return self.op("Gather", (source, index), np.take(self.values[source], at, axis), axis=axis)
            case 2:
                axis = int(self.rng.integers(len(shape)))
                source = self.input((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]), dtype)
                halves = np.split(self.values[source], 2, axis)
                return self.op("Split", (source,), *halves, axis=axis, num_outputs=2)
            case 3:
                order = tuple(map(int, self.rng.permutation(len(shape))))
                under = [0] * len(shape)
                for place, axis in enumerate(order):
                    under[axis] = shape[place]
                source = self.cut(tuple(under), dtype)
                return self.op("Transpose", (source,), self.values[source].transpose(order), perm=order)
            case _:
                return self.cut(shape, dtype)

    def cut(self, shape: tuple[int, ...], dtype: str) -> str:
        steps = tuple(int(self.rng.choice([1, 1, 1, 2, 3, -1, -2])) for _ in shape)
        begins, extents = list[int](), list[int]()
        for extent, step in zip(shape, steps, strict=True):
            before, behind = (int(number) for number in self.rng.integers(0, 3, 2))
            span = abs(step) * max(extent - 1, 0) + 1
            begins.append(before if step > 0 else before + span - 1)
            extents.append(before + span + behind)
        return self.slice(self.input(tuple(extents), dtype), tuple(begins), steps, shape)

    def case(self, result: str, label: str, *others: str) -> Case:
        outputs = (result, *others)
        types = {name: type_of(array) for name, array in self.values.items()}
        group = Group(tuple(self.ops), tuple(self.inputs), outputs, types, frozenset(self.literals), self.literals)
        arrays = {name: self.values[name] for name in self.inputs}
        return Case(group, arrays, [self.values[name] for name in outputs], 1e-6, 1e-5, label, "elementwise")


def random_case(seed: int) -> Case:
    """(a + b) * c of parts, of which one may have fewer dimensions or ones."""
    parts = Parts(seed)
    shape, dtype = SHAPES[seed % len(SHAPES)], TYPES[seed % len(TYPES)]
    one, two = parts.part(shape, dtype), parts.part(shape, dtype)
    few = tuple(extent if parts.rng.random() < 0.7 else 1 for extent in shape)[int(parts.rng.integers(len(shape))) :]
    small = parts.part(few, dtype)
    with np.errstate(over="ignore"):
        total = parts.op("Add", (one, two), parts.values[one] + parts.values[two])
        scaled = parts.op("Mul", (total, small), parts.values[total] * parts.values[small])
    return parts.case(scaled, f"{seed}: {[op.op_type for op in parts.ops]} {shape} {dtype}", *([total] if seed % 3 == 0 else []))


def joined_case(seed: int) -> Case:
    """Two to five results of one shape, of parts, which a Concat puts together: in turns, in rows, or with dimensions of one."""
    parts = Parts(seed)
    shape, dtype = SHAPES[seed % len(SHAPES)], TYPES[seed % len(TYPES)]
    count, axis = int(parts.rng.integers(2, 6)), int(parts.rng.integers(len(shape) + 1))
    one, two = parts.part(shape, dtype), parts.part(shape, dtype)
    makers: list[str] = []
    for number in range(count):
        op_type, by = (("Add", np.add), ("Mul", np.multiply), ("Sub", np.subtract))[number % 3]
        other = makers[-1] if makers and number % 2 else two
        with np.errstate(over="ignore"):
            makers.append(parts.op(op_type, (one, other), by(parts.values[one], parts.values[other])))
    if seed % 2:  # a dimension of its own
        places = parts.integers(axis)
        operands = [parts.op("Unsqueeze", (name, places), np.expand_dims(parts.values[name], axis)) for name in makers]
    else:
        axis, operands = axis % len(shape), makers
    result = parts.op("Concat", tuple(operands), np.concatenate([parts.values[name] for name in operands], axis), axis=axis)
    return parts.case(result, f"{seed}: {count} of {shape} {dtype} along {axis}")
