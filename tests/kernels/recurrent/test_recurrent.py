"""GRU, LSTM and RNN: torch in float64, ONNX Runtime where torch lacks an attribute, a loop in NumPy where both do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.recurrent import recurrent
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

from ..harness import LEVELS, Case, check, check_in_turn, run, target_of, type_of

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
INPUTS = ("x", "w", "r", "b", "lengths", "h", "c", "p")
OUTPUTS = ("y", "last", "cell")
Arrays = dict[str, np.ndarray]


def operands(op: str, steps: int, batch: int, inputs: int, hidden: int, directions: int = 1, *, layout: int = 0) -> Arrays:
    """Random operands of every name; a test drops what it does not want."""
    random = np.random.default_rng(steps * 31 + hidden)
    gates = GATES[op]

    def array(*shape: int) -> np.ndarray:
        return np.asarray(random.uniform(-1, 1, shape) / np.sqrt(shape[-1] if len(shape) == 3 else 1))

    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    arrays = {
        "x": array(*((batch, steps, inputs) if layout else (steps, batch, inputs))) * np.sqrt(inputs),
        "w": array(directions, gates * hidden, inputs),
        "r": array(directions, gates * hidden, hidden),
        "b": array(directions, 2 * gates * hidden),
        "lengths": random.integers(1, steps + 1, batch).astype(np.int32),
        "h": array(*state) * np.sqrt(hidden),
    }
    return arrays | ({"c": array(*state) * np.sqrt(hidden), "p": array(directions, 3 * hidden)} if op == "LSTM" else {})


def case(
    op: str,
    arrays: Arrays,
    expected: Sequence[np.ndarray],
    *,
    dtype: Any = np.float32,
    constants: str = "wrb",
    narrow: str = "",
    precision: Precision = "float32",
    tolerance: float = 2e-6,
    wanted: str = "y last cell",
    **attributes: Any,
) -> Case:
    """The operator on `arrays`, those named in `narrow` stored as bfloat16; of `expected` Y, Y_h and Y_c, those named in `wanted`
    are outputs."""
    kinds = {name: np.int32 if name == "lengths" else ml_dtypes.bfloat16 if name in narrow else dtype for name in arrays}
    arrays = {name: a.astype(kinds[name]) for name, a in arrays.items()}
    results = dict(zip(OUTPUTS, expected, strict=False))
    outputs = tuple(name if name in wanted.split() else "" for name in results)
    results = {name: results[name] for name in outputs if name}
    types = {name: type_of(a) for name, a in arrays.items()}
    types |= {name: type_of(value.astype(dtype)) for name, value in results.items()}
    names = tuple(name if name in arrays else "" for name in INPUTS[: 8 if op == "LSTM" else 6])
    node = Op(op, names, outputs, {"hidden_size": arrays["r"].shape[2], **attributes}, 22)
    group = Group((node,), tuple(arrays), tuple(results), types, frozenset(constants) & arrays.keys(), precision=precision)
    label = f"{op} {arrays['x'].shape} {arrays['r'].shape[2]} {attributes} {wanted}"
    return Case(group, arrays, list(results.values()), tolerance, tolerance, label, "recurrent")


def reordered(one: Case, order: Sequence[int]) -> Case:
    """The same with a Transpose of Y behind the operator, through a view without directions if those are not in the order."""
    group, (op,) = one.group, one.group.ops
    shape, kind = group.types["y"].shape, group.types["y"]
    ops, y, expected = [op], "y", one.expected[0]
    if len(order) < len(shape):
        y, expected = "squeezed", expected.reshape(shape[:1] + shape[2:])
        ops.append(Op("Squeeze", ("y",), (y,), {}))
    ops.append(Op("Transpose", (y,), ("ordered",), {"perm": tuple(order)}))
    ordered = np.ascontiguousarray(expected.transpose(order))
    types = {**group.types, y: replace(kind, shape=expected.shape), "ordered": replace(kind, shape=ordered.shape)}
    outputs = ("ordered", *group.outputs[1:])
    changed = replace(group, ops=tuple(ops), outputs=outputs, types=types)
    return replace(one, group=changed, expected=[ordered, *one.expected[1:]], label=f"{one.label} {order}")


def exchanged(one: Case) -> Case:
    """The same with a Transpose before the operator, which makes its inputs of those whose batch comes first."""
    group, x = one.group, np.ascontiguousarray(one.arrays["x"].swapaxes(0, 1))
    before = Op("Transpose", ("stored",), ("x",), {"perm": (1, 0, 2)})
    names = tuple("stored" if name == "x" else name for name in group.inputs)
    types = {**group.types, "stored": replace(group.types["x"], shape=x.shape)}
    arrays = {name: one.arrays[name] for name in one.arrays if name != "x"} | {"stored": x}
    return replace(one, group=replace(group, ops=(before, *group.ops), inputs=names, types=types), arrays=arrays)


def in_other_orders(op: str) -> list[Case]:
    both = operands(op, 4, 3, 5, 19, 2)
    return [
        reordered(of_torch(op, 5, 3, 4, 6, "bidirectional"), (0, 2, 1, 3)),
        reordered(of_torch(op, 5, 3, 4, 6, "bidirectional"), (2, 0, 1, 3)),
        reordered(of_torch(op, 4, 2, 4, 37), (1, 0, 2)),
        reordered(of_torch(op, 4, 2, 4, 1), (1, 0, 2)),
        reordered(of_runtime(op, both, direction="bidirectional", wanted="y"), (0, 2, 1, 3)),
        exchanged(of_torch(op, 5, 3, 4, 6, "bidirectional")),
        exchanged(reordered(of_runtime(op, both, direction="bidirectional"), (2, 0, 1, 3))),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_sequences_in_other_orders(op: str, level: str) -> None:
    check_in_turn(in_other_orders(op), level)


@pytest.mark.parametrize(
    ("order", "reason"),
    [((0, 3, 1, 2), "puts others between the units of a step"), ((1, 0, 2, 3), "")],
)
def test_orders_that_are_refused(order: Sequence[int], reason: str) -> None:
    one = reordered(of_torch("RNN", 5, 3, 4, 6, "bidirectional"), order)
    found = recurrent.plan(one.group, Target("cpu", "avx2"))
    assert (found.reason if isinstance(found, Refusal) else "") == (f"Transpose {reason}" if reason else "")


def test_inputs_in_other_orders_that_are_refused() -> None:
    one = exchanged(of_torch("RNN", 5, 3, 4, 6))
    before, op = one.group.ops
    other = replace(before, attributes={"perm": (0, 1, 2)})
    types = {**one.group.types, "stored": one.group.types["x"]}
    for group in (replace(one.group, ops=(other, op), types=types), replace(one.group, outputs=(*one.group.outputs, "x"))):
        found = recurrent.plan(group, Target("cpu", "avx2"))
        assert isinstance(found, Refusal)
        assert found.reason == "Transpose does not only exchange steps and batch of what it alone reads"


def runtime(op: str, arrays: Arrays, **attributes: Any) -> list[np.ndarray]:
    """What ONNX Runtime computes in float32. It has no layout 1: operands go in and come out transposed."""
    layout = attributes.pop("layout", 0)
    arrays = {name: a if name == "lengths" else a.astype(np.float32) for name, a in arrays.items()}
    if layout:
        arrays = {name: np.ascontiguousarray(a.swapaxes(0, 1)) if name in "xhc" else a for name, a in arrays.items()}
    outputs = OUTPUTS[: 3 if op == "LSTM" else 2]
    inputs = [name if name in arrays else "" for name in INPUTS[: 8 if op == "LSTM" else 6]]
    node = onnx.helper.make_node(op, inputs, outputs, hidden_size=arrays["r"].shape[2], **attributes)
    facts = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in arrays.items()
    ]
    graph = onnx.helper.make_graph([node], "one", facts, [onnx.helper.make_empty_tensor_value_info(name) for name in outputs])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)
    results = list(onnxruntime.InferenceSession(model.SerializeToString()).run(None, arrays))
    if not layout:
        return results
    return [results[0].transpose(2, 0, 1, 3), *(value.swapaxes(0, 1) for value in results[1:])]


def of_runtime(
    op: str,
    arrays: Arrays,
    *,
    tolerance: float = 4e-6,
    wanted: str = "y last cell",
    narrow: str = "",
    precision: Precision = "float32",
    **attributes: Any,
) -> Case:
    arrays = rounded(arrays, narrow)
    expected = runtime(op, arrays, **attributes)
    return case(op, arrays, expected, tolerance=tolerance, wanted=wanted, narrow=narrow, precision=precision, **attributes)


def without(arrays: Arrays, *names: str) -> Arrays:
    return {name: a for name, a in arrays.items() if name not in names}


def rounded(arrays: Arrays, names: str) -> Arrays:
    """The same, but for those named, of which the nearest bfloat16 numbers are taken."""
    return {name: a.astype(ml_dtypes.bfloat16).astype(a.dtype) if name in names else a for name, a in arrays.items()}


def of_torch(op: str, steps: int, batch: int, inputs: int, hidden: int, direction: str = "forward", **options: Any) -> Case:
    """A torch module in float64 against the operator that it exports as. Its gates are ordered otherwise than ONNX's."""
    both = direction == "bidirectional"
    directions = 2 if both else 1
    module = getattr(torch.nn, op)(inputs, hidden, bidirectional=both, dtype=torch.float64)
    order = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2), "RNN": (0,)}[op]  # of torch's gates in ONNX
    arrays = without(operands(op, steps, batch, inputs, hidden, directions), "lengths", "p")
    arrays = rounded(arrays, options.get("narrow", "") + options.pop("narrow_numbers", ""))
    parts = {"weight_ih": arrays["w"], "weight_hh": arrays["r"]}
    parts["bias_ih"], parts["bias_hh"] = np.split(arrays["b"], 2, 1)
    for name, stacked in parts.items():
        for end, array in zip(("_l0", "_l0_reverse"), stacked, strict=False):
            chunks = np.split(array, GATES[op])
            with torch.no_grad():
                getattr(module, name + end).copy_(
                    torch.from_numpy(np.concatenate([chunks[order.index(g)] for g in range(len(order))]))
                )
    x, state = torch.from_numpy(arrays["x"]), [torch.from_numpy(arrays[name]) for name in ("h", "c") if name in arrays]
    with torch.no_grad():
        y, last = module(x.flip(0) if direction == "reverse" else x, tuple(state) if op == "LSTM" else state[0])
    y = y.flip(0) if direction == "reverse" else y
    expected = [y.reshape(steps, batch, directions, hidden).transpose(1, 2), *(last if op == "LSTM" else [last])]
    attributes: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    return case(op, arrays, [value.numpy() for value in expected], direction=direction, **attributes, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_shapes_against_torch(op: str, level: str) -> None:
    cases = [
        of_torch(op, 5, 1, 8, 32),
        of_torch(op, 4, 9, 7, 37),
        of_torch(op, 3, 5, 7, 37, "bidirectional"),
        of_torch(op, 6, 32, 16, 64, "bidirectional"),
        of_torch(op, 3, 2, 5, 17, "reverse"),
        of_torch(op, 2, 3, 40, 130),
        of_torch(op, 1, 1, 1, 1),
    ]
    check_in_turn(cases, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_storage_types(op: str, level: str) -> None:
    cases = [of_torch(op, 3, 5, 7, 21, "bidirectional", dtype=np.float64, tolerance=1e-12)]
    cases += [of_torch(op, 3, 5, 7, 21, dtype=np.float16, tolerance=5e-3)]
    cases += [of_torch(op, 3, 5, 7, 21, dtype=ml_dtypes.bfloat16, tolerance=4e-2)]
    check_in_turn(cases, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_weights_that_change(op: str, level: str) -> None:
    cases = [of_torch(op, 3, 5, 7, 21, "bidirectional", constants="")]
    cases += [of_torch(op, 2, 3, 9, 70, constants="r"), of_torch(op, 2, 3, 9, 70, constants="wb")]
    check_in_turn(cases, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_attributes_against_onnx_runtime(op: str, level: str) -> None:
    both = operands(op, 6, 9, 5, 19, 2)
    one, first = operands(op, 6, 9, 5, 19), operands(op, 6, 9, 5, 19, 2, layout=1)
    cases = [
        of_runtime(op, both, direction="bidirectional"),  # lengths, states and peepholes together
        of_runtime(op, one, direction="reverse"),
        of_runtime(op, one, clip=0.2),
        of_runtime(op, first, direction="bidirectional", layout=1),
        of_runtime(op, without(first, "lengths", "p"), direction="bidirectional", layout=1),
        of_runtime(op, without(one, "b")),
        of_runtime(op, without(one, "h", "c", "b", "p", "lengths")),
        *(of_runtime(op, one, wanted=wanted) for wanted in ("y", "last", "cell" if op == "LSTM" else "last")),
    ]
    if op == "GRU":
        cases += [of_runtime(op, both, direction="bidirectional", linear_before_reset=1, clip=0.3)]
    if op == "LSTM":
        cases += [of_runtime(op, without(both, "lengths"), direction="bidirectional", input_forget=1)]
        cases += [of_runtime(op, without(both, "c"), direction="bidirectional", input_forget=1, clip=0.4)]
    check_in_turn(cases, level)


ACTIVATIONS: dict[str, dict[str, tuple[float, ...]]] = {
    "Relu": {},
    "Tanh": {},
    "Sigmoid": {},
    "Affine": {"alpha": (0.5,), "beta": (0.1,)},
    "LeakyRelu": {"alpha": (0.2,)},
    "ThresholdedRelu": {"alpha": (0.3,)},
    "ScaledTanh": {"alpha": (0.7,), "beta": (1.5,)},
    "HardSigmoid": {"alpha": (0.3,), "beta": (0.4,)},
    "Elu": {"alpha": (0.6,)},
    "Softsign": {},
    "Softplus": {},
}


def test_activations_against_onnx_runtime() -> None:
    cases = []
    one, both = operands("RNN", 3, 4, 5, 19), operands("RNN", 3, 4, 5, 19, 2)
    for name, values in ACTIVATIONS.items():
        parameters: dict[str, Any] = {f"activation_{kind}": value for kind, value in values.items()}
        expected = runtime("RNN", one, activations=[name], **parameters)
        cases.append(case("RNN", one, expected, activations=(name.upper(),), tolerance=4e-6, **parameters))
    cases += [of_runtime("RNN", one, activations=(name,)) for name in ("LeakyRelu", "HardSigmoid", "Elu")]
    cases.append(of_runtime("RNN", both, direction="bidirectional", activations=("Tanh", "LeakyRelu"), activation_alpha=(0.5,)))
    lstm: dict[str, Any] = {
        "activations": ("HardSigmoid", "Relu", "Elu", "Sigmoid", "Softsign", "Tanh"),
        "activation_alpha": (0.25, 0.7),
    }
    cases.append(of_runtime("LSTM", operands("LSTM", 3, 4, 5, 19, 2), direction="bidirectional", **lstm, activation_beta=(0.4,)))
    for reset in (0, 1):
        gru: dict[str, Any] = {"activations": ("Sigmoid", "Softsign", "HardSigmoid", "Tanh"), "linear_before_reset": reset}
        cases.append(of_runtime("GRU", operands("GRU", 3, 4, 5, 19, 2), direction="bidirectional", **gru))
    check(cases, target_of("avx2"))


def test_empty_dimensions() -> None:
    arrays = without(operands("GRU", 2, 3, 4, 5), "lengths")
    no_steps, no_batch = arrays | {"x": arrays["x"][:0]}, arrays | {"x": arrays["x"][:, :0], "h": arrays["h"][:, :0]}
    no_inputs = arrays | {"x": arrays["x"][:, :, :0], "w": arrays["w"][:, :, :0]}
    cases = [
        case("GRU", no_steps, [np.zeros((0, 1, 3, 5)), arrays["h"]]),
        case("GRU", no_batch, [np.zeros((2, 1, 0, 5)), no_batch["h"]]),
        case("GRU", no_inputs, runtime("GRU", arrays | {"x": arrays["x"] * 0})),
    ]
    check(cases, target_of("avx2"))


def test_lengths_of_zero_and_out_of_range() -> None:
    """A row that takes no step keeps its state; a length beyond the sequence reads nothing beyond it."""
    arrays = without(operands("LSTM", 4, 3, 5, 19, 2), "p")
    full = runtime("LSTM", arrays | {"lengths": np.array([4, 4, 4], np.int32)}, direction="bidirectional")
    expected = [value.copy() for value in full]
    expected[0][:, :, 1] = 0
    expected[1][:, 1], expected[2][:, 1] = arrays["h"][:, 1], arrays["c"][:, 1]
    arrays["lengths"] = np.array([4, 0, 9], np.int32)
    check([case("LSTM", arrays, expected, direction="bidirectional", tolerance=4e-6)], target_of("avx2"))


def test_nan_stays_in_its_row() -> None:
    arrays = without(operands("GRU", 3, 4, 5, 19), "lengths")
    y, last = (value.copy() for value in runtime("GRU", arrays))
    arrays["x"][1, 2] = np.nan
    y[1:, :, 2], last[:, 2] = np.nan, np.nan
    check([case("GRU", arrays, [y, last], tolerance=4e-6)], target_of("avx2"))


@pytest.mark.parametrize("op", GATES)
def test_same_bits_on_any_threads(op: str) -> None:
    """Panels dealt to threads step by step, directions dealt, or neither: the same sums in the same order."""

    def results(count: int) -> list[np.ndarray]:
        cases = [of_torch(op, 3, 8, 7, 320), of_torch(op, 3, 8, 7, 320, "bidirectional")]
        run(cases, target_of("avx2", count))
        return [array for made in cases for array in made.got]

    alone = results(1)
    for threads in (2, 4):
        for got, expected in zip(results(threads), alone, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: case("RNN", operands("RNN", 2, 2, 2, 2), [np.zeros((2, 1, 2, 2))], activations=("Swoosh",)), "Swoosh"),
        (lambda: case("RNN", operands("RNN", 2, 2, 2, 2), [np.zeros((2, 1, 2, 2))], activations=("Tanh",) * 3), "3 activ"),
        (lambda: case("RNN", operands("RNN", 2, 2, 2, 2), [np.zeros((2, 2, 2, 2))], direction="bidirectional"), "directions"),
        (lambda: case("RNN", operands("RNN", 2, 2, 2, 2), [np.zeros((2, 1, 2, 2))], dtype=np.int32), "int32"),
    ],
)
def test_refusals(change: Callable[[], Case], reason: str) -> None:
    built = recurrent.plan(change().group, target_of("avx2"))
    assert isinstance(built, Refusal)
    assert reason in built.reason
