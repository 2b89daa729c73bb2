"""split-weights: within a memory limit, cut weights into pieces that pass through memory one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....compiler.ir.assignments.kept_template import keep_template
from ....compiler.ir.assignments.kernel_choice import AS_IT_IS, Ask, KernelChoice, Variant
from ....compiler.ir.assignments.operand_formats import Formats, assign_operand_formats, operand_formats
from ....compiler.ir.assignments.stored_form import BITS
from ....compiler.ir.constants import add_constant, constant_array, constant_tensor
from ....compiler.ir.facts import infer_node, tensor_type
from ....compiler.ir.matching import input_at, is_constant, rank_of, static_shape
from ....compiler.ir.names import fresh_name
from ....compiler.ir.rewriter import Rejection, copy_source, drop_unused_constants, operation, remove_nodes, replace_node
from ....compiler.ir.stored_weights import PRODUCTS, form_of, is_stored_weights
from ....compiler.pipeline import Context, Pass
from ....runtime.hardware.memory_limit import LEAST_STREAMED_BYTES
from .directions import directions_of, join_directions, take_back, weight_bytes

_LARGE = 4  # a weight of more than the limit over this is cut
_PIECES = 8  # into pieces of at most the limit over this
_JOINED = 4  # results of more than the limit over this are computed and joined some rows at a time, weights read again for each
_COLUMNS = 128  # of a piece, a multiple of them: whole panels of every kernel
_NARROW_BYTES = 2  # of a number of an assigned format
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class SplitWeights(Pass):
    """Multiply by the columns of a large weight piece by piece, and gather those of a large table, where memory is limited.

    Before:  y = MatMul(x, w)                                              (w larger than a quarter of the limit)
    After:   a = MatMul(x, w_left);  b = MatMul(x, w_right);  y = Concat<axis=-1>(a, b)

    Kernels that can store the pieces as rows with the result's pitch; else a copy joins them, of a large result some rows at a
    time, for each of which the weight is read again.

    Legal for MatMul, for Gemm and for a Gather of rows, by constants of two dimensions that nothing else reads, and for products
    by integers with scales, which are cut with them. Each column is computed as before: by the template that the whole would have
    (`compiler/ir/assignments/kept_template.py`), of operands in the formats that were assigned to it. A recurrence of two
    directions becomes two of one. Without a limit, or with one that the program does not reach, nothing changes.
    """

    name: ClassVar[str] = "split-weights"

    def run(self, model: ir.Model, context: Context) -> bool:
        if context.memory_limit is None:
            return False
        total = context.memory_limit.whole_bytes  # with weights as kernels pack them, which may be more bytes
        if total is None:
            total = sum(_bytes_as_read(value) for value in model.graph.initializers.values())
        limit = context.memory_limit.of(total)
        if total <= limit:
            return False
        found = [site for node in model.graph if (site := _site(node)) is not None and site.size_bytes > limit // _LARGE]
        cut = self._cut_directions(model, limit, context)
        for site in found:
            pieces = _pieces(site.columns, site.size_bytes, limit // _PIECES)
            if len(pieces) == 1:
                continue
            whole = _kernel_of_whole(model, site, context)
            rows = [None] if whole.stores_parts else _rows(site, max(limit // _JOINED, 1))
            joined = 0 if whole.stores_parts else -(-site.joined_bytes // len(rows))
            if joined >= site.size_bytes - site.size_bytes // len(pieces):
                reason = (
                    f"the pieces of its result would be joined by a copy: {joined} bytes more at once, as much as cutting saves"
                )
                context.reject(self.name, Rejection(reason, (site.node,)))
                continue
            if _rewrite(model, site, pieces, rows, whole, context):
                cut = True
                often = "" if len(rows) == 1 else f", each read for {len(rows)} parts of the rows"
                context.remark(self.name, f"{site.weight.name} is cut into {len(pieces)} pieces{often}")
            else:
                reason = f"no kernel would multiply by pieces of {site.weight.name} as by the whole"
                context.reject(self.name, Rejection(reason, (site.node,)))
        return cut

    def _cut_directions(self, model: ir.Model, limit: int, context: Context) -> bool:
        """Cut large recurrences of two directions; whether there was one."""
        cut = False
        for node in [one for one in model.graph if weight_bytes(one) > limit // _LARGE]:
            name, formats = str(node.name), operand_formats(node)
            assign_operand_formats(node, {})  # which what cuts its states out, and joins its results, would take over
            parts = directions_of(model, node)
            for one in (node, *parts):
                assign_operand_formats(one, formats)
            if _are_alike(model, node, parts, Variant(tuple(formats.items())), context):
                assign_operand_formats(node, {})
                join_directions(model, node, parts)
                cut = True
                context.remark(self.name, f"{name} is cut into its directions")
            else:
                take_back(model, parts)
                reason = "another kernel would compute its directions, and round otherwise"
                context.reject(self.name, Rejection(reason, (node,)))
        return cut


@dataclass(frozen=True, slots=True)
class _Site:
    """A node that could be cut.

    `weight` is the constant at `position` among its inputs, or at that of `scaling`, a DequantizeLinear which makes the node's
    input of it; `axis` is that of its columns, `size_bytes` what kernels read, scales among it.
    """

    node: ir.Node
    weight: ir.Value
    position: int
    axis: int
    size_bytes: int
    scaling: ir.Node | None = None

    @property
    def columns(self) -> int:
        shape = static_shape(self.weight)
        assert shape is not None
        return shape[self.axis]

    @property
    def row_axis(self) -> int | None:
        """The dimension of the result along which parts of it lie side by side, and that its first operand has, too: the first of
        more than one row; None if there is none."""
        shape, node = static_shape(self.node.outputs[0]), self.node
        if shape is None or node.op_type == "Gather" or not all(isinstance(dim, int) for dim in shape):
            return None
        bias = static_shape(input_at(node, 2))
        if node.attributes.get_int("transA", 0) == 1 or (bias is not None and len(bias) == 2 and bias[0] != 1):
            return None
        if rank_of(node.inputs[0]) != len(shape):
            return None
        return next((axis for axis, dim in enumerate(shape[:-1]) if dim != 1), None)

    @property
    def joined_bytes(self) -> int:
        """Of a result whose pieces lie apart until a Concat copies them, for they are columns of several rows; at their hints."""
        result = tensor_type(self.node.outputs[0]).hinted
        return result.size_bytes if result.elements > self.columns else 0


@dataclass(frozen=True, slots=True)
class _Whole:
    """The template and unit of an uncut product, None where there is none; and whether they store pieces side by side."""

    kernel: tuple[str, str] | None
    stores_parts: bool = False


def _bytes_as_read(value: ir.Value) -> int:
    """The bytes of a constant in the formats that its readers are to read it in; 0 for what is none."""
    tensor = constant_tensor(value)
    if tensor is None:
        return 0
    is_narrow = any(position in operand_formats(node) for node, position in value.uses())
    return min(tensor.nbytes, _NARROW_BYTES * tensor.size) if is_narrow else tensor.nbytes


def _site(node: ir.Node) -> _Site | None:
    """What could be cut at a node."""
    if node.domain != "" or node.op_type not in (*PRODUCTS, "Gather") or rank_of(node.outputs[0]) is None:
        return None
    position = 0 if node.op_type == "Gather" else 1
    weight, scaling = input_at(node, position), None
    producer = None if weight is None or node.op_type == "Gather" else weight.producer()
    if producer is not None and is_stored_weights(producer):
        weight, scaling = producer.inputs[0], producer
    if weight is None or not _is_cuttable(weight, scaling):
        return None
    size_bytes = _bytes_as_read(weight)
    if node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0)
        return _Site(node, weight, position, 1, size_bytes) if axis in (0, -2) else None
    bias = input_at(node, 2)
    if bias is not None and not is_constant(bias):
        return None
    size_bytes += sum(_bytes_as_read(value) for value in (scaling.inputs[1:] if scaling is not None else ()) if value is not None)
    is_transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return _Site(node, weight, position, 0 if is_transposed else 1, size_bytes, scaling)


def _is_cuttable(weight: ir.Value, scaling: ir.Node | None) -> bool:
    """Whether a value is a constant matrix that one node alone reads."""
    if rank_of(weight) != 2 or not is_constant(weight) or len(weight.uses()) != 1 or weight.is_graph_output():
        return False
    return weight.dtype in (_FLOATS if scaling is None else BITS)


def _pieces(columns: int, size_bytes: int, most: int) -> list[tuple[int, int]]:
    """Ranges of columns of at most `most` bytes, none too small to be copied: whole panels, and what the last one has more."""
    panel = -(-size_bytes * _COLUMNS // columns)  # bytes
    size = max(most // panel, -(-LEAST_STREAMED_BYTES // panel), 1) * _COLUMNS
    starts = list(range(0, max(columns - size, 0) + 1, size))
    return list(zip(starts, [*starts[1:], columns], strict=True))


def _rows(site: _Site, most: int) -> Sequence[tuple[int, int] | None]:
    """Ranges of rows whose pieces of the result are joined before those of the next are computed, of at most `most` bytes; None,
    all rows, where they cannot be cut into parts that lie side by side: rows of a Gather, or of sizes that a call decides."""
    shape, axis = static_shape(site.node.outputs[0]), site.row_axis
    if shape is None or axis is None or site.joined_bytes <= most:
        return [None]
    rows = shape[axis]
    size = -(-rows // min(-(-site.joined_bytes // most), rows))
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def _rewrite(
    model: ir.Model,
    site: _Site,
    pieces: Sequence[tuple[int, int]],
    rows: Sequence[tuple[int, int] | None],
    whole: _Whole,
    context: Context,
) -> bool:
    """Cut the weight of a site, if a kernel multiplies by the pieces as by the whole; whether that is so."""
    node, formats = site.node, operand_formats(site.node)
    assign_operand_formats(node, {})
    weights = [_weights(model, site, begin, end) for begin, end in pieces]
    blocks = [[_part(model, site, inputs, block) for inputs in weights] for block in rows]
    parts = [part for block in blocks for part in block]
    for one in (node, *parts):
        assign_operand_formats(one, formats)
    if not _keep_kernel(model, site, parts, whole, context):
        _take_back(model, parts)
        return False
    assign_operand_formats(node, {})  # which the Concat would take over
    joined = [operation("Concat", [part.outputs[0] for part in block], axis=-1) for block in blocks]
    if site.row_axis is not None and len(blocks) > 1:
        joined.append(operation("Concat", [one.outputs[0] for one in joined], axis=site.row_axis))
    unused = [site.weight, *([] if site.scaling is None else site.scaling.inputs[1:]), *node.inputs[2:]]
    replace_node(model, node, joined, joined[-1].outputs)
    for block, one in zip(blocks, joined, strict=False):
        model.graph.insert_after(block[-1], one)  # moves it there: the next block's pieces may have the memory of this one's
    if site.scaling is not None:
        remove_nodes([site.scaling])
    drop_unused_constants(model, unused)
    return True


def _weights(model: ir.Model, site: _Site, begin: int, end: int) -> dict[int, ir.Value]:
    """The inputs of a node that computes columns [begin, end), by position: the weight's, in the model before the whole with what
    dequantizes it, and a bias's."""
    node = site.node
    weight = _columns(model, site.weight, site.axis, site.columns, begin, end)
    if site.scaling is not None:
        scaling = _scaling_part(model, site, weight, begin, end)
        model.graph.insert_before(node, scaling)
        infer_node(scaling, model)
        weight = scaling.outputs[0]
    found = {site.position: weight}
    if node.op_type == "Gemm" and (bias := input_at(node, 2)) is not None:
        found[2] = _columns(model, bias, -1, site.columns, begin, end)
    return found


def _part(model: ir.Model, site: _Site, weights: dict[int, ir.Value], rows: tuple[int, int] | None) -> ir.Node:
    """The node that computes some columns of some rows, or of all, in the model before the whole."""
    node = site.node
    inputs = [weights.get(position, value) for position, value in enumerate(node.inputs)]
    if rows is not None:
        places = (add_constant(model, np.array([place], np.int64), "place") for place in (*rows, site.row_axis))
        cut = operation("Slice", [node.inputs[0], *places])
        cut.outputs[0].name = fresh_name(model, f"{node.outputs[0].name}_rows")
        copy_source((node,), cut)
        model.graph.insert_before(node, cut)
        infer_node(cut, model)
        inputs[0] = cut.outputs[0]
    part = ir.Node("", node.op_type, inputs, [*node.attributes.values()], num_outputs=1)
    part.outputs[0].name = fresh_name(model, f"{node.outputs[0].name}_columns")
    copy_source((node,), part)
    model.graph.insert_before(node, part)
    infer_node(part, model)
    return part


def _scaling_part(model: ir.Model, site: _Site, weight: ir.Value, begin: int, end: int) -> ir.Node:
    """What dequantizes columns [begin, end) of a weight: their scales and zero points, by columns or by blocks along k."""
    scaling = site.scaling
    assert scaling is not None
    inputs = [weight]
    for value in scaling.inputs[1:]:
        assert value is not None
        axis = site.axis if rank_of(value) == 2 else -1
        inputs.append(_columns(model, value, axis, site.columns, begin, end))
    part = ir.Node("", "DequantizeLinear", inputs, [*scaling.attributes.values()], num_outputs=1)
    part.outputs[0].name = fresh_name(model, f"{scaling.outputs[0].name}_columns")
    copy_source((scaling,), part)
    return part


def _columns(model: ir.Model, value: ir.Value, axis: int, columns: int, begin: int, end: int) -> ir.Value:
    """The constant's part for some columns along an axis; the constant where it is one for all."""
    array = constant_array(value)
    assert array is not None
    if array.ndim == 0 or array.shape[axis] != columns:
        return value
    return add_constant(model, np.ascontiguousarray(np.take(array, range(begin, end), axis=axis)), f"{value.name}_columns")


def _take_back(model: ir.Model, parts: Sequence[ir.Node]) -> None:
    """Take parts that nothing reads out of the model, with all that was made for them."""
    used = [value for part in parts for value in part.inputs]
    remove_nodes(parts)
    made = {one for value in used if value is not None and (one := value.producer()) is not None and not value.uses()}
    made = {one for one in made if one.op_type in ("DequantizeLinear", "Slice")}
    used += [value for one in made for value in one.inputs]
    remove_nodes(list(made))
    drop_unused_constants(model, used)


def _kernel_of_whole(model: ir.Model, site: _Site, context: Context) -> _Whole:
    """Which kernel computes the node of a site uncut. What is gathered is copied by any."""
    if site.node.op_type == "Gather":
        return _Whole(None)
    choice = _ask(model, context)(site.node, _variant(site, operand_formats(site.node), site.scaling))
    kernel = _kernel(site.node, AS_IT_IS, context, lambda node, variant: choice)
    if not isinstance(choice, KernelChoice) or (choice.template, choice.unit) != kernel:
        return _Whole(kernel)
    return _Whole(kernel, choice.stores_parts and not tensor_type(site.node.outputs[0]).is_symbolic)


def _keep_kernel(model: ir.Model, site: _Site, parts: Sequence[ir.Node], whole: _Whole, context: Context) -> bool:
    """Let the template that computes the whole compute its parts; whether it does. Strassen's sums of columns would be of other
    columns in a part."""
    if site.node.op_type == "Gather":
        return True
    if whole.kernel is None:
        return False
    ask = _ask(model, context)
    for part in parts:
        keep_template(part, whole.kernel[0])
        value = input_at(part, site.position)
        choice = ask(part, _variant(site, operand_formats(part), None if value is None else value.producer()))
        if not isinstance(choice, KernelChoice) or (choice.template, choice.unit) != whole.kernel or choice.transforms_weights:
            return False
    return True


def _variant(site: _Site, formats: Formats, scaling: ir.Node | None) -> Variant:
    """A product as later passes make it, of a weight that `scaling` makes, if that is there."""
    form = None if scaling is None else form_of(scaling)
    assert not isinstance(form, str), form
    stored = () if form is None else ((site.position, form),)
    return Variant(formats=tuple(formats.items()), stored=stored)


def _are_alike(model: ir.Model, node: ir.Node, parts: Sequence[ir.Node], variant: Variant, context: Context) -> bool:
    """Whether one template computes a node and its parts, by the same unit."""
    ask = _ask(model, context)
    kinds = {_kernel(node, variant, context, ask), *(_kernel(part, variant, None, ask) for part in parts)}
    return len(kinds) == 1 and None not in kinds


def _ask(model: ir.Model, context: Context) -> Ask:
    """Who says which kernel computes a node on the target that the whole is written for."""
    whole = context.whole
    if whole is None or whole.target == context.target:
        return context.kernels_of(model)
    return replace(context, target=whole.target, known_choices={}).kernels_of(model)


def _kernel(node: ir.Node, variant: Variant, context: Context | None, ask: Ask) -> tuple[str, str] | None:
    """Template and unit of a node: those that it has in the whole, where a context knows that, else those that it would have."""
    if context is not None and context.whole is not None and (known := context.whole.kernels.get(str(node.name))) is not None:
        return known
    choice = ask(node, variant)
    return (choice.template, choice.unit) if isinstance(choice, KernelChoice) else None
