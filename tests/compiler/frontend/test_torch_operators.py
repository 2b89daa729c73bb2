"""Translations of torch operators that torch's exporter lacks, against torch."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import prefuse
import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operator for grouped products)
from prefuse.compiler.frontend import torch_export
from prefuse.runtime.errors import UnsupportedModelError
from torch import Tensor, nn

from .applied import check


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


class Several(nn.Module):
    def forward(self, x: Tensor, rows: Tensor, others: Tensor, row: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        norms = tuple(torch.cdist(rows, others, p) for p in (0.0, 1.0, 1.5, 2.0, math.inf))
        places = torch.searchsorted(row, values), torch.searchsorted(row, values, right=True, out_int32=True)
        return torch.erfinv(x), *norms, *places


def test_operators_that_the_exporter_lacks() -> None:
    """At the ends of their domains too: erfinv of -1, 1 and beyond, values outside of the row and equal to its elements."""
    x = torch.cat([torch.linspace(-1, 1, 101), torch.tensor([0.999999, -0.9999999, 1.5, math.nan, 0.0, 1e-20])])
    inputs = (
        x,
        torch.randn(2, 5, 3),
        torch.randn(2, 4, 3),
        torch.tensor([-1.0, 0.0, 0.0, 2.0]),
        torch.tensor([-5.0, 0.0, 1.0, 2.0, 7.0]),
    )
    got = prefuse.compile(Several(), inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, Several()(*inputs), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6 * float(a.dtype.is_floating_point), equal_nan=True)


class Steps(nn.Module):
    def forward(self, x: Tensor, at_zero: Tensor) -> tuple[Tensor, ...]:
        return torch.heaviside(x, at_zero), torch.heaviside(x[:5].to(torch.int32), at_zero.to(torch.int32))


def test_steps_are_zero_for_nan() -> None:
    inputs = torch.tensor([-1.0, -0.0, 0.0, 1e-40, 2.0, math.inf, math.nan]), torch.tensor(7.0)
    got = prefuse.compile(Steps(), inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, Steps()(*inputs), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a[:6], b[:6])
    assert got[0][6] == 0


class Searches(nn.Module):
    def forward(self, row: Tensor, values: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """`places` are those of the elements of each of `rows` in order."""
        return (
            torch.searchsorted(row, values),
            torch.searchsorted(row, values, right=True),
            torch.searchsorted(row, values[0, 0]),
            torch.searchsorted(row, 2.0, side="right"),
            torch.searchsorted(row.to(torch.int32), 2.5, out_int32=True),
            torch.searchsorted(rows, values, sorter=places),
            torch.searchsorted(rows, values, sorter=places, side="right", out_int32=True),
            torch.searchsorted(row, values.to(torch.bfloat16)),
            torch.searchsorted(row.to(torch.int32), values),
            torch.bucketize(values.double(), row, right=True),
        )


def test_searches_in_rows() -> None:
    """Of NaN, which stands behind all, of tensors without dimensions, numbers, and other types, in rows that a sorter orders."""
    values, rows = (
        torch.tensor([[2.0, math.nan, 0.5], [9.0, 2.0, -1.0]]),
        torch.tensor([[3.0, 1.0, 2.0, 2.0], [9.0, 4.0, 5.0, -1.0]]),
    )
    inputs = torch.tensor([1.0, 2.0, 2.0, 4.0]), values, rows, rows.argsort()
    got = prefuse.compile(Searches(), inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, Searches()(*inputs), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class Orders(nn.Module):
    def forward(self, x: Tensor, n: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """No two numbers of `x` are equal: which of equal ones torch takes is not said."""
        of_axes = (*x.kthvalue(3, 1), *x.kthvalue(1, 0, keepdim=True), *x.median(1), *x.median(0, keepdim=True))
        return *of_axes, x.median(), n.median(), n.median(1).values, torch.masked_select(x, mask), x[x > 0]


def test_order_statistics_and_masks() -> None:
    """Rows of an even and an odd length, and a NaN, which makes a median NaN and stands last for kthvalue."""
    x = torch.tensor([[1.0, math.nan, 3.0, 0.5, math.inf], [4.0, -2.0, 9.0, 6.0, 7.0]])
    inputs = x, torch.tensor([[3, 1, 2, 9, 4], [8, 7, 6, 5, 0]]), torch.tensor([True, False, True, True, False])
    got = prefuse.compile(Orders(), inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, Orders()(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class Numbers(nn.Module):
    def forward(self, x: Tensor, y: Tensor, rows: Tensor, volume: Tensor) -> tuple[Tensor, ...]:
        distances = torch.pdist(rows), torch.pdist(rows, 1.0), torch.pdist(rows, 3.0)
        products = rows.prod(), torch.cumprod(rows, 1), torch.cumprod(rows, 0, dtype=torch.float64), torch.vander(rows[0])
        signs = torch.hypot(x, y), torch.copysign(x, y), torch.signbit(y)
        return *distances, *products, *signs, nn.functional.adaptive_avg_pool3d(volume, (2, None, 3))


def test_products_signs_and_averages() -> None:
    """Minus zero has a sign, squares may overflow, and boxes of averages overlap where sizes do not divide."""
    inputs = (
        torch.tensor([0.0, 1e30, -3.0, math.inf, math.nan, 0.0]),
        torch.tensor([-0.0, 1e30, 4.0, math.nan, 1.0, -2.0]),
        torch.randn(4, 5),
        torch.randn(2, 3, 4, 6, 8),
    )
    got = prefuse.compile(Numbers(), inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, Numbers()(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


class Maxima(nn.Module):
    def forward(self, row: Tensor, image: Tensor, volume: Tensor) -> tuple[Tensor, ...]:
        pool = nn.functional
        alone = pool.adaptive_max_pool1d(row, 1), pool.adaptive_max_pool2d(image, 4), pool.adaptive_max_pool2d(image[0], (2, 3))
        with_places = pool.adaptive_max_pool1d(row, 3, True), pool.adaptive_max_pool2d(image, (5, 7), True)
        further = pool.adaptive_max_pool2d(image, 1, True), pool.adaptive_max_pool3d(volume, (2, 3, 1), True)
        return *alone, *(one for pair in (*with_places, *further) for one in pair)


def test_maxima_of_boxes() -> None:
    """Which overlap where sizes do not divide; of equal elements the first is meant."""
    inputs = torch.randn(2, 3, 11), torch.randint(0, 4, (2, 3, 8, 7)).float(), torch.randn(1, 2, 5, 6, 4)
    got = prefuse.compile(Maxima(), inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, Maxima()(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Misread(nn.Module):
    """Calls of which torch's exporter leaves out an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, proj_size=3, bias=False)

    def forward(self, logits: Tensor, target: Tensor, image: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        losses = nn.functional.cross_entropy(logits, target, label_smoothing=0.1), nn.functional.cross_entropy(logits, target)
        pools = nn.functional.avg_pool2d(image, (3, 2), divisor_override=5), nn.functional.avg_pool2d(image, 3, 2, 1)
        states, (hidden, cell) = self.lstm(steps)
        return *losses, *pools, states, hidden, cell


def test_arguments_that_the_exporter_leaves_out() -> None:
    torch.manual_seed(0)
    module = Misread().eval()
    inputs = torch.randn(4, 6), torch.tensor([0, 2, 5, 1]), torch.randn(1, 2, 8, 9), torch.randn(3, 2, 4)
    got = prefuse.compile(module, inputs, cache=False)(*inputs)
    assert isinstance(got, tuple)
    for a, b in zip(got, module(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 6, 7, 6, 5), (6, 4, 5, 6)])
def test_volumes_are_convolved_without_bias(shape: tuple[int, ...]) -> None:
    """And without a batch. The exporter makes a bias of another shape."""
    torch.manual_seed(0)
    plain, strided = nn.Conv3d(6, 9, 3, bias=False), nn.Conv3d(9, 6, (1, 3, 2), (1, 2, 1), (1, 0, 2), (2, 1, 1), 3, bias=False)
    module = nn.Sequential(plain, nn.ReLU(), strided).eval()
    x = torch.randn(shape)
    torch.testing.assert_close(prefuse.compile(module, (x,), cache=False)(x), module(x), rtol=1e-5, atol=1e-5)


def test_a_pool_with_a_divisor_and_ceil_mode_is_refused() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=3)

    with pytest.raises(UnsupportedModelError, match="with ceil_mode and divisor_override; multiply the result"):
        prefuse.compile(Pool(), torch.randn(1, 2, 8, 9), cache=False)


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


class Products(nn.Module):
    def forward(self, rows: Tensor, weights: Tensor, offsets: Tensor | None = None) -> Tensor:
        product: Tensor = torch._grouped_mm(rows, weights, offs=offsets, out_dtype=rows.dtype)
        return product


def test_groups_of_one_size_are_a_product_of_matrices() -> None:
    rows, weights = torch.randn(2, 16, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    got = prefuse.compile(Products(), (rows, weights), cache=False)(rows, weights)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, Products()(rows, weights), rtol=1e-2, atol=1e-2)


def test_a_form_that_is_refused_is_one_error_with_its_line() -> None:
    """Groups of columns: torch multiplies each by the rows of its group."""
    inputs = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.tensor([8, 16], dtype=torch.int32)
    line = Products.forward.__code__.co_firstlineno + 1
    message = rf"{__file__}:{line}: no ONNX form of aten._grouped_mm.default: a grouped product of 2 by 2 dimensions; multiply"
    with pytest.raises(UnsupportedModelError, match=message):
        prefuse.compile(Products(), inputs, cache=False)


def test_a_translation_that_fails_is_one_error_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's exporter wraps it in twice is not what the user reads, nor is an error that the user was handling."""

    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erfinv(x)

    def fail(x: Any) -> Any:
        raise IndexError("no such axis\nas this")

    monkeypatch.setattr(torch_export, "translations", lambda: {torch.ops.aten.erfinv.default: fail})
    line = Inverse.forward.__code__.co_firstlineno + 1
    message = rf"{__file__}:{line}: cannot translate aten.erfinv.default: no such axis; "
    try:
        raise KeyError("another")
    except KeyError:
        with pytest.raises(UnsupportedModelError, match=message):
            prefuse.compile(Inverse(), torch.zeros(3), cache=False)


class BiasedHeads(nn.Module):
    """Attention of two heads whose mask is a parameter with the heads last, as in T5 and Swin.

    When torch takes it apart into products, the result has other strides than that of the whole, of which the module had a view.
    """

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.bias, self.axes = nn.Parameter(torch.randn(24, 24, 2)), axes

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(-1, 24, 2, 8).transpose(1, 2)
        mask = self.bias.permute(self.axes)[None] if self.axes else None
        result = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return result.transpose(1, 2).reshape(-1, 24, 16)


def test_views_of_what_attention_gives() -> None:
    module, x = BiasedHeads(2, 0, 1).eval(), torch.randn(2, 24, 16)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=8)},))
    of_module, of_program = prefuse.compile(module, (x,), cache=False), prefuse.compile(program, cache=False)
    expected = deepcopy(module).double()(x.double()).float().detach()
    for compiled in (of_module, of_program):
        torch.testing.assert_close(torch.as_tensor(compiled(x)), expected)
    assert torch.ops.aten._unsafe_view.default not in {node.target for node in program.graph.nodes}


def test_views_that_hold_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second export is only for programs that the first stopped at."""

    def fail(program: torch.export.ExportedProgram) -> None:
        raise AssertionError("exported twice")

    monkeypatch.setattr(torch_export, "with_views_of_copies", fail)
    module, x = BiasedHeads().eval(), torch.randn(2, 24, 16)
    torch.testing.assert_close(prefuse.compile(module, (x,), cache=False)(x), module(x))


@pytest.mark.parametrize("offset", [0, 1, -2, 9])
def test_diagonals_of_what_is_not_finite(offset: int) -> None:
    """The exporter's form multiplied all elements by 0 or 1."""
    x = torch.randn(3, 4, 5)
    x[0, 1, 2], x[1, 0, 4], x[2, 3, 0] = math.inf, math.nan, -math.inf
    check(lambda x: (x.diagonal(offset, 1, 2), x.diagonal(offset), x.diagonal(offset, -1, 0), (x > 0).diagonal(offset)), x)
    check(lambda x: (x[0].diag(offset), x[0].trace(), torch.diag(x[0, 0], offset)), x)


def test_averages_of_boxes_that_are_not_finite() -> None:
    x = torch.randn(1, 2, 5, 6, 7)
    x[0, 0, 1, 2, 3], x[0, 1, 4, 5, 6], x[0, 1, 0, 0, 0] = math.inf, math.nan, -math.inf
    check(lambda x: tuple(nn.functional.adaptive_avg_pool3d(x, size) for size in ((2, 3, 4), (5, 2, 1), (3, 4, 7))), x)


def test_truths_beside_indices() -> None:
    x, logits = torch.randn(4, 5, 6), torch.randn(2, 3, 7)
    mask, seen = torch.tensor([True, False, True, True]), torch.tensor([[True, False, True], [True, True, False]])
    columns, targets = torch.tensor([4, 0, 2]), torch.tensor([6, 0, 3, 3])
    check(lambda x, m, c: (x[m, c[:1]], x[m, :, c[:1]], x.transpose(0, 1)[c[1:2], m], x[m], x[:, c]), x, mask, columns)
    check(lambda x, m, t: x[m, t[2:3]], logits, seen, targets)

    def put(x: Tensor, m: Tensor, c: Tensor) -> Tensor:
        x = x.clone()
        x[m, c] = 2.5
        return x

    check(put, x, mask, columns)


def test_draws_without_replacement_are_of_different_places() -> None:
    class Drawn(nn.Module):
        def forward(self, shares: Tensor) -> tuple[Tensor, ...]:
            return torch.multinomial(shares, 3), torch.multinomial(shares[0], 1), torch.multinomial(shares[1], 9, True)

    shares = torch.tensor([0.5, 0.0, 0.2, 0.3]).repeat(400, 1)
    found: Any = prefuse.compile(Drawn(), (shares,), cache=False, random=True)(shares)
    several, one, more = found
    assert [list(made.shape) for made in (several, one, more)] == [[400, 3], [1], [9]]
    assert {tuple(sorted(row)) for row in several.tolist()} == {(0, 2, 3)}
    firsts = several[:, 0].bincount(minlength=4) / 400
    assert all(abs(found - wanted) < 0.12 for found, wanted in zip(firsts.tolist(), shares[0].tolist(), strict=True))
