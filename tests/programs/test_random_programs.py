"""Random small models, compiled whole, against onnx.reference: from memory of garbage, on inputs at odd addresses, on threads.

Half of them are dealt to two threads, however little there is to do. Those give the same bits with the tasks of each parallel
region one by one, none of which sees what another leaves in the arena, and with these tasks in reverse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.runtime import native
from prefuse.runtime.executor import CompiledModel, arena_bytes
from prefuse.runtime.plan import Port
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.kernels.harness import POISONS
from prefuse.tests.kernels.race_detector import RaceDetector
from prefuse.tests.models.program_strategies import programs
from prefuse.tests.sample import examples, sample_number

EXAMPLES = examples(100)
THREADS = 2
_Way = Callable[[Sequence[np.ndarray]], AbstractContextManager[Sequence[str]]]


def misaligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins one element after a cache line, where there is room for elements at all."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run_poisoned(
    net: CompiledModel, inputs: list[np.ndarray], poison: int, way: _Way = lambda _: nullcontext(())
) -> tuple[np.ndarray, ...]:
    """The model's outputs, computed in an arena and into arrays full of a byte, in the context that `way` makes of the arena."""
    context = net.context()
    size = arena_bytes(net.plan)
    arena = context._device.allocate(size)
    ctypes.memset(arena.address, poison, size)
    context._invocation = context._executable.bind(arena)
    with way([np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(arena.address))]) as races:
        result = context(*inputs, out=tuple(None if port.extents else _poisoned(port, poison) for port in net.outputs))
    assert not races
    assert isinstance(result, np.ndarray | tuple)
    return result if isinstance(result, tuple) else (result,)


def _poisoned(port: Port, poison: int) -> np.ndarray:
    return np.full(port.type.size_bytes, poison, np.uint8).view(port.type.dtype).reshape(port.type.shape)


@contextmanager
def dealt_to_threads(detectors: list[RaceDetector]) -> Iterator[None]:
    """All that may be parallel is in what is compiled inside; the list gets the parallel regions of each program loaded there."""

    class Library(native.Library):
        def __init__(self, path: Path, names: Sequence[str], replaced: Mapping[str, str] | None = None) -> None:
            super().__init__(path, names, replaced)
            detectors.append(RaceDetector(path))

    with (
        mock.patch("prefuse.kernels.codegen.builder.parallel_work", return_value=0),
        mock.patch("prefuse.compiler.lowering.short_programs._WORTH_WAKING", 0),
        mock.patch.object(native, "Library", Library),
    ):
        yield


@pytest.mark.daily
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@seed(sample_number())
@given(programs(), st.booleans())
def test_compiled_programs_agree_with_the_reference(model: ir.Model, is_dealt: bool) -> None:
    inputs = random_inputs(model)
    try:
        with np.errstate(all="ignore"):
            expected = list(run_model(model, inputs, "reference").values())
    except (IndexError, ValueError):
        reject()  # an operator that has no meaning on an empty tensor
    detectors: list[RaceDetector] = []
    with dealt_to_threads(detectors) if is_dealt else nullcontext():
        net = prefuse.compile(model, threads=THREADS, cache=False)
    if not isinstance(net, CompiledModel):
        reject()  # a branch that the data decide
    assert not check_plan(net.plan)
    arrays = [misaligned(inputs[port.name]) for port in net.inputs]
    first, second = run_poisoned(net, arrays, POISONS[0]), run_poisoned(net, [a.copy() for a in arrays], POISONS[1])
    for port, one, two, wanted in zip(net.outputs, first, second, expected, strict=True):
        assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape), port.name
        assert one.tobytes() == two.tobytes(), f"{port.name} depends on what was in memory, or on what threads do first"
        tolerance = 1e-5 if one.dtype.kind == "f" else 0.0
        assert relative_error(one, wanted) <= tolerance, port.name
    for detector in detectors:
        for poison, way in zip(
            POISONS,
            (
                partial(detector.tasks_apart, read_back=(), tasks=THREADS),
                partial(detector.tasks_backwards, tasks=THREADS),
            ),
            strict=True,
        ):
            again = run_poisoned(net, arrays, poison, way)
            assert [array.tobytes() for array in again] == [array.tobytes() for array in first]
