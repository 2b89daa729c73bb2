"""assign-formats: which operands of products are to lie in memory as bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.assignments.node_precision import precision_in
from ...compiler.ir.assignments.operand_formats import FORMATS, Format, Formats, assign_operand_formats
from ...compiler.ir.constants import constant_tensor
from ...compiler.ir.facts import KEPT_FLOAT_KEY, has_static_type
from ...compiler.ir.kinds import Kind, is_pointwise, kind_of
from ...compiler.ir.matching import static_shape
from ...compiler.ir.opset_raise import OLDEST
from ...compiler.ir.rewriter import Rejection
from ...compiler.ir.shared_weights import has_shared_weights
from ...compiler.ir.stored_weights import RECURRENT, reads_integers, reads_stored_weights
from ...compiler.pipeline import Context, Pass
from ...runtime.symbolic.sizes import SymbolicSizeError, hint_of
from ..fusion.fuse_rows.columns import column_fault, is_by_column
from .predictions import Predictions
from .products import CONVOLUTIONS, depth_of, is_constant, is_depthwise, is_narrow, multiply_adds, result_rows

_LARGEST_FLOAT16 = 65504.0
_MOST_DIMENSIONS = 3  # spatial dimensions of kernels that load bfloat16 and float16 operands
_WIDEST_DEPTHWISE = 15  # columns of depthwise windows with bfloat16 images: at the edges each tap converts its elements again


@dataclass(frozen=True)
class AssignFormats(Pass):
    """Decide which operands products read in a narrow type: half the bytes, and twice the operations where the CPU has them.

    Before:  y = MatMul(h, w)
    After:   y = MatMul(h as bfloat16, w as bfloat16)

    The assignment is metadata of the nodes (`compiler/ir/assignments/operand_formats.py`); place-casts acts on it, and no
    number changes before. An assignment that was there is replaced. A node whose metadata name a precision has that in the
    place of the program's.

    Products of up to `few_rows` rows take narrow weights and float32 rows, as the weights are all that takes time there; so do
    all products where the target multiplies the type no faster than float32, unless their kernels would take longer. On
    NVIDIA's GPUs from sm_80 on, the matrix unit takes both operands of products and convolutions narrow; recurrences stay.
    Recurrent operators of CPUs get narrow weights: their kernel rounds what it multiplies by them where that is faster. Weights
    that Winograd's convolution transforms stay as they are, and so do those of depthwise convolutions, whose time is that of
    their images. Weights of matrix products that programs for other sizes read, too, are narrow by their own size alone.
    """

    name: ClassVar[str] = "assign-formats"
    precision: Format | None = None  # None: the node's own precision, else what the user asked for, if that is one of the two
    min_operations: int = 1 << 17  # multiply-adds of a product that is worth rounding for
    few_rows: int = 8
    weights_only: bool | None = None  # None: where the target multiplies the type no faster than float32

    def run(self, model: ir.Model, context: Context) -> bool:
        for node in model.graph:
            reason = node.metadata_props.get(KEPT_FLOAT_KEY) if kind_of(node) is Kind.OUTPUT_FUSABLE else None
            if reason:
                context.reject(self.name, Rejection(f"{node.op_type} was not quantized: {reason}", (node,)))
        assignment = self._assignment(model, context)
        changed = [assign_operand_formats(node, assignment.get(node, {})) for node in model.graph]
        return any(changed)

    def _assignment(self, model: ir.Model, context: Context) -> dict[ir.Node, Formats]:
        wanted = {node: form for node in model.graph if (form := self._wanted(node, context)) is not None}
        if wanted and not context.target.reads_narrow:
            context.reject(self.name, Rejection(f"no kernel for {context.target} reads narrow operands"))
            return {}
        policies = {one: _Policy(model, context, self, one, Predictions(model, context, one)) for one in set(wanted.values())}
        assignment: dict[ir.Node, Formats] = {}
        for node, form in wanted.items():
            formats = policies[form].formats_of(node)
            if isinstance(formats, Rejection):
                context.reject(self.name, formats)
            else:
                assignment[node] = formats
                if formats and node.op_type in CONVOLUTIONS:
                    policies[form].predictions.record(self.name, node, formats)
        return assignment

    def _wanted(self, node: ir.Node, context: Context) -> Format | None:
        """What a node is asked to read narrow operands in: by the pass's option, by its own precision, or by the program's."""
        return self.precision or FORMATS.get(precision_in(node.metadata_props) or context.precision)


@dataclass(frozen=True, slots=True)
class _Policy:
    """Which operands of which nodes are worth rounding, and why others are not."""

    model: ir.Model
    context: Context
    limits: AssignFormats
    precision: Format
    predictions: Predictions

    def formats_of(self, node: ir.Node) -> Formats | Rejection:
        """The formats of a node's operands; or why a product has none."""
        if reads_stored_weights(node):
            return Rejection(f"{node.op_type} stays float32: its weights are integers", (node,))
        if kind_of(node) is Kind.OUTPUT_FUSABLE:
            positions = [position for position in (0, 1) if not is_narrow(node.inputs[position])]
            fault = self._fault(node) if positions else ""
            wanted = self._worth_rounding(node) if positions and not fault else (0, 1)
        elif node.op_type in RECURRENT and not node.domain:
            stored = reads_integers(node)
            positions, wanted = [position for position in (1, 2) if position not in stored], (1, 2)
            fault = self._recurrent_fault(node) if positions else "its weights are integers"
        else:
            return {}
        if fault:
            return Rejection(f"{node.op_type} stays float32: {fault}", (node,))
        return {position: self.precision for position in positions if position in wanted}

    def _worth_rounding(self, node: ir.Node) -> tuple[int, ...]:
        """Those operands of a product that are worth rounding."""
        if self._reads_rows_wide(node):
            return (1,)
        return (0,) if is_depthwise(node) or self.predictions.transforms_weights(node) else (0, 1)

    def _is_weights_only(self) -> bool:
        chosen = self.limits.weights_only
        return not self.predictions.multiplies_faster() if chosen is None else chosen

    def _reads_rows_wide(self, node: ir.Node) -> bool:
        if node.op_type in CONVOLUTIONS or not is_constant(node.inputs[1]) or self.context.target.is_gpu:
            return False
        if self._is_weights_only():
            return True
        rows = result_rows(node)
        try:
            return rows <= self.limits.few_rows
        except SymbolicSizeError:  # for some shapes of images, which are no range of each dimension
            return hint_of(rows) <= self.limits.few_rows

    def _opset_fault(self) -> str:
        opset = self.model.opset_imports.get("", 1)
        return f"opset {opset} is older than {OLDEST}" if opset < OLDEST else ""

    def _size_fault(self, operations: int) -> str:
        is_small = hint_of(operations) < self.limits.min_operations
        return f"{operations} multiply-adds are too few to round for" if is_small else ""

    def _recurrent_fault(self, node: ir.Node) -> str:
        """Why a recurrent operator stays as it is; empty if it need not."""
        values = [value for value in node.inputs[:3] if value is not None]
        if self.context.target.is_gpu:
            return "no kernel of GPUs reads narrow weights step by step"
        if fault := self._opset_fault():
            return fault
        if other := next((value for value in values if value.dtype != ir.DataType.FLOAT), None):
            return f"%{other.name} is of type {other.dtype}"
        if not all(is_constant(value) for value in values[1:]):
            return "its weights are not constant"
        shape = static_shape(values[0])
        if shape is None:
            return "its shapes are not static"
        operations = prod(shape[:2]) * sum(prod(static_shape(value) or ()) for value in values[1:])
        fault = self._size_fault(operations) or self._weight_fault(values[1:])
        return fault or self._weights_only_fault(node, [one for one in (1, 2) if one not in reads_integers(node)])

    def _fault(self, node: ir.Node) -> str:
        """Why a product's operands stay as they are; empty if they need not."""
        if fault := self._opset_fault():
            return fault
        operands = [value for value in node.inputs[:2] if value is not None]
        if other := next((value for value in operands if value.dtype != ir.DataType.FLOAT and not is_narrow(value)), None):
            return f"%{other.name} is of type {other.dtype}"
        if depth_of(node) is None:
            return "its shapes are not static"
        if fault := self._size_fault(self._multiply_adds(node)):
            return fault
        if node.op_type in CONVOLUTIONS:
            fault = self._image_fault(node)
            beyond = "" if fault else self._weight_fault(operands)
            return beyond if beyond and 1 in self._worth_rounding(node) else fault
        return self._matrix_fault(node) or self._weight_fault(operands) or _column_fault(node)

    def _matrix_fault(self, node: ir.Node) -> str:
        """Why a matrix product stays as it is, for what its operands are like; empty if it need not."""
        if self._is_weights_only() and not is_constant(node.inputs[1]):
            return f"{self.context.target} multiplies {self.precision} no faster"
        if self._shares_weights(node):
            return ""
        if self._is_weights_only() or self._reads_rows_wide(node):
            return self._weights_only_fault(node, [1])
        return self.predictions.matrix_fault(node, [one for one in (0, 1) if not is_narrow(node.inputs[one])])

    def _weights_only_fault(self, node: ir.Node, positions: Sequence[int]) -> str:
        """Why weights stay as they are where nothing else is to be narrow; empty if they need not, or if that was asked for."""
        values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
        if self.limits.weights_only or self.predictions.multiplies_faster() or not all(map(has_static_type, values)):
            return ""
        return self.predictions.weights_fault(node, positions)

    def _multiply_adds(self, node: ir.Node) -> int:
        """Those that decide whether a product is worth rounding for: its own, or of shared weights those of few rows."""
        weights = static_shape(node.inputs[1]) if node.inputs[1] is not None else None
        return prod(weights or ()) * self.limits.few_rows if self._shares_weights(node) else multiply_adds(node)

    def _shares_weights(self, node: ir.Node) -> bool:
        """Whether a matrix product reads weights that programs for other sizes read, too."""
        return has_shared_weights(self.model) and node.op_type not in CONVOLUTIONS and is_constant(node.inputs[1])

    def _image_fault(self, node: ir.Node) -> str:
        """Why a convolution stays as it is; empty if it need not."""
        if self._is_weights_only():
            return f"{self.context.target} multiplies {self.precision} no faster"
        if node.inputs[1] is None or not is_constant(node.inputs[1]):
            return "its weights are not constant"
        weights = static_shape(node.inputs[1]) or ()
        if (dimensions := len(weights) - 2) not in range(1, _MOST_DIMENSIONS + 1):
            return f"it has {dimensions} spatial dimensions, and the kernel {_MOST_DIMENSIONS}"
        if is_depthwise(node):
            return _depthwise_fault(node)
        channels = weights[1] if node.op_type == "Conv" else weights[0] // node.attributes.get_int("group", 1)
        target = self.context.target
        is_asked = channels % 2 or target.has_tiles or target.is_gpu  # else pairs of channels are multiplied faster in any case
        return self.predictions.convolution_fault(node, channels) if is_asked else ""

    def _weight_fault(self, operands: Sequence[ir.Value]) -> str:
        for value in operands:
            tensor = constant_tensor(value)
            if self.precision == "float16" and tensor is not None and abs(tensor.numpy()).max(initial=0) > _LARGEST_FLOAT16:
                return f"%{value.name} has numbers beyond float16"
        return ""


def _column_fault(node: ir.Node) -> str:
    """Why a product that fuse-rows computes with what makes its rows stays as it is: nothing of it lies in memory."""
    return "by one column, it is a sum over rows" if is_by_column(node) and column_fault(node) is None else ""


def _depthwise_fault(node: ir.Node) -> str:
    """Why a depthwise convolution reads its image as it is. Narrow, it takes half the bytes to write and to read."""
    image = node.inputs[0]
    producer = None if image is None else image.producer()
    if image is None or producer is None:
        return "it reads an input of the model"
    if kind_of(producer) is not Kind.OUTPUT_FUSABLE and not is_pointwise(producer):
        return f"{producer.op_type} would be rounded by a kernel of its own"
    if image.is_graph_output() or image.consumers() != (node,):
        return f"others read %{image.name}, too"
    if (width := (static_shape(node.inputs[1]) or (1,))[-1]) > _WIDEST_DEPTHWISE:
        return f"windows of {width} columns are read faster as they are"
    return ""
