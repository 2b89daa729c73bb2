"""Translations of torch operators that torch's exporter lacks, against torch."""

from __future__ import annotations

import prefuse
import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operator for grouped products)
from torch import Tensor, nn


class Reversed(nn.Module):
    def forward(self, mask: Tensor) -> tuple[Tensor, ...]:
        return 1.0 - mask, 1 - mask, torch.rsub(mask, 2.5, alpha=0.5) if mask.is_floating_point() else 2.5 - mask


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_numbers_minus_tensors(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 5], [-2, 3, 1]]).to(dtype)
    got = prefuse.compile(Reversed(), mask, cache=False)(mask)
    assert isinstance(got, tuple)
    for a, b in zip(got, Reversed()(mask), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class Grouped(nn.Module):
    def forward(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, offsets)
        return product


def test_a_grouped_product_takes_the_matrix_of_each_group() -> None:
    """Five rows, of which the groups of 0, 2, 3 and 0 rows lie one behind the other."""
    rows, weights = torch.randn(5, 16), torch.randn(4, 16, 8)
    offsets = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    expected = torch.cat([rows[:2] @ weights[1], rows[2:] @ weights[2]])
    got = prefuse.compile(Grouped(), (rows, weights, offsets), cache=False)(rows, weights, offsets)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
