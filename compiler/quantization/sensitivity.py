"""What quantizing one unit alone does to the outputs of a model: all of them in one session, switched one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..engines.onnxruntime_session import OnnxRuntimeSession
from ..ir.facts import infer_node
from ..ir.names import fresh_name
from ..ir.rewriter import graph_of, operation
from .batches import Batch
from .quantizer import Assignment, Calibrated
from .units import find_units


def squared_error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """For each output the squared norm of the difference, and that of what was expected: [outputs, 2], in float64."""
    rows = [
        (np.sum((a.astype(np.float64) - b) ** 2), np.sum(b.astype(np.float64) ** 2)) if b.dtype.kind == "f" else (0.0, 0.0)
        for a, b in zip(found, expected, strict=True)
    ]
    return np.array(rows, np.float64).reshape(-1, 2)


def relative_error(squares: np.ndarray) -> float:
    """The error of the worst output, relative to its norm, of sums of what `squared_error` gives."""
    norms = np.where(squares[:, 1] > 0, squares[:, 1], 1.0)
    return float(np.sqrt((squares[:, 0] / norms).max(initial=0.0)))


def damages(
    calibrated: Calibrated, assignment: Assignment, batches: Sequence[Batch], progress: Callable[[str, float], None] | None = None
) -> dict[str, float]:
    """The squared relative error of the model's worst output when one unit alone has its format, by the names of units.

    Of recurrences it is that of their weights: what their rows lose no other runtime shows.

    Raises:
        Exception: what ONNX Runtime raises for a model that it cannot run.
    """
    model, switches = switched(calibrated, assignment)
    session = OnnxRuntimeSession(model, optimize=False)
    off = {name: np.array(False) for name in switches.values()}
    totals = {name: np.zeros((len(model.graph.outputs), 2)) for name in switches}
    steps, done = max(len(batches) * len(switches), 1), 0
    for batch in batches:
        expected = session.run({**batch, **off})
        for name, switch in switches.items():
            totals[name] += squared_error(session.run({**batch, **off, switch: np.array(True)}), expected)
            done += 1
            if progress is not None:
                progress(f"measuring {name}", done / steps)
    found = {name: relative_error(squares) ** 2 for name, squares in totals.items()}
    alone = {name: calibrated.place({name: form}) for name, form in assignment.items() if name not in found}
    return found | {name: _damage(calibrated.model, one, batches) for name, one in alone.items()}


def _damage(model: ir.Model, quantized: ir.Model, batches: Sequence[Batch]) -> float:
    exact, other = (OnnxRuntimeSession(one, optimize=False) for one in (model, quantized))
    squares = [squared_error(other.run(batch), exact.run(batch)) for batch in batches]
    return relative_error(np.sum(squares, axis=0)) ** 2 if squares else 0.0


def switched(calibrated: Calibrated, assignment: Assignment) -> tuple[ir.Model, Mapping[str, str]]:
    """A model of float units, each of which an input, by the name of the unit, makes quantized."""
    model = calibrated.place(assignment)
    original = {str(node.name): node for node in calibrated.model.graph}
    values = {str(value.name): value for value in model.graph.inputs}
    values |= {str(value.name): value for node in model.graph for value in node.outputs}
    switches = {}
    for unit in find_units(calibrated.model):
        if unit.name not in assignment:
            continue
        flag = ir.Value(name=fresh_name(model, f"{unit.name}_switch"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        model.graph.inputs.append(flag)
        switches[unit.name] = str(flag.name)
        _switch(model, unit.name, original[unit.name], flag, values)
    return model, switches


def _switch(model: ir.Model, name: str, original: ir.Node, flag: ir.Value, values: dict[str, ir.Value]) -> None:
    """Compute a unit both ways, and take the result that the flag asks for."""
    result = values[str(original.outputs[0].name)]
    operands = [None if value is None else _operand(model, value, values) for value in original.inputs]
    exact = ir.Node("", original.op_type, operands, list(original.attributes.values()))
    last = result.producer()
    assert last is not None
    uses, is_output = tuple(result.uses()), result.is_graph_output()
    chosen = operation("Where", [flag, result, exact.outputs[0]])
    for node, role in ((exact, "float"), (chosen, "chosen")):
        node.name = node.outputs[0].name = fresh_name(model, f"{name}_{role}")
    graph_of(last).insert_after(last, [exact, chosen])
    for node in (exact, chosen):
        infer_node(node, model)
    for reader, index in uses:
        reader.replace_input_with(index, chosen.outputs[0])
    if is_output:
        outputs = model.graph.outputs
        outputs[outputs.index(result)] = chosen.outputs[0]
    values[str(original.outputs[0].name)] = chosen.outputs[0]


def _operand(model: ir.Model, value: ir.Value, values: Mapping[str, ir.Value]) -> ir.Value:
    """The value of the quantized model that stands for one of the float model: what it was before it was rounded, or a weight."""
    if str(value.name) in values:
        return values[str(value.name)]
    if str(value.name) not in model.graph.initializers:
        weight = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        model.graph.register_initializer(weight)
    return model.graph.initializers[str(value.name)]
