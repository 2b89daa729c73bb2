"""Products in float16 and bfloat16 as products of float32 rows, which kernels of weights of few bits take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from ...compiler.ir.assignments.node_precision import assign_precision
from ...compiler.ir.constants import add_constant, constant_tensor
from ...compiler.ir.facts import infer_node
from ...compiler.ir.names import fresh_name
from ...compiler.ir.rewriter import copy_source, graph_of, operation, replace_node
from ...runtime.precision import Precision

NARROW: dict[ir.DataType, Precision] = {ir.DataType.BFLOAT16: "bfloat16", ir.DataType.FLOAT16: "float16"}


class Widened:
    """Rewrites products of a model. Rows that several of them read are cast once."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._wide: dict[ir.Value, ir.Value] = {}

    def multiply(self, node: ir.Node, weights: ir.Value) -> Sequence[ir.Node]:
        """Let a product read weights in float32 in the place of its own, and all else that it reads be float32; the new nodes.

        Before:  y = MatMul(x, w)
        After:   x32 = Cast<to=float>(x);  y32 = MatMul(x32, weights);  y = Cast<to=bfloat16>(y32)

        It may round as far as its type did. A product in float32 gets the weights alone.
        """
        narrow = node.outputs[0].dtype
        if narrow not in NARROW:
            node.replace_input_with(1, weights)
            return ()
        operands = [weights if place == 1 else self._cast(node, value) for place, value in enumerate(node.inputs)]
        wide = ir.Node("", node.op_type, operands, node.attributes.values(), version=node.version)
        assign_precision(wide, NARROW[narrow])
        back = operation("Cast", [wide.outputs[0]], to=narrow.value)
        replace_node(self._model, node, [wide, back], [back.outputs[0]])
        return wide, back

    def _cast(self, node: ir.Node, value: ir.Value | None) -> ir.Value | None:
        """An operand in float32."""
        if value is None or value in self._wide:
            return None if value is None else self._wide[value]
        tensor = constant_tensor(value)
        if tensor is not None:
            shape = ir.Shape(tensor.shape.numpy())
            wide = ir.LazyTensor(partial(_float32, tensor), dtype=ir.DataType.FLOAT, shape=shape)
            self._wide[value] = add_constant(self._model, wide, f"{value.name}_float32")
            return self._wide[value]
        cast = operation("Cast", [value], to=ir.DataType.FLOAT.value)
        cast.outputs[0].name = fresh_name(self._model, f"{value.name}_float32")
        copy_source((node,), cast)
        graph_of(node).insert_before(node, cast)
        infer_node(cast, self._model)
        self._wide[value] = cast.outputs[0]
        return self._wide[value]


def _float32(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(np.asarray(tensor.numpy(), np.float32))
