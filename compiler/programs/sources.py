"""What can be specialised: a PyTorch module, and a graph with symbolic dimensions."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, cast

import numpy as np

from ...runtime.errors import CompileError, InputError, UnsupportedModelError
from ...runtime.interchange import as_array, misplaced, number_array
from ...runtime.signature import in_order, unpacked
from ..frontend.autocast import autocast_types
from ..frontend.pytree import LEAF, Structure, Tensor, flatten, from_json, is_tensor, to_json, without_constants
from .builder import Builder, BuildStages
from .changed_weights import HeldWeights, written_weights_digest
from .digest import model_digest
from .memory_digest import looking, trusting
from .module_family import LEAST_SIZE, ModuleFamily, SizedGraph, family_key
from .module_fingerprint import module_fingerprint, places_of_weights, weights_digest
from .specialize import Call, Specialization, TensorKey

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from ..frontend.torch_sizes import ProgramRules

MANY_PROGRAMS = 8  # of one graph or module for values, or the shapes of runs, before a warning
_OTHER: TensorKey = ((), "")  # the key of an input that is no tensor of numbers


class ModuleSource:
    """An `nn.Module`: exported for the structure and the types of its inputs, and for the values of those that are no tensors.

    From the second signature on that differs from another in sizes only, one graph serves all of these, where torch can export
    it: `SIZES_KEY` in the metadata of what is compiled says how it was exported, and why not so.
    """

    def __init__(self, module: torch.nn.Module, builder: Builder, build: BuildStages) -> None:
        self._module = module
        self._builder = builder
        self._build = build
        self._parameters = inspect.signature(module.forward)
        self._families: dict[object, ModuleFamily] = {}
        self._held = HeldWeights()
        self._lock = threading.Lock()  # of the families, while one of them is exported
        # Those it was compiled for, by themselves without constants.
        self._structures: defaultdict[Structure, set[Structure]] = defaultdict(set)

    @property
    def name(self) -> str:
        return self._builder.name

    def has_input(self, name: str) -> bool:
        parameters = self._parameters.parameters
        return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        try:
            bound = self._parameters.bind(*inputs, **named)
        except TypeError as error:
            raise InputError("inputs", str(error), f"forward takes {self._parameters}") from None
        structure, tensors = flatten((bound.args, bound.kwargs))
        return Call(structure, tuple(map(_tensor_key, tensors)), tensors, autocast=autocast_types())

    def compile(self, call: Call) -> Specialization:
        self._count_values(call.structure)
        with self._builder.reporting():
            with looking() as looked_at:
                fingerprint = module_fingerprint(self._module)
            with trusting(looked_at & places_of_weights(self._module) if looked_at else looked_at):
                weights = weights_digest(self._module)
                self._held.warn_of(weights, self.name)
                found = self._compile(call, fingerprint, weights)
                self._held.note(weights)
                return found

    def _count_values(self, structure: Structure) -> None:
        """Warn where a module is compiled for many values of its inputs that are no tensors."""
        known = self._structures[without_constants(structure)]
        if structure not in known:
            known.add(structure)
            if len(known) == MANY_PROGRAMS:
                what = f"{self.name} is compiled for the {MANY_PROGRAMS}th values of inputs that are no tensors"
                fix = "each new one costs a compilation; give numbers as tensors (torch.tensor(t))"
                warnings.warn(f"{what}: {fix}", stacklevel=2)

    def _compile(self, call: Call, fingerprint: str | None, weights: str) -> Specialization:
        key = self._key(call, fingerprint)
        noted = self._recall(key)
        family = self._families.setdefault((family_key(call.structure, call.types), call.autocast), ModuleFamily())
        if noted is None and (graph := self._sized_graph(call, family, fingerprint or weights)) is not None:
            try:
                return self._specialized(call, key, graph)
            except UnsupportedModelError as error:
                family.refuse(f"the graph for any sizes cannot be compiled: {error.where}: {error.what}")
        if noted is None:
            model, result = self._export(call, family.reason)
            content = self._content_key(model)
        else:
            model, (content, result) = None, noted
        program = self._build(self._builder, content, lambda: self._export(call, "")[0] if model is None else model)
        if noted is None:
            self._remember(key, content, result)
        family.saw(call.types)
        return Specialization(program, result)

    def _specialized(self, call: Call, key: str | None, graph: SizedGraph) -> Specialization:
        """The program for a call, of the graph for any sizes. Raises CompileError."""
        content = "" if self._builder.cache is None else self._builder.key("sized graph", graph.digest, repr(call.types))
        shapes = {name: shape for (name, _), (shape, _) in zip(graph.sizes.inputs, call.types, strict=True)}
        program = self._build(self._builder, content, lambda: graph.bound(shapes))
        self._remember(key, content, graph.result)
        return Specialization(program, graph.result)

    def _sized_graph(self, call: Call, family: ModuleFamily, state: str) -> SizedGraph | None:
        """The graph for any sizes of a family if it holds for a call, exported if need be; `state` is what the module is now."""
        if self._builder.quantize is not None:  # whose ranges are of one graph
            return None
        shapes, dtypes = [shape for shape, _ in call.types], [dtype for _, dtype in call.types]
        with self._lock:
            if family.graph is not None and family.graph.state != state:
                family.graph = None  # the module has been changed since
            free = family.free_axes(call.types)
            if not any(free) or family.has_failed:
                return None
            is_new = family.graph is None or free != family.free
            if is_new and any(shapes[number][axis] < LEAST_SIZE for number, axes in enumerate(free) for axis in axes):
                family.reason = f"torch makes sizes below {LEAST_SIZE} constants"
                return None
            if is_new:
                family.graph, family.free = self._export_sized(call, family, free, state), free
            if family.graph is not None:
                family.reason = family.graph.sizes.refusal(shapes, dtypes)
            if family.graph is None or family.reason:
                return None
            family.saw(call.types)
            return family.graph

    def _export_sized(self, call: Call, family: ModuleFamily, free: tuple[frozenset[int], ...], state: str) -> SizedGraph | None:
        """The graph for any sizes of these axes; None, and the family's reason, if there can be none."""
        from ..frontend.importer import prepare_graph
        from ..frontend.torch_export import export_module

        self._builder.report("export", 0.0)
        leaves = list(map(self._example, call.tensors))
        try:
            found = export_module(self._module, call.structure, leaves, free)
            model = prepare_graph(found.model, self._builder.name)
        except CompileError as error:
            family.refuse(f"{error.where}: {error.what}")
            return None
        assert found.sizes is not None
        digest = "" if self._builder.cache is None else model_digest(model)
        return SizedGraph(model, found.result, found.sizes, digest, state)

    def _example(self, tensor: Tensor) -> torch.Tensor:
        target = self._builder.options.target
        return _example(tensor, on_gpu=target.kind == "cuda" and not target.is_simulated)

    def _export(self, call: Call, reason: str) -> tuple[ir.Model, Structure]:
        from ..frontend.dimensions import SIZES_KEY
        from ..frontend.importer import prepare_graph
        from ..frontend.torch_export import export_module

        self._builder.report("export", 0.0)
        found = export_module(self._module, call.structure, [self._example(tensor) for tensor in call.tensors])
        if reason:
            found.model.metadata_props[SIZES_KEY] = f"exported for these sizes alone: {reason}"
        return self._builder.prepared(prepare_graph(found.model, self._builder.name)), found.result

    def _key(self, call: Call, fingerprint: str | None) -> str | None:
        """What decides the exported graph, without exporting; None if it cannot be known, or nothing is kept."""
        if self._builder.cache is None or fingerprint is None:
            return None
        return self._builder.key("module", fingerprint, repr(call.signature))

    def _content_key(self, model: ir.Model) -> str:
        return "" if self._builder.cache is None else self._builder.key("graph", model_digest(model))

    def _recall(self, key: str | None) -> tuple[str, Structure] | None:
        """The program's key and the structure of the result, from an earlier process."""
        cache = self._builder.cache
        note = None if cache is None or key is None else cache.note(key)
        if note is None:
            return None
        try:
            return str(note["program"]), from_json(note["result"])
        except (KeyError, TypeError, ValueError):
            return None

    def _remember(self, key: str | None, content: str, result: Structure) -> None:
        """Note what the module becomes, where another process could use it."""
        if self._builder.cache is not None and key is not None:
            with suppress(TypeError):  # a result class that cannot be found by its name
                self._builder.cache.write_note(key, {"program": content, "result": to_json(result)})


class GraphSource:
    """A graph with symbolic dimensions: compiled for the shapes of its inputs, and for the values of those that decide shapes.

    Inputs that are no tensors of numbers (sequences, optionals, strings) stay as they are: no program depends on them.
    """

    def __init__(self, model: ir.Model, builder: Builder, build: BuildStages) -> None:
        from ..frontend.dimensions import RULES_KEY, dimension_bindings, is_number_tensor
        from ..frontend.shaping import shaping_inputs
        from ..ir.facts import dtype_name
        from ..ir.states import state_inputs

        self._model = model
        self._prepared: ir.Model | None = None  # what is compiled, once it is needed
        self._shaping = frozenset(shaping_inputs(model))
        self._compiled = count(1)
        self._builder = builder
        self._build = build
        self._check = dimension_bindings
        self._rules: ProgramRules | None = model.meta.get(RULES_KEY)
        kept = state_inputs(model)  # by sessions: no call gives them
        self._names = tuple(str(value.name) for value in model.graph.inputs if value.name not in kept)
        # Element types by the name of the input, "" where only a call knows it.
        self._dtypes = {
            str(value.name): "" if value.dtype is None else dtype_name(value.dtype)
            for value in model.graph.inputs
            if is_number_tensor(value) and value.name not in kept
        }
        self._digest = ""  # of the graph with the weights that it had when they were last looked at
        self._weights: str | None = None  # their digest
        self._held = HeldWeights()

    @property
    def name(self) -> str:
        return self._builder.name

    def has_input(self, name: str) -> bool:
        return name in self._names

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        given = dict(zip(self._names, in_order(self._names, inputs, named), strict=True))
        given = {name: self._checked(name, value) if name in self._dtypes else value for name, value in given.items()}
        keys = tuple(_tensor_key(cast("Tensor", value)) if name in self._dtypes else _OTHER for name, value in given.items())
        self._check(self._model, shapes := self._shapes(keys))
        if self._rules is not None and (refusal := self._rules.refusal(shapes)):
            raise InputError("inputs", refusal, "give other sizes, or export the program for them too")
        kept = [cast("Tensor", value) for name, value in given.items() if name not in self._shaping]
        known = [as_array(value, f"input {name!r}").tobytes() for name, value in given.items() if name in self._shaping]
        return Call(LEAF, keys, kept, tuple(known))

    def compile(self, call: Call) -> Specialization:
        if (what := self._many_programs(call)) and next(self._compiled) == MANY_PROGRAMS:
            warnings.warn(what, stacklevel=2)
        shapes = self._shapes(call.types)
        with self._builder.reporting(), self._looking() as digest:
            key = self._builder.key("graph", digest, repr(call.types), repr(call.values))
            return Specialization(self._build(self._builder, key, lambda: self._bound(shapes, call)))

    @contextmanager
    def _looking(self) -> Iterator[str]:
        """Look which weights the program holds that is made inside; yields the digest of the graph with them, "" without a cache.

        A warning says where they are not those that earlier programs hold.
        """
        weights = written_weights_digest(self._model)
        self._held.warn_of(weights, self.name)
        if weights != self._weights:
            self._digest = "" if self._builder.cache is None else model_digest(self._model)
            self._weights, self._prepared = weights, None
        yield self._digest
        self._held.note(weights)

    def _many_programs(self, call: Call) -> str:
        """What to say where calls like this one have made many programs; empty if that is no news."""
        names = ", ".join(sorted(self._shaping))
        what = f"{self.name} is compiled for the {MANY_PROGRAMS}th values of {names}, which decide shapes or branches"
        return f"{what}: each new one costs a compilation; give few different ones" if call.values else ""

    def _checked(self, name: str, value: object) -> Tensor:
        expected = self._dtypes[name]
        if isinstance(value, (int, float)) and expected and not isinstance(value, np.generic):
            return number_array(value, expected, f"input {name!r}")
        if not is_tensor(value):
            fix = unpacked(value) or "give a NumPy array or a torch tensor"
            raise InputError(f"input {name}", f"{type(value).__name__} given", fix)
        found = _tensor_key(value)[1]
        if expected and found != expected:
            raise InputError(f"input {name}", f"{found} given, the model takes {expected}", f"convert it to {expected}")
        return value

    def _bound(self, shapes: Mapping[str, tuple[int, ...]], call: Call) -> ir.Model:
        """The graph for inputs of these shapes, and of these contents where they decide shapes."""
        from ..frontend.dimensions import bind_dimensions, bind_dtypes
        from ..frontend.shaping import bind_values

        dtypes = {name: dtype for name, (_, dtype) in zip(self._names, call.types, strict=True) if name in self._dtypes}
        known = [name for name in self._names if name in self._shaping]
        values = {
            name: np.frombuffer(content, np.dtype(dtypes[name])).reshape(shapes[name])
            for name, content in zip(known, call.values, strict=True)
        }
        free = {name: shape for name, shape in shapes.items() if name not in values}
        if self._builder.is_for_shapes:
            return self._builder.prepared(bind_dimensions(bind_values(bind_dtypes(self._model, dtypes), values), free))
        return bind_dimensions(bind_values(bind_dtypes(self._to_compile(), dtypes), values), free)

    def _to_compile(self) -> ir.Model:
        """The graph, quantized if the builder does that. Raises CompileError."""
        prepared = self._prepared
        if prepared is None:
            prepared = self._prepared = self._builder.prepared(self._model)
        return prepared

    def _shapes(self, keys: Sequence[TensorKey]) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in zip(self._names, keys, strict=True) if name in self._dtypes}


def _example(value: Tensor, *, on_gpu: bool) -> torch.Tensor:
    """A torch tensor of this type on the CPU, to export with; the elements do not matter. `on_gpu`: the program will run there.

    Raises:
        InputError: a compiled program could not take the tensor.
    """
    import torch

    if isinstance(value, torch.Tensor):
        if on_gpu and value.is_cuda:  # the module is exported where its weights are
            return torch.empty(value.shape, dtype=value.dtype)
        if not value.is_cpu or value.layout is not torch.strided:
            raise misplaced(value, "input")
        return value.detach()
    dtype = getattr(torch, str(value.dtype), None)
    if dtype is None:
        raise InputError("input", f"torch has no {value.dtype}", "give an array of a type that the module takes")
    return torch.zeros(value.shape, dtype=dtype)


def _tensor_key(tensor: Tensor) -> TensorKey:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
