"""One kernel for a range of sizes gives at each of them what the operator is, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.symbolic import write_symbolic
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.tests.sample import every
from tvm import tirx

from .harness import Case, operator, target_of
from .sorting.test_topk import topk
from .symbolic import Shape, built_for, run_at, sized

_RANGE = (Dim("T", 1, 512),)
_POINTS = (1, 2, 7, 16, 17, 32, 47, 128, 129, 384, 512)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Sized:
    """An operator at any size of T, the shapes of its values by names, and the fewest points that one kernel must serve."""

    make: Callable[[int], Case]
    shapes: Mapping[str, Shape]
    level: str = "avx512"
    serves: int = len(_POINTS)
    hint: int = 128


def _rounded(*shape: int) -> np.ndarray:
    """Numbers of which many are equal."""
    return np.round(4 * numbers(*shape))


def close(op_type: str, *inputs: np.ndarray | None, **how: object) -> Case:
    return operator(op_type, *inputs, rtol=1e-4, atol=1e-4, **how)  # type: ignore[arg-type]


def windows(op_type: str, t: int, *weights: np.ndarray, **attributes: object) -> Case:
    """A convolution or a pooling of images of T rows, which it leaves as many."""
    return close(op_type, numbers(2, 4, t, 20), *weights, pads=[1, 1, 1, 1], **attributes)


def _spread(t: int, side: int, **attributes: object) -> Case:
    """A transposed convolution of images of T rows."""
    cut = {"pads": [1, 1, 1, 1]} if "output_padding" in attributes else {}
    return close("ConvTranspose", numbers(2, 4, t, 20), numbers(4, 8, side, side), **cut, **attributes)


_IMAGES = {"x0": (2, 4, "T", 20), "y0": (2, 8, "T", 20)}
_POOLED = {"x0": (2, 4, "T", 20), "y0": (2, 4, "T", 20)}
_ROWS = {"x0": ("T", 64), "y0": ("T", 64)}
_CASES = {
    "elementwise": Sized(lambda t: close("Add", numbers(t, 64), numbers(64)), _ROWS),
    "flat": Sized(lambda t: close("Mul", numbers(t, 33), numbers(t, 33)), dict.fromkeys(("x0", "x1", "y0"), ("T", 33))),
    "of-rows": Sized(lambda t: close("Sub", numbers(t, 10), numbers(t, 1)), {"x0": ("T", 10), "x1": ("T", 1), "y0": ("T", 10)}),
    "layer-norm": Sized(lambda t: close("LayerNormalization", numbers(t, 64), numbers(64), numbers(64)), _ROWS),
    "softmax": Sized(lambda t: close("Softmax", numbers(3, t, t)), {"x0": (3, "T", "T"), "y0": (3, "T", "T")}),
    "softmax-across": Sized(lambda t: close("Softmax", numbers(t, 7, 20), axis=1), {"x0": ("T", 7, 20), "y0": ("T", 7, 20)}),
    "mean-of-rows": Sized(lambda t: close("ReduceMean", numbers(t, 33), np.array([0])), {"x0": ("T", 33)}),
    "mean-along": Sized(lambda t: close("ReduceMean", numbers(5, t), np.array([1])), {"x0": (5, "T")}),
    "greatest": Sized(lambda t: close("ReduceMax", numbers(t, 3), np.array([1])), {"x0": ("T", 3), "y0": ("T", 1)}),
    "heads": Sized(
        lambda t: close("Transpose", numbers(2, t, 4, 16), perm=(0, 2, 1, 3)), {"x0": (2, "T", 4, 16), "y0": (2, 4, "T", 16)}
    ),
    "turned": Sized(lambda t: close("Transpose", numbers(t, 40), perm=(1, 0)), {"x0": ("T", 40), "y0": (40, "T")}, serves=9),
    "convolution": Sized(lambda t: windows("Conv", t, numbers(8, 4, 3, 3)), _IMAGES, serves=8),
    "columns": Sized(
        lambda t: close("Conv", numbers(1, 4, 200, t), numbers(8, 4, 1, 1)),
        {"x0": (1, 4, 200, "T"), "y0": (1, 8, 200, "T")},
        serves=8,
    ),
    "images": Sized(
        lambda t: close("Conv", numbers(t, 4, 5, 5), numbers(8, 4, 3, 3)), {"x0": ("T", 4, 5, 5), "y0": ("T", 8, 3, 3)}, serves=8
    ),
    "transposed": Sized(
        lambda t: _spread(t, 3, strides=[2, 2], output_padding=[1, 1]), {**_IMAGES, "y0": (2, 8, "2*T", 40)}, serves=10
    ),
    "transposed-in-place": Sized(lambda t: _spread(t, 2, strides=[2, 2]), {**_IMAGES, "y0": (2, 8, "2*T", 40)}, serves=8),
    "transposed-dilated": Sized(lambda t: _spread(t, 3, dilations=[2, 2]), {**_IMAGES, "y0": (2, 8, "T+4", 24)}),
    "max-pool": Sized(lambda t: windows("MaxPool", t, kernel_shape=[3, 3]), _POOLED),
    "average-pool": Sized(lambda t: windows("AveragePool", t, kernel_shape=[3, 3]), _POOLED),
    "last": Sized(lambda t: close("Gather", numbers(t), np.array(-1), axis=0), {"x0": ("T",)}),
    "last-cut": Sized(lambda t: close("Slice", numbers(t), np.array([-1]), np.array([2**31]), np.array([0])), {"x0": ("T",)}),
    "gather": Sized(
        lambda t: close("Gather", numbers(50, 48), np.arange(t)[None] % 50 - 9, axis=0, variables=(1,)),
        {"x1": (1, "T"), "y0": (1, "T", 48)},
    ),
    "product": Sized(lambda t: close("MatMul", numbers(t, 48), numbers(48, 33)), {"x0": ("T", 48), "y0": ("T", 33)}),
    "product-batch": Sized(
        lambda t: close("MatMul", numbers(t, 5, 16), numbers(t, 16, 20)),
        {"x0": ("T", 5, 16), "x1": ("T", 16, 20), "y0": ("T", 5, 20)},
    ),
    "best": Sized(lambda t: topk(_rounded(3, t), 5), {"x0": (3, "T"), "y0": (3, 5), "y1": (3, 5)}, serves=9),
    "best-columns": Sized(
        lambda t: topk(_rounded(t, 7), 2, axis=0, largest=0), {"x0": ("T", 7), "y0": (2, 7), "y1": (2, 7)}, serves=10
    ),
    "best-of-a-part": Sized(
        lambda t: topk(_rounded(3, 8 * t + 7), t), {"x0": (3, "8*T+7"), "y0": (3, "T"), "y1": (3, "T")}, serves=9
    ),
    "sorted": Sized(lambda t: topk(_rounded(2, t), t), {"x0": (2, "T"), "y0": (2, "T"), "y1": (2, "T")}),
    "sorted-doubles": Sized(
        lambda t: topk(_rounded(2, t).astype(np.float64), t, largest=0), {"x0": (2, "T"), "y0": (2, "T"), "y1": (2, "T")}
    ),
    "tiles": Sized(lambda t: close("MatMul", numbers(t, 320), numbers(320, 192)), {"x0": ("T", 320), "y0": ("T", 192)}, "amx", 5),
}


@pytest.mark.parametrize("name", every(2, list(_CASES)))
def test_one_kernel_serves_all_sizes(name: str) -> None:
    case = _CASES[name]
    target, domain = target_of(case.level), Domain(_RANGE, {"T": case.hint})
    kernel = built_for(sized(case.make(case.hint), case.shapes, domain), target)
    served = [point for point in _POINTS if domain.serves({"T": point})]
    assert len(served) >= case.serves, domain.cuts
    run_at(kernel, target, domain, {point: (case.make(point), {"T": point}) for point in served})


@pytest.mark.parametrize(("least", "most", "length", "kept"), [(0, 9, 8, 1), (8, 12, 100, 1), (8, 12, 100, 8)])
def test_the_best_of_a_part(least: int, most: int, length: int, kept: int) -> None:
    """None of a row that the buffer does not hold; by thresholds that are ranked, and bisected."""
    target, domain = target_of("avx512"), Domain((Dim("T", least, most),), {"T": most})
    shapes: dict[str, Shape] = {"x0": (3, f"{length}*T+40"), "y0": (3, f"{kept}*T"), "y1": (3, f"{kept}*T")}
    cases = {t: (topk(_rounded(3, length * t + 40), kept * t), {"T": t}) for t in {least, least + 1, most}}
    run_at(built_for(sized(cases[most][0], shapes, domain), target), target, domain, cases)


def test_what_needs_a_number_refuses_and_says_where() -> None:
    domain = Domain(_RANGE, {"T": 128})
    case = close("Det", numbers(128, 128))
    refused = build_kernel(sized(case, {"x0": ("T", "T")}, domain), target_of("avx512"))
    assert isinstance(refused, tuple)
    assert any("symbolic: " in reason and "kernels/" in reason for _, reason in refused)
    assert domain.alive.all()


@pytest.mark.parametrize("type_name", ["int32", "float32"])
def test_a_constant_of_a_size_is_refused(type_name: str) -> None:
    """As TVM says it: a size of a kernel is a variable."""
    domain = Domain(_RANGE, {"T": 128})
    refused = write_symbolic(lambda: tirx.const(domain.size("T"), type_name), domain)
    assert isinstance(refused, Refusal)
    assert "symbolic: " in refused.reason
