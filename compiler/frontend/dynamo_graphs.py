"""Graphs of Dynamo, the tracer of torch.compile: what becomes of their arguments and results, found by a run of fake tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.errors import InputError

NEED_GRADIENTS = "its results need gradients; call it under torch.no_grad() or torch.inference_mode()"


@dataclass(frozen=True, slots=True)
class Result:
    """A result of the graph: an argument itself, or a result of the program."""

    argument: int | None
    result: int = 0
    order: tuple[int, ...] = ()  # its axes, that of the longest stride first; none: row by row


@dataclass(frozen=True, slots=True)
class Form:
    """What becomes of arguments and results of the graph, by their places."""

    weights: tuple[int, ...]  # constants of a program
    numbers: tuple[int, ...]  # the same
    tensors: tuple[int, ...]  # what a program takes
    changed: tuple[int, ...]  # those of them that the graph changes: the program returns them behind its results
    sizes: Mapping[int, tuple[int, int]]  # numbers that are those of an axis of a tensor
    results: tuple[Result, ...]
    computed: tuple[int, ...]  # results that a program makes
    devices: tuple[torch.device, ...]  # where they are

    def taking(self, places: Collection[int]) -> Form:
        """The same with these weights as arguments of the program."""
        moved = [place for place in self.weights if place in places]
        left = tuple(place for place in self.weights if place not in places)
        return replace(self, weights=left, tensors=(*self.tensors, *moved))

    def is_overlapping(self, args: Sequence[object]) -> bool:
        """Whether what is changed may share memory with another argument."""
        tensors = [(place, one, one.data_ptr()) for place, one in enumerate(args) if isinstance(one, torch.Tensor)]
        for place in self.changed:
            first, last = _extent(cast("torch.Tensor", args[place]))
            if any(at < last and other != place and first < _extent(one)[1] for other, one, at in tensors):
                return True
        return False

    def returned(self, args: Sequence[object], computed: Sequence[torch.Tensor]) -> list[object]:
        """The results of the graph. Raises InputError where the program leaves one on another device than torch does."""
        for result, device in zip(computed, self.devices, strict=True):
            if result.device != device:
                raise InputError("graph", f"a result is on {device}, and would be on {result.device}")
        laid_out = {
            one.result: _laid_out(computed[one.result], one.order) for one in self.results if one.argument is None
        }  # what is returned twice is one tensor
        return [laid_out[one.result] if one.argument is None else args[one.argument] for one in self.results]


def form_of(graph: torch.fx.GraphModule, args: Sequence[object], constants: Collection[int], *, may_draw: bool = False) -> Form:
    """What arguments, those with these places as constants, and results of a graph are, by a run that computes nothing.

    `may_draw`: it may draw random numbers.

    Raises:
        InputError: torch is to run the graph.
    """
    _check_arguments(graph, args)
    watch = _Watch()
    given, results = _fake_run(graph, args, watch)
    changed = tuple(
        place
        for place, one in enumerate(given)
        if isinstance(one, torch.Tensor) and (one._version or _storage(one) in watch.written)
    )
    if any(isinstance(one, torch.Tensor) and one.requires_grad for one in _made(given, results, changed)):
        raise InputError("graph", NEED_GRADIENTS)
    if watch.random and not may_draw:
        raise InputError("graph", f"{watch.random} draws random numbers")
    weights = tuple(place for place in constants if place not in changed)
    tensors = tuple(place for place, one in enumerate(given) if isinstance(one, torch.Tensor) and place not in weights)
    numbers = tuple(place for place, one in enumerate(given) if not isinstance(one, torch.Tensor))
    sizes = _sizes(graph, numbers, tensors)
    found, computed = _results(given, results)
    if not computed and not changed:
        raise InputError("graph", "it computes nothing")
    return Form(
        weights=weights,
        numbers=tuple(place for place in numbers if place not in sizes),
        tensors=tensors,
        changed=changed,
        sizes=sizes,
        results=tuple(found),
        computed=tuple(computed),
        devices=tuple(cast("torch.Tensor", results[place]).device for place in computed),
    )


def with_numbers(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, frozenset[int]]:
    """The graph with numbers for the arguments of which it reads nothing but the number in them, and their places.

    Dynamo gives a float that has had another value as a tensor without dimensions, and has the graph read it by item().
    """
    placed = [node for node in graph.graph.nodes if node.op == "placeholder"]
    places = frozenset(place for place, node in enumerate(placed) if node.users and all(map(_reads_number, node.users)))
    if not places:
        return graph, places
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    given = [node for node in copied.nodes if node.op == "placeholder"]
    for place in places:
        for node in list(given[place].users):
            node.replace_all_uses_with(given[place])
            copied.erase_node(node)
    return torch.fx.GraphModule(graph, copied), places


def _reads_number(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def without_grad_modes(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph without what switches gradients on and off, which ONNX has no word for; itself where nothing does."""
    if not switches_gradients(graph):
        return graph
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.nodes:
        if node.target is torch._C._set_grad_enabled:
            copied.erase_node(node)
    return torch.fx.GraphModule(graph, copied)


def switches_gradients(graph: torch.fx.GraphModule) -> bool:
    """Whether gradients are switched on or off inside."""
    return any(node.target is torch._C._set_grad_enabled for node in _nodes(graph))


def _nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Those of the graphs inside, too."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _check_arguments(graph: torch.fx.GraphModule, args: Sequence[object]) -> None:
    """Raise InputError for what is neither a plain tensor nor a number, and for tensors that are no arguments at all."""
    for one in args:
        kind = type(one)
        if isinstance(one, torch.Tensor):
            if kind not in (torch.Tensor, torch.nn.Parameter) or one.layout is not torch.strided:
                raise InputError("graph", f"an argument is a {one.layout} {kind.__name__}, no plain tensor")
        elif kind not in (int, float, bool):
            raise InputError("graph", f"an argument is {kind.__name__}, neither tensor nor number")
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            held: Any = module
            for name in str(node.target).split(".") if node.op == "get_attr" else ():
                held = getattr(held, name, None)
            if isinstance(held, torch.Tensor):  # which may be changed, here and elsewhere
                raise InputError("graph", f"it holds a tensor, {node.target}, that is no argument")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """What operators change, by its memory, and the first of them that draws random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.random = ""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        named = kwargs or {}
        if isinstance(func, OpOverload):
            self._note(func, args, named)
        return func(*args, **named)

    def _note(self, operator: OpOverload, args: tuple[object, ...], named: Mapping[str, object]) -> None:
        declared = operator._schema.arguments
        given = {one.name: value for one, value in zip(declared, args, strict=False)} | dict(named)
        writes = [given.get(one.name) for one in declared if one.alias_info is not None and one.alias_info.is_write]
        if given.get("training") or given.get("train"):  # a normalisation renews them, though not by its schema
            writes += [given.get("running_mean"), given.get("running_var")]
        for value in writes:
            several = value if isinstance(value, (list, tuple)) else [value]
            self.written |= {_storage(one) for one in several if isinstance(one, torch.Tensor)}
        if torch.Tag.nondeterministic_seeded in operator.tags and not self.random:
            rates = [given.get(one.name) for one in declared if one.name in ("dropout_p", "dropout")]
            if not rates or (any(rates) and given.get("train") is not False):
                self.random = str(operator)


def _fake_run(graph: torch.fx.GraphModule, args: Sequence[object], watch: _Watch) -> tuple[list[object], Sequence[object]]:
    """Fake arguments, and what the graph makes of them; in-place operators have counted up the arguments' versions."""
    needs = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(needs[0]), FakeTensorMode(allow_non_fake_inputs=True):
            given = [_alike(value, needs[1]) if isinstance(value, torch.Tensor) else value for value in args]
            with watch:
                return given, cast("Sequence[object]", graph(*given))
    except Exception as error:  # whatever torch's fake tensors cannot do
        said = next(iter(str(error).splitlines()), "without a message")
        raise InputError("graph", f"torch cannot run it without numbers ({type(error).__name__}: {said})") from error


def _alike(tensor: torch.Tensor, is_inference: bool) -> torch.Tensor:
    """A new tensor, which counts changes, as those of `torch.inference_mode` do not, and needs gradients as this one does."""
    needs = tensor.requires_grad and not is_inference
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=needs)


def _made(given: Sequence[object], results: Sequence[object], changed: Sequence[int]) -> list[object]:
    """What a program would make: results that are no arguments, and arguments that are changed."""
    return [*(one for one in results if all(one is not other for other in given)), *(given[place] for place in changed)]


def _results(given: Sequence[object], results: Sequence[object]) -> tuple[list[Result], list[int]]:
    """What each result is, and those to compute. Raises InputError where they share memory."""
    own = {_storage(one) for one in given if isinstance(one, torch.Tensor)}
    found: list[Result] = []
    computed: list[int] = []
    for place, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise InputError("graph", f"a result is {type(result).__name__}, no tensor")
        argument = next((number for number, one in enumerate(given) if one is result), None)
        if argument is None and _storage(result) in own:
            raise InputError("graph", "a result is a view of an argument")
        known = next((number for number, other in enumerate(computed) if results[other] is result), len(computed))
        if argument is None and known == len(computed):
            if any(_share(cast("torch.Tensor", results[other]), result) for other in computed):
                raise InputError("graph", "two results share memory")
            computed.append(place)
        found.append(Result(argument, known, _order(result)))
    return found, computed


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of one is also one of the other: parts of one tensor may lie between each other and share none."""
    if _storage(one) != _storage(other):
        return False
    if one.dtype != other.dtype:
        return True
    seen = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    seen.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(seen.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of a dense tensor, that of the longest stride first; none where that is how they stand, or nothing is dense."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
    is_plain = tensor.is_contiguous() or not tensor.permute(order).is_contiguous()
    return () if is_plain else tuple(order)


def _laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor with its axes in this order in memory."""
    if not order:
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(*order).contiguous().permute(*back)


def _sizes(graph: torch.fx.GraphModule, numbers: Sequence[int], tensors: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Which size of which tensor numbers among the arguments are, as far as they are any."""
    examples = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    known: dict[object, tuple[int, int]] = {}
    for place in tensors:
        for axis, size in enumerate(getattr(examples[place], "shape", ())):
            if isinstance(size, torch.SymInt):
                known.setdefault(size.node.expr, (place, axis))
    found = {}
    for place in numbers:
        value = examples[place]
        symbol = value.node.expr if isinstance(value, torch.SymInt) else None
        if symbol in known:
            found[place] = known[symbol]
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + last * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
