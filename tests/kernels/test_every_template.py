"""One small case of every template of CPUs, each day: the templates' own tests take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prefuse.kernels.groups.group import Op
from prefuse.kernels.registry import TEMPLATES
from prefuse.kernels.template.values import PANELS

from .attention.attention_cases import attend
from .attention.test_linear_attention import case as linear_attention
from .attention.test_linear_attention import operands
from .convolution import test_strassen_convolution, test_winograd
from .convolution.channels_last_cases import convolution, pooling, transposed
from .elementwise.test_random import draws, key_of, multinomial, uniform
from .harness import Case, check, operator, target_of
from .linalg import test_strassen_matmul
from .linalg.test_gathered_matmul import product as gathered_product
from .linalg.test_matmul import product
from .linalg.test_product_rows import alone
from .linalg.test_shared_weights import embedding
from .linalg.test_stored_weights import by_template, case_of, rows_of
from .movement.test_one_hot import one_hot
from .movement.test_scatter import elements
from .pooling.test_regions import align
from .recurrent.test_recurrent import of_runtime
from .recurrent.test_recurrent import operands as recurrent_operands
from .reduction.test_rows import residual_norm
from .sorting.test_selection import non_zero, sparse
from .sorting.test_suppression import scattered, suppression, ties
from .sorting.test_unique import few, unique

rng = np.random.default_rng(5)
LEVEL = "avx2"  # which is run wherever tests are


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def range_of(first: int, end: int, step: int) -> Case:
    """Of which a call knows the end."""
    numbers = [np.array(number) for number in (first, end, step)]
    case = operator("Range", *numbers, variables=(1,), expected=[np.arange(first, end, step)])
    group = replace(case.group, constants=case.group.constants | {"x0"}, literals={**case.group.literals, "x0": numbers[0]})
    return replace(case, group=group)


def of_operators() -> dict[str, Case]:
    """By onnx.reference."""
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    return {
        "elementwise": operator("Tanh", x(3, 7), **near),
        "injective": operator("Transpose", x(3, 4, 5), perm=[2, 0, 1]),
        "trilu": operator("Trilu", x(4, 5), upper=0),
        "gather": operator("Gather", x(5, 3), np.array([4, 0, 2]), variables=(1,)),
        "scan": operator("CumSum", x(3, 9), np.array(1), **near),
        "reduction": operator("ReduceSum", x(3, 4, 5), np.array([1]), **near),
        "arg_reduction": operator("ArgMax", x(3, 5), axis=1),
        "normalization": operator("Softmax", x(3, 9), **near),
        "pooling": operator("MaxPool", x(1, 2, 7, 7), kernel_shape=[3, 3]),
        "grid_sample": operator("GridSample", x(1, 2, 5, 5), x(1, 3, 3, 2) / 3, mode="linear", **near),
        "resize": operator("Resize", x(1, 2, 4, 4), None, None, np.array([1, 2, 9, 7]), mode="linear", **near),
        "col2im": operator("Col2Im", x(1, 12, 4), np.array([4, 4]), np.array([2, 2]), strides=[2, 2], **near),
        "sequence": operator("ReverseSequence", x(5, 3), np.array([5, 1, 3]), variables=(1,)),
        "determinant": operator("Det", x(2, 3, 3), rtol=1e-4, atol=1e-4),
        "range": range_of(2, 17, 3),
        "topk": operator("TopK", x(3, 19), np.array([4]), outputs=2),
        "convolution": operator("Conv", x(1, 3, 7, 6), x(4, 3, 3, 3), pads=[1, 1, 1, 1], rtol=1e-4, atol=1e-4),
    }


def of_other_tests() -> dict[str, Case]:
    """By their own references."""
    image = x(1, 1, 7, 7)
    greatest = torch.nn.functional.max_pool2d(torch.from_numpy(image), 3, return_indices=True, stride=1)
    table, tokens = x(40, 33), np.array([0, 39, -1])
    read = (Op("Gather", ("w", "tokens"), ("rows",), {"axis": 0, PANELS: 1}, 23),)
    linear = operands(1, 3, 2, 1, 7, 8)
    recurrent = {name: array for name, array in recurrent_operands("GRU", 4, 2, 5, 9).items() if name in "xwrb"}
    return {
        "rows": residual_norm(4, 40),
        "pooling_indices": operator("MaxPool", image, outputs=2, kernel_shape=[3, 3], expected=[one.numpy() for one in greatest]),
        "regions": align((2, 3, 9, 9), 4),
        "one_hot": one_hot(np.array([[1, 6], [0, 3]]), 7, np.array([-1.5, 2.5], np.float32)),
        "scatter": elements(x(4, 6), rng.integers(0, 4, (3, 6)), reduction="add"),
        "random": draws("RandomUniform", (7, 11), uniform(77, key_of(2.5)).reshape(7, 11), seed=2.5),
        "multinomial": next(multinomial()),
        "strassen_matmul": test_strassen_matmul.forced(test_strassen_matmul.multiplied((64, 64), 64), 1),
        "matmul": product((5, 33), (33, 20)),
        **{case.template: case for case in by_template([case_of(rows_of(3, 64), "int8", 17, 32)], LEVEL)},
        "panel_gather": embedding({"w": table}, table, tokens, read),
        "product_rows": alone(6, 16, 24, "Softmax"),
        "gathered_matmul": gathered_product([0, 2, 1], 3, 2, 7, 19),
        "attention": attend((1, 2, 9, 21, 8, 8)),
        "winograd_channels_last": test_winograd.forced(test_winograd.fast((1, 8, 9, 9), 8, 3, 1, 1), 4),
        "strassen_convolution": test_strassen_convolution.forced(test_strassen_convolution.fast((1, 64, 8, 8), 64, 1), 1),
        "convolution_channels_last": convolution((1, 5, 8, 7), 12, 3, 1, 1),
        "transposed_convolution_channels_last": transposed((1, 5, 6, 7), 9, 3, 2, 1),
        "pooling_channels_last": pooling("MaxPool", (1, 5, 8, 7), kernel_shape=(3, 3)),
        "recurrent": of_runtime("GRU", recurrent),
        "linear_attention": linear_attention("gated_delta", linear, 2, 1),
        "selection": non_zero(sparse(3, 5, 7)),
        "suppression": suppression(scattered(1, 20), ties(1, 2, 20), 5),
        "unique": unique(few(30)),
    }


@pytest.mark.daily
def test_every_template() -> None:
    cases = of_operators() | of_other_tests()
    assert cases.keys() == {template.name for template in TEMPLATES}
    check([replace(case, template=name, label=name) for name, case in cases.items()], target_of(LEVEL))
