"""Index arithmetic of views against onnx.reference, element by element; and which operators are views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from prefuse.kernels.codegen.builder import row_major
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.template.values import anchors_of, surroundings
from prefuse.kernels.template.views import reshape_index, view_of
from tvm import tirx

from ..harness import Case, operator


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def views() -> list[Case]:
    return [
        operator("Transpose", numbered(2, 3, 4), perm=[2, 0, 1]),
        operator("Transpose", numbered(2, 3)),
        operator("Reshape", numbered(2, 3, 8), ints(2, 3, 2, 4)),
        operator("Reshape", numbered(2, 3, 8), ints(6, 8)),
        operator("Reshape", numbered(4, 6), ints(3, 1, 8)),
        operator("Reshape", numbered(4, 6), ints(2, -1, 3)),
        operator("Reshape", numbered(1, 1), ints()),
        operator("Squeeze", numbered(2, 1, 3, 1), ints(1)),
        operator("Unsqueeze", numbered(2, 3), ints(0, 3)),
        operator("Flatten", numbered(2, 3, 4), axis=2),
        operator("Flatten", numbered(2, 3, 4), axis=0),
        operator("Expand", numbered(3, 1), ints(2, 3, 4)),
        operator("Expand", numbered(2, 3), ints(1)),
        operator("Slice", numbered(5, 7), ints(1, -1), ints(4, -9), None, ints(2, -3)),
        operator("Slice", numbered(5, 7), ints(-3), ints(100), ints(-1)),
        operator("Slice", numbered(5, 7), ints(100, 2), ints(-100, 5), ints(0, 1), ints(-2, 1)),
        operator("Gather", numbered(2, 3, 4), np.array(-1, np.int64), axis=1),
        operator("Gather", numbered(2, 3, 4), ints(1), axis=-1),
        operator("Split", numbered(2, 7), ints(3, 4), outputs=2, axis=1),
        operator("Split", numbered(5, 2), outputs=2, num_outputs=2, axis=0),
    ]


@pytest.mark.parametrize("case", views(), ids=lambda case: case.label)
def test_elements_are_where_the_view_says(case: Case) -> None:
    group, (op,) = case.group, case.group.ops
    view = view_of(group, op)
    assert view is not None
    source = case.arrays[op.inputs[0]]
    for name, expected in zip(group.outputs, case.expected, strict=True):
        for index in np.ndindex(expected.shape):
            place = view.source(group, op, name, index)
            assert source[place] == expected[index]
            if view.result is not None:
                assert view.result(group, op, place) == index


@pytest.mark.parametrize(
    "case",
    [
        operator("Slice", numbered(5, 7), ints(1), ints(4), variables=(1,)),
        operator("Gather", numbered(2, 3), np.array(1, np.int64), variables=(1,)),
        operator("Gather", numbered(2, 3), ints(0, 1)),
        operator("Concat", numbered(2, 3), numbered(1, 3), axis=0),
    ],
    ids=lambda case: case.label,
)
def test_places_that_are_not_known_are_no_views(case: Case) -> None:
    assert view_of(case.group, case.group.ops[0]) is None


def test_a_reshape_that_merges_or_splits_dimensions_divides_nothing() -> None:
    """Heads split off a row, and merged back into it, as attention does: read through, they are a product and a sum."""
    token, head, depth = (tirx.Var(name, "int32") for name in ("token", "head", "depth"))
    split = reshape_index((0, token, head, depth), (1, 128, 12, 64), (1, 128, 768))
    assert "/" not in str(split)
    assert split[0] == 0
    assert token.same_as(split[1])
    merged = reshape_index((0, token, head), (1, 128, 12), (128, 12))
    assert token.same_as(merged[0])
    assert head.same_as(merged[1])


def test_a_general_reshape_goes_by_the_offset() -> None:
    for index in np.ndindex(4, 15):
        place = reshape_index(index, (4, 15), (6, 2, 5))
        assert row_major(place, (6, 2, 5)) == row_major(index, (4, 15))


def surrounded(*ops: Op, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Sequence[Op], Sequence[Op]]:
    types = {name: operator("Identity", numbered(*shape)).group.types["x0"] for name, shape in shapes.items()}
    produced = {name for op in ops for name in op.outputs}
    group = Group(ops, tuple(name for name in types if name not in produced), ops[-1].outputs, types)
    return anchors_of(group), surroundings(group)


def test_views_are_anchors_only_where_they_are_alone() -> None:
    turn, product = Op("Transpose", ("a",), ("t",)), Op("MatMul", ("t", "b"), ("m",))
    relu, flat = Op("Relu", ("m",), ("r",)), Op("Flatten", ("r",), ("f",))
    square = dict.fromkeys(("a", "b", "t", "m", "r", "f"), (3, 3))
    assert surrounded(turn, product, relu, flat, shapes=square) == ((product,), (turn, flat))
    assert surrounded(product, relu, shapes=square) == ((product,), ())
    assert surrounded(turn, shapes=square) == ((turn,), ())
    assert surrounded(Op("Relu", ("a",), ("t",)), product, shapes=square)[1][0].op_type == "Relu"
