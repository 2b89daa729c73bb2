"""lower-precision: what matrix products read lies in memory as bfloat16 or float16."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Literal

import onnx_ir as ir

from ..compiler.ir.constants import add_constant, constant_tensor
from ..compiler.ir.facts import infer_node
from ..compiler.ir.functions import body_of, drop_uncalled_groups, fuse_into_function, inline_function, is_fused
from ..compiler.ir.kinds import Kind, is_pointwise, kind_of
from ..compiler.ir.names import fresh_name
from ..compiler.ir.opset_raise import OLDEST
from ..compiler.ir.residual_branches import convolutions_on_branches
from ..compiler.ir.rewriter import Rejection, copy_source, drop_unused_constants, graph_of, remove_nodes
from ..compiler.pipeline import Context, Pass
from ..kernels.costs import (
    PAIRED_TILES,
    channels_last_cycles,
    has_fewer_pairs_of_taps,
    in_pairs,
    pays_to_fill_pairs,
    winograd_choice,
)
from ..kernels.tile_costs import tile_convolution_cycles
from ..runtime.precision import TOLERANCES
from .canonicalization.scope import static_shape
from .layout.extents import convolution_extents, phase_extents

Narrow = Literal["bfloat16", "float16"]
_TYPES: dict[Narrow, ir.DataType] = {"bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}
_LARGEST_FLOAT16 = 65504.0
_RECURRENT = frozenset(["GRU", "LSTM", "RNN"])
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_MOST_DIMENSIONS = 3  # spatial ones, of kernels that read narrow operands
_MOVES = frozenset(["Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])  # of elements, whatever their type
_IMAGE_MOVES = frozenset(["Concat", "Slice"])  # the same, of which kernels for images take narrow ones
_POOLS = ("AveragePool", "MaxPool")
_IMAGE_RANKS = (3, 4, 5)  # of signals, images and volumes
_MOVED_RANKS = (4, 5)  # of images and volumes: what has three dimensions may be rows
_WIDEST_DEPTHWISE = 15  # columns of a window whose image is read narrow: what overhangs is widened for each tap
_LONGEST_CHAIN = 64  # of nodes that move elements, through which a rounding is moved up


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """Store the operands of matrix products in a narrow type: half the bytes, and twice the operations where the CPU has them.

    Before:  h = LayerNormalization(x);  y = MatMul(h, w)
    After:   h = LayerNormalization(x);  n = Cast<to=bfloat16>(h);  f = Cast<to=float>(n);  v = Cast<to=float>(w_bfloat16)
             y = MatMul(f, v)

    Products stay float32 operators, of operands that are narrow numbers: their kernels read these as they lie and add up in
    float32, as ONNX Runtime would by the same graph. The first Cast joins the kernel of the value, the others that of the
    product (fuse-epilogue). What is neither weight nor operand of a product stays float32: normalizations, softmax, residual
    sums of rows, the model's inputs and outputs. Images that a convolution reads are read narrow by pointwise nodes and poolings,
    too, and so lie in memory once. What a convolution reads of a Concat, a Slice or a MaxPool is rounded before that, which gives
    the same numbers.

    Products of up to `few_rows` rows take narrow weights and float32 rows, as the weights are all that takes time there; so do
    all products where the target multiplies the type no faster than float32. Recurrent operators get narrow weights: their kernel
    rounds what it multiplies by them where that is faster. Weights that Winograd's convolution transforms stay as they are, and
    so do those of depthwise convolutions, whose time is that of their images.
    """

    name: ClassVar[str] = "lower-precision"
    precision: Narrow | None = None  # None: what the user asked for, if that is one of the two
    min_operations: int = 1 << 17  # multiply-adds of a product that is worth rounding for
    few_rows: int = 8
    weights_only: bool | None = None  # None: where the target multiplies the type no faster than float32

    def run(self, model: ir.Model, context: Context) -> bool:
        precision = self.precision or _narrow_precision(context)
        if precision is None:
            return False
        if context.target.is_gpu:
            context.reject(self.name, Rejection(f"no kernel for {context.target} reads narrow operands"))
            return False
        is_fast = precision == "bfloat16" and context.target.has("avx512_bf16")
        lowering = _Lowering(model, context, self, precision, not is_fast if self.weights_only is None else self.weights_only)
        changed = [lowering.lower(node) for node in list(model.graph) if kind_of(node) is Kind.OUTPUT_FUSABLE]
        changed += [lowering.lower_recurrent(node) for node in list(model.graph) if node.op_type in _RECURRENT]
        lowering.read_images_narrow()
        lowering.store_attention_narrow()
        drop_uncalled_groups(model)
        return any(changed)


def _narrow_precision(context: Context) -> Narrow | None:
    storage = TOLERANCES[context.precision].storage
    return None if storage == "float32" else storage


@dataclass(slots=True)
class _Lowering:
    """One run of the pass. `narrow` are the narrow forms found so far, by the value that they are of."""

    model: ir.Model
    context: Context
    limits: LowerPrecision
    precision: Narrow
    weights_only: bool
    narrow: dict[ir.Value, ir.Value] = field(default_factory=dict)
    on_branches: frozenset[ir.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.on_branches = convolutions_on_branches(self.model)

    def lower(self, node: ir.Node) -> bool:
        """Give a product narrow operands; whether it has any now that it had not."""
        positions = [i for i in (0, 1) if not _is_narrow(node.inputs[i])]
        if not positions:
            return False
        if fault := self._fault(node):
            self.context.reject(self.limits.name, Rejection(f"{node.op_type} stays float32: {fault}", (node,)))
            return False
        if self._reads_rows_wide(node):
            positions = [i for i in positions if i == 1]
        elif _is_depthwise(node) or self._transforms_weights(node):
            positions = [i for i in positions if i == 0]
        for position in positions:
            self._replace_operand(node, position)
        return bool(positions)

    def lower_recurrent(self, node: ir.Node) -> bool:
        """Give a recurrent operator narrow weights, in one function with the Casts that its kernel reads through."""
        if fault := self._recurrent_fault(node):
            self.context.reject(self.limits.name, Rejection(f"{node.op_type} stays float32: {fault}", (node,)))
            return False
        for position in (1, 2):
            self._replace_operand(node, position)
        casts = [cast for value in node.inputs[1:3] if value is not None and (cast := value.producer()) is not None]
        fuse_into_function(self.model, [*casts, node], node.op_type.lower())
        return True

    def _recurrent_fault(self, node: ir.Node) -> str:
        """Why a recurrent operator stays as it is; empty if it need not."""
        values = [value for value in node.inputs[:3] if value is not None]
        if self.model.opset_imports.get("", 1) < OLDEST:
            return f"opset {self.model.opset_imports.get('', 1)} is older than {OLDEST}"
        if other := next((value for value in values if value.dtype != ir.DataType.FLOAT), None):
            return f"%{other.name} is of type {other.dtype}"
        if not all(_is_constant(value) for value in values[1:]):
            return "its weights are not constant"
        shape = static_shape(values[0])
        if shape is None:
            return "its shapes are not static"
        operations = prod(shape[:2]) * sum(prod(static_shape(value) or ()) for value in values[1:])
        if operations < self.limits.min_operations:
            return f"{operations} multiply-adds are too few to round for"
        return self._weight_fault(values[1:])

    def _reads_rows_wide(self, node: ir.Node) -> bool:
        if node.op_type in _CONVOLUTIONS or not _is_constant(node.inputs[1]):
            return False
        return self.weights_only or _rows(node) <= self.limits.few_rows

    def _transforms_weights(self, node: ir.Node) -> bool:
        """Whether a convolution will be Winograd's, which makes float32 numbers of its weights: rounding them wins nothing."""
        target = self.context.target
        is_plane = node.op_type == "Conv" and len(static_shape(node.outputs[0]) or ()) == 4
        if not is_plane or target.has_tiles or not TOLERANCES[self.context.precision].winograd_outputs:
            return False
        one = replace(convolution_extents(node), element_bytes=2)
        lanes, registers = target.vector_lanes, target.vector_registers
        paired_tiles = PAIRED_TILES if target.multiplies_pairs and node in self.on_branches else 0
        choice = winograd_choice(one, lanes, registers, self.context.precision, paired_tiles=paired_tiles)
        direct = channels_last_cycles(in_pairs(one), lanes, registers)
        return choice is not None and choice.cycles < direct

    def read_images_narrow(self) -> None:
        """Let the pointwise readers of an image that convolutions read narrow do so, too, each by a Cast of its own."""
        for value, narrow in self.narrow.items():
            rounding = narrow.producer()
            if rounding is None or rounding.inputs[0] is not value or len(static_shape(value) or ()) not in _IMAGE_RANKS:
                continue
            if value.is_graph_output() or not any(_is_image_reader(reader) for reader in narrow.consumers()):
                continue
            for reader, position in tuple(value.uses()):
                if reader is not rounding and (is_pointwise(reader) or _is_pool(reader)):
                    self._read_narrow(reader, position, narrow)

    def store_attention_narrow(self) -> None:
        """Let the kernels of attention whose results nobody reads but products round them in their store."""
        for value, narrow in self.narrow.items():
            call, rounding = value.producer(), narrow.producer()
            if call is None or rounding is None or rounding.inputs[0] is not value or not is_fused(call):
                continue
            is_attention = any(node.op_type == "Softmax" for node in body_of(self.model, call))
            if is_attention and value.consumers() == (rounding,) and not value.is_graph_output():
                fuse_into_function(self.model, [*inline_function(self.model, call), rounding], call.op_type)

    def _read_narrow(self, reader: ir.Node, position: int, narrow: ir.Value) -> None:
        cast = self._cast(narrow, ir.DataType.FLOAT, f"{narrow.name}_wide", reader)
        graph_of(reader).insert_before(reader, cast)
        infer_node(cast, self.model)
        reader.replace_input_with(position, cast.outputs[0])

    def _fault(self, node: ir.Node) -> str:
        """Why a product's operands stay as they are; empty if they need not."""
        if self.model.opset_imports.get("", 1) < OLDEST:
            return f"opset {self.model.opset_imports.get('', 1)} is older than {OLDEST}"
        operands = [value for value in node.inputs[:2] if value is not None]
        if other := next((value for value in operands if value.dtype != ir.DataType.FLOAT and not _is_narrow(value)), None):
            return f"%{other.name} is of type {other.dtype}"
        depth = _depth(node)
        if depth is None:
            return "its shapes are not static"
        if self._operations(node) < self.limits.min_operations:
            return f"{self._operations(node)} multiply-adds are too few to round for"
        if node.op_type in _CONVOLUTIONS:
            return self._image_fault(node)
        if self.weights_only and not _is_constant(node.inputs[1]):
            return f"{self.context.target} multiplies {self.precision} no faster"
        if self.precision == "bfloat16" and node.attributes.get_int("transA", False):
            return "elements of a row are not neighbours"
        if self.precision == "bfloat16" and depth % 2 and (self.context.target.has_tiles or not _is_constant(node.inputs[1])):
            return f"rows of {depth} elements are no pairs"
        return self._weight_fault(operands)

    def _image_fault(self, node: ir.Node) -> str:
        """Why a convolution stays as it is; empty if it need not."""
        if self.weights_only:
            return f"{self.context.target} multiplies {self.precision} no faster"
        if node.inputs[1] is None or not _is_constant(node.inputs[1]):
            return "its weights are not constant"
        weights = static_shape(node.inputs[1]) or ()
        if (dimensions := len(weights) - 2) not in range(1, _MOST_DIMENSIONS + 1):
            return f"it has {dimensions} spatial dimensions, and the kernel {_MOST_DIMENSIONS}"
        if _is_depthwise(node):
            return self._depthwise_fault(node)
        channels = weights[1] if node.op_type == "Conv" else weights[0] // node.attributes.get_int("group", 1)
        return self._unit_fault(node) if channels % 2 == 0 else self._odd_fault(node, channels)

    def _odd_fault(self, node: ir.Node, channels: int) -> str:
        """Why a convolution of an odd number of channels a group stays as it is; empty where a copy with one more pays."""
        target, fault = self.context.target, f"{channels} channels are no pairs"
        if node.op_type != "Conv":
            return fault
        one = replace(convolution_extents(node), element_bytes=2)
        has_neighbours = one.kernel[1] > 1 and one.dilations[1] == 1
        pays = target.multiplies_pairs and pays_to_fill_pairs(one, target.vector_lanes, target.vector_registers)
        if pays and not has_fewer_pairs_of_taps(one):
            return ""
        if has_neighbours:
            return f"{fault}: a kernel may round taps of a row as it reads them"
        return f"{fault}, and a copy with one more would cost more than it saves" if one.groups == 1 and not pays else fault

    def _depthwise_fault(self, node: ir.Node) -> str:
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

    def _unit_fault(self, node: ir.Node) -> str:
        """Why a convolution stays float32 on CPUs with a tile unit, whose vectors multiply pairs at half the rate of float32."""
        target = self.context.target
        if not target.has_tiles:
            return ""
        one = convolution_extents(node) if node.op_type == "Conv" else phase_extents(node)
        tiles, vectors = tile_convolution_cycles(one, 1), channels_last_cycles(one, target.vector_lanes, target.vector_registers)
        return "" if tiles < vectors else f"{tiles:.0f} cycles on tiles are no fewer than {vectors:.0f} on vectors in float32"

    def _weight_fault(self, operands: list[ir.Value]) -> str:
        for value in operands:
            tensor = constant_tensor(value)
            if self.precision == "float16" and tensor is not None and abs(tensor.numpy()).max(initial=0) > _LARGEST_FLOAT16:
                return f"%{value.name} has numbers beyond float16"
        return ""

    def _operations(self, node: ir.Node) -> int:
        return prod(static_shape(node.outputs[0]) or ()) * (_depth(node) or 0)

    def _replace_operand(self, node: ir.Node, position: int) -> None:
        """Let a product read the narrow form of an operand, by a Cast of its own, which its kernel reads through."""
        value = node.inputs[position]
        assert value is not None
        self._read_narrow(node, position, self._narrowed(value, {node}))
        drop_unused_constants(self.model, [value])
        _remove_unread_moves(value)

    def _narrowed(self, value: ir.Value, readers: set[ir.Node], moves: int = _LONGEST_CHAIN) -> ir.Value:
        """The narrow form of a value: constants are rounded now, what is moved is moved narrow, through at most `moves` nodes."""
        if value in self.narrow:
            return self.narrow[value]
        tensor, producer = constant_tensor(value), value.producer()
        if tensor is not None:
            narrow = self._rounded(value, tensor)
        elif producer is not None and moves and _is_move(producer) and self._is_for_products(value, readers):
            sources = [self._narrowed(source, {producer}, moves - 1) for source in _moved_values(producer)]
            narrow = self._moved(producer, sources, value)
        else:
            if producer is not None and moves and _is_pool(producer) and self._is_for_products(value, readers):
                self._read_pool_narrow(producer, moves - 1)
            cast = self._cast(value, _TYPES[self.precision], f"{value.name}_{self.precision}", producer)
            self._insert_after(producer, cast)
            narrow = cast.outputs[0]
        self.narrow[value] = narrow
        return narrow

    def _is_for_products(self, value: ir.Value, readers: set[ir.Node]) -> bool:
        """Whether products alone read a value, beside `readers`, some of them through what moves elements."""
        return not value.is_graph_output() and self._lead_to_products(set(value.consumers()) - readers)

    def _lead_to_products(self, readers: set[ir.Node]) -> bool:
        """Whether all are products, or move elements to nothing else. Each is looked at once, by however many ways it is met."""
        pending, seen = list(readers), set(readers)
        while pending:
            reader = pending.pop()
            if _is_image_move(reader) or (_is_pool(reader) and reader.op_type == "MaxPool"):
                result = reader.outputs[0]
                if result.is_graph_output() or not result.uses():
                    return False
                found = set(result.consumers()) - seen
                seen |= found
                pending += found
            elif kind_of(reader) is not Kind.OUTPUT_FUSABLE or (reader.op_type in _CONVOLUTIONS and self._fault(reader)):
                return False
        return True

    def _read_pool_narrow(self, pool: ir.Node, moves: int) -> None:
        """Let a MaxPool whose result is rounded read what is rounded before, unless that would be stored in both types."""
        source = pool.inputs[0]
        if pool.op_type != "MaxPool" or source is None or source.producer() is None or source.is_graph_output():
            return
        if self._lead_to_products({reader for reader in source.consumers() if reader is not pool and not is_pointwise(reader)}):
            self._read_narrow(pool, 0, self._narrowed(source, {pool}, moves))
            _remove_unread_moves(source)

    def _rounded(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        """A constant in the narrow type, not computed before it is read."""
        dtype = _TYPES[self.precision]
        lazy = ir.LazyTensor(
            lambda: ir.tensor(tensor.numpy().astype(dtype.numpy())), dtype=dtype, shape=ir.Shape(tensor.shape.numpy())
        )
        return add_constant(self.model, lazy, f"{value.name}_{self.precision}")

    def _moved(self, move: ir.Node, sources: list[ir.Value], value: ir.Value) -> ir.Value:
        copy = ir.Node("", move.op_type, [*sources, *move.inputs[len(sources) :]], move.attributes.values(), version=move.version)
        copy.outputs[0].name = fresh_name(self.model, f"{value.name}_{self.precision}")
        copy_source((move,), copy)
        graph_of(move).insert_after(move, copy)
        infer_node(copy, self.model)
        return copy.outputs[0]

    def _cast(self, value: ir.Value, dtype: ir.DataType, name: str, origin: ir.Node | None) -> ir.Node:
        cast = ir.node("Cast", [value], {"to": dtype.value})
        cast.outputs[0].name = fresh_name(self.model, name)
        if origin is not None:
            copy_source((origin,), cast)
        return cast

    def _insert_after(self, producer: ir.Node | None, node: ir.Node) -> None:
        graph = self.model.graph
        if producer is not None:
            graph_of(producer).insert_after(producer, node)
        elif len(graph):
            graph.insert_before(graph[0], node)
        infer_node(node, self.model)


def _is_move(node: ir.Node) -> bool:
    return node.domain == "" and (node.op_type in _MOVES or _is_image_move(node))


def _is_image_move(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _IMAGE_MOVES and len(static_shape(node.outputs[0]) or ()) in _MOVED_RANKS


def _is_pool(node: ir.Node) -> bool:
    """Whether a node is a pooling of images without indices."""
    has_one_output = sum(output.name != "" for output in node.outputs) == 1
    rank = len(static_shape(node.outputs[0]) or ())
    return node.domain == "" and node.op_type in _POOLS and has_one_output and rank in _IMAGE_RANKS


def _moved_values(move: ir.Node) -> list[ir.Value]:
    """The values whose elements a node moves, its first inputs."""
    return [value for value in (move.inputs if move.op_type == "Concat" else move.inputs[:1]) if value is not None]


def _remove_unread_moves(value: ir.Value) -> None:
    """Take what only moved elements to nobody out of the graph."""
    pending = [value]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is not None and node.graph is not None and _is_move(node) and not value.uses() and not value.is_graph_output():
            pending += _moved_values(node)
            remove_nodes([node])


def _is_narrow(value: ir.Value | None) -> bool:
    """Whether a product reads a value that lies in a narrow type."""
    producer = None if value is None else value.producer()
    return producer is not None and kind_of(producer) is Kind.OPERAND


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and (constant_tensor(value) is not None or _is_narrow(value))


def _is_depthwise(node: ir.Node) -> bool:
    """Whether each output channel of a convolution is made of one input channel of its own."""
    source, weights = (static_shape(value) if value is not None else None for value in node.inputs[:2])
    groups = node.attributes.get_int("group", 1)
    return bool(node.op_type == "Conv" and source and weights and groups == source[1] == weights[0] and weights[1] == 1)


def _is_image_reader(node: ir.Node) -> bool:
    """Whether a reader of a narrow value moves elements of images, or is the Cast of a convolution's or a pooling's operand."""
    if _is_image_move(node):
        return True
    readers = node.outputs[0].consumers() if kind_of(node) is Kind.OPERAND else ()
    return any(reader.op_type in _CONVOLUTIONS or _is_pool(reader) for reader in readers)


def _depth(node: ir.Node) -> int | None:
    """Multiply-adds for each element of the result; None where that is not known."""
    found = [static_shape(value) for value in (*node.inputs[:2], *node.outputs) if value is not None]
    shapes = [shape for shape in found if shape is not None]
    if len(shapes) < len(found) or not shapes[0] or not shapes[1]:
        return None
    if node.op_type == "Conv":
        return prod(shapes[1][1:])
    if node.op_type == "ConvTranspose":
        return prod(shapes[0]) * prod(shapes[1][1:]) // max(prod(shapes[2]), 1)
    return shapes[0][-2 if node.attributes.get_int("transA", 0) else -1]


def _rows(node: ir.Node) -> int:
    """Rows of the result, of all matrices together."""
    return prod((static_shape(node.outputs[0]) or ())[:-1])
