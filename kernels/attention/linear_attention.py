"""LinearAttention: a recurrence over one state matrix a head, which each step decays, updates and reads.

Columns of the state are independent, so a vector of them takes all steps while it stays in L1; batch, heads and vectors of
columns are dealt to the threads. The arithmetic is that of the operator's definition step by step, in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import sqrt

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..expressions import math
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder

OPERATORS = frozenset(["LinearAttention"])
_QUERY, _KEY, _VALUE, _PAST, _DECAY, _BETA = range(6)  # inputs
_RULES = ("linear", "gated", "delta", "gated_delta")
_TYPE = "float32"  # of the state and of all accumulators
_MAX_LOCAL_BYTES = 256 * 1024  # of a thread's stack
_COST_OF_EXP = 12


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    (op,) = group.ops
    rule = op.attribute("update_rule", "gated_delta")
    if rule not in _RULES:
        return f"no update rule {rule!r}"
    heads, queries = op.attribute("kv_num_heads", 0), op.attribute("q_num_heads", 0)
    if heads < 1 or queries < 1 or queries % heads:
        return f"{queries} query heads for {heads} heads of state"
    for name, position in (("gated", _DECAY), ("delta", _BETA)):
        if name in rule and not (position < len(op.inputs) and op.inputs[position]):
            return f"update rule {rule!r} without its input {position}"
    attention = _attention(group, target)
    is_large = attention.local_bytes > _MAX_LOCAL_BYTES
    return f"a state of {attention.rows} rows is more than a thread's stack holds" if is_large else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one LinearAttention of any update rule."""
    return _attention(group, target).build()


def _attention(group: Group, target: Target) -> _Attention:
    """The group's operator, whose numbers of heads are legal."""
    (op,) = group.ops
    heads, queries = op.attribute("kv_num_heads", 0), op.attribute("q_num_heads", 0)
    batch, steps, width = group.types[op.inputs[0]].shape
    columns = group.types[op.inputs[2]].shape[2] // heads
    return _Attention(group, op, new_builder(target), batch, steps, heads, queries // heads, width // queries, columns)


@dataclass(frozen=True)
class _Attention:
    """The operator with static shapes. `shared` query heads read the state of one head, a `rows` x `columns` matrix."""

    group: Group
    op: Op
    builder: KernelBuilder
    batch: int
    steps: int
    heads: int
    shared: int
    rows: int
    columns: int

    @property
    def lanes(self) -> int:
        return self.builder.lanes(_TYPE)

    @property
    def local_bytes(self) -> int:
        """Bytes on the stack for one vector of columns."""
        return (self.rows + self.shared + 1) * self.lanes * 4

    @property
    def scale(self) -> float:
        """The factor of each query's result."""
        return float(self.op.attribute("scale", 0.0)) or 1 / sqrt(max(self.rows, 1))

    def has(self, position: int) -> bool:
        """Whether an optional input is present and used by the update rule."""
        rule = self.op.attribute("update_rule", "gated_delta")
        is_used = {_PAST: True, _DECAY: "gated" in rule, _BETA: "delta" in rule}[position]
        return is_used and position < len(self.op.inputs) and bool(self.op.inputs[position])

    def operand(self, position: int) -> Buffer:
        kind = self.group.types[self.op.inputs[position]]
        return self.builder.parameter(self.op.inputs[position], kind.elements, kind.dtype)

    def width(self, position: int) -> int:
        """Elements of an input for one token."""
        return self.group.types[self.op.inputs[position]].shape[-1]

    def store(self, position: int, offset: Expr, value: Expr) -> None:
        """Store an element of an output, in the output's type."""
        name = self.op.outputs[position]
        kind = self.group.types[name]
        self.builder.store(self.builder.parameter(name, kind.elements, kind.dtype), offset, tirx.Cast(kind.dtype, value))

    def build(self) -> BuiltKernel:
        operations = 2 + 2 * self.has(_DECAY) + 2 * self.has(_BETA) + 2 * self.shared  # of a state element in a step
        work = self.batch * self.steps * self.heads * self.rows * self.columns * operations
        factors = self._decay_factors() if self.has(_DECAY) and self.batch * self.steps else None
        whole, rest = divmod(self.columns, self.lanes)
        for count, lanes, first in ((whole, self.lanes, 0), (rest, 1, whole * self.lanes)):
            if self.batch * self.heads * count == 0:
                continue
            with self.builder.chunks(self.batch * self.heads * count, work) as task:
                head = self.builder.bind(tirx.floordiv(task, count))
                column = self.builder.bind(tirx.floormod(task, count) * lanes + first)
                _Columns(self, factors, head, column, lanes).emit()
        return finish("linear_attention", self.builder, self.group, flops=work)

    def _decay_factors(self) -> Buffer:
        """exp(decay), once for all columns."""
        builder, source, kind = self.builder, self.operand(_DECAY), self.group.types[self.op.inputs[_DECAY]]
        factors = builder.workspace(kind.elements, _TYPE)

        def element(i: Expr) -> None:
            builder.store(factors, i, math.exponential(builder.name, builder.name(tirx.Cast(_TYPE, source[i]))))

        with builder.chunks(self.batch * self.steps, kind.elements * _COST_OF_EXP) as row:
            base = builder.bind(row * kind.shape[-1])
            builder.vector_loop(kind.shape[-1], self.lanes, lambda i: element(base + i))
        return factors


@dataclass(frozen=True)
class _Columns:
    """All steps of `lanes` neighbouring columns of one head's state; `head` counts over the batch too."""

    of: _Attention
    factors: Buffer | None  # exp(decay)
    head: Expr
    column: Expr
    lanes: int

    def emit(self) -> None:
        builder, rows = self.of.builder, self.of.rows
        state = builder.local(max(rows, 1) * self.lanes, _TYPE, "state")
        place = builder.bind(self.head * rows * self.of.columns + self.column)
        with builder.loop(rows, name="row") as row, self._each_lane() as lane:
            builder.store(state, row * self.lanes + lane, self._past(place + row * self.of.columns + lane))
        with builder.loop(self.of.steps, name="step") as step:
            self._step(state, builder.bind(step))
        with builder.loop(rows, name="row") as row, self._each_lane() as lane:
            self.of.store(1, place + row * self.of.columns + lane, state[row * self.lanes + lane])

    def _step(self, state: Buffer, step: Expr) -> None:
        """One token: decay the state, compute the update (of the delta rule: value less what the state has for the key), add and
        read it."""
        builder, of = self.of.builder, self.of
        token = builder.bind(tirx.floordiv(self.head, of.heads) * of.steps + step)  # its number over batch and steps
        kv_head = builder.bind(tirx.floormod(self.head, of.heads))
        write = builder.local(self.lanes, _TYPE, "write")
        with self._each_lane() as lane:
            builder.store(write, lane, _zero())
        if self.factors is not None or of.has(_BETA):
            with builder.loop(of.rows, name="row") as row:
                factor, key = self._factor(token, kv_head, row), self._load(_KEY, token, kv_head * of.rows + row)
                with self._each_lane() as lane:
                    kept = builder.name(state[row * self.lanes + lane] * factor)
                    builder.store(state, row * self.lanes + lane, kept)
                    builder.store(write, lane, write[lane] + kept * key)
        rate = self._load(_BETA, token, kv_head if of.width(_BETA) > 1 else 0) if of.has(_BETA) else None
        values = of.operand(_VALUE)
        with self._each_lane() as lane:
            value = tirx.Cast(_TYPE, values[(token * of.heads + kv_head) * of.columns + self.column + lane])
            builder.store(write, lane, value if rate is None else rate * (value - write[lane]))
        self._read(state, write, token, kv_head)

    def _read(self, state: Buffer, write: Buffer, token: Expr, kv_head: Expr) -> None:
        """Add the outer product of key and `write` to the state, and store its product with each query."""
        builder, of = self.of.builder, self.of
        sums = builder.local(of.shared * self.lanes, _TYPE, "sums")
        with builder.loop(of.shared, name="query") as query, self._each_lane() as lane:
            builder.store(sums, query * self.lanes + lane, _zero())
        with builder.loop(of.rows, name="row") as row:
            key = self._load(_KEY, token, kv_head * of.rows + row)
            with self._each_lane() as lane:
                builder.store(state, row * self.lanes + lane, state[row * self.lanes + lane] + key * write[lane])
            with builder.loop(of.shared, name="query") as query:
                weight = self._load(_QUERY, token, (kv_head * of.shared + query) * of.rows + row)
                with self._each_lane() as lane:
                    held = sums[query * self.lanes + lane] + weight * state[row * self.lanes + lane]
                    builder.store(sums, query * self.lanes + lane, held)
        with builder.loop(of.shared, name="query") as query, self._each_lane() as lane:
            place = ((token * of.heads + kv_head) * of.shared + query) * of.columns + self.column
            of.store(0, place + lane, sums[query * self.lanes + lane] * tirx.const(of.scale, _TYPE))

    def _past(self, offset: Expr) -> Expr:
        """An element of the initial state."""
        return tirx.Cast(_TYPE, self.of.operand(_PAST)[offset]) if self.of.has(_PAST) else _zero()

    def _factor(self, token: Expr, kv_head: Expr, row: Expr) -> Expr:
        """The decay factor of a row of the state."""
        if self.factors is None:
            return tirx.const(1, _TYPE)
        width = self.of.width(_DECAY)
        place = kv_head if width == self.of.heads else kv_head * self.of.rows + row
        return self.of.builder.name(self.factors[token * width + place])

    def _load(self, position: int, token: Expr, place: Expr) -> Expr:
        """An element of an input for a token, the same for all lanes."""
        source = self.of.operand(position)
        return self.of.builder.name(tirx.Cast(_TYPE, source[token * self.of.width(position) + place]))

    def _each_lane(self) -> AbstractContextManager[Expr]:
        return self.of.builder.loop(self.lanes, "vectorized", "lane")


def _zero() -> Expr:
    return tirx.const(0, _TYPE)
