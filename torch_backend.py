"""prefuse as a backend of torch.compile.

    fast = torch.compile(module, backend="prefuse", options={"precision": "float32-fast"})

Dynamo, its tracer, cuts what Python calls into graphs, and leaves to Python what no graph can hold; here each graph becomes a
program. What changes an argument in place, such as a cache or the running mean of a BatchNorm, changes it. A graph that prefuse
cannot take, or whose results need gradients, is run by torch, with a warning that says why.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .compiler.api import compile_model
from .runtime.errors import CompileError, DeviceError, InputError, MemoryLimitError, OptionError

if TYPE_CHECKING:
    from .compiler.programs.specialize import SpecializedModel

# What renews running statistics where an argument says so.
_NORMALISATIONS: Mapping[object, str] = {
    torch.nn.functional.batch_norm: "training",
    torch.nn.functional.instance_norm: "use_input_stats",
}
_NAMED = ("target", "precision", "calibration", "name", "cache", "progress")
_MOST_PROGRAMS = 8  # of one graph: for weights of several modules of one class, and for numbers


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Sequence[object]]:
    """What runs a graph of Dynamo; `options` are those of `prefuse.compile`.

    Parameters and buffers are constants of the program. Where one of them has been changed since, in place (`load_state_dict`,
    a step of an optimizer) or by another tensor in its place, the graph is compiled again.

    Raises:
        OptionError: an option is unknown, or a mode is given, which those of torch's own backend are.
    """
    if mode is not None:
        fix = 'leave it out, or say what you want as options={"precision": "bfloat16"}'
        raise OptionError("mode", f"{mode!r} is one of torch's own backend", fix)
    return DynamoGraph(graph, example_inputs, options or {})


class DynamoGraph:
    """One graph of Dynamo: called with its arguments, gives its results in a row."""

    def __init__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[object], options: Mapping[str, Any]) -> None:
        self._graph, self._options = graph, dict(options)
        self._are_constant = [_is_constant(value) for value in example_inputs]
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs):
            self._options.setdefault("target", "cuda")
        _compile(torch.nn.Identity(), self._options)  # nothing is compiled yet: it raises for an option that is wrong
        self._form: _Form | None = None
        self._programs: list[_Program] = []  # the one used last at the end
        self._refusal = ""  # why torch runs the graph

    def __call__(self, *args: object) -> Sequence[object]:
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            self._warn("its results need gradients; call it under torch.no_grad() or torch.inference_mode()")
        elif not self._refusal:
            try:
                return self._run(args)
            except (OptionError, DeviceError, MemoryLimitError, MemoryError):  # not of the graph
                raise
            except CompileError as error:
                self._refusal = str(error)
                self._warn(self._refusal)
        return cast("Sequence[object]", self._graph(*args))

    def _run(self, args: Sequence[object]) -> Sequence[object]:
        if self._form is None:
            self._form = _form_of(self._graph, args, self._are_constant)
        form = self._form
        program = next((one for one in reversed(self._programs) if one.is_for(args)), None)
        if program is None:
            program = _Program(self._graph, form, args, self._options)
            self._programs = [*self._programs[1 - _MOST_PROGRAMS :], program]
        with torch.no_grad():
            results = program.run([args[place] for place in form.tensors])
            for place, result in zip(form.changed, results[len(results) - len(form.changed) :], strict=True):
                cast("torch.Tensor", args[place]).copy_(result)
        return [args[one.argument] if one.argument is not None else results[one.result] for one in form.results]

    def _warn(self, why: str) -> None:
        warnings.warn(f"torch runs a graph that prefuse does not: {why}", RuntimeWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class _Result:
    """A result of the graph: an argument itself, or a result of the program."""

    argument: int | None
    result: int = 0


@dataclass(frozen=True, slots=True)
class _Form:
    """What becomes of arguments and results of the graph, by their places."""

    weights: tuple[int, ...]  # constants of a program
    numbers: tuple[int, ...]  # the same
    tensors: tuple[int, ...]  # what a program takes
    changed: tuple[int, ...]  # those of them that the graph changes: the program returns them behind its results
    sizes: Mapping[int, tuple[int, int]]  # numbers that are those of an axis of a tensor
    results: tuple[_Result, ...]
    computed: tuple[int, ...]  # results that a program makes


class _Program:
    """The program of a graph with some weights, and with numbers that it cannot find in a tensor's shape."""

    def __init__(self, graph: torch.fx.GraphModule, form: _Form, args: Sequence[object], options: Mapping[str, Any]) -> None:
        self._weights = [(place, weight, _version(weight)) for place, weight in _tensors(args, form.weights)]
        self._numbers = [(place, args[place]) for place in form.numbers]
        self._model = _compile(_Module(graph, form, args), options)

    def is_for(self, args: Sequence[object]) -> bool:
        """Whether these have the program's weights, as they were, and numbers."""
        return all(args[place] is weight and _version(weight) == version for place, weight, version in self._weights) and all(
            args[place] == number for place, number in self._numbers
        )

    def run(self, tensors: Sequence[object]) -> Sequence[torch.Tensor]:
        """Raises CompileError where prefuse cannot take the graph."""
        return cast("Sequence[torch.Tensor]", self._model(*tensors))


class _Module(torch.nn.Module):
    """A graph between tensors that calls bring and those that they get, with its weights in it."""

    def __init__(self, graph: torch.fx.GraphModule, form: _Form, args: Sequence[object]) -> None:
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


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when a tensor is changed in place, or given other memory."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _form_of(graph: torch.fx.GraphModule, args: Sequence[object], are_constant: Sequence[bool]) -> _Form:
    """Found by a run of fake tensors, which computes nothing. Raises InputError for what torch is to run."""
    given, results = _fake_run(graph, args)
    renewed = _renewed_statistics(graph)
    changed = tuple(
        place for place, one in enumerate(given) if isinstance(one, torch.Tensor) and (one._version or place in renewed)
    )
    tensors = tuple(
        place
        for place, one in enumerate(given)
        if isinstance(one, torch.Tensor) and (place in changed or not are_constant[place])
    )
    numbers = tuple(place for place, one in enumerate(given) if not isinstance(one, torch.Tensor))
    sizes = _sizes(graph, numbers, tensors)
    own = {_storage(one): place for place, one in enumerate(given) if isinstance(one, torch.Tensor)}
    found: list[_Result] = []
    computed: list[int] = []
    for place, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise InputError("graph", f"a result is {type(result).__name__}, no tensor")
        argument = next((number for number, one in enumerate(given) if one is result), None)
        if argument is None and _storage(result) in own:
            raise InputError("graph", "a result is a view of an argument")
        found.append(_Result(argument, len(computed)))
        computed += [place] if argument is None else []
    if not computed and not changed:
        raise InputError("graph", "it computes nothing")
    return _Form(
        weights=tuple(place for place, is_constant in enumerate(are_constant) if is_constant and place not in changed),
        numbers=tuple(place for place in numbers if place not in sizes),
        tensors=tensors,
        changed=changed,
        sizes=sizes,
        results=tuple(found),
        computed=tuple(computed),
    )


def _fake_run(graph: torch.fx.GraphModule, args: Sequence[object]) -> tuple[list[object], Sequence[object]]:
    """Fake arguments, and what the graph makes of them; in-place operators have counted up the arguments' versions."""
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [_alike(value, mode) if isinstance(value, torch.Tensor) else value for value in args]
        try:
            return given, cast("Sequence[object]", graph(*given))
        except Exception as error:  # whatever torch's fake tensors cannot do
            what = f"torch cannot run it without numbers ({type(error).__name__}: {str(error).splitlines()[0]})"
            raise InputError("graph", what) from error


def _alike(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A new fake tensor, which counts changes, as those of `torch.inference_mode` do not."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _renewed_statistics(graph: torch.fx.GraphModule) -> set[int]:
    """Arguments that are running means and variances which a normalisation renews: no tensor's version counts these changes."""
    places = {node: place for place, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder")}
    found = set[int]()
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _NORMALISATIONS:
            call = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            call.apply_defaults()
            if call.arguments[_NORMALISATIONS[node.target]] is not False:
                statistics = (call.arguments[name] for name in ("running_mean", "running_var"))
                found |= {places[one] for one in statistics if one in places}
    return found


def _sizes(graph: torch.fx.GraphModule, numbers: Sequence[int], tensors: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Which size of which tensor numbers among the arguments are, as far as they are any."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    known: dict[object, tuple[int, int]] = {}
    for place in tensors:
        for axis, size in enumerate(nodes[place].meta["example_value"].shape):
            if isinstance(size, torch.SymInt):
                known.setdefault(size.node.expr, (place, axis))
    found = {}
    for place in numbers:
        value = nodes[place].meta.get("example_value")
        symbol = value.node.expr if isinstance(value, torch.SymInt) else None
        if symbol in known:
            found[place] = known[symbol]
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
