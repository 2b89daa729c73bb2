"""Values of a body with Python's operators, for bodies that are formulas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ....compiler.ir.facts import data_type
from .body import Body


@dataclass(frozen=True)
class Number:
    """A value of one element type, given by NumPy's name. Numbers beside an operator get its type."""

    body: Body
    value: ir.Value
    dtype: str

    def __add__(self, other: Number | float) -> Number:
        return self._apply("Add", other)

    def __sub__(self, other: Number | float) -> Number:
        return self._apply("Sub", other)

    def __mul__(self, other: Number | float) -> Number:
        return self._apply("Mul", other)

    def __truediv__(self, other: Number | float) -> Number:
        return self._apply("Div", other)

    def __gt__(self, other: Number | float) -> Number:
        return Number(self.body, self.body.op("Greater", self.value, self.like(other).value), "bool")

    def where(self, yes: Number, no: Number) -> Number:
        """`yes` where this boolean holds, `no` elsewhere."""
        return Number(self.body, self.body.op("Where", self.value, yes.value, no.value), yes.dtype)

    def sqrt(self) -> Number:
        return Number(self.body, self.body.op("Sqrt", self.value), self.dtype)

    def cast(self, dtype: str) -> Number:
        return self if dtype == self.dtype else Number(self.body, self.body.cast(self.value, dtype), dtype)

    def like(self, number: Number | float) -> Number:
        """A number of this one's type."""
        if isinstance(number, Number):
            return number
        return Number(self.body, self.body.constant(np.array(number, data_type(self.dtype).numpy())), self.dtype)

    def power(self, base: float) -> Number:
        """base ** this."""
        return Number(self.body, self.body.op("Pow", self.like(base).value, self.value), self.dtype)

    def _apply(self, op_type: str, other: Number | float) -> Number:
        return Number(self.body, self.body.op(op_type, self.value, self.like(other).value), self.dtype)
