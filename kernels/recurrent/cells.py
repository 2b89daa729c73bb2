"""RNN, GRU and LSTM as data: their gates, the products that these need and in which order, and the arithmetic of a hidden unit.

A time step of a cell is one or two stages. A stage multiplies a state (of the last step, or of an earlier stage) by the recurrent
weights R of its gates, and computes new states from the sums. All formulas are those of the ONNX operators; gates are numbered in
the order of ONNX's weights. The "input projection" is x W^T with the input biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from ..codegen.builder import Expr
from ..expressions import math, pointwise
from ..groups.group import Op

HIDDEN, CELL = "hidden", "cell"  # the states carried from step to step


class Unit(Protocol):
    """A hidden unit of a row of the batch, or a vector of them, as the arithmetic of a stage sees it."""

    def gate(self, number: int) -> Expr:
        """A gate's preactivation: input projection, product with the state, and biases."""

    def projected(self, number: int) -> Expr:
        """The input projection of a gate, with those biases that do not belong to the product."""

    def product(self, number: int) -> Expr:
        """The product of the stage's state with the recurrent weights of a gate, with its own bias."""

    def peephole(self, number: int) -> Expr:
        """A weight of LSTM's peepholes, in ONNX's order: input, output, forget."""

    def state(self, name: str) -> Expr:
        """A state's value before this stage."""

    def activate(self, number: int, value: Expr, *, clipped: bool = True) -> Expr:
        """The activation function f, g or h of a value, which is clipped first if the operator clips.

        LSTM's h is not clipped: `clip` bounds the arguments of the gates, as in ONNX Runtime.
        """

    def name(self, value: Expr) -> Expr:
        """The value, named so that it is computed once."""

    def one(self) -> Expr:
        """The constant 1."""


@dataclass(frozen=True)
class Stage:
    """The products of state `reads` by the weights of `gates`, and `unit`, which computes the states `writes` from them."""

    gates: tuple[int, ...]
    reads: str
    unit: Callable[[Unit], dict[str, Expr]]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A kind of cell. `separate`: gates whose recurrent bias belongs to the product; others are part of the input projection."""

    gates: int
    stages: tuple[Stage, ...]
    activations: tuple[str, ...]
    states: tuple[str, ...] = (HIDDEN,)
    separate: tuple[int, ...] = ()


def cell_of(op: Op) -> Cell:
    """The cell of a GRU, LSTM or RNN operator."""
    if op.op_type == "RNN":
        return Cell(1, (Stage((0,), HIDDEN, lambda u: {HIDDEN: u.activate(0, u.gate(0))}, (HIDDEN,)),), ("Tanh",))
    if op.op_type == "GRU":
        return _gru_reset_after() if op.attribute("linear_before_reset", 0) else _gru_reset_before()
    return _lstm(peepholes=len(op.inputs) > 7 and op.inputs[7] != "", coupled=bool(op.attribute("input_forget", 0)))


def _gru_reset_after() -> Cell:
    """linear_before_reset = 1: the reset gate scales the product, so one stage is enough (as in cuDNN)."""

    def unit(u: Unit) -> dict[str, Expr]:
        update = u.name(u.activate(0, u.gate(0)))
        reset = u.activate(0, u.gate(1))
        new = u.activate(1, u.projected(2) + reset * u.product(2))
        return {HIDDEN: (u.one() - update) * new + update * u.state(HIDDEN)}

    return Cell(3, (Stage((0, 1, 2), HIDDEN, unit, (HIDDEN,)),), ("Sigmoid", "Tanh"), separate=(2,))


def _gru_reset_before() -> Cell:
    """linear_before_reset = 0: the reset gate scales the state before its product, so there is a second stage after it."""

    def gates(u: Unit) -> dict[str, Expr]:
        return {"update": u.activate(0, u.gate(0)), "reset": u.activate(0, u.gate(1)) * u.state(HIDDEN)}

    def unit(u: Unit) -> dict[str, Expr]:
        update, new = u.state("update"), u.activate(1, u.gate(2))
        return {HIDDEN: (u.one() - update) * new + update * u.state(HIDDEN)}

    stages = (Stage((0, 1), HIDDEN, gates, ("update", "reset")), Stage((2,), "reset", unit, (HIDDEN,)))
    return Cell(3, stages, ("Sigmoid", "Tanh"))


def _lstm(*, peepholes: bool, coupled: bool) -> Cell:
    """`coupled`: the forget gate is 1 - the input gate (ONNX's input_forget)."""

    def unit(u: Unit) -> dict[str, Expr]:
        def gate(number: int, cell: Expr) -> Expr:
            return u.activate(0, u.gate(number) + u.peephole(number) * cell if peepholes else u.gate(number))

        old = u.state(CELL)
        enter = u.name(gate(0, old))
        keep = u.one() - enter if coupled else gate(2, old)
        cell = u.name(keep * old + enter * u.activate(1, u.gate(3)))
        return {CELL: cell, HIDDEN: gate(1, cell) * u.activate(2, cell, clipped=False)}

    return Cell(4, (Stage((0, 1, 2, 3), HIDDEN, unit, (CELL, HIDDEN)),), ("Sigmoid", "Tanh", "Tanh"), (HIDDEN, CELL))


# The parameters that each activation takes, alpha before beta, with their defaults. ONNX has none for ScaledTanh.
_PARAMETERS: dict[str, tuple[float, ...]] = {
    "Affine": (1.0, 0.0),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01,),
    "Relu": (),
    "ScaledTanh": (1.0, 1.0),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": (1.0,),
}
_SPELLING = {name.lower(): name for name in _PARAMETERS}


@dataclass(frozen=True)
class Activation:
    """An activation function with the values of its parameters."""

    name: str
    parameters: tuple[float, ...] = ()

    def __call__(self, name: math.Name, dtype: str, x: Expr, *, is_rough: bool = False) -> Expr:
        """The function of x; `is_rough`: the result needs no smaller error than rounding to bfloat16 makes."""
        if is_rough and dtype == "float32" and self.name in _ROUGH:
            return _ROUGH[self.name](name, x)
        if self.name in ("Affine", "ScaledTanh"):
            alpha, beta = (tirx.const(value, dtype) for value in self.parameters)
            return alpha * x + beta if self.name == "Affine" else alpha * pointwise.apply(_TANH, [x * beta], [dtype], dtype, name)
        attributes = dict(zip(("alpha", "beta"), self.parameters, strict=False))
        return pointwise.apply(Op(self.name, ("x",), ("y",), attributes), [x], [dtype], dtype, name)


_ROUGH = {"Sigmoid": math.rough_sigmoid, "Tanh": math.rough_tanh}
_TANH = Op("Tanh", ("x",), ("y",))


def activations_of(op: Op, cell: Cell, directions: int) -> tuple[tuple[Activation, ...], ...] | str:
    """The activations of each direction, or why there are none.

    Names match in any case, as ONNX says. Values of alpha and beta are consumed in the order of the functions that take them,
    as ONNX Runtime does it.
    """
    count = len(cell.activations)
    names = tuple(op.attribute("activations") or cell.activations * directions)
    if len(names) != count * directions:
        return f"{len(names)} activations for {directions} directions of {count}"
    if unknown := [name for name in names if name.lower() not in _SPELLING]:
        return f"unknown activations {', '.join(unknown)}"
    values = [iter(op.attribute(f"activation_{kind}") or ()) for kind in ("alpha", "beta")]
    found = [_activation(_SPELLING[name.lower()], values) for name in names]
    return tuple(tuple(found[d * count : (d + 1) * count]) for d in range(directions))


def _activation(name: str, values: list[Iterator[float]]) -> Activation:
    return Activation(name, tuple(next(given, default) for given, default in zip(values, _PARAMETERS[name], strict=False)))
