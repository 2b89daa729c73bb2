"""What runs a model in stages: a list of steps over named values, and what each kind of step does.

A value is an array, a list of values (a sequence) or None (an empty optional). What computes is compiled; the host decides (If,
Loop, Scan), keeps sequences, moves bytes by shapes that only the run knows, and computes what exists on the host alone (strings,
images).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeVar

import numpy as np

from ..errors import CompileError, InputError
from .host_operators import HostFunction, HostOperator, Value

Values = dict[str, Value]
T = TypeVar("T")


class Step(Protocol):
    """One step of a procedure."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...

    @property
    def bodies(self) -> tuple[Procedure, ...]: ...

    def run(self, values: Values) -> None:
        """Compute `writes` from `reads`."""

    def describe(self) -> Iterator[str]:
        """Lines for the report."""


class Program(Protocol):
    """A compiled stage: for one signature, or specialised at each new one."""

    def __call__(self, *inputs: object) -> object: ...

    def report(self) -> str: ...


@dataclass(frozen=True)
class Procedure:
    """Steps in order. `inputs` and `captured` are given, `constants` are there; `outputs` may be any of these or written.

    A value is dropped after the last step that reads it, so that memory grows with what is alive and not with the run.
    """

    inputs: tuple[str, ...]
    captured: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    steps: tuple[Step, ...]
    _last_reads: tuple[tuple[str, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        kept = set(self.outputs)
        last: list[tuple[str, ...]] = []
        for step in reversed(self.steps):
            done = tuple(dict.fromkeys(name for name in (*step.reads, *step.writes) if name not in kept))
            kept.update(done)
            last.append(done)
        object.__setattr__(self, "_last_reads", tuple(reversed(last)))

    def run(self, inputs: tuple[Value, ...], outer: Mapping[str, Value]) -> list[Value]:
        """The outputs for these inputs; what is captured is read from `outer`."""
        values: Values = {**self.constants, **{name: outer[name] for name in self.captured}}
        values.update(zip(self.inputs, inputs, strict=True))
        for step, done in zip(self.steps, self._last_reads, strict=True):
            step.run(values)
            for name in done:
                values.pop(name, None)
        return [values[name] for name in self.outputs]

    def describe(self) -> Iterator[str]:
        for step in self.steps:
            yield from step.describe()

    def all_constants(self) -> Iterator[np.ndarray]:
        """The constants of the procedure, of its branches and loop bodies, and of stages that are procedures themselves."""
        yield from self.constants.values()
        for step in self.steps:
            inner = getattr(getattr(step, "program", None), "procedure", None)
            for body in (*step.bodies, *([inner] if isinstance(inner, Procedure) else [])):
                yield from body.all_constants()

    def walk(self) -> Iterator[Step]:
        """Every step, those of branches and loop bodies after the one that they belong to."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.walk()


@dataclass(frozen=True)
class ProgramStep:
    """A compiled stage."""

    name: str
    program: Program
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bodies: tuple[Procedure, ...] = ()

    def run(self, values: Values) -> None:
        result = self.program(*[values[name] for name in self.reads])
        values.update(zip(self.writes, result if isinstance(result, tuple) else (result,), strict=True))

    def describe(self) -> Iterator[str]:
        yield f"{self.name}: compiled"
        yield from (f"  {line}" for line in self.program.report().splitlines())


@dataclass(frozen=True)
class HostStep:
    """An operator on the host: a `HostOperator`, or a function of the compiler's that needs onnx."""

    source: str  # the operator and where it comes from
    function: HostFunction
    reads: tuple[str, ...]  # "" for an input left out
    writes: tuple[str, ...]  # "" for an output nobody reads
    bodies: tuple[Procedure, ...] = ()

    @property
    def is_reference(self) -> bool:
        """Whether onnx.reference computes it; what is ours moves bytes only."""
        return not isinstance(self.function, HostOperator)

    def run(self, values: Values) -> None:
        with _blaming(self.source):
            results = self.function(*[values[name] if name else None for name in self.reads])
            values.update((name, result) for name, result in zip(self.writes, results, strict=True) if name)

    def describe(self) -> Iterator[str]:
        yield f"host: {self.source}{' (onnx.reference)' if self.is_reference else ''}"


@dataclass(frozen=True)
class BranchStep:
    """If: one of two procedures, which capture what they read."""

    source: str
    condition: str
    then: Procedure
    otherwise: Procedure
    writes: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.condition, *self.then.captured, *self.otherwise.captured)

    @property
    def bodies(self) -> tuple[Procedure, ...]:
        return (self.then, self.otherwise)

    def run(self, values: Values) -> None:
        chosen = self.then if _truth(values[self.condition], self.source) else self.otherwise
        values.update(_named(self.writes, chosen.run((), values)))

    def describe(self) -> Iterator[str]:
        yield f"host: {self.source}, decided at each call"
        for name, branch in (("then", self.then), ("else", self.otherwise)):
            yield f"  {name}:"
            yield from (f"    {line}" for line in branch.describe())


@dataclass(frozen=True)
class LoopStep:
    """Loop. The body takes (iteration, condition, carried...) and gives (condition, carried..., slices of scan outputs...)."""

    source: str
    trips: str  # "" for no bound
    condition: str  # "" for true
    initial: tuple[str, ...]
    body: Procedure
    writes: tuple[str, ...]
    scan_types: tuple[tuple[tuple[int, ...], str], ...]  # of one slice, for no trips at all; unknown dimensions are 0

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for name in (self.trips, self.condition, *self.initial, *self.body.captured) if name)

    @property
    def bodies(self) -> tuple[Procedure, ...]:
        return (self.body,)

    def run(self, values: Values) -> None:
        with _blaming(self.source):
            trips = None if not self.trips else int(_array(values[self.trips], self.source).reshape(()))
        goes_on = not self.condition or _truth(values[self.condition], self.source)
        carried: list[Value] = [values[name] for name in self.initial]
        slices: list[list[np.ndarray]] = [[] for _ in self.scan_types]
        for iteration in count():
            if not goes_on or (trips is not None and iteration >= trips):
                break
            given = (np.array(iteration, np.int64), np.array(True), *carried)
            again, *results = self.body.run(given, values)
            goes_on = _truth(again, self.source)
            carried = results[: len(carried)]
            for rows, row in zip(slices, results[len(carried) :], strict=True):
                rows.append(_array(row, self.source))
        scanned = [_stacked(rows, kind, self.source) for rows, kind in zip(slices, self.scan_types, strict=True)]
        values.update(_named(self.writes, [*carried, *scanned]))

    def describe(self) -> Iterator[str]:
        yield f"host: {self.source}, as long as the run decides; each iteration:"
        yield from (f"  {line}" for line in self.body.describe())


@dataclass(frozen=True)
class ScanStep:
    """Scan over slices of its last inputs. Axes and directions are one a scanned input, or output."""

    source: str
    initial: tuple[str, ...]
    scanned: tuple[str, ...]
    body: Procedure
    writes: tuple[str, ...]
    input_axes: tuple[int, ...]
    input_reversed: tuple[bool, ...]
    output_axes: tuple[int, ...]
    output_reversed: tuple[bool, ...]
    scan_types: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.initial, *self.scanned, *self.body.captured)

    @property
    def bodies(self) -> tuple[Procedure, ...]:
        return (self.body,)

    def run(self, values: Values) -> None:
        with _blaming(self.source):
            arrays = [
                np.moveaxis(_array(values[name], self.source), axis, 0)
                for name, axis in zip(self.scanned, self.input_axes, strict=True)
            ]
            lengths = {len(array) for array in arrays}
        if len(lengths) != 1:
            raise InputError(self.source, f"scanned inputs have lengths {sorted(lengths)}", "give them one length")
        length = lengths.pop()
        carried: list[Value] = [values[name] for name in self.initial]
        slices: list[list[np.ndarray]] = [[] for _ in self.scan_types]
        for step in range(length):
            rows: list[Value] = [
                np.asarray(array[length - 1 - step if backwards else step], array.dtype)  # a vector's element is no array
                for array, backwards in zip(arrays, self.input_reversed, strict=True)
            ]
            results = self.body.run((*carried, *rows), values)
            carried = results[: len(carried)]
            for kept, row in zip(slices, results[len(carried) :], strict=True):
                kept.append(_array(row, self.source))
        scanned: list[Value] = []
        for kept, kind, axis, backwards in zip(slices, self.scan_types, self.output_axes, self.output_reversed, strict=True):
            whole = _stacked(kept[::-1] if backwards else kept, kind, self.source)
            with _blaming(self.source):
                scanned.append(np.ascontiguousarray(np.moveaxis(whole, 0, axis)))
        values.update(_named(self.writes, [*carried, *scanned]))

    def describe(self) -> Iterator[str]:
        yield f"host: {self.source}, as long as its inputs; each step:"
        yield from (f"  {line}" for line in self.body.describe())


@dataclass(frozen=True)
class MapStep:
    """SequenceMap: the body on the items of the first input; other sequences give theirs, tensors stay the same."""

    source: str
    inputs: tuple[str, ...]
    body: Procedure
    writes: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.inputs, *self.body.captured)

    @property
    def bodies(self) -> tuple[Procedure, ...]:
        return (self.body,)

    def run(self, values: Values) -> None:
        given = [values[name] for name in self.inputs]
        lengths = {len(value) for value in given if isinstance(value, list)}
        if len(lengths) != 1:
            raise InputError(self.source, f"sequences of lengths {sorted(lengths)}", "give them one length")
        rows = [
            self.body.run(tuple(value[item] if isinstance(value, list) else value for value in given), values)
            for item in range(lengths.pop())
        ]
        results: list[Value] = [[row[position] for row in rows] for position in range(len(self.writes))]
        values.update(_named(self.writes, results))

    def describe(self) -> Iterator[str]:
        yield f"host: {self.source}, as long as its inputs; each item:"
        yield from (f"  {line}" for line in self.body.describe())


@contextmanager
def _blaming(source: str) -> Iterator[None]:
    """What NumPy or the reference raises on inputs that break an operator's rules, as an InputError."""
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        raise InputError(source, f"{type(error).__name__}: {error}", "correct the model's inputs") from error


def _array(value: Value, source: str) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise InputError(source, "a tensor is needed, not a sequence or an empty optional", "correct the model")
    return value


def _truth(value: Value, source: str) -> bool:
    array = _array(value, source)
    if array.size != 1:
        raise InputError(source, f"a condition of shape {list(array.shape)}", "give one boolean")
    return bool(array.reshape(())[()])


def _stacked(rows: list[np.ndarray], kind: tuple[tuple[int, ...], str], source: str) -> np.ndarray:
    """Slices along a new first axis; where there are none, the type that is known of them."""
    if not rows:
        return np.zeros((0, *kind[0]), kind[1])
    if len({row.shape for row in rows}) > 1:
        raise InputError(source, "the slices of a scan output differ in shape", "correct the model")
    return np.stack(rows)


def _named(names: tuple[str, ...], results: list[T]) -> list[tuple[str, T]]:
    return [(name, result) for name, result in zip(names, results, strict=False) if name]
