"""The key of a group in the database of tuned configurations."""

from __future__ import annotations

from typing import Any

from .expressions.pointwise import POINTWISE
from .groups.group import Group, Op
from .symbolic import at_hint
from .template.values import read_narrow


def problem_of(group: Group) -> str:
    """A text of what decides which configuration is fastest: operators, attributes, types, formats and constants.

    Equal for groups that differ in names, pointwise operators and floating point attributes only. The text is stable from run
    to run.
    """
    narrow = read_narrow(at_hint(group))
    return " ".join(_operator(narrow, op) for op in narrow.ops if op.op_type not in POINTWISE)


def _operator(group: Group, op: Op) -> str:
    attributes = "".join(
        f",{name}={_text(value)}" for name, value in sorted(op.attributes.items()) if not isinstance(value, float)
    )
    operands = ",".join(_operand(group, name) for name in op.inputs)
    results = ",".join(str(group.types[name]) if name else "-" for name in op.outputs)
    return f"{op.op_type}({operands}{attributes})->{results}"


def _operand(group: Group, name: str) -> str:
    if not name:
        return "-"
    literal = group.literals.get(name)
    if literal is not None and literal.dtype.kind in "iu":
        return _text(literal)
    less = " less a zero point" * (name in group.zero_points)
    return f"{'const ' if name in group.constants else ''}{group.types[name]}{group.formats.get(name, '')}{less}"


def _text(value: Any) -> str:
    return repr(value.tolist() if hasattr(value, "tolist") else value).replace(" ", "")
