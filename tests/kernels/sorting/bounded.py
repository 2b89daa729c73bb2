"""Cases of operators whose results have a size that a run decides: their largest outputs, and the part that a run finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType

from ..harness import OPSET, POISONS, Case, plain, type_of

Largest = tuple[tuple[int, ...], int | None]


@dataclass
class BoundedCase(Case):
    """A bounded operator: `axes` are those along which its outputs have as many elements as its last output, the count, says.

    None is an axis of an output of static size.
    """

    axes: Sequence[int | None] = field(default_factory=tuple)
    unwritten: int | None = POISONS[0]  # behind the end

    def check(self) -> None:
        *results, count = self.got
        (found,) = count
        for got, expected, axis in zip(results, self.expected, self.axes, strict=True):
            if axis is not None:
                assert found == expected.shape[axis], self.label
                rest = np.take(got, np.arange(found, got.shape[axis]), axis)
                behind = np.full(rest.nbytes, 0 if self.group.ops[0].attribute("padded") else self.unwritten, np.uint8)
                np.testing.assert_array_equal(rest.reshape(-1).view(np.uint8), behind, f"{self.label}: behind the end")
                got = np.take(got, np.arange(found), axis)
            assert got.shape == expected.shape, self.label
            if got.dtype.type.__module__ == "ml_dtypes":  # NumPy does not know their NaN
                got, expected = got.astype(np.float32), expected.astype(np.float32)
            np.testing.assert_array_equal(plain(got), plain(expected), self.label)


def padded(case: BoundedCase) -> BoundedCase:
    """The same operator with zeros behind what it finds."""
    op = replace(case.group.ops[0], attributes={**case.group.ops[0].attributes, "padded": 1})
    return replace(case, group=replace(case.group, ops=(op,)), label=f"{case.label} padded", got=[])


def bounded(
    op_type: str,
    inputs: Sequence[np.ndarray | None],
    largest: Sequence[Largest | None],
    expected: Sequence[np.ndarray],
    *,
    constants: Sequence[int] = (),
    attributes: Mapping[str, int] | None = None,
) -> BoundedCase:
    """One bounded operator.

    Args:
        largest: of each output, its largest shape and the axis that is cut, if one is; None for one that nobody asks for.
        expected: what a run must find for those that are asked for.
        constants: the positions of inputs whose values the kernel may write into its code.
    """
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    arrays = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in zip(names, inputs, strict=True) if a is not None}
    outputs = ["" if one is None else f"y{i}" for i, one in enumerate(largest)]
    asked = [one for one in largest if one is not None]
    types = {name: type_of(array) for name, array in arrays.items()} | {"count": TensorType((1,), "int64")}
    for name, (shape, _), array in zip(filter(None, outputs), asked, expected, strict=True):
        types[name] = TensorType(shape, str(array.dtype))
    literals = {names[position]: arrays[names[position]] for position in constants}
    op = Op(op_type, tuple(names), (*outputs, "count"), attributes or {}, OPSET)
    group = Group((op,), tuple(arrays), (*filter(None, outputs), "count"), types, frozenset(literals), literals)
    label = f"{op_type} {[array.shape for array in arrays.values()]} {attributes or ''}"
    return BoundedCase(group, arrays, expected, label=label, axes=[axis for _, axis in asked])
