"""Which operands' memory kernels say that their outputs may take; that they then compute the same, each test of a kernel sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..convolution.channels_last_cases import convolution, of_several_results
from ..convolution.test_winograd import fast, forced
from ..harness import LEVELS, check_in_turn
from ..linalg.test_product_rows import projected
from ..reduction.test_rows import residual_norm, sample_variance

Step = tuple[str, str, str] | tuple[str, str, str, Mapping[str, object]]
SQUARE = (32, 32)


def pairs(
    steps: Sequence[Step],
    shapes: Mapping[str, tuple[int, ...]],
    outputs: str = "y",
    constants: str = "w",
    template: str = "",
    target: str = "cpu:avx512",
) -> set[str]:
    """The pairs of a group of operators ("Add", inputs, outputs, attributes), each as "output=operand"."""
    ops = tuple(Op(step[0], tuple(step[1].split()), tuple(step[2].split()), dict(*step[3:]), 23) for step in steps)
    made = {name for op in ops for name in op.outputs}
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    inputs = tuple(name for name in dict.fromkeys(name for op in ops for name in op.inputs) if name not in made)
    kept = frozenset(constants.split())
    choices = {TEMPLATE: template} if template else {}
    group = Group(ops, inputs, tuple(outputs.split()), types, kept, configuration=choices, updates_state=True)
    machine = Target.parse(target, threads=2 if target.startswith("cpu") else None)
    plain, built = (build_kernel(one, machine) for one in (replace(group, updates_state=False), group))
    assert isinstance(plain, BuiltKernel)
    assert not plain.inplace, "only a state is worth what LLVM does not know then"
    assert isinstance(built, BuiltKernel), built
    assert built.template == template or not template
    return {f"{group.outputs[output]}={built.operands[operand].name}" for output, operand in built.inplace}


PRODUCT: Step = ("MatMul", "x w", "p")
SHAPES = dict.fromkeys("xwprsytz", SQUARE)


@pytest.mark.parametrize(
    ("steps", "outputs", "constants", "expected"),
    [
        ([PRODUCT, ("Add", "p r", "y")], "y", "w", {"y=r"}),
        ([PRODUCT, ("Add", "p r", "y")], "y", "", {"y=r"}),
        ([PRODUCT, ("Add", "p r", "y")], "y", "w r", set()),
        ([PRODUCT, ("Add", "p r", "s"), ("Mul", "s t", "y")], "y s", "w", {"y=r", "s=r", "y=t", "s=t"}),
        ([PRODUCT, ("Add", "p x", "y")], "y", "w", set()),  # of which other elements need more
        ([PRODUCT, ("Add", "p w", "y")], "y", "", set()),
        ([("Gemm", "x w r", "y")], "y", "w", {"y=r"}),
        ([("Gemm", "x w x", "y")], "y", "w", set()),
    ],
)
def test_products(steps: Sequence[Step], outputs: str, constants: str, expected: set[str]) -> None:
    assert pairs(steps, SHAPES, outputs, constants) == expected


def test_what_rows_share_stays() -> None:
    assert pairs([PRODUCT, ("Add", "p r", "y")], {**SHAPES, "r": (32,)}) == set()


@pytest.mark.parametrize("level", ["cpu:avx2", "cpu:avx512"])
def test_convolutions(level: str) -> None:
    shapes = {"x": (1, 32, 9, 9), "w": (32, 32, 3, 3), "p": (1, 32, 7, 7), "r": (1, 32, 7, 7), "y": (1, 32, 7, 7)}
    assert pairs([("Conv", "x w", "p"), ("Add", "p r", "y")], shapes, target=level) == {"y=r"}
    same = {**shapes, "w": (32, 32, 1, 1), "p": shapes["x"], "y": shapes["x"]}
    assert pairs([("Conv", "x w", "p"), ("Add", "p x", "y")], same, target=level) == set()


def channels_last(image: str, residual: str) -> set[str]:
    """A convolution that adds one operand, both of which lie channels-last."""
    first, last = {"perm": (0, 3, 1, 2)}, {"perm": (0, 2, 3, 1)}
    steps: list[Step] = [("Transpose", image, "a", first), ("Transpose", residual, "b", first)]
    steps += [("Conv", "a w", "p"), ("Add", "p b", "s"), ("Transpose", "s", "y", last)]
    shapes = dict.fromkeys("xry", (1, 7, 7, 16)) | dict.fromkeys("abps", (1, 16, 7, 7)) | {"w": (16, 16, 1, 1)}
    return pairs(steps, shapes)


def test_convolutions_of_what_lies_channels_last() -> None:
    assert channels_last("x", "r") == {"y=r"}
    assert channels_last("x", "x") == set()


def test_sums_of_columns_where_no_vectors_overlap() -> None:
    def summed(rows: int, columns: int, axis: int) -> set[str]:
        length = (columns, rows)[axis]
        shapes = {"x": (rows, columns), **dict.fromkeys("sry", (length,))}
        steps: list[Step] = [("ReduceSum", "x", "s", {"axes": (axis,), "keepdims": 0}), ("Add", "s r", "y")]
        return pairs(steps, shapes, template="reduction")

    assert summed(5, 64, 0) == summed(5, 63, 1) == {"y=r"}
    assert summed(5, 65, 0) == set()


def test_rows_until_their_last_reader() -> None:
    steps: list[Step] = [
        ("Add", "x r", "s"),
        ("ReduceMax", "s", "m", {"axes": (-1,)}),
        ("Sub", "s m", "t"),
        ("Mul", "t r", "y"),
    ]
    shapes = {**SHAPES, "m": (32, 1)}
    assert pairs(steps, shapes, "y") == {"y=x", "y=r"}
    assert pairs(steps, shapes, "s y") == {"s=x", "y=x", "y=r"}


def test_exponentials_wait_where_results_go() -> None:
    shapes = dict.fromkeys("xpry", (8, 40))
    for operator, expected in (("LogSoftmax", {"y=r"}), ("Softmax", set[str]())):
        steps: list[Step] = [(operator, "x", "p", {"axis": -1}), ("Add", "p r", "y")]
        assert pairs(steps, shapes, template="normalization") == expected


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_compute_the_same_in_place(level: str) -> None:
    """Tiles that do not divide what is left, rows of several loops, and products before them."""
    cases = [
        convolution((2, 17, 13, 11), 33, 1),
        convolution((2, 64, 7, 9), 17, 3, 2, 1),
        convolution((1, 4, 19, 19), 6, 3, 1, 2, 2),
        convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2),
        of_several_results(convolution((1, 8, 9, 9), 5, 1, 1, (1, 0, 2, 0))),
        forced(fast((2, 17, 8, 9), 33, 3, 1, (0, 1, 2, 0)), 2),
        *(residual_norm(2, 3, n, outputs=outputs) for n in (17, 100) for outputs in ("y", "s y")),
        sample_variance(3, 2, 17),
        projected((5, 33), 40, "y"),
        projected((5, 33), 40, "s y"),
    ]
    check_in_turn([replace(case, group=replace(case.group, updates_state=True)) for case in cases], level)


def test_nothing_on_gpus_whose_grids_follow_each_other() -> None:
    assert pairs([PRODUCT, ("Add", "p r", "y")], SHAPES, target="cuda:sm_90") == set()
