"""What tells a user's functions apart, in this process and in others: their code, and all that they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from uuid import uuid4

import numpy as np

_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes, np.generic, np.dtype)
_NAMED = (type, BuiltinFunctionType, np.ufunc, type(np.sum))


class _UnknownError(Exception):
    """Something without a text that is the same in another process."""


def identity_of(function: object) -> str:
    """A text that differs where two functions may give different results. What holds something that has no such text is equal to
    nothing else."""
    try:
        text = "\n".join(_parts(function, {}))
    except _UnknownError:
        return uuid4().hex
    return hashlib.sha256(text.encode()).hexdigest()


def _parts(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Texts of a value and of what it holds. What is met again, as of a function that calls itself, is named alone: `seen` has
    all values by their addresses, which are theirs as long as they are in it."""
    kind = type(value)
    if isinstance(value, _PLAIN):
        yield f"{kind.__name__} {value!r}"
    elif isinstance(value, _NAMED):
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    elif isinstance(value, ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        yield f"array {value.dtype} {value.shape} {digest}"
    elif id(value) in seen:
        yield f"again {kind.__qualname__}"
    else:
        seen[id(value)] = value
        held = _held(value)
        yield f"{kind.__module__}.{kind.__qualname__} of {len(held)}"
        for one in held:
            yield from _parts(one, seen)


def _held(value: object) -> list[object]:
    """The values that a container, a function or an object is made of. Raises _UnknownError where that is not known."""
    if isinstance(value, Mapping):
        return [one for pair in value.items() for one in pair]
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, CodeType):
        return [value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells, _globals_of(value)]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    call = getattr(type(value), "__call__", None)  # noqa: B004  (what it is, not whether)
    if isinstance(call, FunctionType) and hasattr(value, "__dict__"):
        return [call, vars(value)]
    raise _UnknownError


def _is_filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True


def _globals_of(function: FunctionType) -> dict[str, object]:
    """What the names in a function's code mean in its module."""
    return {name: function.__globals__[name] for name in sorted(_names_of(function.__code__)) if name in function.__globals__}


def _names_of(code: CodeType) -> set[str]:
    nested = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names_of, nested))
