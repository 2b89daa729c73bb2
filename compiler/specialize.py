"""Models that are compiled once per input signature: PyTorch modules, and graphs with symbolic dimensions."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ..runtime.errors import OptionError
from ..runtime.executor import CompiledModel, Context
from ..runtime.plan import Plan, Port
from ..runtime.profile import Profile
from ..runtime.staged import StagedModel, StagedPort
from .frontend.pytree import LEAF, Structure, Tensor, is_tensor, unflatten

_CAPACITY = 16  # specialisations kept in memory


TensorKey = tuple[tuple[int, ...], str]  # shape and element type


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of one call: their structure, their types, and the tensors themselves in the order of the program's inputs.

    `values` are the bytes of the inputs that the program is made for, which it does not take.
    """

    structure: Structure
    types: tuple[TensorKey, ...]
    tensors: Sequence[Tensor]
    values: tuple[bytes, ...] = ()

    @property
    def signature(self) -> Hashable:
        """What a specialisation depends on."""
        return self.structure, self.types, self.values


@dataclass(frozen=True, slots=True)
class Specialization:
    """A program for one signature, and the structure of its result; None: one array, or a tuple of them."""

    model: CompiledModel | StagedModel
    structure: Structure | None = None

    def run(self, callee: Callable[..., object], tensors: Sequence[object]) -> object:
        """Call the model or a context of it, and give the result its structure."""
        result = callee(*tensors)
        if self.structure is None or self.structure is LEAF:
            return result
        row = result if isinstance(result, tuple) else (result,)
        return unflatten(self.structure, row if tensors else [_to_torch(array) for array in row])


class Source(Protocol):
    """What specialisations are made from."""

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        """Sort and check the inputs of a call. Raises InputError."""

    def compile(self, call: Call) -> Specialization:
        """Make the program for the signature of a call. Raises CompileError."""


class SpecializedModel:
    """A model with one program per input signature, each compiled when it is first needed; calls as `CompiledModel` does.

    Threads may call it at the same time; one of them compiles what all of them wait for. The specialisations used last are
    kept in memory, the others in the cache on disk.
    """

    def __init__(self, source: Source, capacity: int = _CAPACITY) -> None:
        self._source = source
        self._capacity = capacity
        self._lock = threading.Lock()
        self._programs: OrderedDict[Hashable, Future[Specialization]] = OrderedDict()
        self._direct: dict[Hashable, Hashable] = {}  # signature of a call with tensors only, cheap to compute -> signature

    def __call__(self, *inputs: object, **named: object) -> object:
        """Run the model, compiled for these inputs.

        Raises:
            InputError: the inputs are not those of the model.
            CompileError: it cannot be compiled for them.
            ArenaMemoryError: there is no memory for the activations.
        """
        found, tensors = self._find(inputs, named)
        return found.run(found.model, tensors)

    def specialize(self, *inputs: object, **named: object) -> CompiledModel | StagedModel:
        """The program for inputs like these, as a model of its own: it takes and returns their tensors in a row."""
        return self._find(inputs, named)[0].model

    def profile(self, *inputs: object, runs: int = 20, **named: object) -> Profile:
        """The times of each step in `runs` calls with these inputs. Raises as `CompiledModel.profile`, and CompileError."""
        found, tensors = self._find(inputs, named)
        return found.model.profile(*tensors, runs=runs)

    def context(self) -> SpecializedContext:
        """A caller of its own, with arenas that no other call uses."""
        return SpecializedContext(self)

    @property
    def plan(self) -> Plan:
        """The plan of the only specialisation."""
        return self._only("plan").plan

    @property
    def inputs(self) -> tuple[Port, ...] | tuple[StagedPort, ...]:
        """Names and types of the inputs of the only specialisation."""
        return self._only("inputs").inputs

    @property
    def outputs(self) -> tuple[Port, ...] | tuple[StagedPort, ...]:
        """Names and types of the outputs of the only specialisation."""
        return self._only("outputs").outputs

    def report(self) -> str:
        """The report of every specialisation in memory, the one used last at the end."""
        return "\n\n".join(one.model.report() for one in self._ready()) or "not compiled yet: it is at its first call"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the only specialisation to a `.prefuse` file. What is loaded from it takes and returns tensors in a row.

        Raises:
            OptionError: there is none yet, or more than one, or it is in stages that no file can hold.
            ProgramFileError: the file cannot be written.
        """
        self._only("save").save(path)

    def _find(self, inputs: tuple[object, ...], named: dict[str, object]) -> tuple[Specialization, Sequence[object]]:
        """The specialisation for a call, and the tensors to call it with."""
        direct: Hashable = None
        if not named and (arrays := [value for value in inputs if is_tensor(value)]) and len(arrays) == len(inputs):
            direct = tuple([(value.shape, value.dtype) for value in arrays])
            with self._lock:
                future = self._programs.get(self._direct.get(direct))
                if future is not None and future.done():
                    self._programs.move_to_end(self._direct[direct])
                    return future.result(), inputs
        call = self._source.bind(inputs, named)
        found = self._specialization(call)
        if direct is not None and not call.values and all(a is b for a, b in zip(call.tensors, inputs, strict=False)):
            with self._lock:
                self._direct[direct] = call.signature
        return found, call.tensors

    def _specialization(self, call: Call) -> Specialization:
        with self._lock:
            future = self._programs.get(call.signature)
            is_mine = future is None
            if future is None:
                future = self._programs[call.signature] = Future()
            self._programs.move_to_end(call.signature)
        if is_mine:
            self._compile(call, future)
        return future.result()

    def _compile(self, call: Call, future: Future[Specialization]) -> None:
        """Settle the future of a signature; one that failed is forgotten, so that the next call tries again."""
        try:
            future.set_result(self._source.compile(call))
        except BaseException as error:  # Ctrl-C too: the threads that wait must not wait for ever
            with self._lock:
                self._programs.pop(call.signature, None)
            future.set_exception(error)
            return
        with self._lock:
            while len(self._programs) > self._capacity:
                gone, _ = self._programs.popitem(last=False)
                self._direct = {direct: signature for direct, signature in self._direct.items() if signature != gone}

    @property
    def programs(self) -> tuple[CompiledModel | StagedModel, ...]:
        """Every specialisation in memory, the one used last at the end."""
        return tuple(one.model for one in self._ready())

    def _ready(self) -> list[Specialization]:
        with self._lock:
            futures = list(self._programs.values())
        return [future.result() for future in futures if future.done() and future.exception() is None]

    def _only(self, what: str) -> CompiledModel | StagedModel:
        ready = self._ready()
        if len(ready) != 1:
            state = f"has {len(ready)} specialisations" if ready else "is not compiled yet"
            raise OptionError(what, f"the model {state}", f"choose one by its inputs: net.specialize(...).{what}")
        return ready[0].model


class SpecializedContext:
    """One caller of a specialised model, with an arena for each specialisation. Not to be called from two threads at once."""

    def __init__(self, model: SpecializedModel) -> None:
        self._model = model
        self._contexts: dict[CompiledModel | StagedModel, Context | StagedModel] = {}

    def __call__(self, *inputs: object, **named: object) -> object:
        """Run the model, as `SpecializedModel` does."""
        found, tensors = self._model._find(inputs, named)
        context = self._contexts.get(found.model)
        if context is None:
            context = self._contexts[found.model] = found.model.context()
        return found.run(context, tensors)


def _to_torch(value: object) -> object:
    """A result as a module gives it. A call without tensors gets NumPy arrays from the program, which cannot know better."""
    torch = sys.modules["torch"]
    return torch.from_numpy(value)
