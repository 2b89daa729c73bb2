"""Linear layers with batch normalisation and ReLU, and attention, with the variants that are usually missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefuse.tests.passes.classic.case import IMAGE, ROWS, TOKENS, case
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import relu

LINEAR_BN_RELU = (
    case("plain", lambda m, x: relu(m.bn(m.linear(x))), ROWS, "gemm_relu", linear=nn.Linear(8, 6), bn=nn.BatchNorm1d(6)),
    case(
        "no bias",
        lambda m, x: relu(m.bn(m.linear(x))),
        ROWS,
        "gemm_relu",
        linear=nn.Linear(8, 6, bias=False),
        bn=nn.BatchNorm1d(6),
    ),
    case(
        "residual", lambda m, x: relu(x + m.bn(m.linear(x))), ROWS, "gemm_add_relu", linear=nn.Linear(8, 8), bn=nn.BatchNorm1d(8)
    ),
    case(
        "shared activation",
        lambda m, x: m.relu(m.b2(m.l2(m.relu(m.b1(m.l1(x)))))),
        ROWS,
        "gemm_relu gemm_relu",
        l1=nn.Linear(8, 6),
        b1=nn.BatchNorm1d(6),
        l2=nn.Linear(6, 4),
        b2=nn.BatchNorm1d(4),
        relu=nn.ReLU(),
    ),
    case(
        "two readers",
        lambda m, x: (h := m.linear(x), relu(m.bn(h)) * h)[1],
        ROWS,
        "gemm_mul_add_relu_mul",
        "Mul not folded into Gemm: %linear has 2 readers",
        linear=nn.Linear(8, 6),
        bn=nn.BatchNorm1d(6),
    ),
    case(
        "product is an output",
        lambda m, x: (h := m.linear(x), relu(m.bn(h))),
        ROWS,
        "gemm_mul_add_relu",
        "Mul not folded into Gemm: %linear is an output of the graph",
        linear=nn.Linear(8, 6),
        bn=nn.BatchNorm1d(6),
    ),
    case("norm first", lambda m, x: relu(m.linear(m.bn(x))), ROWS, "gemm_relu", linear=nn.Linear(8, 6), bn=nn.BatchNorm1d(8)),
    case(
        "image first",
        lambda m, x: relu(m.linear(m.bn(x).flatten(1))),
        IMAGE,
        "gemm_relu",
        linear=nn.Linear(144, 6),
        bn=nn.BatchNorm2d(4),
    ),
)
LINEAR_BN = (
    case("plain", lambda m, x: m.bn(m.linear(x)), ROWS, "gemm", linear=nn.Linear(8, 6), bn=nn.BatchNorm1d(6)),
    case(
        "tokens",
        lambda m, x: m.bn(m.linear(x).transpose(1, 2)).transpose(1, 2),
        TOKENS,
        "matmul_add",
        linear=nn.Linear(8, 6),
        bn=nn.BatchNorm1d(6),
    ),
    case(
        "norm on both sides",
        lambda m, x: m.b2(m.linear(m.b1(x))),
        ROWS,
        "gemm",
        linear=nn.Linear(8, 6),
        b1=nn.BatchNorm1d(8),
        b2=nn.BatchNorm1d(6),
    ),
    case(
        "norm read twice",
        lambda m, x: (h := m.bn(x), m.linear(h) + h)[1],
        ROWS,
        "mul_add gemm_add",
        "Add not folded into Gemm: %",
        linear=nn.Linear(8, 8),
        bn=nn.BatchNorm1d(8),
    ),
)
LINEAR_RELU = (
    case("plain", lambda m, x: relu(m.linear(x)), ROWS, "gemm_relu", linear=nn.Linear(8, 6)),
    case("tokens", lambda m, x: relu(m.linear(x)), TOKENS, "matmul_add_relu", linear=nn.Linear(8, 6)),
    case("residual", lambda m, x: relu(m.linear(x) + x), TOKENS, "matmul_add_add_relu", linear=nn.Linear(8, 8)),
    case(
        "shared activation",
        lambda m, x: m.relu(m.l2(m.relu(m.l1(x)))),
        ROWS,
        "gemm_relu gemm_relu",
        l1=nn.Linear(8, 6),
        l2=nn.Linear(6, 4),
        relu=nn.ReLU(),
    ),
    case("two readers", lambda m, x: (h := m.linear(x), relu(h) * h)[1], ROWS, "gemm_relu_mul", linear=nn.Linear(8, 6)),
    case(
        "product is an output",
        lambda m, x: (h := m.linear(x), relu(h)),
        ROWS,
        "gemm_relu",
        "Relu not fused with Gemm: %linear is an output of the graph",
        linear=nn.Linear(8, 6),
    ),
    case(
        "broadcast from the left", lambda m, x, y: relu(y * m.linear(x)), (*ROWS, (1, 6)), "gemm_mul_relu", linear=nn.Linear(8, 6)
    ),
    case(
        "broadcast from the right",
        lambda m, x, y: relu(m.linear(x) - y),
        (*TOKENS, (5, 1)),
        "matmul_add_sub_relu",
        linear=nn.Linear(8, 6),
    ),
)


def heads(x: Tensor, count: int = 2) -> Tensor:
    """[N, S, E] -> [N, heads, S, E / heads]."""
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(m: Any, x: Tensor, y: Tensor | None = None, **options: Any) -> Tensor:
    y = x if y is None else y
    return functional.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(y)), heads(m.v(y)), **options)


def spelled(m: Any, x: Tensor, mask: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Attention as written by hand: its weights and its result."""
    weights = mask(heads(m.q(x)) @ heads(m.k(x)).transpose(-1, -2) / 2).softmax(-1)
    return weights, merged(weights @ heads(m.v(x)))


def projections() -> dict[str, Any]:
    """Linear layers q, k, v and out."""
    return {name: nn.Linear(8, 8) for name in ("q", "k", "v", "out")}


ATTENTION = (
    case("plain", lambda m, x: m.out(merged(attend(m, x))), TOKENS, "matmul_add attention matmul_add", **projections()),
    case(
        "residual", lambda m, x: x + m.out(merged(attend(m, x))), TOKENS, "matmul_add attention matmul_add_add", **projections()
    ),
    case(
        "module",
        lambda m, x: m.a(x, x, x, need_weights=False)[0],
        TOKENS,
        "transpose matmul_add attention gemm transpose",
        a=nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    case(
        "causal",
        lambda m, x: m.out(merged(attend(m, x, is_causal=True))),
        TOKENS,
        "matmul_add attention matmul_add",
        **projections(),
    ),
    case(
        "cross",
        lambda m, x, y: m.out(merged(attend(m, x, y))),
        (*TOKENS, (2, 7, 8)),
        "matmul_add matmul_add attention matmul_add",
        **projections(),
    ),
    case(
        "shared layer",
        lambda m, x: (h := merged(attend(m, x)), merged(attend(m, h)))[1],
        TOKENS,
        "matmul_add attention matmul_add attention",
        **projections(),
    ),
    case(
        "by hand", lambda m, x: m.out(spelled(m, x, lambda s: s)[1]), TOKENS, "matmul_add attention matmul_add", **projections()
    ),
    case(
        "mask on the right",
        lambda m, x, y: m.out(spelled(m, x, lambda s: s + y)[1]),
        (*TOKENS, (5, 5)),
        "matmul_add attention matmul_add",
        **projections(),
    ),
    case(
        "mask on the left",
        lambda m, x, y: m.out(spelled(m, x, lambda s: y + s)[1]),
        (*TOKENS, (2, 1, 1, 5)),
        "matmul_add attention matmul_add",
        **projections(),
    ),
    case(
        "weights are an output",
        lambda m, x: spelled(m, x, lambda s: s),
        TOKENS,
        "matmul_add split transpose transpose matmul_mul softmax transpose matmul transpose",
        "fuse-attention: %softmax is also an output of the graph",
        **projections(),
    ),
    case(
        "two readers",
        lambda m, x: (h := spelled(m, x, lambda s: s)[1], m.out(h) * h)[1],
        TOKENS,
        "matmul_add attention matmul_add_mul",
        **projections(),
    ),
    case(
        "norm first",
        lambda m, x: m.out(merged(attend(m, m.bn(x.transpose(1, 2)).transpose(1, 2)))),
        TOKENS,
        "matmul_add attention matmul_add",
        **projections(),
        bn=nn.BatchNorm1d(8),
    ),
)
