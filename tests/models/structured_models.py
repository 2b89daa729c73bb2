"""Random models with control flow: branches, loops and scans in each other, which read values around them and share names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir
from hypothesis import strategies as st

_UNARY, _BINARY = ("Tanh", "Neg", "Identity", "Sigmoid"), ("Add", "Mul", "Sub", "Max")
_HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
_CONSTANTS = """
    n0 = Constant<value_int=0>() n1 = Constant<value_int=1>() n2 = Constant<value_int=2>() n3 = Constant<value_int=3>()
    zero = Constant<value=float[2] {0, 0}>() rows = Constant<value_ints=[0]>() yes = Constant<value=bool {1}>()
    no = Constant<value=bool {0}>() top = ReduceMax<keepdims=0>(x) below = ReduceMin<keepdims=0>(x)
    some = Add(top, below) none = Sub(some, some) run = Greater(some, none) pair = Concat<axis=0>(x, w)
    two = Constant<value_ints=[2, 2]>() matrix = Reshape(pair, two)"""


@dataclass
class _Writer:
    """Writes one model; every value is a float[2]. Names count from 0 again in each body of one depth, as exporters do it."""

    draw: st.DrawFn
    left: int = 14  # statements that may still be written
    lines: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=lambda: ["yes", "no", "run"])  # constant, and known to a run
    counts: list[str] = field(default_factory=lambda: ["n0", "n1", "n2", "n3"])

    def body(self, depth: int, scope: list[str], tail: Callable[[list[str]], list[str]]) -> tuple[str, list[str]]:
        """Statements of a graph, and what `tail` makes of the values that they see: the values to return."""
        saved, self.lines = self.lines, []
        seen = list(scope)
        for number in range(self.draw(st.integers(2, 4))):
            if self.left > 0:
                self.left -= 1
                seen.append(self.statement(f"d{depth}_{number}", depth, seen))
        results = tail(seen)
        text, self.lines = " ".join(self.lines), saved
        return text, results

    def pick(self, scope: list[str]) -> str:
        return self.draw(st.sampled_from(scope))

    def statement(self, name: str, depth: int, scope: list[str]) -> str:
        """One statement more, whose result has this name."""
        kinds = ["unary", "binary", *(["if", "loop", "scan"] if depth < 3 else [])]
        write = {"unary": self.unary, "binary": self.binary, "if": self.branch, "loop": self.loop, "scan": self.scan}
        write[self.draw(st.sampled_from(kinds))](name, depth, scope)
        return name

    def unary(self, name: str, depth: int, scope: list[str]) -> None:
        self.lines.append(f"{name} = {self.draw(st.sampled_from(_UNARY))}({self.pick(scope)})")

    def binary(self, name: str, depth: int, scope: list[str]) -> None:
        self.lines.append(f"{name} = {self.draw(st.sampled_from(_BINARY))}({self.pick(scope)}, {self.pick(scope)})")

    def branch(self, name: str, depth: int, scope: list[str]) -> None:
        """If with a condition that is constant, follows from the iteration around, or is known to a run."""
        texts = [self.body(depth + 1, scope, partial(self.fresh, f"{name}_{side}")) for side in "te"]
        then, other = (f"() => (float[2] {results[0]}) {{ {text} }}" for text, results in texts)
        self.lines.append(f"{name} = If({self.pick(self.conditions)}) <then_branch = t {then}, else_branch = e {other}>")

    def loop(self, name: str, depth: int, scope: list[str]) -> None:
        """Loop of up to three iterations, whose number may decide what is in them; it carries one value and stacks another."""
        count, first, goes_on = (
            self.pick(self.counts),
            self.pick(self.conditions),
            self.pick(["Identity({0}_c)", "Less({0}_k, n1)"]),
        )

        def tail(seen: list[str]) -> list[str]:
            self.lines.append(f"{name}_go = {goes_on.format(name)}")
            return [f"{name}_go", *self.fresh(f"{name}_b", seen), *self.fresh(f"{name}_s", seen)]

        self.conditions.append(f"{name}_q")
        self.counts.append(f"{name}_k")
        text, results = self.body(depth + 1, [*scope, f"{name}_a"], tail)
        self.conditions.pop()
        self.counts.pop()
        outputs = f"bool {results[0]}, float[2] {results[1]}, float[2] {results[2]}"
        self.lines.append(
            f"{name}_v, {name}_z = Loop({count}, {first}, {self.pick(scope)}) <body = l (int64 {name}_k, bool {name}_c, "
            f"float[2] {name}_a) => ({outputs}) {{ {name}_q = Equal({name}_k, n1) {text} }}>"
            f" {name}_r = ReduceSum<keepdims=0>({name}_z, rows) {name} = Add({name}_v, {name}_r)"
        )

    def scan(self, name: str, depth: int, scope: list[str]) -> None:
        """Scan over the rows or the columns of a matrix, forwards or backwards."""
        carried, row = f"{name}_a", f"{name}_p"

        def tail(seen: list[str]) -> list[str]:
            return [*self.fresh(f"{name}_b", seen), *self.fresh(f"{name}_s", seen)]

        text, results = self.body(depth + 1, [*scope, carried, row], tail)
        numbers = [self.draw(st.integers(0, 1)) for _ in range(4)]
        names = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
        attributes = ", ".join(f"{key}=[{number}]" for key, number in zip(names, numbers, strict=True))
        self.lines.append(
            f"{name}_v, {name}_z = Scan({self.pick(scope)}, matrix) <num_scan_inputs=1, {attributes}, "
            f"body = s (float[2] {carried}, float[2] {row}) => (float[2] {results[0]}, float[2] {results[1]}) {{ {text} }}>"
            f" {name}_r = ReduceSum<keepdims=0>({name}_z, rows) {name} = Add({name}_v, {name}_r)"
        )

    def fresh(self, name: str, seen: list[str]) -> list[str]:
        """A new value that a body may return."""
        self.lines.append(f"{name} = Add({self.pick(seen)}, zero)")
        return [name]


@st.composite
def structured_models(draw: st.DrawFn) -> ir.Model:
    """A model of two inputs and one output, each a float[2]."""
    writer = _Writer(draw)
    text, (result,) = writer.body(0, ["x", "w"], lambda seen: [seen[-1]])
    return ir.from_onnx_text(f"{_HEAD}main (float[2] x, float[2] w) => (float[2] y) {{ {_CONSTANTS} {text} y = Tanh({result}) }}")
