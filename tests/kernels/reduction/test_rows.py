"""Groups of reductions and pointwise operators over the same rows, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401  (names bfloat16 to NumPy)
import numpy as np
import pytest
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.reduction import row_schedule
from prefuse.kernels.reduction.rows import plan
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Candidate, Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, OPSET, Case, check, check_in_turn, target_of, type_of

rng = np.random.default_rng(11)
Arrays = dict[str, np.ndarray]
Step = tuple[str, str, str] | tuple[str, str, str, dict[str, Any]]  # operator, operands, results, attributes
UNIT = {"float64": 1e-12, "float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (rng.standard_normal(shape) * 2 + 0.5).astype(dtype)


def axes_of(x: np.ndarray, a: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(a["axes"]) if "axes" in a else tuple(range(a.get("axis", -1) % x.ndim, x.ndim))


def standard(x: np.ndarray, a: Mapping[str, Any], *parameters: np.ndarray, centred: bool = True) -> list[np.ndarray]:
    axes = axes_of(x, a)
    length = max(int(np.prod([x.shape[axis] for axis in axes])), 1)
    mean = x.sum(axes, keepdims=True) / length if centred else 0
    inverse = 1 / np.sqrt(((x - mean) ** 2).sum(axes, keepdims=True) / length + a.get("epsilon", 1e-5))
    y = (x - mean) * inverse
    for place, parameter in enumerate(parameters):
        y = y + parameter if place else y * parameter
    return [y, np.asarray(mean), inverse]


def softmax(x: np.ndarray, a: Mapping[str, Any]) -> np.ndarray:
    e = np.exp(x - x.max(axes_of(x, a), keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(axes_of(x, a), keepdims=True))


def log_softmax(x: np.ndarray, a: Mapping[str, Any]) -> np.ndarray:
    shifted = x - x.max(axes_of(x, a), keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axes_of(x, a), keepdims=True)))


def reduce_by(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda a, x: np.asarray(function(x, axis=axes_of(x, a), keepdims=bool(a.get("keepdims", 1))))


FORMULAS: dict[str, Callable[..., Any]] = {
    "Abs": lambda a, x: np.abs(x), "Add": lambda a, x, y: x + y, "Cast": lambda a, x: x, "Clip": lambda a, x, y: np.maximum(x, y),
    "Div": lambda a, x, y: x / y, "Exp": lambda a, x: np.exp(x), "Log": lambda a, x: np.log(x), "Mul": lambda a, x, y: x * y,
    "Neg": lambda a, x: -x, "Sqrt": lambda a, x: np.sqrt(x), "Sub": lambda a, x, y: x - y, "Tanh": lambda a, x: np.tanh(x),
    "Relu": lambda a, x: np.maximum(x, 0), "Round": lambda a, x: np.rint(x),
    "Where": lambda a, c, x, y: np.where(c, x, y), "Less": lambda a, x, y: x < y,
    "ReduceSum": reduce_by(np.sum), "ReduceMean": reduce_by(np.mean), "ReduceProd": reduce_by(np.prod),
    "ReduceMax": reduce_by(lambda x, **k: np.max(x, initial=-np.inf, **k)),
    "ReduceMin": reduce_by(lambda x, **k: np.min(x, initial=np.inf, **k)),
    "ReduceL1": reduce_by(lambda x, **k: np.abs(x).sum(**k)), "ReduceL2": reduce_by(lambda x, **k: np.sqrt((x * x).sum(**k))),
    "ReduceLogSum": reduce_by(lambda x, **k: np.log(x.sum(**k))),
    "ReduceLogSumExp": reduce_by(lambda x, **k: np.log(np.exp(x).sum(**k))),
    "ReduceSumSquare": reduce_by(lambda x, **k: (x * x).sum(**k)),
    "Softmax": lambda a, x: softmax(x, a), "LogSoftmax": lambda a, x: log_softmax(x, a),
    "LayerNormalization": lambda a, x, *p: standard(x, a, *p),
    "RMSNormalization": lambda a, x, *p: standard(x, a, *p, centred=False)[0],
}  # fmt: skip


def group_of(
    steps: Sequence[Step], arrays: Arrays, outputs: str, dtypes: Mapping[str, str] | None = None
) -> tuple[Group, Arrays]:
    """The group of these operators, and every value in float64. Operands of one element are literals."""
    values = {name: array.astype(np.float64) if array.dtype.kind in "fV" else array for name, array in arrays.items()}
    first = next(iter(arrays.values()))
    dtype = str(first.dtype)
    ops, types = [], {name: type_of(array) for name, array in arrays.items()}
    for name, inputs, results, *rest in steps:
        attributes: dict[str, Any] = rest[0] if rest else {}
        ops.append(Op(name, tuple(inputs.split()), tuple(results.split()), attributes, OPSET))
        with np.errstate(all="ignore"):
            found = FORMULAS[name](attributes, *(values[one] for one in inputs.split()))
        for result, value in zip(results.split(), found if isinstance(found, list) else [found], strict=False):
            values[result] = np.asarray(value)
            kind = (dtypes or {}).get(result, "bool" if value.dtype == bool else dtype)
            types[result] = TensorType(value.shape, kind)
    literals = {name: array for name, array in arrays.items() if array.size == 1 and array.ndim == 0}
    return Group(tuple(ops), tuple(arrays), tuple(outputs.split()), types, frozenset(literals), literals), values


def case(steps: Sequence[Step], arrays: Arrays, outputs: str, dtypes: Mapping[str, str] | None = None) -> Case:
    group, values = group_of(steps, arrays, outputs, dtypes)
    expected = [values[name].astype(group.types[name].dtype) for name in group.outputs]
    unit = max(UNIT.get(group.types[name].dtype, 0) for name in group.outputs)
    shapes = [list(array.shape) for array in arrays.values()]
    group = replace(group, configuration={TEMPLATE: "rows"})  # on some cores others are as fast for small ones
    return Case(group, arrays, expected, unit, unit, f"{[op.op_type for op in group.ops]} {shapes}", "rows")


def residual_norm(*shape: int, dtype: str = "float32", outputs: str = "s y", name: str = "LayerNormalization") -> Case:
    """What stands between the blocks of a transformer: the sum itself is read again where outputs name it."""
    x, r, w, b = (
        normal(*shape, dtype=dtype),
        normal(*shape, dtype=dtype),
        normal(shape[-1], dtype=dtype),
        normal(shape[-1], dtype=dtype),
    )
    arrays, operands = {"x": x, "r": r, "w": w, "b": b}, "s w b"
    if name == "RMSNormalization":
        del arrays["b"]
        operands = "s w"
    return case([("Add", "x r", "s"), (name, operands, "y", {"axis": -1})], arrays, outputs)


def pooled(*shape: int, keepdims: int = 0, dtype: str = "float32") -> Case:
    """Attention pooling: scores, probabilities, their weighted sum."""
    steps: list[Step] = [
        ("Mul", "x scale", "s"),
        ("Softmax", "s", "p", {"axis": -1}),
        ("Mul", "p v", "w"),
        ("ReduceSum", "w", "t", {"axes": (-1,), "keepdims": keepdims}),
        ("Tanh", "t", "y"),
    ]
    return case(
        steps, {"x": normal(*shape, dtype=dtype), "scale": np.array(0.3, dtype), "v": normal(*shape[1:], dtype=dtype)}, "y"
    )


def unit_vectors(*shape: int, axes: tuple[int, ...] = (-1,)) -> Case:
    """torch's `normalize`."""
    steps: list[Step] = [("ReduceL2", "x", "n", {"axes": axes}), ("Clip", "n eps", "c"), ("Div", "x c", "y")]
    made = case(steps, {"x": normal(*shape), "eps": np.array(1e-12, np.float32)}, "y")
    return replace(made, template="rows" if shape[-1] > 1 else "")


def sample_variance(*shape: int) -> Case:
    """Epsilon outside the root and one element fewer, which no operator of ONNX has."""
    arrays = {
        "x": normal(*shape),
        "n": np.array(shape[-1] - 1, np.float32),
        "eps": np.array(1e-6, np.float32),
        "w": normal(*shape[1:]),
    }
    over = {"axes": (-1,)}
    steps: list[Step] = [
        ("ReduceMean", "x", "m", over), ("Sub", "x m", "d"), ("Mul", "d d", "q"), ("ReduceSum", "q", "t", over),
        ("Div", "t n", "v"),
        ("Sqrt", "v", "r"), ("Add", "r eps", "e"), ("Div", "d e", "z"), ("Mul", "z w", "y"),
    ]  # fmt: skip
    return case(steps, arrays, "y m")


def each_fold(*shape: int, keepdims: int, axes: tuple[int, ...] = (-1,)) -> Case:
    """All reductions of one tanh, stored beside them."""
    names = sorted(name for name in FORMULAS if name.startswith("Reduce") and name != "ReduceLogSum")
    over = {"axes": axes, "keepdims": keepdims}
    steps: list[Step] = [("Tanh", "x", "h"), *((name, "h", name.lower(), over) for name in names)]
    steps += [("Abs", "h", "a"), ("ReduceLogSum", "a", "reducelogsum", over)]
    return case(steps, {"x": normal(*shape)}, " ".join(["h", "reducelogsum", *(name.lower() for name in names)]))


def plane_norm(*shape: int) -> Case:
    """Rows of two dimensions, of which an operand spans one, and each row has a number of its own."""
    arrays = {"x": normal(*shape), "w": normal(*shape[2:]), "c": normal(shape[3]), "k": normal(shape[1], 1, 1)}
    steps: list[Step] = [("Mul", "x c", "m"), ("LayerNormalization", "m w", "n", {"axis": 2}), ("Add", "n k", "y")]
    return case(steps, arrays, "y")


def rounded_rows(*shape: int) -> Case:
    """Rows in 8 bits by their own range, whose scales are powers of two here, and the scales."""
    scales = 2.0 ** rng.integers(-9, 9, (*shape[:-1], 1))
    x = rng.integers(0, 256, shape) + 0.25
    x[..., 0] = 255
    arrays = {"x": (x * scales).astype(np.float32), "levels": np.array(255, np.float32), "none": np.array(0, np.float32)}
    steps: list[Step] = [
        ("ReduceMax", "x", "m", {"axes": (-1,)}),
        ("Div", "m levels", "s"),
        ("Div", "x s", "d"),
        ("Round", "d", "r"),
        ("Clip", "r none", "c"),
        ("Cast", "c", "q"),
    ]
    return replace(case(steps, arrays, "s q", {"q": "uint8"}), template="rows" if shape[-1] > 1 else "")


def masked_softmax(*shape: int) -> Case:
    arrays = {
        "x": normal(*shape),
        "m": normal(shape[0], 1, shape[2]),
        "zero": np.array(0, np.float32),
        "low": np.array(-1e9, np.float32),
    }
    steps: list[Step] = [
        ("Less", "m zero", "c"),
        ("Where", "c low x", "s"),
        ("Softmax", "s", "p", {"axis": -1}),
        ("LogSoftmax", "s", "l", {"axis": -1}),
    ]
    return case(steps, arrays, "p l")


def statistics(*shape: int) -> Case:
    """All three outputs of LayerNormalization, and what is computed from them."""
    arrays = {"x": normal(*shape), "w": normal(shape[-1]), "b": normal(shape[-1])}
    steps: list[Step] = [("Neg", "x", "n"), ("LayerNormalization", "n w b", "y m i", {"axis": -1}), ("Mul", "m i", "z")]
    return case(steps, arrays, "y m i z")


LENGTHS = (1, 3, 17, 768, 1000)


@pytest.mark.parametrize("level", LEVELS)
def test_rows(level: str) -> None:
    cases = [residual_norm(2, 3, n, outputs=outputs) for n in LENGTHS for outputs in ("y", "s y")]
    cases += [pooled(2, 5, n, keepdims=keepdims) for n in LENGTHS for keepdims in (0, 1)]
    cases += [unit_vectors(5, n) for n in LENGTHS] + [sample_variance(3, 2, n) for n in (3, 17, 768)]
    cases += [each_fold(3, n, keepdims=keepdims) for n in (1, 17, 100) for keepdims in (0, 1)]
    cases += [plane_norm(2, 3, 4, 5), plane_norm(1, 1, 3, 17), masked_softmax(2, 3, 17), statistics(2, 3, 33)]
    cases += [unit_vectors(2, 3, 17, axes=(-2, -1)), unit_vectors(17, axes=(0,)), each_fold(2, 3, 5, keepdims=0, axes=(0, 1, 2))]
    check_in_turn(cases, level)


def test_threads_share_the_rows() -> None:
    """More work than one thread is given, with scratch of each."""
    check([residual_norm(41, 333, outputs="y"), pooled(3, 97, 128)], target_of("avx2", threads=3))


@pytest.mark.parametrize("level", LEVELS)
def test_rows_become_bytes(level: str) -> None:
    """Of lengths that fill no vector, too."""
    for length in LENGTHS:
        check([rounded_rows(5, length)], target_of(level))


def test_other_types() -> None:
    cases = [residual_norm(3, 17, dtype=dtype) for dtype in ("float64", "float16", "bfloat16")]
    cases += [pooled(2, 3, 17, dtype="float16"), residual_norm(3, 40, dtype="float16", name="RMSNormalization")]
    check(cases, target_of("avx2"))


def test_empty() -> None:
    """No rows, and rows of nothing: a sum of 0, a maximum of minus infinity."""
    empty_rows: list[Step] = [
        ("Neg", "x", "n"),
        ("ReduceSum", "n", "s", {"axes": (-1,)}),
        ("ReduceMax", "n", "m", {"axes": (-1,)}),
    ]
    check([residual_norm(0, 17), residual_norm(3, 0), case(empty_rows, {"x": normal(3, 0)}, "s m")], target_of("avx2"))


def test_edge_values() -> None:
    """NaN stays in its row; rows of one infinity or all of them are what NumPy says."""
    nan, inf = np.nan, np.inf
    x = np.array(
        [[1, nan, 2, 3, 4], [1, inf, 2, 3, 4], [1, -inf, 2, 3, 4], [-inf] * 5, [0] * 5, [100, -100, 0, 1, 2]], np.float32
    )
    arrays = {"x": x, "one": np.array(1, np.float32)}
    over = {"axes": (-1,)}
    steps: list[Step] = [("Mul", "x one", "y"), ("Softmax", "y", "p", {"axis": -1})]
    steps += [(name, "y", name.lower(), over) for name in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceLogSumExp")]
    names = "p reducesum reducemax reducemin reducel2 reducelogsumexp"
    one = case(steps, arrays, names)
    one.expected = [array.copy() for array in one.expected]
    one.expected[-1][-1] = 100.0  # which NumPy's plain formula overflows in float32 only
    one.expected[-1][3] = -inf
    check([one], target_of("avx2"))


def test_what_later_loops_read_again_is_kept_or_computed_again() -> None:
    """exp(x - max) is kept; x - mean, one operation on an operand, is not; the sum is read from the output that it is."""

    def kept(made: Case) -> list[str]:
        form = row_schedule.row_form(made.group)
        assert isinstance(form, row_schedule.RowForm)
        return [form.group.producers[name].op_type for name in form.scratch]

    assert kept(residual_norm(4, 100, outputs="s y")) == []
    assert kept(residual_norm(4, 100, outputs="y")) == ["Add"]
    assert kept(pooled(2, 3, 100)) == ["ExpNonpositive"]
    assert kept(sample_variance(3, 2, 100)) == []


def test_normalizations_of_one_value_share_their_statistics() -> None:
    """The parallel blocks of Falcon and GPT-NeoX."""
    norm = "LayerNormalization"
    made = case([(norm, "x w", "y"), (norm, "x v", "z")], {"x": normal(5, 33), "w": normal(33), "v": normal(33)}, "y z")
    form = row_schedule.row_form(made.group)
    assert isinstance(form, row_schedule.RowForm)
    assert len(form.folds) == 2
    assert form.loops == 3
    check([made], target_of("avx2"))


def refusal(steps: Sequence[Step], arrays: Arrays, outputs: str) -> str:
    group, _ = group_of(steps, arrays, outputs)
    planned = plan(group, Target.parse("cpu"))
    assert isinstance(planned, Refusal)
    return planned.reason


def test_refusals() -> None:
    x = {"x": normal(3, 4, 8)}
    last, middle = {"axes": (-1,)}, {"axes": (1,)}
    neg: Step = ("Neg", "x", "n")
    assert "not over the last dimensions" in refusal([neg, ("ReduceSum", "n", "y", middle)], x, "y")
    two: list[Step] = [neg, ("ReduceSum", "n", "y", last), ("ReduceSum", "n", "z", {"axes": (1, 2)})]
    assert "different numbers of dimensions" in refusal(two, x, "y z")
    apart: list[Step] = [("ReduceSum", "x", "y", last), ("ReduceSum", "v", "z", last)]
    assert "rows of another shape" in refusal(apart, {**x, "v": normal(3, 4, 7)}, "y z")
    assert "a template of its own" in refusal([("ReduceSum", "x", "y", last)], x, "y")
    both: list[Step] = [("ReduceSum", "x", "s", {"axes": (-1,), "keepdims": 0}), ("Exp", "x", "e"), ("Add", "e s", "y")]
    assert "with and without" in refusal(both, {"x": normal(4, 4)}, "y")
    larger: list[Step] = [("ReduceSum", "x", "s", last), ("Add", "s v", "y")]
    assert "in no row" in refusal(larger, {**x, "v": normal(2, 3, 4, 8)}, "y")
    smaller: list[Step] = [("Neg", "v", "y"), ("Add", "x v", "a"), ("ReduceSum", "a", "s", last)]
    assert "another shape than the rows" in refusal(smaller, {**x, "v": normal(8)}, "y s")
    twice: list[Step] = [("ReduceSum", "x", "s", last), ("ReduceSum", "s", "y", last)]
    assert "rows of another shape" in refusal(twice, x, "y")
    long = residual_norm(2, 40_000, outputs="y").group
    planned = plan(long, Target.parse("cpu"))
    assert planned == Refusal(
        "rows of 40000 elements need 156 KiB of scratch, more than the 128 KiB that a thread keeps in cache"
    )
    fits = replace(long, outputs=("s", "y"))
    assert isinstance(plan(fits, Target.parse("cpu")), Candidate)


def test_integers_are_left_to_others() -> None:
    group, _ = group_of([("Neg", "x", "n"), ("ReduceSum", "n", "y", {"axes": (-1,)})], {"x": np.ones((2, 3), np.int32)}, "y")
    built = build_kernel(group, Target.parse("cpu"))
    assert isinstance(built, BuiltKernel)
    assert built.template == "reduction"
    assert ("rows", "ReduceSum of int32") in built.refused


def test_a_small_constant_of_a_row_is_read_element_by_element() -> None:
    """Integer constants of up to 64 elements come as literals, and only one number is written into the code."""
    steps: list[Step] = [("Less", "limit place", "l"), ("Where", "l x rest", "m"), ("ReduceMax", "m", "y", {"axes": (-1,)})]
    x, rest = normal(3, 8), np.zeros((1,), np.float32)
    limit, place = np.array([[3], [4], [5]], np.int64), np.arange(8, dtype=np.int64).reshape(1, 8)
    arrays = {"x": x, "limit": limit, "place": place, "rest": rest}
    group, _ = group_of(steps, arrays, "m y", {"l": "bool"})
    group = replace(group, constants=frozenset(["place"]), literals={"place": place})
    m = np.where(limit < place, x, rest)
    check([Case(group, arrays, [m, m.max(-1, keepdims=True)], template="rows")], target_of("avx2"))
