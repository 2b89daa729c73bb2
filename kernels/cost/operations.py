"""Scalar operations an element of each operator: one count for kernels, the Plan and reports."""

from __future__ import annotations

_COSTLY = """
    Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu Log Mish Pow Selu Sigmoid Sin Sinh Softplus Swish Tan Tanh"""
COSTLY = frozenset(_COSTLY.split())  # transcendental functions and the like
_NORMALIZATIONS = ("GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization")
_REDUCTIONS = ("L1", "L2", "LogSum", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_OF_ROWS = {
    **dict.fromkeys(("LogSoftmax", "Softmax"), 16),
    **dict.fromkeys(_NORMALIZATIONS, 6),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", *(f"Reduce{name}" for name in _REDUCTIONS)), 2),
    "ReduceLogSumExp": 20,
    **dict.fromkeys(("ArgMax", "ArgMin"), 3),
}
OF_ROWS = frozenset(_OF_ROWS)  # operators that fold rows
_OPERATIONS = dict.fromkeys(COSTLY, 12) | _OF_ROWS


def operations_of(op_type: str) -> int:
    """Scalar operations of a pointwise operator or reduction for each element of its largest operand."""
    return _OPERATIONS.get(op_type, 1)
