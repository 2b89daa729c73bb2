"""Neighbouring elements that one thread of a GPU computes, one after the other, and loads and stores as vectors of 16 bytes.

A template writes the body of one element, number `lane` of `count`. What it loads from memory `lane` elements behind a place
where whole vectors begin is loaded before all bodies, and what it stores so is stored behind them. All else stays as it is
written: loads under a condition or in a loop, loads at places that loads tell, and what lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from .builder import Buffer, Expr

VECTOR_BITS = 128


def side_by_side(body: Sequence[Any], lane: Any, count: int, definitions: Sequence[tuple[Any, Expr]]) -> list[Any]:
    """The statements of `count` elements for those of one; `definitions` are the variables bound so far, and what they are.

    The body must not read what it writes for another element.
    """
    return _Widening(lane, count, definitions).statements(_flat(body))


@dataclass
class _Vector:
    """Neighbours in memory, from `begin` on, and the registers that stand for them."""

    buffer: Buffer
    begin: Expr
    registers: Buffer


@dataclass
class _Widening:
    lane: Any
    count: int
    definitions: Sequence[tuple[Any, Expr]]
    loaded: dict[tuple[str, str], _Vector] = field(default_factory=dict)  # by buffer and place
    stored: list[_Vector] = field(default_factory=list)
    analyzer: Any = field(default_factory=sym.Analyzer)

    def statements(self, body: Sequence[Any]) -> list[Any]:
        allocations = [one for one in body if isinstance(one, tirx.AllocBuffer)]
        rest = [self._stored(self._withloads_of(one)) for one in body if not isinstance(one, tirx.AllocBuffer)]
        copies = [one for element in range(self.count) for one in self._copy(rest, element)]
        before, behind = list[Any](), list[Any]()
        for one in self.loaded.values():
            before += [_allocated(one.registers), *self._pieces(one, is_load=True)]
        for one in self.stored:
            before.append(_allocated(one.registers))
            behind += self._pieces(one, is_load=False)
        return [*allocations, *before, *copies, *behind]

    def _copy(self, statements: Sequence[Any], element: int) -> list[Any]:
        """The statements of one element, with variables of their own."""
        bound = list[Any]()
        for one in statements:
            tvm_ffi.structural_walk(one, (tirx.Bind, lambda bind: bound.append(bind.var)))
            tvm_ffi.structural_walk(one, (tirx.For, lambda loop: bound.append(loop.loop_var)))
        renewed = [(one, tirx.Var(one.name, one.ty)) for one in bound]

        def replaced(variable: Any) -> Any:
            if variable.same_as(self.lane):
                return _i32(element)
            return next((new for old, new in renewed if old.same_as(variable)), variable)

        return [tvm_ffi.structural_map(one, (tirx.Var, replaced), order="post") for one in statements]

    def _withloads_of(self, statement: Any) -> Any:
        """The statement with registers for what it always loads, `lane` behind the begin of a vector."""
        if not isinstance(statement, tirx.BufferStore | tirx.Bind | tirx.Evaluate):
            return statement
        conditional = list[Any]()
        tvm_ffi.structural_walk(statement, (Call, lambda call: conditional.extend(loads_of(call) if _is_choice(call) else ())))
        unsure = {_key(one) for one in conditional}

        def replaced(load: Any) -> Any:
            if _is_local(load.source) or _key(load) in unsure:
                return load
            vector = self._vector_of(load.source, load.indices, self.loaded.get(_key(load)))
            if vector is None:
                return load
            self.loaded[_key(load)] = vector
            return vector.registers[self.lane]

        return tvm_ffi.structural_map(statement, (TensorLoad, replaced), order="post")

    def _stored(self, statement: Any) -> Any:
        """A store to memory as one to registers, if neighbours are a vector."""
        if not isinstance(statement, tirx.BufferStore) or _is_local(statement.buffer):
            return statement
        vector = self._vector_of(statement.buffer, statement.indices)
        if vector is None:
            return statement
        self.stored.append(vector)
        return tirx.BufferStore(vector.registers, statement.value, [self.lane])

    def _vector_of(self, buffer: Buffer, indices: Sequence[Expr], known: _Vector | None = None) -> _Vector | None:
        """The vector that the neighbours of an element are; None if they are none."""
        if known is not None:
            return known
        lanes = self._lanes(buffer)
        place = self._defined(indices[0])
        if lanes == 1 or len(indices) > 1 or any(_is_local(load.source) for load in loads_of(place)):
            return None
        found = sym.detect_linear_equation(place, [self.lane])
        if len(found) != 2 or not isinstance(found[0], tirx.IntImm) or int(found[0]) != 1:
            return None
        begin = self.analyzer.simplify(found[1])
        multiple = self.analyzer.modular_set(begin)
        if multiple.coeff % lanes or multiple.base % lanes:
            return None
        registers = tirx.decl_buffer((self.count,), str(buffer.dtype), name="near", scope="local", layout=None)
        return _Vector(buffer, begin, registers)

    def _lanes(self, buffer: Buffer) -> int:
        """Elements of one load; 1 where they are no vectors."""
        bits = 0 if str(buffer.dtype) == "bool" else buffer.dtype.bits
        return min(self.count, VECTOR_BITS // bits) if bits else 1

    def _defined(self, value: Expr) -> Expr:
        """The value without variables that were bound."""
        for variable, meaning in reversed(self.definitions):
            value = _replaced(value, variable, meaning)
        return value

    def _pieces(self, one: _Vector, *, is_load: bool) -> list[Any]:
        """Loads or stores of 16 bytes or less."""
        lanes, statements = self._lanes(one.buffer), []
        for first in range(0, self.count, lanes):
            inside = tirx.Ramp(_i32(first), _i32(1), lanes)
            outside = tirx.Ramp(one.begin + _i32(first) if first else one.begin, _i32(1), lanes)
            (to, at), (source, place) = ((one.registers, inside), (one.buffer, outside))[:: 1 if is_load else -1]
            statements.append(tirx.BufferStore(to, source[place], [at]))
        return statements


def _replaced(tree: Any, variable: Any, meaning: Any) -> Any:
    value = _i32(meaning) if isinstance(meaning, int) else meaning
    return tvm_ffi.structural_map(tree, (tirx.Var, lambda one: value if one.same_as(variable) else one), order="post")


def loads_of(tree: Any) -> list[Any]:
    """All loads in a tree of expressions or statements."""
    found: list[Any] = []
    tvm_ffi.structural_walk(tree, (TensorLoad, found.append))
    return found


def _key(load: Any) -> tuple[str, str]:
    return load.source.name, str(load.indices)


def _is_local(buffer: Buffer) -> bool:
    return bool(buffer.scope() != "global")


def _is_choice(call: Any) -> bool:
    """Whether a call computes some of its arguments only."""
    return str(getattr(call.op, "name", "")) == "tirx.if_then_else"


def _allocated(registers: Buffer) -> Any:
    return tirx.AllocBuffer(registers, {"disable_lower_builtin": tirx.const(True, "bool")})


def _flat(statements: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for one in statements:
        found += _flat(list(one.seq)) if isinstance(one, tirx.SeqStmt) else [one]
    return found


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")
