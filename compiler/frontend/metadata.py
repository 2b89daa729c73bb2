"""What a file says under our own keys: passes write there for each other, and believe what they read."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from itertools import chain

import onnx_ir as ir

from ...runtime.errors import InvalidModelError
from ..ir.facts import ORIGINS_KEY
from ..ir.functions import NODES_KEY
from ..ir.shared_weights import PANELS, SHARES_KEY, TABLE
from ..ir.states import STATES_KEY

_OF_PASSES = (NODES_KEY, PANELS, TABLE)


def check_metadata(model: ir.Model, where: str, *, keeps_groups: bool = False) -> None:
    """Drop what only passes may say, and of the rest what has not its form. What a user asked for in a saved model stays.

    Args:
        keeps_groups: the file is one of our own dumps, all of whose words stay.

    Raises:
        InvalidModelError: its states are not pairs of outputs and inputs.
    """
    _check_states(model, where)
    if keeps_groups:
        return
    model.metadata_props.pop(SHARES_KEY, None)
    for node in chain(model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for key in _OF_PASSES:
            node.metadata_props.pop(key, None)
        _check_origins(node.metadata_props)


def _check_origins(metadata: MutableMapping[str, str]) -> None:
    if ORIGINS_KEY in metadata and not isinstance(_parsed(metadata[ORIGINS_KEY]), list):
        del metadata[ORIGINS_KEY]


def _check_states(model: ir.Model, where: str) -> None:
    if STATES_KEY not in model.metadata_props:
        return
    pairs = _parsed(model.metadata_props[STATES_KEY])
    outputs, inputs = ({value.name for value in values} for values in (model.graph.outputs, model.graph.inputs))
    inputs |= model.graph.initializers.keys()
    is_sound = isinstance(pairs, dict) and all(
        output in outputs and isinstance(name, str) and name in inputs for output, name in pairs.items()
    )
    if not is_sound:
        what = f"its metadata {STATES_KEY} names no outputs with the inputs that they renew"
        raise InvalidModelError(where, what, "take it out of the file")


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
