"""Attention of torch of any number of dimensions under any mask, against torch."""

from __future__ import annotations

from typing import Any

import prefuse
import pytest
import torch
from torch import Tensor, nn


class Attended(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def check(query: tuple[int, ...], key: tuple[int, ...] | None = None, mask: Tensor | None = None, **options: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (query, key or query, key or query)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes] + ([] if mask is None else [mask])
    module = Attended(**options).eval()
    net = prefuse.compile(module, inputs, cache=False, threads=2)
    torch.testing.assert_close(net(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)
    assert net.report().count("attention: 1 launches") == 1


@pytest.mark.parametrize("query", [(9, 16), (3, 9, 16), (2, 4, 9, 16), (2, 3, 4, 9, 16), (2, 1, 3, 4, 9, 16)])
def test_any_number_of_dimensions(query: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    key = (*query[:-2], 7, 16)
    check(query, key)
    check(query, key, is_causal=True)
    check(query, key, scale=0.3)
    check(query, key, torch.rand((9, 7), generator=generator) > 0.5)
    check(query, key, torch.randn((*query[:-2], 9, 7), generator=generator))


@pytest.mark.parametrize("query", [(2, 4, 9, 16), (3, 2, 4, 9, 16)])
def test_heads_of_several_queries(query: tuple[int, ...]) -> None:
    check(query, (*query[:-3], 2, 7, 16), enable_gqa=True)


@pytest.mark.parametrize("keys", [9, 5000])
@pytest.mark.parametrize("is_boolean", [True, False])
@pytest.mark.parametrize("heads", [(3,), (3, 2)])
def test_queries_without_a_key_are_zeros(heads: tuple[int, ...], is_boolean: bool, keys: int) -> None:
    """In torch's exporter they were the mean of all values, and NaN by a mask of numbers; 5,000 keys come in several blocks."""
    mask = torch.rand((12, keys), generator=torch.Generator().manual_seed(2)) > 0.5
    mask[[4, 11]] = False
    numbers = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    check((*heads, 12, 64), (*heads, keys, 64), mask if is_boolean else numbers)


def test_any_number_of_sequences() -> None:
    dims = {**{name: {0: "B", 2: "T"} for name in "qkv"}, "B": (1, 6), "T": (2, 40)}
    x, module = torch.randn(2, 3, 9, 2, 16), Attended().eval()
    net = prefuse.compile(module, (x, x, x), dims=dims, cache=False, threads=2)
    for batch, length in ((1, 2), (6, 40), (3, 17)):
        x = torch.randn(batch, 3, length, 2, 16)
        torch.testing.assert_close(net(x, x, x), module(x, x, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": -0.3}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_narrow_numbers_are_wide(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """1 / sqrt(80) is 0.3% off in bfloat16; the root of a negative one is no number."""
    generator = torch.Generator().manual_seed(3)
    inputs = [(3 * torch.randn(1, 2, 24, 80, generator=generator)).to(dtype) for _ in range(3)]
    module = Attended(**options).eval()
    net: Any = prefuse.compile(module, inputs, cache=False, threads=2)
    exact = module(*(one.double() for one in inputs))
    found: Any = net(*inputs)
    errors = [(made.double() - exact).abs().mean() for made in (found, module(*inputs))]
    assert errors[0] <= 1.6 * errors[1] + (2e-3 if dtype == torch.float16 else 1e-6)  # scores are rounded to it, too
    assert net.report().count("attention: 1 launches") == 1
