"""Parts of a graph between two places of its order, in ONNX Runtime, with products whose operands can be rounded.

Weights are inputs of each part, not constants of it: so parts are small and made quickly, and rounded weights are fed as others
are. The activations of a product that can be rounded go through nested Ifs, which flags among the inputs decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...engines.onnxruntime_session import OnnxRuntimeSession
from ...ir.cloning import ValueMap, clone_node, copy_value
from ...ir.constants import constant_array, constant_tensor, contiguous
from ...ir.scopes import read_values
from ...quantization.formats import LEVELS, unsigned_affine
from ...quantization.units import Unit as Product
from .roundings import UNCHANGED, ActivationRounding, Array, rounding_of
from .study import Range

Values = Mapping[str, Array]

_KEPT_BYTES = 1024  # constants up to this size stay: shapes, axes, scales, which ONNX Runtime computes with when it loads
REALS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_KINDS: tuple[ActivationRounding, ...] = ("bfloat16", "tensor", "rows")


def has_real_outputs(model: ir.Model) -> bool:
    """Whether a model has outputs by which errors are measured."""
    return any(value.dtype is None or value.dtype in REALS for value in model.graph.outputs)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the graph as it runs: what it reads of the values before it, what it makes, and the products it can round."""

    session: OnnxRuntimeSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Values
    products: tuple[Product, ...]

    def run(self, values: Values, operands: Values) -> dict[str, Array]:
        """The outputs by name, with the rounded `operands` of its products."""
        feeds = {**{name: values[name] for name in self.inputs}, **self.constants, **operands}
        return dict(zip(self.outputs, self.session.run(feeds), strict=True))

    def operands(self, formats: Mapping[str, str], ranges: Mapping[str, Range], keeps_pairs: bool = False) -> dict[str, Array]:
        """What is fed for its products in these formats, by the names of their nodes; others stay as they are."""
        feeds: dict[str, Array] = {}
        for product in self.products:
            feeds |= operands_of(product, formats.get(product.name, UNCHANGED), ranges, keeps_pairs)
        return feeds


def operands_of(product: Product, form: str, ranges: Mapping[str, Range], keeps_pairs: bool) -> dict[str, Array]:
    """The weights of a product in a format, and how its activations are to be rounded."""
    rounding = rounding_of(form, keeps_pairs)
    affine = unsigned_affine(*ranges.get(str(product.activations.name), (0.0, 0.0)))
    weights = rounding.weights(product.weights, product.channel_axis)
    return {
        _operand(product, "weights"): contiguous(weights.astype(np.float32, copy=False)),
        _operand(product, "scale"): affine.scale,
        _operand(product, "zero"): affine.zero,
        **{_operand(product, kind): np.array(rounding.activations == kind) for kind in _KINDS},
    }


class Sections:
    """The parts of a model whose functions are inlined. Place `i` is before node `i` of `nodes`, the last one behind all.

    `ends` are what the model is judged by: its outputs of real numbers.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.nodes = tuple(node for node in model.graph if node.op_type != "Constant" or node.domain != "")
        self.places = {str(node.name): place for place, node in enumerate(self.nodes)}
        self.ends = tuple(dict.fromkeys(value for value in model.graph.outputs if value.dtype in REALS))
        self._last = {value: place for place, node in enumerate(self.nodes) for value in read_values(node)}
        self._last |= dict.fromkeys(self.ends, len(self.nodes))
        self._made = {value: place for place, node in enumerate(self.nodes) for value in node.outputs}
        self._contiguous: dict[str, Array] = {}  # constants as sections are fed them: transposed views are copied once

    def live(self, place: int) -> tuple[ir.Value, ...]:
        """What a section that begins at a place needs of those before it, and the ends that are made by then."""
        inputs = (value for value in self.model.graph.inputs if self._last.get(value, -1) >= place)
        made = (value for value, maker in self._made.items() if maker < place <= self._last.get(value, -1))
        return (*inputs, *made)

    def section(
        self, start: int, stop: int, outputs: Sequence[ir.Value], products: Sequence[Product] = (), more: Sequence[ir.Node] = ()
    ) -> Section | None:
        """The nodes of the places from `start` to `stop` and `more` behind them, with those of `outputs` that they make.

        None if they make none of them.
        """
        nodes = (*self.nodes[start:stop], *more)
        made = {value for node in nodes for value in node.outputs}
        kept = [value for value in outputs if value in made]
        if not kept:
            return None
        nodes = _needed(nodes, kept)
        draft = _Draft(products, self._contiguous)
        for node in nodes:
            draft.add(node)
        graph = draft.graph(kept, self.model.graph.opset_imports)
        session = OnnxRuntimeSession(ir.Model(graph, ir_version=self.model.ir_version), optimize=True)
        rounded = tuple(product for product in products if product.node in nodes)
        names = tuple(str(value.name) for value in kept)
        return Section(session, tuple(draft.inputs), names, draft.constants, rounded)


class _Draft:
    """A graph that grows by copies of nodes: values from elsewhere become its inputs, the larger constants among them."""

    def __init__(self, products: Collection[Product], contiguous: dict[str, Array]) -> None:
        self.contiguous = contiguous
        self.products = {product.node: product for product in products}
        self.values: ValueMap = {}
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.inputs: dict[str, ir.Value] = {}
        self.constants: dict[str, Array] = {}
        self.fed: list[ir.Value] = []  # inputs of rounded products

    def add(self, node: ir.Node) -> None:
        product = self.products.get(node)
        own = {node.inputs[1]} if product is not None else set()
        for value in read_values(node):
            if value not in self.values and value not in own:
                self._bring(value)
        if product is None:
            self.nodes.append(clone_node(node, self.values))
        else:
            self._add_product(product)

    def _add_product(self, product: Product) -> None:
        """The node, reading weights of its own and rounded activations."""
        constant = _present(product.node.inputs[1])
        weights = copy_value(constant)
        weights.name = _operand(product, "weights")
        self.fed.append(weights)
        values: ValueMap = {**self.values, constant: weights, product.activations: self._rounded(product)}
        self.nodes.append(clone_node(product.node, values))
        self.values |= {value: values[value] for value in product.node.outputs}

    def _rounded(self, product: Product) -> ir.Value:
        """If bfloat16: ..., else if of a range: ..., else if by rows: ..., else as they are."""
        x = _present(self.values[product.activations])
        result = [ir.node("Identity", [x])]
        for kind in reversed(_KINDS):
            flag = ir.Value(name=_operand(product, kind), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
            self.fed.append(flag)
            parts = {"then": self._branch(kind, product, x), "else": result}
            for name, nodes in parts.items():
                for number, node in enumerate(nodes):  # names are unique beyond their graphs
                    node.name = node.outputs[0].name = _operand(product, f"{kind}/{name}/{number}")
            branches = [ir.Graph([], nodes[-1].outputs, nodes=nodes, name=name) for name, nodes in parts.items()]
            attributes = [ir.AttrGraph(name, graph) for name, graph in zip(("then_branch", "else_branch"), branches, strict=True)]
            result = [ir.Node("", "If", [flag], attributes)]
        (outermost,) = result
        outermost.name = outermost.outputs[0].name = _operand(product, "rounded")
        self.nodes.append(outermost)
        return outermost.outputs[0]

    def _branch(self, kind: ActivationRounding, product: Product, x: ir.Value) -> list[ir.Node]:
        if kind == "bfloat16":
            narrow = ir.node("Cast", [x], {"to": ir.DataType.BFLOAT16.value})
            return [narrow, ir.node("Cast", narrow.outputs, {"to": ir.DataType.FLOAT.value})]
        if kind == "rows":
            return _rows_rounded(x)
        scale = ir.Value(name=_operand(product, "scale"), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
        zero = ir.Value(name=_operand(product, "zero"), type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([]))
        self.fed += [scale, zero]
        numbers = ir.node("QuantizeLinear", [x, scale, zero])
        return [numbers, ir.node("DequantizeLinear", [*numbers.outputs, scale, zero])]

    def _bring(self, value: ir.Value) -> None:
        """Make a value from elsewhere readable."""
        tensor, new = constant_tensor(value), copy_value(value)
        self.values[value] = new
        if tensor is None:
            self.inputs[str(value.name)] = new
        elif tensor.dtype == ir.DataType.STRING or tensor.nbytes <= _KEPT_BYTES:
            new.const_value = tensor
            self.initializers.append(new)
        else:
            self.constants[str(value.name)] = self._fed(value)
            self.fed.append(new)
            new.type, new.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())

    def _fed(self, value: ir.Value) -> Array:
        """A constant as ONNX Runtime takes it."""
        name = str(value.name)
        if name not in self.contiguous:
            array = constant_array(value)
            assert array is not None
            self.contiguous[name] = contiguous(array)
        return self.contiguous[name]

    def graph(self, outputs: Sequence[ir.Value], opsets: Mapping[str, int]) -> ir.Graph:
        return ir.Graph(
            [*self.inputs.values(), *self.fed],
            [_present(self.values[value]) for value in outputs],
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports=dict(opsets),
            name="section",
        )


def _rows_rounded(x: ir.Value) -> list[ir.Node]:
    """`quantize_rows` and back, as nodes."""
    zero, one, levels = (ir.node("Constant", [], {"value_float": number}) for number in (0.0, 1.0, float(LEVELS)))
    last = ir.node("Constant", [], {"value_ints": [-1]})
    (zero_, one_, levels_, last_) = (node.outputs[0] for node in (zero, one, levels, last))
    nodes = [zero, one, levels, last]

    def add(operator: str, *inputs: ir.Value) -> ir.Value:
        nodes.append(ir.node(operator, list(inputs)))
        return nodes[-1].outputs[0]

    low, high = add("Min", add("ReduceMin", x, last_), zero_), add("Max", add("ReduceMax", x, last_), zero_)
    span = add("Sub", high, low)
    scale = add("Where", add("Greater", span, zero_), add("Div", span, levels_), one_)
    offset = add("Clip", add("Round", add("Neg", add("Div", low, scale))), zero_, levels_)
    numbers = add("Clip", add("Add", add("Round", add("Div", x, scale)), offset), zero_, levels_)
    add("Mul", add("Sub", numbers, offset), scale)
    return nodes


def _needed(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> tuple[ir.Node, ...]:
    """Those of nodes in order that outputs depend on."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            kept.append(node)
            wanted.update(read_values(node))
    return tuple(reversed(kept))


def _operand(product: Product, what: str) -> str:
    return f"{product.name}/{what}"


def _present(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value
