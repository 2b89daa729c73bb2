"""One program where a model allows it, else a `StagedModel` of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...runtime.errors import OptionError
from ...runtime.executor import CompiledModel
from ...runtime.hardware.memory_limit import MemoryLimit
from ...runtime.plan import TensorType
from ...runtime.staged.procedure import BranchStep, HostStep, LoopStep, MapStep, Procedure, Program, ProgramStep, ScanStep, Step
from ...runtime.staged.staged import StagedPort, StagedProgram
from ...runtime.staged.staged_model import StagedModel
from ...runtime.staged.strings import with_str_objects
from ..frontend.dimensions import is_dynamic
from ..frontend.shaping import forget_decided_shapes, shaping_inputs
from ..ir.constants import constant_tensor
from ..ir.facts import dtype_name, has_static_type, infer_facts, source_of
from ..ir.randomness import check_repeatable
from ..ir.scopes import captured_by, read_values
from ..ir.states import refuse_states
from ..ir.validity import check_nodes
from ..pipeline import Context, Pass, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES, STRUCTURE_PIPELINE
from ..programs.builder import Builder
from ..programs.digest import model_digest
from ..programs.sources import MANY_PROGRAMS, GraphSource
from ..programs.specialize import Call, SpecializedModel
from .host_operators import host_function
from .partition import Stage, crossing_values, needs_host, partition
from .stage_model import StageModel, stage_model


def build_model(builder: Builder, key: str, model: ir.Model) -> CompiledModel | StagedModel:
    """The program of a model whose inputs have static types where they are tensors, or the stages that it needs.

    Raises:
        CompileError: the model cannot be compiled.
    """
    if not builder.options.random:
        check_repeatable(model)
    forget_decided_shapes(model)
    staged = _structured(model, builder)
    if staged is None:
        return builder.build_program(key, lambda: model)
    what = "the model needs several programs, since its control flow or shapes depend on the data of a run, and has states"
    refuse_states(model, what, "leave the states inputs and outputs, and give each call what the one before returned")
    _refuse_bytes(builder.options.memory_limit)
    procedure = _Staging(staged, builder).procedure()
    graph = staged.graph
    program = StagedProgram(builder.name, procedure, tuple(map(_port, graph.inputs)), tuple(map(_port, graph.outputs)))
    return StagedModel(program)


def _refuse_bytes(limit: MemoryLimit | None) -> None:
    """Refuse a limit in bytes, which each of several programs would take: a share of what each takes is that share of all.

    Raises:
        OptionError: the limit is one of bytes.
    """
    if limit is not None and limit.size_bytes is not None:
        what = f"the model needs several programs, since its control flow or shapes depend on the data of a run, and {limit}"
        fix = 'give a share, such as "50%", which all of them keep together'
        raise OptionError("memory_limit", f"{what} would be the limit of each", fix)


def _build_stage(builder: Builder, key: str, model: Callable[[], ir.Model]) -> CompiledModel | StagedModel:
    known = builder.recall(key)
    return build_model(builder, key, model()) if known is None else known


def _structured(model: ir.Model, builder: Builder) -> ir.Model | None:
    """The model with its control flow resolved as far as it can be now, if it needs stages; None if one program holds it."""
    if all(_is_settled(node) for node in model.graph):
        return None
    changed = model.clone()
    builder.report("structure", 0.0)
    passes = [one for one in parse_pipeline(STRUCTURE_PIPELINE, PASSES) if isinstance(one, Pass)]
    infer_facts(changed)
    check_nodes(changed)
    run_pipeline(
        changed, passes, Context(builder.options.target, precision=builder.options.precision, weights=builder.options.weights)
    )
    infer_facts(changed)
    stages = partition(tuple(changed.graph))
    is_one = len([stage for stage in stages if stage.compiled]) <= 1 and not any(stage.host for stage in stages)
    return None if is_one else changed


def _is_settled(node: ir.Node) -> bool:
    return not needs_host(node) and all(has_static_type(value) for value in node.outputs if value.name)


class _Staging:
    """The procedure of one model, and those of its branches and loop bodies."""

    def __init__(self, model: ir.Model, builder: Builder) -> None:
        self.model = model
        self.builder = builder
        self.programs = 0

    def procedure(self) -> Procedure:
        graph = self.model.graph
        return self._procedure(graph, graph.inputs, ())

    def _procedure(self, graph: ir.Graph, inputs: Sequence[ir.Value], captured: Sequence[ir.Value]) -> Procedure:
        stages = partition(tuple(graph))
        steps: list[Step] = []
        for number, stage in enumerate(stages):
            if stage.compiled:
                later = {value for node in _after(stages, number) for value in read_values(node)} | set(graph.outputs)
                outputs = crossing_values(stage.compiled, later)
                if outputs:
                    steps.append(self._compiled(stage_model(stage.compiled, outputs, self.model)))
            steps += [self._host(node) for node in stage.host if constant_tensor(node.outputs[0]) is None]
        hosted = [value for stage in stages for node in stage.host for value in read_values(node)]
        return Procedure(
            tuple(str(value.name) for value in inputs),
            tuple(str(value.name) for value in captured if constant_tensor(value) is None),
            tuple(str(value.name) for value in graph.outputs),
            _constants((*hosted, *graph.outputs)),
            tuple(steps),
        )

    def _compiled(self, stage: StageModel) -> ProgramStep:
        self.programs += 1
        name = f"stage {self.programs}"
        builder = replace(self.builder, name=f"{self.builder.name}, {name}")
        program: Program
        if is_dynamic(stage.model) or shaping_inputs(stage.model) or any(value.dtype is None for value in stage.inputs):
            program = SpecializedModel(_StageSource(stage.model, builder))
        else:
            key = "" if builder.cache is None else builder.key("graph", model_digest(stage.model))
            built = _build_stage(builder, key, lambda: stage.model)
            program = built.program if isinstance(built, StagedModel) else built
        reads, writes = (tuple(str(value.name) for value in values) for values in (stage.inputs, stage.outputs))
        return ProgramStep(name, program, reads, writes)

    def _host(self, node: ir.Node) -> Step:
        control = {"If": self._branch, "Loop": self._loop, "Scan": self._scan, "SequenceMap": self._map}
        if node.domain == "" and node.op_type in control:
            return control[node.op_type](node)
        function = host_function(node, self.model.graph.opset_imports, _label(node))
        return HostStep(_label(node), function, _names(node.inputs), _names(node.outputs))

    def _branch(self, node: ir.Node) -> Step:
        then, otherwise = (self._body(node, name, ()) for name in ("then_branch", "else_branch"))
        condition = node.inputs[0]
        assert condition is not None
        return BranchStep(_label(node), str(condition.name), then, otherwise, _names(node.outputs))

    def _loop(self, node: ir.Node) -> Step:
        body = node.attributes["body"].as_graph()
        trips, condition, *initial = _names(node.inputs)
        slices = body.outputs[1 + len(initial) :]
        types = tuple(map(_slice_type, slices))
        return LoopStep(
            _label(node), trips, condition, tuple(initial), self._body(node, "body", body.inputs), _names(node.outputs), types
        )

    def _scan(self, node: ir.Node) -> Step:
        body, attributes = node.attributes["body"].as_graph(), node.attributes
        scanned = attributes["num_scan_inputs"].as_int()
        names = _names(node.inputs)
        carried, given = names[: len(names) - scanned], names[len(names) - scanned :]
        slices = body.outputs[len(carried) :]

        def of_each(name: str, number: int) -> tuple[int, ...]:
            return tuple(attributes.get_ints(name) or [0] * number)

        return ScanStep(
            _label(node),
            carried,
            given,
            self._body(node, "body", body.inputs),
            _names(node.outputs),
            of_each("scan_input_axes", scanned),
            tuple(map(bool, of_each("scan_input_directions", scanned))),
            of_each("scan_output_axes", len(slices)),
            tuple(map(bool, of_each("scan_output_directions", len(slices)))),
            tuple(map(_slice_type, slices)),
        )

    def _map(self, node: ir.Node) -> Step:
        body = self._body(node, "body", node.attributes["body"].as_graph().inputs)
        return MapStep(_label(node), _names(node.inputs), body, _names(node.outputs))

    def _body(self, node: ir.Node, attribute: str, inputs: Sequence[ir.Value]) -> Procedure:
        graph = node.attributes[attribute].as_graph()
        return self._procedure(graph, inputs, captured_by(graph))


class _StageSource(GraphSource):
    """A stage whose shapes come from the run. Each new one costs a compilation, which nobody should find out by waiting."""

    def __init__(self, model: ir.Model, builder: Builder) -> None:
        super().__init__(model, builder, _build_stage)

    def _many_programs(self, call: Call) -> str:
        what = f"{self.name} is compiled for the {MANY_PROGRAMS}th shape: its shapes depend on the data of each run"
        return f"{what}, and each new one costs a compilation; pad the data to few sizes"


def _after(stages: Sequence[Stage], number: int) -> Iterable[ir.Node]:
    """The nodes that run after the program of a stage."""
    yield from stages[number].host
    for stage in stages[number + 1 :]:
        yield from stage.compiled
        yield from stage.host


def _constants(values: Iterable[ir.Value]) -> Mapping[str, np.ndarray]:
    """What the host reads of the model's constants."""
    found = {}
    for value in values:
        tensor = constant_tensor(value)
        if tensor is not None:
            array = tensor.numpy()
            found[str(value.name)] = with_str_objects(array) if tensor.dtype == ir.DataType.STRING else array
    return found


def _slice_type(value: ir.Value) -> tuple[tuple[int, ...], str]:
    """Shape and type of a scan output's slice, where unknown dimensions are 0 and unknown types float32."""
    shape = () if value.shape is None else tuple(dim if isinstance(dim, int) else 0 for dim in value.shape)
    if value.dtype is None:
        return shape, "float32"
    return shape, "object" if value.dtype == ir.DataType.STRING else dtype_name(value.dtype)


def _port(value: ir.Value) -> StagedPort:
    """A value as the user sees it."""
    name = str(value.name)
    if isinstance(value.type, ir.SequenceType | ir.OptionalType):
        return StagedPort(name, None, "sequence" if isinstance(value.type, ir.SequenceType) else "optional")
    if value.dtype is None:
        return StagedPort(name, None, "tensor")
    shape = "[...]" if value.shape is None else f"[{','.join(map(str, value.shape))}]"
    if value.dtype == ir.DataType.STRING:
        return StagedPort(name, None, f"string{shape}")
    dtype = dtype_name(value.dtype)
    sizes = () if value.shape is None else tuple(dim for dim in value.shape if isinstance(dim, int))
    is_static = value.shape is not None and len(sizes) == len(value.shape)
    return StagedPort(name, TensorType(sizes, dtype) if is_static else None, f"{dtype}{shape}")


def _names(values: Iterable[ir.Value | None]) -> tuple[str, ...]:
    return tuple("" if value is None else str(value.name or "") for value in values)


def _label(node: ir.Node) -> str:
    return f"{node.op_type} at {source_of(node)}"
