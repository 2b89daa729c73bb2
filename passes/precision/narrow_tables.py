"""Tables of a Gather that are weights of a product, too: where these become narrow, the Gather reads them so."""

from __future__ import annotations

import onnx_ir as ir

from ...compiler.ir.functions import fuse_into_function
from ...compiler.ir.rewriter import drop_unused_constants, operation, replace_node
from ...compiler.ir.shared_weights import TABLE


def read_tables(model: ir.Model, table: ir.Value, narrow: ir.Value, scaling: ir.Node | None = None) -> None:
    """Let the Gathers that share-tables has marked read `narrow` in the place of `table` [rows, depth].

    Before:  e = Gather(w, tokens)
    After:   e = Cast<to=float>(Gather(w_bfloat16, tokens))
             e = Gather(DequantizeLinear(w_int8, scales), tokens)

    `scaling` is the DequantizeLinear that the product reads, of which the Gather gets one like it, as one group: its kernel
    makes float32 of the rows that it reads. Rows of a table in float16 or bfloat16 are cast back to its type.
    """
    for gather, position in tuple(table.uses()):
        if gather.op_type != "Gather" or position != 0 or TABLE not in gather.metadata_props:
            continue
        if scaling is None:
            chosen = operation("Gather", [narrow, gather.inputs[1]])
            pair = [chosen, operation("Cast", [chosen.outputs[0]], to=ir.DataType.FLOAT.value)]
        else:
            wide = ir.Node("", "DequantizeLinear", scaling.inputs, scaling.attributes.values())
            pair = [wide, operation("Gather", [wide.outputs[0], gather.inputs[1]])]
        made, kind = list(pair), table.dtype
        if kind is not None and kind != ir.DataType.FLOAT:
            made.append(operation("Cast", [pair[1].outputs[0]], to=kind.value))
        replace_node(model, gather, made, [made[-1].outputs[0]])
        fuse_into_function(model, pair, "embedding")
    drop_unused_constants(model, [table])
