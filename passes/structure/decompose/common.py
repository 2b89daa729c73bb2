"""What the writers of bodies ask of a node."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.symbolic.symbols import sizes_of

MAX_COMPARISONS = 2**27  # elements of x times what each of them is compared with


def dims(value: ir.Value | None) -> tuple[int, ...]:
    """The shape of a value, in which dimensions of the operators in `SIZED` may be sizes; () where it is left out or unknown."""
    return sizes_of(value) or ()


def dtype_of(value: ir.Value | None) -> ir.DataType:
    """The element type of an input that the node has: expansions are asked for once all types are known."""
    assert value is not None
    assert value.dtype is not None
    return value.dtype
