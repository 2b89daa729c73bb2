"""place-casts: Casts through which operands lie in memory in the formats that are assigned to their readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.assignments.operand_formats import assign_operand_formats, operand_formats
from ...compiler.ir.functions import body_of, drop_uncalled_groups, fuse_into_function, inline_function, is_fused
from ...compiler.ir.kinds import is_pointwise
from ...compiler.ir.matching import static_shape
from ...compiler.ir.stored_weights import RECURRENT, reads_integers
from ...compiler.pipeline import Context, Pass
from .moves import IMAGE_RANKS, is_image_reader, is_pool
from .narrow_tables import read_tables
from .narrowing import Narrowing


@dataclass(frozen=True)
class PlaceCasts(Pass):
    """Store operands in the formats assigned to the nodes that read them, and let these read them as float32.

    Before:  h = LayerNormalization(x);  y = MatMul(h as bfloat16, w as bfloat16)
    After:   h = LayerNormalization(x);  n = Cast<to=bfloat16>(h);  f = Cast<to=float>(n);  v = Cast<to=float>(w_bfloat16)
             y = MatMul(f, v)

    Products stay float32 operators fed by Casts from bfloat16 or float16: their kernels fold the Casts into the loads and
    accumulate in float32, as ONNX Runtime would by the same graph. The rounding Cast becomes the epilogue of the value's producer
    (fuse-epilogue). What no assigned node reads stays float32: normalizations, softmax, residual sums of rows, the model's
    inputs and outputs. Images that a convolution reads as bfloat16 are so read by pointwise nodes and poolings, too, and are
    stored once. What a convolution reads of a Concat, a Slice or a MaxPool is rounded before that, which gives the same numbers.
    Recurrent operators are one function with the Casts that their kernel reads through, and with what dequantizes the integers
    among their weights. Always legal; the assignment, which is
    assign-formats' or another's, is used up.
    """

    name: ClassVar[str] = "place-casts"

    def run(self, model: ir.Model, context: Context) -> bool:
        formats = {node: found for node in model.graph if (found := operand_formats(node))}
        for node in formats:
            assign_operand_formats(node, {})  # before Casts take over the metadata of what they are made for
        narrowing = Narrowing(model, formats)
        for node in formats:
            for position, form in formats[node].items():
                narrowing.replace_operand(node, position, form)
        stored = {node: reads_integers(node) for node in model.graph if node.op_type in RECURRENT and node.domain == ""}
        joined = {node: sorted({*formats.get(node, ()), *positions}) for node, positions in stored.items()}
        for node, positions in joined.items():
            if positions:
                _join_casts(model, node, positions)
        _read_tables_narrow(narrowing)
        _read_images_narrow(narrowing)
        _store_attention_narrow(narrowing)
        drop_uncalled_groups(model)
        return bool(formats) or any(joined.values())


def _join_casts(model: ir.Model, node: ir.Node, positions: Iterable[int]) -> None:
    """Put a node into one function with the Casts and DequantizeLinears that its kernel reads operands through."""
    values = [node.inputs[position] for position in positions]
    casts = [cast for value in values if value is not None and (cast := value.producer()) is not None]
    fuse_into_function(model, [*casts, node], node.op_type.lower())


def _roundings(narrowing: Narrowing) -> Iterator[tuple[ir.Value, ir.Value, ir.Node]]:
    """The values that are rounded to one format, their narrow forms, and the Casts that round them."""
    times = Counter(value for value, _ in narrowing.narrow)
    for (value, _), narrow in narrowing.narrow.items():
        rounding = narrow.producer()
        if rounding is not None and rounding.inputs[0] is value and times[value] == 1 and not value.is_graph_output():
            yield value, narrow, rounding


def _read_tables_narrow(narrowing: Narrowing) -> None:
    """Let what gathers rows of a product's weights read them narrow, too."""
    for (value, _), narrow in tuple(narrowing.narrow.items()):
        read_tables(narrowing.model, value, narrow)


def _read_images_narrow(narrowing: Narrowing) -> None:
    """Let the pointwise readers of an image that convolutions read narrow do so, too, each by a Cast of its own."""
    for value, narrow, rounding in _roundings(narrowing):
        if len(static_shape(value) or ()) not in IMAGE_RANKS or not any(is_image_reader(one) for one in narrow.consumers()):
            continue
        for reader, position in tuple(value.uses()):
            if reader is not rounding and (is_pointwise(reader) or is_pool(reader)):
                narrowing.read_narrow(reader, position, narrow)


def _store_attention_narrow(narrowing: Narrowing) -> None:
    """Let the kernels of attention whose results nobody reads but products round them in their store."""
    model = narrowing.model
    for value, _, rounding in _roundings(narrowing):
        call = value.producer()
        if call is None or not is_fused(call) or value.consumers() != (rounding,):
            continue
        if any(node.op_type == "Softmax" for node in body_of(model, call)):
            fuse_into_function(model, [*inline_function(model, call), rounding], call.op_type)
