"""torch tensors and NumPy arrays over the same bytes. torch is used only where the caller has imported it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with NumPy)
import numpy as np

from .errors import InputError

if TYPE_CHECKING:
    import torch

OUT = "out"  # the keyword for memory of the caller for results, where no input has this name


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a user has given a whole number, one of NumPy's perhaps, and no flag."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_torch(value: object) -> bool:
    """Whether a value, or an element of a list of them, is a torch tensor."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(value, (list, tuple)):
        return any(map(is_torch, value))
    return isinstance(value, torch.Tensor)


def as_array(value: object, where: str) -> np.ndarray:
    """A tensor of any kind as a NumPy array, over the same memory where it is dense and on the CPU.

    Raises:
        InputError: it is no tensor, or one that NumPy cannot see.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        raise InputError(where, f"{type(value).__name__} is neither a NumPy array nor a torch tensor", "give a tensor")
    if not value.is_cpu or value.layout is not torch.strided:
        raise misplaced(value, where)
    elements_address(value, where)
    return _array(value.detach().resolve_conj().resolve_neg().contiguous())


def misplaced(tensor: torch.Tensor, where: str) -> InputError:
    """What is wrong with a tensor that is not dense or not on a device where a program could read it."""
    what = f"a {tensor.layout} tensor on {tensor.device}, the program takes dense tensors on the CPU"
    if tensor.is_meta:
        return InputError(where, f"{what}; this one has no elements", "give one that has")
    return InputError(where, what, "call .cpu() on it" if not tensor.is_cpu else "call .to_dense() on it")


def number_array(value: float, dtype: str, where: str) -> np.ndarray:
    """A Python number (a bool, an int or a float) as an array without dimensions.

    Raises:
        InputError: the type does not hold such a number.
    """
    is_integer = dtype.startswith(("int", "uint"))
    is_taken = type(value) is bool or (dtype != "bool" and (type(value) is int or not is_integer))
    with suppress(OverflowError, TypeError):  # outside of the range of the type, or text
        array = np.array(value, dtype)
        if is_taken and not (is_integer and int(array) != value):  # integers of 4 bits wrap around
            return array
    raise InputError(where, f"the number {value!r} is no {dtype}", f"give a {dtype}")


def elements_address(tensor: torch.Tensor, where: str) -> int:
    """Address of the first element of a dense tensor on a device.

    Raises:
        InputError: it has a type and a shape, but no memory.
    """
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor inside torch.vmap or torch.func has no storage at all
        address = 0
    if not address and tensor.numel():
        what = f"a {type(tensor).__name__} without memory: fake, wrapped, traced or freed"
        raise InputError(where, what, "give plain tensors, outside of what traces torch")
    return address


def as_tensor(array: np.ndarray) -> torch.Tensor | np.ndarray:
    """A torch tensor over an array's memory; the array itself where torch has no such type (strings)."""
    module = sys.modules["torch"]
    dtype = getattr(module, array.dtype.name, None)
    if dtype is None:
        return array
    dense = np.require(array, requirements=["C", "W"])
    if array.dtype.isbuiltin == 1:
        return cast("torch.Tensor", module.from_numpy(dense))
    return cast("torch.Tensor", module.from_numpy(dense.view(f"int{8 * array.dtype.itemsize}")).view(dtype))


def all_as_tensors(values: Iterable[object]) -> list[object]:
    """Each array as a tensor, those in lists too; None stays."""
    return [
        as_tensor(value) if isinstance(value, np.ndarray) else all_as_tensors(value) if isinstance(value, list) else value
        for value in values
    ]


def _array(tensor: torch.Tensor) -> np.ndarray:
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    signed = getattr(sys.modules["torch"], f"int{8 * dtype.itemsize}")  # which NumPy and torch both have
    return tensor.view(signed).numpy().view(dtype)


def taken_out(named: Mapping[str, object], is_input: bool) -> tuple[dict[str, object], object]:
    """The named inputs of a call, and what it gives for its outputs, unless an input has that name."""
    rest = dict(named)
    return rest, None if is_input else rest.pop(OUT, None)


def in_output_order(out: object, names: Sequence[str]) -> list[Any]:
    """What is given for each output. Raises InputError for another number of them, and for a name that no output has."""
    if isinstance(out, Mapping):
        if unknown := [name for name in out if name not in names]:
            raise InputError(OUT, f"the model has no output {unknown[0]!r}", f"the outputs are {', '.join(names)}")
        return [out.get(name) for name in names]
    values = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(values) != len(names):
        raise InputError(OUT, f"{len(values)} given, the model has {len(names)} outputs", "give None for some of them")
    return values


def copied_results(result: object, out: object, names: Sequence[str]) -> object:
    """The result of a call, one or a tuple, copied to what is given for it: where a program cannot write there itself.

    Raises:
        InputError: something that is given is no array or tensor of the result's type and shape that can be written to.
    """
    row = result if isinstance(result, tuple) else (result,)
    given = in_output_order(out, names)
    pairs = [(_like(one, place, name), place) for one, place, name in zip(row, given, names, strict=True) if place is not None]
    for one, place in pairs:
        place[...] = one
    found = [one if place is None else place for one, place in zip(row, given, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _like(result: Any, place: object, name: str) -> Any:
    """A result as what it is to be copied to: array or tensor. Raises InputError where it cannot be."""
    array, torch = as_array(result, "result"), sys.modules.get("torch")
    found: Any
    if isinstance(place, np.ndarray):
        found, is_writable = array, place.flags.writeable
    elif torch is not None and isinstance(place, torch.Tensor):
        found, is_writable = as_tensor(array), not place.requires_grad
    else:
        what = f"what is given is {type(place).__name__}"
        raise InputError(f"out, output {name!r}", what, "give a NumPy array or a torch tensor")
    if place.dtype != found.dtype or tuple(place.shape) != array.shape or not is_writable:
        what = f"what is given is {place.dtype} of {tuple(place.shape)}{'' if is_writable else ', read-only'}"
        raise InputError(f"out, output {name!r}", what, f"give {array.dtype.name} of {array.shape} that can be written to")
    return found
