"""A format that the compiler does not have, added as a row of the table: 16-bit integers, by pairs, added up in 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prefuse.kernels.formats import format as formats
from prefuse.kernels.formats import multiply_add
from prefuse.kernels.formats.format import Format, Storage
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.target import Target
from tvm import tirx

from ..convolution.channels_last_cases import channels_last
from ..harness import Case, check, type_of

INT16_PAIRS = Format("s16 pairs", Storage("int16"), Storage("int16"), "int32", "dot", 2, None)
rng = np.random.default_rng(3)


def dot(total: Any, a: Any, b: Any) -> Any:
    """VPDPWSSD in shifts: the sum of 32 bits with the products of the low and of the high halves of two words added."""
    half = tirx.const(16, "int32")
    return total + ((a << half) >> half) * ((b << half) >> half) + (a >> half) * (b >> half)


@pytest.fixture(autouse=True)
def one_more_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", (INT16_PAIRS, *formats.FORMATS))
    monkeypatch.setitem(multiply_add.MULTIPLY_ADDS, INT16_PAIRS.name, dot)


def of_integers(op: str, a: np.ndarray, b: np.ndarray, exact: np.ndarray, constants: str, **attributes: Any) -> Case:
    result = exact.astype(np.int32)
    types = {"a": type_of(a), "b": type_of(b), "y": type_of(result)}
    group = Group((Op(op, ("a", "b"), ("y",), attributes),), ("a", "b"), ("y",), types, frozenset(constants))
    return Case(group, {"a": a, "b": b}, [result], label=f"{a.shape} x {b.shape}")


def integers(*shape: int) -> np.ndarray:
    return rng.integers(-(2**12), 2**12, shape, np.int16)


@pytest.mark.parametrize("level", ["avx2", "avx512bf16-emulated"])
@pytest.mark.parametrize("shape", [(5, 8, 17), (33, 77, 50), (3, 1, 9), (70, 2048, 40)])
def test_products(shape: tuple[int, int, int], level: str) -> None:
    """Exactly, of weights that are constant and of such as change; also of more numbers than a float32 sum may have."""
    m, k, n = shape
    a, b = integers(m, k), integers(k, n)
    exact = a.astype(np.int64) @ b
    constant = of_integers("MatMul", a, b, exact, "b")
    check([constant, *([of_integers("MatMul", a, b, exact, "")] if k % 2 == 0 else [])], Target("cpu", level, 2))


@pytest.mark.parametrize("pad", [0, 1])
def test_convolutions(pad: int) -> None:
    """Of windows of 1x1, and of 3x3 on a copy with zeros around it, by pairs of channels."""
    a, b = integers(2, 10, 7, 5), integers(19, 10, 1 + 2 * pad, 1 + 2 * pad)
    padded = np.pad(a.astype(np.int64), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, b.shape[2:], (2, 3))
    case = of_integers("Conv", a, b, np.einsum("nchwij,ocij->nohw", windows, b), "b", pads=(pad,) * 4)
    check([channels_last(case, template="convolution_channels_last")], Target("cpu", "avx2", 2))
