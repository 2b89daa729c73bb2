"""What the bytecode of a function says without running it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping

_IMPORT = dis.opmap["IMPORT_NAME"]
_NO_OPERATION = frozenset({"EXTENDED_ARG", "CACHE"})


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def imported_modules(code: types.CodeType, scope: Mapping[str, object]) -> Iterator[str]:
    """The full names of the modules that a function imports, whose globals are `scope`; nested code is not looked into."""
    if _IMPORT not in code.co_code[::2]:  # disassembling takes longer than all else that is read of a function
        return
    package = str(scope.get("__package__") or "").split(".")
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _NO_OPERATION]
    for level, _, instruction in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if instruction.opcode == _IMPORT:
            above = package[: len(package) - level.argval + 1] if level.argval else []
            yield ".".join([*above, *filter(None, [str(instruction.argval or "")])])
