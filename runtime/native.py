"""TVM's runtime through its stable C interface (tvm/ffi/c_api.h), with ctypes.

Importing tvm takes seconds and importing tvm_ffi imports torch; a compiled program needs neither, only the two shared libraries
that those packages install.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from .errors import ProgramFileError

_INT, _POINTER, _RAW_STRING = 1, 4, 8  # TVMFFITypeIndex of values held without a reference count
_OBJECT_BEGIN = 64  # first type index of reference-counted objects
_OBJECT_HEADER_BYTES = 24  # sizeof(TVMFFIObject); an object's fields follow it


class _ByteArray(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Any(ctypes.Structure):
    """TVMFFIAny: a tagged value of 16 bytes."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_int64))


class NativeError(Exception):
    """TVM reported a failure; the text is TVM's."""


class Object:
    """One owned reference to a TVM object, dropped with this one."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # when Python ends, the functions of this module may be gone before what its variables hold
            tvm_ffi().TVMFFIObjectDecRef(self.handle)


class Function(Object):
    """A TVM function. Arguments are integers, strings and objects."""

    def __call__(self, *arguments: int | str | Object) -> Object | int | None:
        """Call and return an object, an integer or nothing.

        Raises:
            NativeError: TVM reported a failure.
        """
        keep = [argument.encode() for argument in arguments if isinstance(argument, str)]
        strings = iter(keep)
        packed = (Any * len(arguments))()
        for slot, argument in zip(packed, arguments, strict=True):
            if isinstance(argument, str):
                slot.type_index = _RAW_STRING
                slot.value = ctypes.cast(ctypes.c_char_p(next(strings)), ctypes.c_void_p).value or 0
            elif isinstance(argument, Object):
                slot.type_index = ctypes.c_int32.from_address(argument.handle + 8).value
                slot.value = argument.handle
            else:
                slot.type_index, slot.value = _INT, argument
        result = Any()
        if tvm_ffi().TVMFFIFunctionCall(self.handle, ctypes.addressof(packed), len(arguments), ctypes.addressof(result)):
            raise NativeError(last_error())
        if result.type_index >= _OBJECT_BEGIN:
            return (Function if result.type_index == _FUNCTION else Object)(result.value)
        return int(result.value) if result.type_index == _INT else None


_FUNCTION = 68  # TVMFFITypeIndex of a function object


def global_function(name: str) -> Function:
    """A function that TVM's runtime registers under a name.

    Raises:
        NativeError: there is none.
    """
    text = ctypes.create_string_buffer(name.encode())
    key = _ByteArray(ctypes.addressof(text), len(name))
    handle = ctypes.c_void_p()
    if tvm_ffi().TVMFFIFunctionGetGlobal(ctypes.byref(key), ctypes.byref(handle)) or not handle.value:
        raise NativeError(f"TVM's runtime has no function {name!r}")
    return Function(handle.value)


def last_error() -> str:
    """Take the message of the failure that TVM reported last on this thread."""
    handle = ctypes.c_void_p()
    tvm_ffi().TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        return "unknown failure"
    error = Object(handle.value)
    kind, message = (_ByteArray * 2).from_address(error.handle + _OBJECT_HEADER_BYTES)
    return f"{_text(kind)}: {_text(message)}"


def _text(value: _ByteArray) -> str:
    return ctypes.string_at(value.data, value.size).decode(errors="replace") if value.data else ""


class Library:
    """A shared library that TVM has loaded, and has given the functions of its runtime to; in memory as long as this object.

    `functions` are those of the names given that it has: C functions without a result, which run without Python's lock.
    """

    def __init__(self, path: Path, names: Sequence[str], replaced: Mapping[str, str] | None = None) -> None:
        """Load the library; its file is no longer needed after this.

        Args:
            path: of the library.
            names: of functions.
            replaced: functions of the library to call in place of some of TVM's runtime, by the names of the pointers to these.

        Raises:
            NativeError: it cannot be loaded.
        """
        tvm_runtime()
        self._module = global_function("ffi.ModuleLoadFromFile")(str(path))
        library = ctypes.CDLL(str(path))  # the same, once more
        found = {name: getattr(library, name, None) for name in names}
        addresses = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in found.items() if function}
        self.functions = {name: ctypes.CFUNCTYPE(None)(address) for name, address in addresses.items() if address}
        for pointer, name in (replaced or {}).items():
            if name in self.functions:
                ctypes.c_void_p.in_dll(library, pointer).value = addresses[name]
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))  # which Python never does


@cache
def tvm_ffi() -> ctypes.CDLL:
    """libtvm_ffi.so with the signatures that are used here."""
    library = _open("tvm_ffi", "libtvm_ffi.so")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[Sequence[type], type | None]] = {
        "TVMFFIFunctionGetGlobal": ((pointer, pointer), number),
        "TVMFFIFunctionCall": ((pointer, pointer, ctypes.c_int32, pointer), number),
        "TVMFFIObjectDecRef": ((pointer,), number),
        "TVMFFIErrorMoveFromRaised": ((pointer,), None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


@cache
def tvm_runtime() -> ctypes.CDLL:
    """libtvm_runtime.so: the functions that generated code calls."""
    tvm_ffi()
    return _open("tvm", "libtvm_runtime.so")


def _open(package: str, name: str) -> ctypes.CDLL:
    """Load a library that a Python package installs, with its symbols visible to the libraries loaded after it."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "lib" / name
        if path.is_file():
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    raise ProgramFileError(name, "TVM's runtime is not installed", "install the package apache-tvm")
