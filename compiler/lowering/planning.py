"""From an ordered graph to a Plan without addresses: one launch a group, and values that share the bytes of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ...kernels.groups.group import Group
from ...kernels.template.contract import BuiltKernel, Pack
from ...runtime.constants.shared import LEAST_BYTES, LEAST_SHARED_BYTES
from ...runtime.plan import (
    ARENA,
    BARRIERS,
    CALLER,
    CONSTANTS,
    DIMENSIONS,
    SHARED,
    STATES,
    VECTOR_ALIGNMENT,
    Buffer,
    Copy,
    Extent,
    Kernel,
    Launch,
    Plan,
    Port,
    Region,
    Role,
    Sized,
    Space,
    State,
    Step,
    TensorType,
)
from ...runtime.symbolic.sizes import Size, SymbolicSizeError
from ...runtime.target import Target
from ..ir.aliases import Aliases, Place, find_aliases, view_root
from ..ir.bounds import Trim, trim_of
from ..ir.constants import constant_array
from ..ir.facts import source_of, tensor_type
from ..ir.functions import fused_names
from ..ir.shared_weights import has_shared_weights
from ..ir.states import states_of
from ..ir.symbolic.symbols import constant_sizes, domain_of_model
from .gpu.device_code import grids_of
from .state_order import order_renewals


@dataclass(frozen=True)
class LoweredGroup:
    """A node of the graph with the kernel that computes it. Groups of equal structure share one kernel and its symbol."""

    node: ir.Node
    group: Group
    kernel: BuiltKernel
    symbol: str


@dataclass
class PlanDraft:
    """A Plan whose buffers have no offsets yet, how to load each constant that it names, and what each is made of: the parameter
    and its packing."""

    plan: Plan
    constants: dict[str, tuple[TensorType, Callable[[], np.ndarray]]] = field(default_factory=dict)
    parameters: dict[str, tuple[ir.Value, Pack | None]] = field(default_factory=dict)


def aliases_of(model: ir.Model, target: Target, pitched: frozenset[ir.Value] = frozenset()) -> Aliases:
    """What of a graph needs no memory of its own; what the caller gets is written where he wants it. `pitched`: as of
    `find_aliases`."""
    results = [_result(value, _trim_under(model, value)) for value in model.graph.outputs]
    counts = [trim.count for value in model.graph.outputs if (trim := _trim_under(model, value)) is not None]
    return find_aliases(model.graph, results + counts, VECTOR_ALIGNMENT if target.is_gpu else 1, pitched)


def launch_label(item: LoweredGroup) -> str:
    """What reports and profiles call the launch of a group: its nodes, the anchor first, and where they come from."""
    name = item.node.name or item.group.label
    names = sorted(fused_names(item.node) or (name,), key=lambda one: one != name)
    source = source_of(item.node)
    return "+".join(names) + ("" if source == ", ".join(names) else f" at {source}")


def draft_plan(
    model: ir.Model, lowered: list[LoweredGroup], target: Target, aliases: Aliases, *, is_limited: bool = False
) -> PlanDraft:
    """The Plan of a graph in the order of its nodes, all on one stream.

    Large constants are shared with other programs, but where memory `is_limited`: those may stay in the file.
    """
    return _Drafting(model, target, aliases, shares=not is_limited).draft(lowered)


class _Drafting:
    def __init__(self, model: ir.Model, target: Target, aliases: Aliases, *, shares: bool) -> None:
        self.shares = shares
        self.least_bytes = LEAST_SHARED_BYTES if has_shared_weights(model) else LEAST_BYTES
        self.graph = model.graph
        self.target = target
        self.aliases = aliases
        self.trims = {value: trim for value in self.graph.outputs if (trim := _trim_under(model, value)) is not None}
        self.buffers: dict[str, Buffer] = {}
        self.constants: dict[str, tuple[TensorType, Callable[[], np.ndarray]]] = {}
        self.parameters: dict[str, tuple[ir.Value, Pack | None]] = {}
        self.steps: list[Step] = []
        domain = domain_of_model(model)
        self.dims = () if domain is None else domain.box
        if self.dims:
            self.buffers[DIMENSIONS] = Buffer(DIMENSIONS, Role.INPUT, 4 * len(self.dims), CALLER)
        outputs, inputs = ({str(value.name): value for value in one} for one in (self.graph.outputs, self.graph.inputs))
        self.renewed = {outputs[output]: inputs[name] for output, name in states_of(model).items()}
        self.claimed = self._claim_outputs()

    def draft(self, lowered: list[LoweredGroup]) -> PlanDraft:
        states = [self._state(*pair) for pair in self.renewed.items()]
        given = [value for value in self.graph.inputs if value not in self.renewed.values()]
        inputs = [self._port(value, Role.INPUT, str(value.name)) for value in given]
        made = [(position, value) for position, value in enumerate(self.graph.outputs) if value not in self.renewed]
        outputs = [self._output(position, value) for position, value in made]
        kernels: dict[str, Kernel] = {}
        launched = {item.node: item for item in lowered}
        for node in self.graph:
            self.steps += [self._copy(value, node, offset) for value, offset in self.aliases.free.get(node, ())]
            if (item := launched.get(node)) is None:
                continue
            step = self._launch(item)
            self.steps.append(step)
            moved = sum(region.size_bytes for region in step.reads + step.writes)
            arguments = len(step.reads) + len(step.writes) + len(step.scratch)
            grids = grids_of(item.symbol, item.kernel.function)
            built = item.kernel
            kernel = Kernel(item.symbol, built.template, arguments, built.flops, moved, grids, built.multiplies)
            kernels.setdefault(item.symbol, kernel)
        for position, value in made:
            self._copy_unless_there(_result(value, self.trims.get(value)), _output_buffer(position, value))
        self._renew_states()
        plan = Plan(
            target=str(self.target),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            spaces=tuple(map(Space, (ARENA, CONSTANTS, CALLER, *self._further_spaces()))),
            buffers=tuple(self.buffers.values()),
            kernels=tuple(kernels.values()),
            steps=tuple(self.steps),
            states=tuple(states),
            dims=self.dims,
        )
        return PlanDraft(plan, self.constants, self.parameters)

    def _further_spaces(self) -> list[str]:
        used = {buffer.space for buffer in self.buffers.values()}
        return [name for name in (SHARED, STATES, BARRIERS) if name in used]

    def _copy_unless_there(self, value: ir.Value, buffer: str) -> None:
        source = self._region(value)
        if source.buffer != buffer and tensor_type(value).is_symbolic:
            raise SymbolicSizeError(f"%{value.name} is copied, whose size a call decides")
        if source.buffer != buffer:
            self.steps.append(Copy(source, Region(buffer, 0, source.size_bytes)))

    def _state(self, output: ir.Value, value: ir.Value) -> State:
        """A state as a call finds it, and its new value if that is another; a default of its input is what it is at first."""
        name, kind, initial = str(value.name), tensor_type(value), None
        self.buffers[name] = Buffer(name, Role.STATE, kind.size_bytes, STATES)
        if self.aliases.place(output) != Place(value, 0):
            self.buffers[_renewal(output)] = Buffer(_renewal(output), Role.STATE, kind.size_bytes, STATES, renews=name)
        if value.const_value is not None and (first := value.const_value.numpy()).astype(bool).any():
            initial = f"initial:{name}"
            self.buffers[initial] = Buffer(initial, Role.CONSTANT, kind.size_bytes, CONSTANTS)
            self.constants[initial] = (kind, lambda: first)
        return State(name, kind, name, initial)

    def _renew_states(self) -> None:
        """Put the new value of each state into its place, unless it is the old one, after all who read that."""
        for output in self.renewed:
            if _renewal(output) in self.buffers:
                self._copy_unless_there(output, _renewal(output))
        renewals = [buffer for buffer in self.buffers.values() if buffer.renews is not None]
        self.steps, copies = order_renewals(self.steps, renewals)
        self.buffers.update((name, Buffer(name, Role.ACTIVATION, size_bytes, ARENA)) for name, size_bytes in copies.items())

    def _claim_outputs(self) -> dict[ir.Value, str]:
        """The values whose kernel can write straight into a state or the caller's output; the first who wants one gets it."""
        claimed: dict[ir.Value, str] = {}
        for output in self.renewed:
            root = view_root(output)
            if root.producer() is not None and not _is_constant(root):
                claimed.setdefault(root, _renewal(output))
        for position, value in enumerate(self.graph.outputs):
            if value in self.renewed:
                continue
            root = view_root(_result(value, self.trims.get(value)))
            if root.producer() is not None and not _is_constant(root):
                claimed.setdefault(root, _output_buffer(position, value))
        for trim in self.trims.values():
            claimed[trim.count] = f"count:{trim.count.name}"
        return claimed

    def _output(self, position: int, value: ir.Value) -> Port:
        trim = self.trims.get(value)
        port = self._port(value if trim is None else trim.data, Role.OUTPUT, _output_buffer(position, value))
        if trim is None:
            return port
        count = self.claimed[trim.count]
        self.buffers[count] = Buffer(count, Role.OUTPUT, tensor_type(trim.count).size_bytes, CALLER)
        return replace(port, name=str(value.name), extents=(Extent(trim.axis, count),))

    def _port(self, value: ir.Value, role: Role, buffer: str) -> Port:
        kind = tensor_type(value)
        self.buffers[buffer] = Buffer(buffer, role, kind.size_bytes, CALLER)
        sizes = tuple(Sized(axis, str(dim)) for axis, dim in enumerate(kind.shape) if isinstance(dim, Size))
        return Port(str(value.name), kind.largest, buffer, sizes=sizes)

    def _region(self, value: ir.Value) -> Region:
        """Where a value lies: a buffer made at its first use, or a part of one."""
        place = self.aliases.place(value)
        buffer = self._buffer(place.value)
        return Region(buffer, place.offset_bytes, tensor_type(value).size_bytes, place.rows, place.pitch_bytes)

    def _buffer(self, value: ir.Value) -> str:
        """The buffer of a value that has memory of its own."""
        if _is_constant(value):
            return self._constant_region(value, None).buffer
        name = self.claimed.get(value, str(value.name))
        if name not in self.buffers:
            self.buffers[name] = Buffer(name, Role.ACTIVATION, tensor_type(value).size_bytes, ARENA)
        return name

    def _copy(self, value: ir.Value, concat: ir.Node, offset_bytes: int) -> Copy:
        """An operand of a Concat to its place in the result, where its kernel could not write."""
        source, result = self._region(value), self._region(concat.outputs[0])
        return Copy(source, Region(result.buffer, result.offset + offset_bytes, source.size_bytes))

    def _constant_region(self, value: ir.Value, pack: Pack | None) -> Region:
        if (sizes := constant_sizes(value)) is not None:
            raise SymbolicSizeError(f"a kernel reads {sizes.tolist()} from memory, which are no numbers before a call")
        source = tensor_type(value)
        kind = pack.packed_type(source) if pack else source
        name = f"{value.name}:{pack}" if pack else str(value.name)
        if name not in self.buffers:
            is_shared = self.shares and kind.size_bytes >= self.least_bytes
            self.buffers[name] = Buffer(name, Role.CONSTANT, kind.size_bytes, SHARED if is_shared else CONSTANTS)
            self.constants[name] = (kind, lambda: _load(value, pack))
            self.parameters[name] = value, pack
        return Region(name, 0, kind.size_bytes)

    def _launch(self, item: LoweredGroup) -> Launch:
        values = {str(value.name): value for value in item.node.inputs if value is not None}
        reads = []
        for operand in item.kernel.operands:
            if operand.name == DIMENSIONS:
                reads.append(Region(DIMENSIONS, 0, 4 * len(self.dims)))
                continue
            value = values[operand.name]
            reads.append(self._region(value) if operand.pack is None else self._constant_region(value, operand.pack))
        writes = [self._region(value) for value in item.node.outputs if value.name]
        scratch, first = [], next(output.name for output in item.node.outputs if output.name)  # leading ones may be absent
        if item.kernel.workspace_bytes:
            name = f"{first}.workspace"
            self.buffers[name] = Buffer(name, Role.WORKSPACE, item.kernel.workspace_bytes, ARENA)
            scratch.append(Region(name, 0, item.kernel.workspace_bytes))
        if item.kernel.barrier_bytes:
            name = f"{first}.barrier"
            self.buffers[name] = Buffer(name, Role.BARRIER, item.kernel.barrier_bytes, BARRIERS)
            scratch.append(Region(name, 0, item.kernel.barrier_bytes))
        inplace = tuple(
            (out, read)
            for out, read in item.kernel.inplace
            if all(r.buffer != reads[read].buffer for position, r in enumerate(reads) if position != read)
            and writes[out].rows == 1
        )
        return Launch(item.symbol, tuple(reads), tuple(writes), tuple(scratch), inplace, label=launch_label(item))


def _trim_under(model: ir.Model, output: ir.Value) -> Trim | None:
    """What cuts an output of the graph; equal outputs are one under identities."""
    while (producer := output.producer()) is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
        output = producer.inputs[0]
    return None if producer is None else trim_of(model, producer)


def _result(output: ir.Value, trim: Trim | None) -> ir.Value:
    """The value whose bytes an output of the graph is, at their largest where a run decides its size."""
    return output if trim is None else trim.data


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()


def _load(value: ir.Value, pack: Pack | None) -> np.ndarray:
    array = constant_array(value)
    assert array is not None, f"{value.name} is no constant"
    return pack(array) if pack else array


def _renewal(output: ir.Value) -> str:
    """The name of the buffer in which a state gets its new value."""
    return f"new:{output.name}"


def _output_buffer(position: int, value: ir.Value) -> str:
    """A name of its own for each output, which may be an input or another output too."""
    return f"output{position}:{value.name}"
