"""Models that are compiled once per input signature: PyTorch modules, and graphs with symbolic dimensions."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from ...runtime.errors import OptionError
from ...runtime.executor import CompiledModel, Context, Shared, session_states
from ...runtime.interchange import OUT, as_array, as_tensor, taken_out
from ...runtime.plan import Plan, Port
from ...runtime.profile import Profile
from ...runtime.program_set.member import Member, differences
from ...runtime.program_set.program_set_file import save_set
from ...runtime.staged.staged import StagedPort
from ...runtime.staged.staged_model import StagedModel
from ...runtime.states import States
from ..frontend.autocast import autocast_types
from ..frontend.pytree import LEAF, Structure, Tensor, is_tensor, unflattener

_CAPACITY = 16  # specialisations kept in memory
_MOST_SHORTCUTS = 4096  # to them, of calls of as many sizes; beyond, they are made anew
DIFFERENT_CALLS = "its calls differ in more than sizes: in the inputs that they give, or in values that programs are made for"


TensorKey = tuple[tuple[int, ...], str]  # shape and element type


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of one call: their structure, their types, and the tensors themselves in the order of the program's inputs.

    `values` are the bytes of the inputs that the program is made for, which it does not take; `autocast` are the types that torch
    computes in where the call is.
    """

    structure: Structure
    types: tuple[TensorKey, ...]
    tensors: Sequence[Tensor]
    values: tuple[bytes, ...] = ()
    autocast: tuple[str, ...] = ()

    @property
    def signature(self) -> Hashable:
        """What a specialisation depends on."""
        found = self.structure, self.types, self.values
        return (*found, self.autocast) if self.autocast else found


@dataclass(frozen=True, slots=True)
class Specialization:
    """A program for one signature, and the structure of its result; None: one array, or a tuple of them."""

    model: CompiledModel | StagedModel
    structure: Structure | None = None
    has_states: bool = field(init=False, compare=False, default=False)  # kept from call to call
    _build: Callable[[Sequence[object]], object] | None = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_states", isinstance(self.model, CompiledModel) and bool(self.model.plan.states))
        if self.structure is not None and self.structure is not LEAF:
            object.__setattr__(self, "_build", unflattener(self.structure))

    def member(self) -> Member:
        """The program and its sizes, without the structure of the result. Raises OptionError for a model in stages."""
        if isinstance(self.model, StagedModel):
            what = "a specialisation runs in stages, of which a file holds those of one model"
            raise OptionError("save", what, "save each for itself: net.specialize(...).save(path)")
        return Member(self.model)

    def run(self, callee: Callable[..., object], tensors: Sequence[object], out: object = None) -> object:
        """Call the model or a context of it, and give the result its structure; `out` is given for the program's outputs."""
        return self.shaped(callee(*tensors) if out is None else callee(*tensors, out=out), tensors)

    def shaped(self, result: object, tensors: Sequence[object]) -> object:
        """What a call of the model with these tensors gives, in the structure of the result."""
        if self._build is None:
            return result
        row = result if isinstance(result, tuple) else (result,)
        return self._build(row if tensors else [_to_torch(array) for array in row])


@dataclass(slots=True)
class _Entry:
    """A specialisation, or the wait for it, and the number of the call that used it last."""

    future: Future[Specialization]
    used: int
    call: Call


@dataclass(frozen=True, slots=True)
class _Shortcut:
    """What calls with tensors alone, of certain types, come to: an entry, and the program's inputs by their place in the call."""

    entry: _Entry
    found: Specialization
    order: tuple[int, ...]


class Source(Protocol):
    """What specialisations are made from."""

    @property
    def name(self) -> str:
        """What reports call the model."""

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        """Sort and check the inputs of a call. Raises InputError."""

    def has_input(self, name: str) -> bool:
        """Whether calls may give an input of this name."""

    def compile(self, call: Call) -> Specialization:
        """Make the program for the signature of a call. Raises CompileError."""


class SpecializedModel(Shared):
    """A model with one program per input signature, each compiled when it is first needed; calls as `CompiledModel` does.

    Threads may call it at the same time; one of them compiles what all of them wait for. The specialisations used last are
    kept in memory, the others in the cache on disk.
    """

    def __init__(self, source: Source, capacity: int = _CAPACITY) -> None:
        self._source = source
        self._capacity = capacity
        self._lock = threading.Lock()
        self._calls = count()
        self._entries: dict[Hashable, _Entry] = {}  # by the signature of a call
        self._forgotten: set[int] = set()  # hashes of the signatures of programs that are no longer in memory
        self._shortcuts: dict[Hashable, _Shortcut] = {}  # by what a call shows without being bound to parameters
        self._session = SpecializedContext(self)  # of calls of the model itself, if it has states

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the model, compiled for these inputs. `out`, a keyword where no input has this name, gives memory for the results,
        as for `CompiledModel`: of a module for the tensors in its result, one after the other.

        Raises:
            InputError: the inputs or `out` are not those of the model.
            CompileError: it cannot be compiled for them.
            ArenaMemoryError: there is no memory for the activations.
        """
        named, out = taken_out(named, self._source.has_input(OUT)) if OUT in named else (named, None)
        found, tensors = self._find(inputs, named)
        return self._session.run(found, tensors, out) if found.has_states else found.run(found.model, tensors, out)

    def specialize(self, /, *inputs: object, **named: object) -> CompiledModel | StagedModel:
        """The program for inputs like these, as a model of its own: it takes and returns their tensors in a row."""
        return self._find(inputs, named)[0].model

    def profile(self, /, *inputs: object, runs: int = 20, **named: object) -> Profile:
        """The times of each step in `runs` calls with these inputs. Raises as `CompiledModel.profile`, and CompileError."""
        found, tensors = self._find(inputs, named)
        return found.model.profile(*tensors, runs=runs)

    def context(self) -> SpecializedContext:
        """A caller of its own, with arenas that no other call uses, and states, if the model has any, as at the beginning."""
        return SpecializedContext(self)

    @property
    def states(self) -> States:
        """The states of the model's own session, in which calls of the model itself run, one thread at a time.

        Raises:
            OptionError: the model has none, or is not compiled yet.
        """
        return self._session.states

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

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs of the only specialisation, in order."""
        return self._only("input_names").input_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs of the only specialisation, in order."""
        return self._only("output_names").output_names

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the passes said while compiling the specialisations in memory, each line once."""
        return tuple(dict.fromkeys(remark for model in self.programs for remark in model.remarks))

    def report(self) -> str:
        """The report of every specialisation in memory, the one used last at the end."""
        return "\n\n".join(one.model.report() for one in self._ready()) or "not compiled yet: it is at its first call"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all specialisations in memory to one `.prefuse` file. What is loaded from it runs the program for the sizes of a
        call, and takes and returns tensors in a row; sizes that no call has had yet have none, nor, with a warning, those
        whose programs have left memory.

        Raises:
            OptionError: there is none yet, or they differ in more than sizes, keep states, or are in stages.
            ProgramFileError: the file cannot be written.
        """
        found = self._to_save()
        if not found:
            fix = "call it, or give example inputs: prefuse.compile(model, (x,))"
            raise OptionError("save", "the model is not compiled yet", fix)
        model = found[0].model
        is_sized = isinstance(model, CompiledModel) and bool(model.plan.dims)  # a set answers for size 0, too
        if len(found) == 1 and type(found[0]) is Specialization and not is_sized:
            model.save(path)
            return
        if self._forgotten:
            what = f"{len(self._forgotten)} programs of earlier calls are not saved: the {self._capacity} used last are in memory"
            warnings.warn(f"{self._source.name}: {what}; call the others again and save them to another file", stacklevel=2)
        members = [one.member() for one in found]
        if fault := differences(members):
            raise OptionError("save", f"its programs are no set: {fault}", "save each for itself: net.specialize(...).save(path)")
        save_set(path, self._source.name, members)

    def _to_save(self) -> list[Specialization]:
        """What a file of the model holds. Raises OptionError where calls differ in more than their sizes."""
        with self._lock:
            calls = [entry.call for entry in self._entries.values()]
        if len({call.structure for call in calls}) > 1 or len({(call.values, call.autocast) for call in calls}) > 1:
            raise OptionError("save", DIFFERENT_CALLS, "save each program for itself: net.specialize(...).save(path)")
        return self._ready()

    def _find(self, inputs: tuple[object, ...], named: dict[str, object]) -> tuple[Specialization, Sequence[object]]:
        """The specialisation for a call, and the tensors to call it with."""
        values = (*inputs, *named.values()) if named else inputs
        key = _key(values, named)
        known = None if key is None else self._shortcuts.get(key)
        if known is not None:
            known.entry.used = next(self._calls)
            return known.found, values if not named else [values[place] for place in known.order]
        call = self._source.bind(inputs, named)
        entry = self._entry(call)
        found = entry.future.result()
        order = None if key is None or call.values else _places(call.tensors, values, len(inputs))
        if order is not None:
            with self._lock:
                if self._entries.get(call.signature) is entry:  # else it has been forgotten meanwhile
                    if len(self._shortcuts) >= _MOST_SHORTCUTS:
                        self._shortcuts = {}
                    self._shortcuts[key] = _Shortcut(entry, found, order)
        return found, call.tensors

    def _entry(self, call: Call) -> _Entry:
        """The entry for a call, compiled here if it is new; its future is to be waited for where another thread compiles it."""
        with self._lock:
            entry = self._entries.get(call.signature)
            is_mine = entry is None
            if entry is None:
                entry = self._entries[call.signature] = _Entry(Future(), 0, replace(call, tensors=()))
                self._forgotten.discard(hash(call.signature))
            entry.used = next(self._calls)
        if is_mine:
            self._compile(call, entry.future)
        return entry

    def _compile(self, call: Call, future: Future[Specialization]) -> None:
        """Settle the future of a signature; one that failed is forgotten, so that the next call tries again."""
        try:
            future.set_result(self._source.compile(call))
        except BaseException as error:  # Ctrl-C too: the threads that wait must not wait for ever
            with self._lock:
                self._entries.pop(call.signature, None)
            future.set_exception(error)
            return
        with self._lock:
            while len(self._entries) > self._capacity:
                oldest = min(self._entries, key=lambda signature: self._entries[signature].used)
                gone = self._entries.pop(oldest)
                self._forgotten.add(hash(oldest))
                self._shortcuts = {key: known for key, known in self._shortcuts.items() if known.entry is not gone}

    @property
    def programs(self) -> tuple[CompiledModel | StagedModel, ...]:
        """Every specialisation in memory, the one used last at the end."""
        return tuple(one.model for one in self._ready())

    def _ready(self) -> list[Specialization]:
        with self._lock:
            futures = [entry.future for entry in sorted(self._entries.values(), key=lambda entry: entry.used)]
        return [future.result() for future in futures if future.done() and future.exception() is None]

    def _any(self, what: str) -> CompiledModel | StagedModel:
        """The specialisation used last. Raises OptionError if there is none."""
        ready = self._ready()
        return ready[-1].model if ready else self._only(what)

    def _only(self, what: str) -> CompiledModel | StagedModel:
        ready = self._ready()
        if len(ready) != 1:
            state = f"has {len(ready)} specialisations" if ready else "is not compiled yet"
            raise OptionError(what, f"the model {state}", f"choose one by its inputs: net.specialize(...).{what}")
        return ready[0].model


class SpecializedContext:
    """One caller of a specialised model, a session: an arena for each specialisation, and states, which they share.

    Not to be called from two threads at once.
    """

    def __init__(self, model: SpecializedModel) -> None:
        self._model = model
        self._contexts: OrderedDict[CompiledModel | StagedModel, Context | StagedModel] = OrderedDict()  # by last use
        self._states: States | None = None
        self._lock = threading.Lock()  # of the contexts

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the model, as `SpecializedModel` does."""
        named, out = taken_out(named, self._model._source.has_input(OUT)) if OUT in named else (named, None)
        return self.run(*self._model._find(inputs, named), out)

    def run(self, found: Specialization, tensors: Sequence[object], out: object = None) -> object:
        """Call one specialisation. Raises InputError where it keeps other states than the first one, or another thread calls."""
        return found.run(self._context(found.model), tensors, out)

    @property
    def states(self) -> States:
        """The states by name: to look at, set, reset, save and load.

        Raises:
            OptionError: the model has none, or is not compiled yet.
        """
        if self._states is None:
            self._context(self._model._any("states"))
        return session_states(self._states)

    def _context(self, model: CompiledModel | StagedModel) -> Context | StagedModel:
        """The context of a specialisation, made if it is new; with as many others as the model keeps specialisations."""
        with self._lock:
            known = self._contexts.get(model)
            if known is not None:
                self._contexts.move_to_end(model)
                return known
            context = model.context() if isinstance(model, StagedModel) else model.context_of(self._states)
            if isinstance(context, Context) and self._states is None:
                self._states = context.kept
            self._contexts[model] = context
            if len(self._contexts) > self._model._capacity:
                self._contexts.popitem(last=False)  # else programs that the model has forgotten stayed in memory
            return context


def _key(values: Sequence[object], named: Mapping[str, object]) -> Hashable:
    """What is seen of a call with tensors alone: their types, autocast's, and the names of some; None for other calls."""
    types: list[object] = []
    for value in values:
        if not is_tensor(value):
            return None
        types.append(value.shape)
        types.append(value.dtype)
    return (tuple(types), tuple(named), autocast_types()) if types else None


def _places(tensors: Sequence[object], values: Sequence[object], positional: int) -> tuple[int, ...] | None:
    """Where each tensor stands among the values of a call, of which the first ones were not named.

    None where the call does not tell: one of them was made from a value, or one is given twice and by name.
    """
    places = {id(value): place for place, value in enumerate(values)}
    if len(places) < len(values) == positional and all(a is b for a, b in zip(tensors, values, strict=False)):
        return tuple(range(len(values)))
    found = [places.get(id(tensor), -1) for tensor in tensors]
    return tuple(found) if sorted(found) == list(range(len(values))) else None


def _to_torch(value: object) -> object:
    """A result as a module gives it. A call without tensors gets NumPy arrays from the program, which cannot know better."""
    return as_tensor(as_array(value, "result"))
