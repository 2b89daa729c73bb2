"""Tensors side by side by torch's second names, and rows without a batch, against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from .applied import check

STACKS = [torch.vstack, torch.hstack, torch.dstack, torch.column_stack]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (2, 3, 4)])
def test_stacks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch's exporter maps a sequence, which ONNX's checker refuses of bfloat16."""
    a, b = (torch.randn(shape).to(dtype) for _ in range(2))
    check(lambda a, b: tuple(stack([a, b, a]) for stack in STACKS), a, b)


def test_stacks_of_different_ranks() -> None:
    row, matrix = torch.randn(4), torch.randn(3, 4)
    check(lambda row, matrix: (torch.vstack([row, matrix]), torch.column_stack([row[:3], matrix])), row, matrix)
    check(lambda row: (torch.hstack([row, row[0]]), torch.hstack([row.int(), row])), row)


@pytest.mark.parametrize("right", [False, True])
def test_bucket_of_a_number(right: bool) -> None:
    edges = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    check(lambda edges: (torch.bucketize(0.5, edges, right=right), torch.bucketize(3, edges, out_int32=True)), edges)


@pytest.mark.parametrize("weights", [None, torch.rand(5)])
def test_cross_entropy_of_one_row(weights: torch.Tensor | None) -> None:
    x, label = torch.randn(5), torch.tensor(2)
    reductions = ("mean", "sum", "none")
    check(lambda x, label: tuple(functional.cross_entropy(x, label, weights, reduction=one) for one in reductions), x, label)
