"""Native code of kernels as relocatable objects, kept by what they compute and where: a program links those that are there.

A kernel's code depends on its loops, the target and prefuse itself, of which its key is a digest; so it is compiled apart from
the program's host function, which calls it as any C function. What a program lacks is compiled into one object, since each costs
LLVM 10 ms beside its kernels, or into two, where some kernels may write what they read; a later program takes an object of whose
kernels it needs half at least. Objects are kept in memory, and beside the programs of a cache, where they are found by the set of
their kernels.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_ffi

from ...runtime.target import Target
from .native import compile_functions

SUFFIX = ".object"
_HASH_BYTES = 32  # of a file's content, before it
_KEPT_BYTES = 64 << 20  # in memory


@dataclass(frozen=True, slots=True)
class KernelObject:
    """The code of some kernels, by whose keys it has its name."""

    keys: frozenset[str]
    code: bytes

    @property
    def name(self) -> str:
        return object_name(self.keys)

    def symbol(self, key: str) -> str:
        """The C name of a kernel: no two objects have one in common."""
        return symbol_in(self.name, key)


@dataclass(frozen=True, slots=True)
class KernelObjects:
    """Where the objects of kernels are looked for and kept: in memory, and in a folder, if there is one.

    `keys` say of each kernel's symbol what it computes, `version` by which prefuse.
    """

    version: str
    keys: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def find(self, functions: Mapping[str, Any], target: Target) -> tuple[dict[str, str], list[bytes]]:
        """The C names of the kernels by their symbols in the Plan, and the objects with their code, compiled where it is new.

        Each takes the addresses of its PrimFunc, and returns an int32 that says nothing.
        """
        keys = {symbol: self._key(symbol, functions[symbol], target) for symbol in self.keys}
        # TVM tells LLVM of all functions of a module what it should tell of the last one: that pointers are apart, or may not be.
        # So kernels of the two kinds are in modules of their own.
        apart = frozenset(key for symbol, key in keys.items() if functions[symbol].attrs["tirx.noalias"])
        chosen: list[KernelObject] = []
        for needed in filter(None, (apart, frozenset(keys.values()) - apart)):
            chosen += self._choose(needed)
            if missing := needed - frozenset(key for one in chosen for key in one.keys):
                name = object_name(missing)
                new = {symbol_in(name, key): functions[symbol] for symbol, key in keys.items() if key in missing}
                chosen.append(KernelObject(missing, compile_functions(new, target)))
                self._write(chosen[-1])
        for one in chosen:
            _keep(one)
        owners = {key: one for one in reversed(chosen) for key in one.keys}
        return {symbol: owners[key].symbol(key) for symbol, key in keys.items()}, [one.code for one in chosen]

    def _key(self, symbol: str, function: Any, target: Target) -> str:
        text = f"{self.version}\n{target!r}\n{self.keys[symbol]}\n{tvm_ffi.structural_hash(function)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _choose(self, needed: frozenset[str]) -> list[KernelObject]:
        """Known objects with kernels that are needed, those with most of them first."""
        with _lock:
            known = list(_kept.values())
        if (exact := next((one for one in known if one.keys == needed), None) or self._read(needed)) is not None:
            return [exact]
        found: list[KernelObject] = []
        for one in sorted(known, key=lambda one: -len(one.keys & needed)):
            useful = one.keys & needed
            if useful and 2 * len(useful) >= len(one.keys):
                found.append(one)
                needed -= useful
        return found

    def _read(self, keys: frozenset[str]) -> KernelObject | None:
        """What a file holds behind its hash; None if there is none, or something else."""
        if self.folder is None or not keys:
            return None
        try:
            content = self._path(keys).read_bytes()
        except OSError:
            return None
        code = content[_HASH_BYTES:]
        return KernelObject(keys, code) if hashlib.sha256(code).digest() == content[:_HASH_BYTES] else None

    def _write(self, one: KernelObject) -> None:
        """Write a file, whole; where that fails, nothing is kept there."""
        if self.folder is None:
            return
        temporary = self.folder / f".{one.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        with suppress(OSError):
            try:
                temporary.write_bytes(hashlib.sha256(one.code).digest() + one.code)
                temporary.replace(self._path(one.keys))
            finally:
                temporary.unlink(missing_ok=True)

    def _path(self, keys: frozenset[str]) -> Path:
        assert self.folder is not None
        return self.folder / f"{object_name(keys)}{SUFFIX}"


_kept: dict[str, KernelObject] = {}  # by name, those used last at the end
_lock = threading.Lock()


def _keep(one: KernelObject) -> None:
    """Keep an object in memory as one that was used just now."""
    with _lock:
        _kept.pop(one.name, None)
        _kept[one.name] = one
        while sum(len(kept.code) for kept in _kept.values()) > _KEPT_BYTES and len(_kept) > 1:
            _kept.pop(next(iter(_kept)))


def object_name(keys: frozenset[str]) -> str:
    """A digest of the keys of an object's kernels."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


def symbol_in(name: str, key: str) -> str:
    """The C name of a kernel in an object."""
    return f"prefuse_{key[:32]}_{name[:32]}"
