"""A causal language model of `transformers` in OpenVINO, token by token: its caches are variables, nncf compresses weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as operators
import torch
from openvino._offline_transformations import apply_make_stateful_transformation

_TOKENS, _PAST = 3, 5  # of the example that the model is traced with

_GROUP = 128  # weights of a scale, of 4 bits, as is nncf's default


class _WithCaches(torch.nn.Module):
    """A language model whose caches are inputs and outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *pasts: Any) -> Any:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        cache = DynamicCache()
        for keys, values in zip(pasts[::2], pasts[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        found = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        kept = [one for layer in found.past_key_values.layers for one in (layer.keys, layer.values)]
        return found.logits, *kept


def openvino_decoder(model: Any, bits: int | None) -> ov.Model:
    """The model with states, as OpenVINO's attention wants it; weights in 8 or 4 bits, or as they are.

    Weights of few bits want a model in float32: behind what converts other floats, OpenVINO does not know them.
    """
    pasts = _pasts(model, 2, _PAST)
    names = [f"past.{number}" for number in range(len(pasts))]
    arguments = (
        torch.zeros(2, _TOKENS, dtype=torch.int64),
        torch.ones(2, _PAST + _TOKENS, dtype=torch.int64),
        torch.arange(_PAST, _PAST + _TOKENS).expand(2, -1),
        *pasts,
    )
    some = torch.export.Dim.DYNAMIC
    free = ({0: some, 1: some}, {0: some, 1: some}, {0: some, 1: some}, tuple({0: some, 2: some} for _ in pasts))
    with torch.no_grad():
        program = torch.export.export(_WithCaches(model), arguments, dynamic_shapes=free, strict=False)
    found = ov.convert_model(program)
    for value, name in zip(found.inputs, ("input_ids", "attention_mask", "position_ids", *names), strict=True):
        value.get_tensor().set_names({name})
        shape = [-1, -1] if name not in names else [-1, pasts[0].shape[1], -1, pasts[0].shape[3]]
        value.get_node().set_partial_shape(ov.PartialShape(shape))
    for value, name in zip(found.outputs[1:], names, strict=True):
        value.get_tensor().set_names({f"new.{name}"})
    _order_sequences(found, names)
    if bits is not None:
        import nncf

        modes = nncf.CompressWeightsMode
        group = {"group_size": min(_GROUP, model.config.hidden_size), "all_layers": True}
        how = {"mode": modes.INT8_ASYM} if bits == 8 else {"mode": modes.INT4_SYM, **group}
        found = nncf.compress_weights(found, **how)
    apply_make_stateful_transformation(found, {name: f"new.{name}" for name in names})
    _begin_empty(found, *pasts[0].shape[1::2])
    return found


def _order_sequences(model: ov.Model, names: list[str]) -> None:
    """Read each past through a Gather of sequences, by which OpenVINO knows caches."""
    order = operators.parameter([-1], np.int32, name="beam_idx")
    order.output(0).set_names({"beam_idx"})
    for name in names:
        past = next(value for value in model.inputs if name in value.get_names())
        readers = list(past.get_target_inputs())
        gathered = operators.gather(past.get_node(), order, operators.constant(0))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    model.add_parameters([order])
    model.validate_nodes_and_infer_types()


def _begin_empty(model: ov.Model, heads: int, width: int) -> None:
    """Give each variable a first value without tokens, for as many sequences as there are."""
    tokens = model.input("input_ids").get_node()
    batch = operators.gather(operators.shape_of(tokens, output_type="i64"), operators.constant([0]), operators.constant(0))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            sizes = operators.concat([batch, *(operators.constant([size]) for size in (heads, 0, width))], 0)
            zero = operators.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([operators.broadcast(zero, sizes)])
    model.validate_nodes_and_infer_types()


def _pasts(model: Any, batch: int, tokens: int) -> list[torch.Tensor]:
    """Keys and values of `tokens` tokens, layer by layer."""
    with torch.no_grad():
        kept = model(input_ids=torch.full((batch, tokens), 5), use_cache=True).past_key_values
    return [one for layer in kept.layers for one in (layer.keys, layer.values)]
