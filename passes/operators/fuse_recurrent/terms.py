"""The argument of a gate as a sum: products of columns by constant weights, constant vectors, and gated sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array, constant_tensor, scalar_constant
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.rewriter import Rejection
from .columns import Columns, columns_of, size_of, static_shape, stripped

_MAX_TERMS, _MAX_DEPTH = 16, 24  # of a sum in which gates are looked for
_ACTIVATIONS: dict[str, tuple[float, ...]] = {  # those of ONNX's recurrent operators, with the defaults of alpha and beta
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01,),
    "Relu": (),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": (1.0,),
}


@dataclass(frozen=True, slots=True)
class Activation:
    """A pointwise function of one operand; `parameters` are alpha and beta as far as it has them."""

    name: str
    parameters: tuple[float, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether ONNX's recurrent operators have it."""
        return self.name in _ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation function of some columns."""

    activation: Activation
    argument: Columns


@dataclass(frozen=True, slots=True)
class Matrix:
    """A part of a constant matrix, times `scale`: input features `rows` to `rows_end`, output features `begin` to `end`.

    The matrix is [input features, output features], or the other way round if `transposed`.
    """

    value: ir.Value
    transposed: bool
    rows: int
    rows_end: int
    begin: int
    end: int
    scale: float

    def array(self) -> np.ndarray:
        """[output features, input features], as ONNX's recurrent operators have them."""
        whole = constant_array(self.value)
        assert whole is not None
        part = (whole if self.transposed else whole.T)[self.begin : self.end, self.rows : self.rows_end]
        return part if self.scale == 1 else part * part.dtype.type(self.scale)


@dataclass(frozen=True, slots=True)
class Product:
    """Columns times a matrix."""

    source: Columns
    matrix: Matrix

    def of_piece(self, piece: Columns, begin: int) -> Product:
        """The product's share of a piece of its source that begins at column `begin` there."""
        matrix, first = self.matrix, self.matrix.rows + begin
        part = Matrix(matrix.value, matrix.transposed, first, first + piece.width, matrix.begin, matrix.end, matrix.scale)
        return Product(piece, part)


@dataclass(frozen=True, slots=True)
class Shift:
    """Columns `begin` to `end` of a constant that is the same for all rows, times `scale`; one number for all if it is one."""

    value: ir.Value
    begin: int
    end: int
    scale: float

    def array(self) -> np.ndarray:
        whole = constant_array(self.value)
        assert whole is not None
        if whole.size == 1:
            part = np.broadcast_to(whole.reshape(1), (self.end - self.begin,))
        else:
            part = whole.reshape(-1, whole.shape[-1])[0, self.begin : self.end]
        return part if self.scale == 1 else part * part.dtype.type(self.scale)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A gate's columns times other columns."""

    gate: Columns
    inner: Columns


Term = Product | Shift | Scaled


def gate_of(columns: Columns) -> Gate | None:
    """The activation that computes these columns; one that ONNX's recurrent operators lack, too."""
    node = columns.producer
    if node is None or kind_of(node) != Kind.ELEMENTWISE or node.op_type in ("Cast", "Neg") or len(node.inputs) != 1:
        return None
    argument = columns.of(node.inputs[0])
    if argument is None:
        return None
    defaults = zip(("alpha", "beta"), _ACTIVATIONS.get(node.op_type, ()), strict=False)
    parameters = tuple(node.attributes.get_float(name, default) for name, default in defaults)
    return Gate(Activation(node.op_type, parameters), stripped(argument))


def terms_of(columns: Columns) -> tuple[Term, ...] | Rejection:
    """What the columns are the sum of, or which of it is nothing that a recurrent operator adds up."""
    found = list(islice(_terms(columns, 1.0, _MAX_DEPTH), _MAX_TERMS + 1))
    for term in found:
        if isinstance(term, Rejection):
            return term
    if len(found) > _MAX_TERMS:
        return Rejection(f"%{columns.value.name} is a sum of more than {_MAX_TERMS} terms")
    return tuple(term for term in found if not isinstance(term, Rejection))


def _terms(columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    columns = stripped(columns)
    node = columns.producer
    operator = None if node is None or depth == 0 else _OPERATORS.get(node.op_type)
    if constant_tensor(columns.value) is not None:
        yield _shift(columns.value, columns, scale)
    elif node is None or operator is None:
        yield Rejection(f"%{columns.value.name} is no sum of products by constant weights", () if node is None else (node,))
    else:
        yield from operator(node, columns, scale, depth - 1)


def _operand(node: ir.Node, position: int, columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    value = node.inputs[position]
    same = columns.of(value)
    if value is not None and constant_tensor(value) is not None:
        yield _shift(value, columns, scale)
    elif same is None:
        yield Rejection(f"an operand of {node.op_type} is broadcast", (node,))
    else:
        yield from _terms(same, scale, depth)


def _sum(node: ir.Node, columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    yield from _operand(node, 0, columns, scale, depth)
    yield from _operand(node, 1, columns, -scale if node.op_type == "Sub" else scale, depth)


def _negation(node: ir.Node, columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    yield from _operand(node, 0, columns, -scale, depth)


def _product_of_columns(node: ir.Node, columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    """A number times a sum, or a gate times a sum."""
    for position, value in enumerate(node.inputs):
        number = scalar_constant(value)
        if number is not None:
            yield from _operand(node, 1 - position, columns, scale * number, depth)
            return
    operands = [None if (same := columns.of(value)) is None else stripped(same) for value in node.inputs]
    for gate, inner in (operands, operands[::-1]):
        if scale == 1 and gate is not None and inner is not None and gate_of(gate) is not None:
            yield Scaled(gate, inner)
            return
    yield Rejection(f"%{columns.value.name} is no sum of products by constant weights", (node,))


def _matmul(node: ir.Node, columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    yield _by_weights(node, columns, scale, transposed=False)


def _gemm(node: ir.Node, columns: Columns, scale: float, depth: int) -> Iterator[Term | Rejection]:
    if node.attributes.get_int("transA", 0):
        yield Rejection("Gemm transposes its left operand", (node,))
        return
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    yield _by_weights(node, columns, scale * alpha, transposed=bool(node.attributes.get_int("transB", 0)))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        yield from _operand(node, 2, columns, scale * beta, depth)


def _by_weights(node: ir.Node, columns: Columns, scale: float, *, transposed: bool) -> Product | Rejection:
    source, weights = columns_of(node.inputs[0]), node.inputs[1]
    if weights is not None and (turned := weights.producer()) is not None and turned.op_type == "Transpose":
        weights, transposed = turned.inputs[0], not transposed
    if weights is None or constant_tensor(weights) is None:
        return Rejection(f"the weights %{node.inputs[1] and node.inputs[1].name} of {node.op_type} are not constant", (node,))
    if source is None or len(static_shape(weights)) != 2:
        return Rejection(f"{node.op_type} is no product by one matrix", (node,))
    depth = static_shape(weights)[1 if transposed else 0]
    return Product(source, Matrix(weights, transposed, 0, depth, columns.begin, columns.end, scale))


def _shift(value: ir.Value, columns: Columns, scale: float) -> Shift | Rejection:
    """A constant that is added to columns, as a vector."""
    shape = static_shape(value)
    if size_of(value) == 1:
        return Shift(value, columns.begin, columns.end, scale)
    width = static_shape(columns.value)[-1]
    array = constant_array(value)
    if array is None or shape[-1] != width or (array.reshape(-1, width) != array.reshape(-1, width)[0]).any():
        return Rejection(f"the constant %{value.name} differs between rows", ())
    return Shift(value, columns.begin, columns.end, scale)


_OPERATORS = {
    "Add": _sum,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Mul": _product_of_columns,
    "Neg": _negation,
    "Sub": _sum,
}
