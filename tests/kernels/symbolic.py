"""Runs one kernel at many sizes: what a call decides is read from a table, and outputs end where those of a call end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import DIMENSIONS, TensorType
from prefuse.runtime.symbolic.sizes import Dim, Domain, Size
from prefuse.runtime.target import Target

from .guarded import Guarded
from .harness import OPSET, POISONS, Case, _load, operands_of, operator

Shape: TypeAlias = Sequence[int | str]  # numbers, and names of dimensions, maybe with a factor and a summand: "2*T+1"
_DIMENSION = re.compile(r"(?:(\d+)\*)?([A-Z]+)(?:\+(\d+))?")


def shape_at(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with a number for each name."""
    return tuple(_dimension(dim, sizes.__getitem__) if isinstance(dim, str) else dim for dim in shape)


def _dimension(text: str, size_of: Callable[[str], Any]) -> Any:
    match = _DIMENSION.fullmatch(text)
    assert match is not None, text
    return int(match[1] or 1) * size_of(match[2]) + int(match[3] or 0)


def sized(case: Case, shapes: Mapping[str, Shape], domain: Domain) -> Group:
    """The group of a case with named dimensions in the shapes of some values."""
    types = dict(case.group.types)
    for name, shape in shapes.items():
        dims: tuple[Any, ...] = tuple(_dimension(dim, domain.size) if isinstance(dim, str) else dim for dim in shape)
        types[name] = TensorType(dims, types[name].dtype)
    return replace(case.group, types=types)


def built_for(group: Group, target: Target) -> BuiltKernel:
    """The kernel for all sizes of a group, on as many threads as the target has."""
    with mock.patch("prefuse.kernels.codegen.builder.parallel_work", return_value=0):
        kernel = build_kernel(group, target)
    assert isinstance(kernel, BuiltKernel), str(kernel)
    return kernel


def run_at(kernel: BuiltKernel, target: Target, domain: Domain, cases: Mapping[int, tuple[Case, Mapping[str, int]]]) -> None:
    """Call one kernel for each of the cases, at its sizes; each must give what it expects, and touch nothing else."""
    (function,), _ = _load([kernel], target)
    for case, sizes in cases.values():
        assert domain.serves(sizes), f"{sizes} is cut off: {domain.cuts}"
        table = np.array([sizes[dim.name] for dim in domain.dims], np.int32)
        arrays = {**case.arrays, DIMENSIONS: table}
        for at_end, poison in zip((True, False), POISONS, strict=True):
            given = operands_of(replace(case, arrays=arrays), kernel)
            operands = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in given]
            read = [Guarded(array.nbytes, poison, at_end=at_end) for array in operands]
            for one, array in zip(read, operands, strict=True):
                one.bytes[:] = array
            made = [np.empty(case.expected[n].shape, case.group.types[name].dtype) for n, name in enumerate(case.group.outputs)]
            written = [Guarded(array.nbytes, poison, at_end=at_end) for array in made]
            scratch = [Guarded(kernel.workspace_bytes, poison, at_end=at_end)] if kernel.workspace_bytes else []
            function(*(one.address for one in (*read, *written, *scratch)))
            assert all(one.is_untouched() for one in (*read, *written, *scratch)), f"{case.label}: writes outside"
            case.got = [
                np.frombuffer(one.bytes.tobytes(), array.dtype).reshape(array.shape)
                for one, array in zip(written, made, strict=True)
            ]
            case.check()


__all__ = ["OPSET", "Dim", "Domain", "Op", "Size", "built_for", "operator", "run_at", "shape_at", "sized"]
