"""prefuse as a backend of torch.compile.

    fast = torch.compile(module, backend="prefuse", options={"precision": "float32-fast"})

Dynamo, its tracer, cuts what Python calls into graphs, and leaves to Python what no graph can hold; here each graph becomes a
program. What changes an argument in place, such as a cache or the running mean of a BatchNorm, changes it. A graph that prefuse
cannot take, or whose results need gradients, is run by torch, with a warning that says why.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .compiler.api import compile_model
from .compiler.frontend.autocast import autocast_types
from .compiler.frontend.dynamo_graphs import Form, form_of, with_numbers, without_grad_modes
from .compiler.programs.options import EXTRA_OPTIONS, MIXED_OPTIONS, check_names
from .runtime.errors import CompileError, DeviceError, InputError, MemoryLimitError, OptionError

if TYPE_CHECKING:
    from .compiler.programs.specialize import SpecializedModel

# Whether gradients are on, whether inference mode is, whether an argument needs gradients, and what autocast computes in.
_Mode = tuple[bool, bool, bool, tuple[str, ...]]
_Key = tuple[_Mode, tuple[int, ...], tuple[str, ...]]  # of a program: weights by their identity, and numbers
_NAMED = ("target", "precision", "calibration", "name", "cache", "progress")
_OPTIONS = (*_NAMED, *MIXED_OPTIONS, *(name for name in EXTRA_OPTIONS if name != "dims"))  # Dynamo decides which sizes vary
_MOST_PROGRAMS = 64  # of one graph, for the weights of several modules of one class
_MOST_NUMBERS = 8  # of them that a graph is compiled for
_MOST_CHANGES = 2  # of a weight: it is an argument of the program from then on


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Sequence[object]]:
    """What runs a graph of Dynamo; `options` are those of `prefuse.compile` but `args`, `kwargs`, `states` and `dims`.

    Parameters and buffers are constants of the program. Where one of them has been changed since, in place (`load_state_dict`,
    a step of an optimizer) or by another tensor in its place, the graph is compiled again, and after the second time it is an
    argument like others. What is written through `.data` torch does not count: of weights on the CPU one element of each is
    compared at every call, which tells when a whole weight was written, but not a row of it; on a GPU nothing tells. Change
    weights under `torch.no_grad()` instead.

    Raises:
        OptionError: an option is unknown, or a `mode` is given: modes are of torch's own backend.
    """
    check_names(options or {}, _OPTIONS)
    if mode is not None:
        fix = 'leave it out, or say what you want as options={"precision": "bfloat16"}'
        raise OptionError("mode", f"{mode!r} is one of torch's own backend", fix)
    return DynamoGraph(graph, example_inputs, options or {})


class DynamoGraph:
    """One graph of Dynamo: called with its arguments, gives its results in a row. Threads may call it at the same time."""

    def __init__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[object], options: Mapping[str, Any]) -> None:
        _count_fused_steps()
        self._graph, self._options = graph, dict(options)
        self._plain, self._read = with_numbers(graph)
        self._traced = without_grad_modes(self._plain)
        self._are_constant = [_is_constant(value) for value in example_inputs]
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs):
            self._options.setdefault("target", "cuda")
        _compile(torch.nn.Identity(), self._options)  # nothing is compiled yet: it raises for an option that is wrong
        self._forms: dict[_Mode, Form] = {}
        self._refused: set[_Mode] = set()  # where torch runs the graph, but for calls that have a program
        self._programs: OrderedDict[_Key, _Program] = OrderedDict()  # the one used last at the end
        self._replaced: Counter[int] = Counter()  # how often weights of these places were gone when others came
        self._arguments: set[int] = set()  # the places of those that are no constants any more
        self._lock = threading.Lock()  # of forms and programs

    def __call__(self, *args: object) -> Sequence[object]:
        mode = self._mode(args)
        if mode not in self._refused or self._has_program(args, mode):
            try:
                return self._run(args, mode)
            except (OptionError, DeviceError, MemoryLimitError, MemoryError):  # not of the graph
                raise
            except CompileError as error:
                self._refused.add(mode)
                warnings.warn(f"torch runs a graph that prefuse does not: {error}", RuntimeWarning, stacklevel=2)
        return cast("Sequence[object]", self._graph(*args))

    def _mode(self, args: Sequence[object]) -> _Mode:
        """What decides whether results need gradients, and their types."""
        is_on = torch.is_grad_enabled()
        needs = (is_on or self._traced is not self._plain) and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in args
        )
        return is_on, torch.is_inference_mode_enabled(), needs, autocast_types()

    def _has_program(self, args: Sequence[object], mode: _Mode) -> bool:
        """Whether a program that has been made before can be called with these arguments."""
        args = self._with_numbers(args)
        with self._lock:
            form = self._forms.get(mode)
            program = None if form is None else self._programs.get(_key(form, mode, args))
            return form is not None and program is not None and not program.stale(args) and program.takes(args, form)

    def _with_numbers(self, args: Sequence[object]) -> Sequence[object]:
        """The arguments of the graph that is traced."""
        if not self._read:
            return args
        return [cast("torch.Tensor", one).item() if place in self._read else one for place, one in enumerate(args)]

    def _run(self, given: Sequence[object], mode: _Mode) -> Sequence[object]:
        args = self._with_numbers(given)
        with self._lock:
            form = self._forms.get(mode) or self._new_form(args, mode)
        if form.changed and form.is_overlapping(args):
            return cast("Sequence[object]", self._graph(*given))
        with self._lock:
            form, program = self._program(mode, args)
        with torch.no_grad():
            results = program.run([args[place] for place in form.tensors])
            count = len(form.computed)
            returned = form.returned(args, results[:count])
            for place, result in zip(form.changed, results[count:], strict=True):
                cast("torch.Tensor", args[place]).copy_(result)
        return returned

    def _new_form(self, args: Sequence[object], mode: _Mode) -> Form:
        places = [place for place, is_constant in enumerate(self._are_constant) if is_constant and not _is_uncounted(args[place])]
        constants = [place for place in places if place not in self._arguments and place not in self._read]
        self._forms[mode] = form_of(self._plain, args, constants, may_draw=bool(self._options.get("random")))
        return self._forms[mode]

    def _program(self, mode: _Mode, args: Sequence[object]) -> tuple[Form, _Program]:
        """The program for these weights and numbers, made where there is none, and the form that it has."""
        form = self._forms[mode]
        key = _key(form, mode, args)
        program = self._programs.get(key)
        stale = program.stale(args) if program is not None else set[int]()
        if program is not None and not stale:
            self._programs.move_to_end(key)
            return form, program
        changes = Counter(stale) + (program.changes if program is not None else Counter())
        if moved := self._to_move(form, args, changes):
            self._arguments |= moved
            self._forms = {one: known.taking(moved) for one, known in self._forms.items()}
            self._programs.clear()
            return self._program(mode, args)
        self._programs.pop(key, None)
        if len({key[2], *(known[2] for known in self._programs)}) > _MOST_NUMBERS:
            raise InputError("graph", f"a number in it has had {_MOST_NUMBERS} values, for each of which it was compiled")
        while len(self._programs) >= _MOST_PROGRAMS:
            self._programs.popitem(last=False)
        program = self._programs[key] = _Program(self._traced, form, args, self._options, changes)
        return form, program

    def _to_move(self, form: Form, args: Sequence[object], changes: Counter[int]) -> set[int]:
        """Weights that are to be arguments from now on, where a program is to be made, by how often they have changed in place.

        Programs whose weights are gone go, too.
        """
        dead = {key: places for key, program in self._programs.items() if (places := program.dead())}
        self._replaced.update(set().union(*dead.values()))
        for key in dead:
            del self._programs[key]
        often = {place for counted in (changes, self._replaced) for place in counted if counted[place] > _MOST_CHANGES}
        moved = often | {place for place in form.weights if _is_uncounted(args[place])}
        if len(self._programs) >= _MOST_PROGRAMS:  # those of more modules than there may be programs
            moved |= next(iter(self._programs.values())).stale(args)
        return moved & {*form.weights}


class _Program:
    """The program of a graph with some weights, and with numbers that it cannot find in a tensor's shape."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        form: Form,
        args: Sequence[object],
        options: Mapping[str, Any],
        changes: Counter[int],
    ) -> None:
        self.changes = changes  # how often the weights of these places were changed before
        weights = _tensors(args, form.weights)
        self._weights = [(place, ref(one), one.data_ptr(), one._version) for place, one in weights]
        self._samples = [(place, *sample) for place, one in weights if (sample := _sample(one)) is not None]
        self._model = _compile(_Module(graph, form, args), options)
        self._has_run: set[tuple[object, ...]] = set()  # sizes

    def stale(self, args: Sequence[object]) -> set[int]:
        """The places of weights that are others than the program's, or no longer as they were."""
        found = {
            place
            for place, weight, address, version in self._weights
            if weight() is not (one := cast("torch.Tensor", args[place])) or one.data_ptr() != address or one._version != version
        }
        return found or {place for place, element, value in self._samples if element.value != value}

    def dead(self) -> set[int]:
        """The places of weights that are no more."""
        return {place for place, weight, _, _ in self._weights if weight() is None}

    def takes(self, args: Sequence[object], form: Form) -> bool:
        """Whether it has run with tensors of these sizes."""
        return _sizes(args[place] for place in form.tensors) in self._has_run

    def run(self, tensors: Sequence[object]) -> Sequence[torch.Tensor]:
        """Raises CompileError where prefuse cannot take the graph."""
        results = cast("Sequence[torch.Tensor]", self._model(*tensors))
        self._has_run.add(_sizes(tensors))
        return results


class _Module(torch.nn.Module):
    """A graph between tensors that calls bring and those that they get, with its weights in it."""

    def __init__(self, graph: torch.fx.GraphModule, form: Form, args: Sequence[object]) -> None:
        super().__init__()
        self.graph, self.form = graph, form
        self.numbers = {place: args[place] for place in form.numbers}
        for place, weight in _tensors(args, form.weights):
            self.register_buffer(f"weight{place}", weight.detach())

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        form = self.form
        given = dict(zip(form.tensors, tensors, strict=True))
        given |= {place: given[place].clone() for place in form.changed}
        sizes = {place: given[tensor].shape[axis] for place, (tensor, axis) in form.sizes.items()}
        weights = {place: self.get_buffer(f"weight{place}") for place in form.weights}
        args = {**given, **sizes, **weights, **self.numbers}
        results = self.graph(*(args[place] for place in range(len(args))))
        return [*(results[place] for place in form.computed), *(given[place] for place in form.changed)]


def _key(form: Form, mode: _Mode, args: Sequence[object]) -> _Key:
    """Of numbers by their text, which tells 0.0 from -0.0, and of NaNs makes one."""
    return mode, tuple(id(args[place]) for place in form.weights), tuple(repr(args[place]) for place in form.numbers)


def _compile(module: torch.nn.Module, options: Mapping[str, Any]) -> SpecializedModel:
    """As `prefuse.compile` does with these keywords."""
    named = {name: value for name, value in options.items() if name in _NAMED}
    others = {name: value for name, value in options.items() if name not in _NAMED}
    return cast("SpecializedModel", compile_model(module, **named, options=others))


def _is_constant(value: object) -> bool:
    """Whether Dynamo gives a parameter or a buffer of a module as an argument."""
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None


def _tensors(args: Sequence[object], places: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    return [(place, cast("torch.Tensor", args[place])) for place in places]


def _sizes(tensors: Iterable[object]) -> tuple[object, ...]:
    return tuple(cast("torch.Tensor", one).shape for one in tensors)


def _is_uncounted(value: object) -> bool:
    """Whether torch counts no changes of a tensor, as of those made under `torch.inference_mode`."""
    return isinstance(value, torch.Tensor) and value.is_inference()


def _sample(weight: torch.Tensor) -> tuple[ctypes.c_uint64, int] | None:
    """Eight bytes of a weight, and what they are now: not zeros, if others are found, for many a write leaves those alone."""
    if not weight.is_cpu or not weight.is_contiguous() or weight.nbytes < 8:
        return None
    places = (weight.nbytes // 2 & ~7, 0, weight.nbytes - 8)
    found = [ctypes.c_uint64.from_address(weight.data_ptr() + place) for place in places]
    chosen = next((one for one in found if one.value), found[0])
    return chosen, chosen.value


@cache
def _count_fused_steps() -> None:
    """From now on a step of a fused optimizer counts as a change of its parameters, as others do."""

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            if group.get("fused"):
                torch.autograd.graph.increment_version([one for one in group["params"] if one.grad is not None])

    register_optimizer_step_post_hook(count)
