"""What decides the graph that a PyTorch module exports to, found without exporting it.

The fingerprint covers parameters and buffers, every plain attribute of every submodule, and the bytecode of every function that
`forward` can reach, with the globals, closures and defaults that these read. Code of torch and of the pure parts of the standard
library stands for itself by its version. Anything else that is reached (a file, a random generator, an object of an unknown
class) makes the answer None: the module must be exported to know what it computes.

Code whose file is as a distribution installed it is read in the same way, so that what a user patches, registers or sets shows.
Of such code, and of it alone, two things are assumed: what it computes does not depend on the time, on files or on the
environment, even if it reads them (to log, say); and it calls methods by names that stand in it as names or strings, so that
of its classes only those members are followed that some code names.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

from .bytecode import imported_modules, nested_code
from .digest import arrays_digest, combine
from .installed_code import installed_as
from .memory_digest import Place

if TYPE_CHECKING:
    import torch


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXPORTERS = ("torch", "onnxscript", "onnx-ir", "onnx")
# Packages whose functions give the same result for the same arguments, at one version.
_TRUSTED = _words(
    """torch numpy math cmath operator _operator typing typing_extensions collections _collections_abc functools _functools
    itertools enum dataclasses abc warnings copy contextlib numbers types string re builtins __future__"""
)
# Names that lead out of what can be followed, wherever they appear: files, random numbers, the environment, other code.
_IMPURE_NAMES = _words(
    """eval exec globals locals vars open input compile __import__ id hash random load environ getenv ops seed initial_seed
    get_rng_state is_available import_module"""
)
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)
_FIELD = type(vars(collections.namedtuple("_FIELD", "x"))["x"])  # of a named tuple: which element it is
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Members that run without being named.
_IMPLICIT_NAMES = _words(
    """forward __call__ __init__ __new__ __post_init__ __getattr__ __getattribute__ __get__ __set__ __getitem__ __setitem__
    __contains__ __len__ __iter__ __next__ __bool__ __eq__ __ne__ __lt__ __gt__ __le__ __ge__ __hash__ __enter__ __exit__
    __missing__ __add__ __sub__ __mul__ __or__ __and__ __neg__ __index__ __int__ __float__"""
)
_CLASS_NOISE = _words(
    """__module__ __dict__ __weakref__ __doc__ __annotations__ __abstractmethods__ _abc_impl __parameters__ __orig_bases__
    __slots__ __dataclass_fields__ __dataclass_params__ __match_args__ __static_attributes__ __firstlineno__"""
)


class _UnknownError(Exception):
    """Something was reached whose influence on the graph cannot be known."""


def module_fingerprint(module: torch.nn.Module) -> str | None:
    """A key that is equal for modules that export to the same graph, in any process; None if there can be none."""
    import torch
    from torch.nn.modules import module as internals

    if internals._global_forward_hooks or internals._global_forward_pre_hooks:
        return None
    visitor = _Visitor(module)
    try:
        for name, part in module.named_modules(remove_duplicate=False):
            visitor.add(f"module {name}")
            visitor.visit_module(part)
    except (_UnknownError, RecursionError):
        return None
    installed = [f"{name} {_version(name)}" for name in _EXPORTERS]
    environment = [sys.version, np.__version__, str(torch.get_default_dtype()), *installed]
    return combine(*environment, visitor.digest(), weights_digest(module))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def weights_digest(module: torch.nn.Module) -> str:
    """Digest of the names, types and contents of parameters and buffers."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return arrays_digest((f"{name} {_describe(tensor)}", _loader(tensor)) for name, tensor in tensors)


def places_of_weights(module: torch.nn.Module) -> set[Place]:
    """Where those parameters and buffers lie that are digested where they are. Others are copied first, to memory that anything
    else may have next."""
    import torch

    tensors = (one for one in (*module.parameters(), *module.buffers()) if one.is_cpu and one.layout is torch.strided)
    in_order = (one for one in tensors if one.is_contiguous() and not one.is_conj() and not one.is_neg())
    return {(tensor.data_ptr(), tensor.nbytes) for tensor in in_order}


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"


def _loader(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """The bytes of a tensor, viewed if it is contiguous."""
    import torch

    return lambda: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class _Visitor:
    """A walk over everything that code reaches, in an order that does not depend on the process."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._hash = hashlib.sha256()
        # By identity, with the order of the first visits; keeping the objects keeps identities from being used twice.
        self._seen: dict[int, tuple[int, object]] = {}
        self._classes: dict[tuple[int, bool], tuple[int, type]] = {}
        self._functions: deque[types.FunctionType] = deque()  # met, and still to be read
        self._names: set[str] = set(_IMPLICIT_NAMES)  # what the code that was read names
        self._unnamed: dict[str, list[object]] = {}  # members of installed classes that no code has named yet
        self._is_installed = False  # whether what is read now belongs to code of an installed distribution
        for part in root.modules():
            self._is_new(part)
        tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        self._own = {id(tensor): name for name, tensor in tensors}  # their content has a digest of its own

    def add(self, text: str | bytes) -> None:
        """Put one piece into the digest."""
        data = text.encode() if isinstance(text, str) else text
        self._hash.update(len(data).to_bytes(8, "little") + data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def visit_module(self, module: torch.nn.Module) -> None:
        """One submodule: its class, what its instance holds beside parameters, buffers and submodules, and what these call."""
        self._visit_class(type(module), is_built=True)
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                self.add(f"{name} {list(value)}")
            elif name in _HOOKS and value:
                raise _UnknownError(f"{name} of {type(module).__qualname__}")
            elif name != "training":
                self.add(name)
                self.visit(value)
        while self._functions:  # not where they are met: chains of calls are deeper than Python's stack
            self._visit_code_of(self._functions.popleft())

    def visit(self, value: object) -> None:
        """Add whatever a value can contribute to a graph.

        Raises:
            _UnknownError: nobody can say.
        """
        import torch

        if isinstance(value, (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            self.add(f"{type(value).__qualname__} {value!r}")
            if isinstance(value, str) and value.isidentifier():
                self._name((value,))  # getattr
        elif isinstance(value, type):
            self._visit_class(value, is_built=False)
        elif self._is_new(value):
            self._visit_new(value)

    def _is_new(self, value: object) -> bool:
        """Whether a value is met for the first time; which one it is has been added."""
        count = len(self._seen)
        order, _ = self._seen.setdefault(id(value), (count, value))
        self.add(f"object {order}")
        return order == count

    def _visit_new(self, value: object) -> None:
        import torch

        if id(value) in self._own:
            self.add(f"tensor {self._own[id(value)]}")
        elif isinstance(value, weakref.ReferenceType):
            self.visit(value())
        elif isinstance(value, torch.Tensor):
            self.add(arrays_digest([(_describe(value), _loader(value))]))
        elif isinstance(value, torch.nn.Module) and not self._is_installed:  # torch would not find its parameters either
            raise _UnknownError(f"module {type(value).__qualname__} outside the tree")
        elif isinstance(value, np.ndarray):
            self.add(arrays_digest([("array", lambda: value)]))
        elif isinstance(value, types.ModuleType):
            self.add(f"module {value.__name__}")
        elif isinstance(value, enum.Enum):
            self.add(str(value))
            self.visit(value.value)
        elif not self._visit_callable(value):
            self._visit_data(value)

    def _visit_class(self, kind: type, is_built: bool) -> None:
        """A class; `is_built` if only instances are used that exist already, so that its constructor cannot matter."""
        for base in kind.__mro__:
            self.add(f"{base.__module__}.{base.__qualname__}")
            if _is_trusted(base.__module__) or (self._is_installed and _is_standard(base.__module__)):
                continue
            count = len(self._classes)
            order, _ = self._classes.setdefault((id(base), is_built), (count, base))
            self.add(f"class {order}")
            if order == count:
                self._visit_members(base, is_built)

    def _visit_members(self, kind: type, is_built: bool) -> None:
        installed = installed_as(_file_of(kind.__module__))
        with self._reading(installed):
            for name, member in vars(kind).items():
                if name in _CLASS_NOISE or (is_built and name == "__init__") or _is_generated(member):
                    continue
                self.add(name)
                if installed is None or name in self._names:
                    self.visit(member)
                else:
                    self._unnamed.setdefault(name, []).append(member)

    def _visit_callable(self, value: object) -> bool:
        """Add a function or a wrapper of one; False if the value is none."""
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__)
            self.visit(value.__func__)
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__)
        elif isinstance(value, property):
            self._visit_all((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self._visit_all((value.func, value.args, value.keywords))
        elif isinstance(value, functools._lru_cache_wrapper):
            self.visit(value.__wrapped__)
        elif isinstance(value, types.MemberDescriptorType):  # a slot: its value is among the instance's attributes
            self.add(value.__name__)
        elif isinstance(value, _FIELD):
            self.add(repr(value))
        elif isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, type):  # tuple.__new__ of a named tuple
            self.add(value.__qualname__)
            self._visit_class(value.__self__, is_built=False)
        elif isinstance(value, types.BuiltinFunctionType):
            if not _is_trusted(value.__module__ or "?") and not self._is_installed:
                raise _UnknownError(value.__qualname__)
            self.add(value.__qualname__)
        else:
            return False
        return True

    def _visit_function(self, function: types.FunctionType) -> None:
        self.add(f"{function.__module__}.{function.__qualname__}")
        if not _is_trusted(function.__globals__.get("__name__")):
            self._functions.append(function)
            return
        with self._reading(function.__module__):
            for cell in function.__closure__ or ():  # a decorator of torch's may hold anybody's function
                if not _is_empty(cell) and isinstance(cell.cell_contents, _FUNCTIONS):
                    self.visit(cell.cell_contents)

    def _visit_code_of(self, function: types.FunctionType) -> None:
        """All that a function is made of, and the globals that it reads."""
        codes = list(nested_code(function.__code__))
        names = {name for code in codes for name in code.co_names}
        with self._reading(installed_as(function.__code__.co_filename)):
            if not self._is_installed and (impure := names & _IMPURE_NAMES):
                raise _UnknownError(f"{function.__qualname__} uses {impure}")
            for code in codes:
                self._visit_code(code, function.__globals__, names)
            self._visit_all((function.__defaults__, function.__kwdefaults__))
            self._visit_all(cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell))
            for name in sorted(names):
                if name in function.__globals__:
                    self.add(name)
                    self._visit_global(function.__globals__[name], names)
                elif name not in vars(builtins):
                    self.add(f"attribute {name}")
        self._name(names)

    def _name(self, names: Iterable[str]) -> None:
        """Follow what installed classes hold under names that code has now named."""
        for name in sorted(set(names) - self._names):
            self._names.add(name)
            with self._reading(name if name in self._unnamed else None):
                self._visit_all(self._unnamed.pop(name, ()))

    @contextmanager
    def _reading(self, installed: str | None) -> Iterator[None]:
        """While code of a distribution is read, or of none."""
        before, self._is_installed = self._is_installed, installed is not None
        self.add(str(installed))
        try:
            yield
        finally:
            self._is_installed = before

    def _visit_global(self, value: object, names: set[str]) -> None:
        """A global that a function reads; of a module that is not trusted, whatever the function may read of it."""
        if not isinstance(value, types.ModuleType) or _is_trusted(value.__name__):
            self.visit(value)
            return
        self.add(f"module {value.__name__}")
        if self._is_installed and _is_standard(value.__name__):
            return
        for name in sorted(names & vars(value).keys()):
            self.add(name)
            self._visit_global(vars(value)[name], names - {name})

    def _visit_code(self, code: types.CodeType, scope: dict[str, object], names: set[str]) -> None:
        self.add(code.co_code)
        self.add(f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_flags}")
        self._visit_all(constant for constant in code.co_consts if not isinstance(constant, types.CodeType))
        for name in imported_modules(code, scope):
            if not _is_trusted(name):
                if not self._is_installed:
                    raise _UnknownError(f"import of {name}")
                self.add(f"import {name}")
                if name in sys.modules:
                    self._visit_global(sys.modules[name], names)

    def _visit_data(self, value: object) -> None:
        if isinstance(value, Mapping):
            self.add(f"{type(value).__qualname__} {len(value)}")
            self._visit_all(part for item in value.items() for part in item)
        elif isinstance(value, (tuple, list)):
            self.add(f"{type(value).__qualname__} {len(value)}")
            self._visit_all(value)
        elif isinstance(value, (set, frozenset)):
            self.add(f"{type(value).__qualname__} {sorted(map(repr, value))}")
            if not self._is_installed and not all(isinstance(item, _PLAIN) for item in value):
                raise _UnknownError("a set of objects")
        elif isinstance(value, ContextVar):
            self.visit(value.get(None))
        elif self._is_installed and _is_standard(type(value).__module__):  # locks, loggers
            self.add(type(value).__qualname__)
        elif (self._is_installed or not _is_trusted(type(value).__module__)) and (state := _state(value)) is not None:
            self._visit_class(type(value), is_built=True)
            self._visit_all(part for item in state.items() for part in item)
        else:
            raise _UnknownError(f"{type(value).__module__}.{type(value).__qualname__}")

    def _visit_all(self, values: Iterable[object]) -> None:
        for value in values:
            self.visit(value)


def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _TRUSTED


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _is_generated(member: object) -> bool:
    """Whether a class member is a method that `dataclass` wrote: it follows from the fields, which are visited."""
    code = getattr(member, "__code__", None)
    return isinstance(code, types.CodeType) and code.co_filename in ("<string>", dataclasses.__file__)


def _state(value: object) -> dict[str, object] | None:
    """The attributes of an instance, whether it keeps them in slots or in a dictionary; None if it has neither."""
    slots = [name for base in type(value).__mro__ for name in _names(vars(base).get("__slots__", ()))]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))


def _names(slots: object) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots) if isinstance(slots, Iterable) else ()
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
