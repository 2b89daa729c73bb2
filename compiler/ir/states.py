"""Which outputs of a graph are the new values of which inputs: its states, which a session keeps from call to call.

The graph itself stays a function from inputs to outputs; the pairs stand in the model's metadata. What a state is before the
first call is the default of its input, an initializer of the same name; without one it is zeros.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx_ir as ir

from ...runtime.errors import OptionError, UnsupportedModelError
from .facts import has_static_type, tensor_type

STATES_KEY = "prefuse.states"


def states_of(model: ir.Model) -> dict[str, str]:
    """The name of the input that each output renews, by the name of the output, in the order of the states."""
    text = model.metadata_props.get(STATES_KEY)
    return dict(json.loads(text)) if text else {}


def state_inputs(model: ir.Model) -> frozenset[str]:
    """Names of the inputs that are states, which no caller gives."""
    return frozenset(states_of(model).values())


def declare_states(model: ir.Model, pairs: Mapping[str, str]) -> None:
    """Make inputs states, each renewed by an output: `pairs` are names of inputs by those of outputs. The model is changed.

    An initializer may stand for an input: then it is what the state is at first.

    Raises:
        OptionError: no such output or input, one that is a state already, or types or shapes that differ or are not fixed.
    """
    known = states_of(model)
    outputs, inputs = ({str(value.name): value for value in values} for values in (model.graph.outputs, model.graph.inputs))
    for output, name in pairs.items():
        if output not in outputs:
            raise OptionError("states", f"the model has no output {output!r}", f"its outputs are {_listed(outputs)}")
        if name not in inputs:
            if name not in model.graph.initializers:
                raise OptionError("states", f"the model has no input {name!r}", f"its inputs are {_listed(inputs)}")
            inputs[name] = model.graph.initializers[name]
            model.graph.inputs.append(inputs[name])
        if output in known or name in known.values():
            raise OptionError("states", f"{output!r} renews {name!r}, one of which is in a pair already", "name each once")
        known[output] = name
    model.metadata_props[STATES_KEY] = json.dumps(known)
    check_states(model, is_final=False)


def check_states(model: ir.Model, *, is_final: bool = True) -> None:
    """Check the types of states and of their new values; those that only calls tell, where they are known: `is_final`.

    Raises:
        OptionError: they differ, are not fixed, or are no tensors of numbers.
    """
    outputs, inputs = ({str(value.name): value for value in values} for values in (model.graph.outputs, model.graph.inputs))
    for output, name in states_of(model).items():
        old, new = inputs[name], outputs[output]
        if not _is_kept(old):
            what = f"input {name!r} is {old.dtype}{old.shape or ''}: a state has a fixed shape, of numbers"
            raise OptionError("states", what, "give the model's input a shape of numbers")
        if not _is_kept(new):
            if is_final or new.dtype == ir.DataType.STRING or not isinstance(new.type, ir.TensorType | None):
                what = f"output {output!r} has no fixed shape, or is no tensor of numbers"
                raise OptionError("states", what, f"it shall renew {name!r}, {tensor_type(old)}")
        elif tensor_type(new) != tensor_type(old):
            what = f"output {output!r} is {tensor_type(new)}, and {name!r}, which it shall renew, {tensor_type(old)}"
            raise OptionError("states", what, "a state keeps its type and shape")


def refuse_states(model: ir.Model, why: str, fix: str) -> None:
    """Raise UnsupportedModelError if a model has states."""
    if states_of(model):
        raise UnsupportedModelError("states", why, fix)


def _is_kept(value: ir.Value) -> bool:
    is_tensor = isinstance(value.type, ir.TensorType) and value.dtype != ir.DataType.STRING
    return is_tensor and has_static_type(value)


def _listed(values: Mapping[str, ir.Value]) -> str:
    return ", ".join(values) or "none"
