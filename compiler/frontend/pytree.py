"""The shape of a Python value made of tensors: how to take it apart, and how to put it together again.

A module's arguments and results are trees of tuples, lists, dictionaries, dataclasses, and plain objects, such as the key-value
caches of decoders, taken apart by their attributes. A compiled program knows only a row of tensors, so the tree is kept beside it
as a `Structure`: hashable, hence part of a signature, and JSON, hence part of the cache.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeGuard, cast

import numpy as np

from ...runtime.errors import InputError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """The next tensor of the row; for one of complex numbers a row has that of their real and imaginary parts: [..., 2]."""

    is_complex: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is no tensor, a part of the signature. `key` tells True from 1 and 0.0 from -0.0."""

    value: object = dataclasses.field(compare=False)
    key: str


@dataclass(frozen=True, slots=True)
class Container:
    """A tuple, list, named tuple, mapping, dataclass or plain object. `keys` are those of a mapping, or names of attributes."""

    kind: type
    keys: tuple[str | int, ...] | None
    children: tuple[Structure, ...]


Structure = Leaf | Constant | Container

_FACTORY = "<default factory>"  # the last key of a defaultdict
LEAF, COMPLEX = Leaf(), Leaf(is_complex=True)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum)


class Tensor(Protocol):
    """What NumPy's arrays and scalars and torch's tensors have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> object: ...


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a NumPy array or scalar, or a torch tensor (without importing torch)."""
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def flatten(tree: object, where: str = "input") -> tuple[Structure, list[Tensor]]:
    """Take a value apart into its structure and its tensors, left to right.

    Raises:
        InputError: something in it is neither a tensor, a container nor a plain value; `where` starts the path to it.
    """
    leaves: list[Tensor] = []
    try:
        return _flatten(tree, where, leaves), leaves
    except RecursionError:
        raise InputError(where, f"{type(tree).__qualname__} contains itself, or is nested too deeply", "unfold it") from None


def _flatten(value: object, where: str, leaves: list[Tensor]) -> Structure:
    if is_tensor(value):
        is_complex = str(value.dtype).removeprefix("torch.").startswith("complex")
        leaves.append(_parts_of(value) if is_complex else value)
        return COMPLEX if is_complex else LEAF
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return _flatten_attributes(value, names, where, leaves)
    if isinstance(value, dict):
        keys = tuple(value)
        if not all(isinstance(key, (str, int)) for key in keys):
            raise InputError(where, f"a dictionary has the keys {list(keys)}", "use str or int keys")
        if not _is_plain_mapping(type(value)):
            what = f"{type(value).__module__}.{type(value).__qualname__} is a dictionary that may not be made of its items again"
            raise InputError(where, what, "pass and return a dict of its items")
        children = tuple(_flatten(value[key], f"{where}[{key!r}]", leaves) for key in keys)
        if isinstance(value, defaultdict):
            factory = Constant(value.default_factory, f"factory:{value.default_factory!r}")
            return Container(defaultdict, (*keys, _FACTORY), (*children, factory))
        return Container(type(value), keys, children)
    if isinstance(value, (tuple, list)):
        children = tuple(_flatten(item, f"{where}[{index}]", leaves) for index, item in enumerate(value))
        return Container(type(value), None, children)
    if _is_symbolic(value):
        what = f"{value} depends on sizes that differ from call to call, and is no tensor"
        raise InputError(where, what, "make a tensor of it (torch.full((), n)), or compile without `dims`, for each size")
    if isinstance(value, _PLAIN) or type(value).__module__ == "torch":  # torch.dtype, torch.device, torch.layout
        return Constant(value, f"{type(value).__qualname__}:{value!r}")
    if _is_plain_object(value):
        return _flatten_attributes(value, tuple(vars(value)), where, leaves)
    raise InputError(
        where,
        f"{type(value).__module__}.{type(value).__qualname__} is neither a tensor nor a container of tensors",
        "pass and return tensors, numbers, strings, None, and tuples, lists, dictionaries or dataclasses of them",
    )


def _parts_of(value: Any) -> Tensor:
    """The real and imaginary parts of complex numbers, over the same memory where that is dense: [..., 2]."""
    if isinstance(value, (np.ndarray, np.generic)):
        parts: np.ndarray = np.ascontiguousarray(value).reshape(*value.shape, 1).view(value.real.dtype)
        return parts
    resolved: Tensor = sys.modules["torch"].view_as_real(value.resolve_conj() if value.is_conj() else value)
    return resolved


def _complex_of(parts: Any) -> object:
    """The complex numbers of real and imaginary parts, over the same memory."""
    if isinstance(parts, np.ndarray):
        return parts.view(f"complex{16 * parts.dtype.itemsize}")[..., 0]
    return sys.modules["torch"].view_as_complex(parts)


def _is_symbolic(value: object) -> bool:
    """Whether it stands for a number of a call while torch traces for any sizes: a constant of it would be that of no call."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _flatten_attributes(value: object, names: tuple[str, ...], where: str, leaves: list[Tensor]) -> Container:
    return Container(type(value), names, tuple(_flatten(getattr(value, name), f"{where}.{name}", leaves) for name in names))


def _is_plain_mapping(kind: type) -> bool:
    """Whether a class of dictionaries is made as dict is: Counter would count the pairs."""
    return kind is defaultdict or next(base for base in kind.__mro__ if "__init__" in vars(base)) in (dict, OrderedDict)


def _is_plain_object(value: object) -> bool:
    """Whether the attributes in an object's dictionary are all that it consists of, and it can be made again from them."""
    kind = type(value)
    if callable(value) or not hasattr(value, "__dict__") or kind.__module__ == "builtins":
        return False
    has_slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
    return kind.__new__ is object.__new__ and not has_slots


def without_constants(structure: Structure) -> Structure:
    """What structures have in common that differ in values of constants only."""
    if isinstance(structure, Container):
        return dataclasses.replace(structure, children=tuple(map(without_constants, structure.children)))
    return Constant(None, "") if isinstance(structure, Constant) else structure


def unflatten(structure: Structure, leaves: Sequence[object]) -> object:
    """Put a value together again from its structure and as many tensors as it has leaves."""
    return unflattener(structure)(leaves)


def unflattener(structure: Structure) -> Callable[[Sequence[object]], object]:
    """`unflatten` for one structure and many calls, which then do not look at it again."""
    make = _maker(structure)

    def build(leaves: Sequence[object]) -> object:
        row = iter(leaves)
        value = make(row)
        assert next(row, None) is None, "more tensors than the structure has leaves"
        return value

    return build


def unflatten_arguments(structure: Structure, leaves: Sequence[object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """`unflatten` for the structure of a call, which is a pair: a tuple of positional and a dictionary of keyword arguments."""
    call = unflatten(structure, leaves)
    assert isinstance(call, tuple)
    positional, named = call
    assert isinstance(positional, tuple)
    assert isinstance(named, dict)
    return positional, named


def _maker(structure: Structure) -> Callable[[Iterator[object]], object]:
    """What takes the tensors of a structure from a row and makes its value."""
    if isinstance(structure, Leaf):
        return (lambda row: _complex_of(next(row))) if structure.is_complex else next
    if isinstance(structure, Constant):
        constant = structure.value
        return lambda row: constant
    kind: Callable[..., object] = structure.kind
    makers = [_maker(child) for child in structure.children]
    if structure.keys is not None:
        return _named_maker(structure.kind, structure.keys, makers)
    if hasattr(kind, "_fields"):  # a named tuple takes its fields one by one
        return lambda row: kind(*[make(row) for make in makers])
    return lambda row: kind([make(row) for make in makers])


def _named_maker(
    kind: type, keys: tuple[str | int, ...], makers: Sequence[Callable[[Iterator[object]], object]]
) -> Callable[[Iterator[object]], object]:
    """The maker of a dataclass, a mapping or a plain object."""

    def named(row: Iterator[object]) -> dict[Any, object]:
        return {key: make(row) for key, make in zip(keys, makers, strict=True)}

    def plain(row: Iterator[object]) -> object:
        made: object = object.__new__(kind)
        vars(made).update(named(row))
        return made

    def with_default(row: Iterator[object]) -> object:
        items = named(row)
        return defaultdict(cast("Callable[[], object] | None", items.pop(_FACTORY)), items)

    if dataclasses.is_dataclass(kind):
        return lambda row: kind(**named(row))
    if kind is defaultdict:
        return with_default
    if issubclass(kind, dict):
        return named if kind is dict else lambda row: kind(named(row).items())
    return plain


def leaf_paths(structure: Structure, prefix: str = "") -> Iterator[str]:
    """A name for each tensor: the keys and indices that lead to it, joined by "_"."""
    if isinstance(structure, Leaf):
        yield prefix or "input"
    elif isinstance(structure, Container):
        keys = structure.keys if structure.keys is not None else range(len(structure.children))
        for key, child in zip(keys, structure.children, strict=True):
            yield from leaf_paths(child, f"{prefix}_{key}" if prefix else str(key))


def to_json(structure: Structure) -> Json:
    """The structure as JSON.

    Raises:
        TypeError: it has a constant or a class that another process could not find again.
    """
    if isinstance(structure, Leaf):
        return "complex leaf" if structure.is_complex else "leaf"
    if isinstance(structure, Constant):
        return _constant_to_json(structure.value)
    kind = structure.kind
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        raise TypeError(f"{kind} cannot be found by its name")
    keys: Json = None if structure.keys is None else list(structure.keys)
    children: Json = [to_json(child) for child in structure.children]
    return {"module": kind.__module__, "class": kind.__qualname__, "keys": keys, "children": children}


def from_json(data: object) -> Structure:
    """The inverse of `to_json`.

    Raises:
        TypeError, KeyError, ValueError: the data is no structure, or this process has not imported a class that it names.
    """
    if data in ("leaf", "complex leaf"):
        return LEAF if data == "leaf" else COMPLEX
    if not isinstance(data, dict):
        raise TypeError(f"{data!r} is no structure")
    if "constant" in data or "torch" in data:
        value = data["constant"] if "constant" in data else _torch_value(str(data["torch"]), str(data["value"]))
        return Constant(value, f"{type(value).__qualname__}:{value!r}")
    kind, keys, children = _find_class(str(data["module"]), str(data["class"])), data["keys"], data["children"]
    if kind is None or not isinstance(children, list):
        raise TypeError(f"{data!r} is no structure")
    names = tuple(key for key in keys if isinstance(key, (str, int))) if isinstance(keys, list) else None
    if names is not None and len(names) != len(children):
        raise ValueError(f"{data!r} has {len(children)} children for {len(names)} keys")
    return Container(kind, names, tuple(from_json(child) for child in children))


def _constant_to_json(value: object) -> Json:
    if isinstance(value, (bool, int, float, str, type(None))):
        return {"constant": value}
    kind = type(value).__qualname__
    if type(value).__module__ != "torch" or kind not in ("dtype", "device"):
        raise TypeError(f"{value!r} has no JSON form")
    return {"torch": kind, "value": str(value).removeprefix("torch.")}


def _torch_value(kind: str, text: str) -> object:
    """A dtype or device of torch, which a process that has no torch cannot hold. Raises TypeError."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise TypeError(f"torch is not there for {text}")
    try:
        found = torch.device(text) if kind == "device" else getattr(torch, text, None)
    except RuntimeError as error:
        raise TypeError(f"{text} is no device of torch") from error
    if not isinstance(found, (torch.device, torch.dtype)):
        raise TypeError(f"{text} is no {kind} of torch")
    return found


def _find_class(module: str, qualified_name: str) -> type | None:
    """A class by its name, among the modules that this process has imported: a cache file can make nobody import anything."""
    found: object = sys.modules.get(module)
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None
