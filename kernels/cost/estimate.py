"""What a kernel would take before any code of it is written: cycles of arithmetic, bytes, and the time that both make together.

A kernel takes no less than its arithmetic and no less than its bytes (Williams, Waterman, Patterson: Roofline, CACM 52/4, 2009);
most of the smaller of the two hides behind the larger. Bytes come from the level that holds them: where no program is known,
activations from the nearest cache with room for what a group reads and writes, and constants from memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log2, prod

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating
from ..groups.group import Group, Op
from .operations import OF_ROWS, operations_of
from .pointwise import operator_body

UNHIDDEN = 0.2  # of the smaller of arithmetic and bytes
_UNHIDDEN_BY_TILES = 0.5  # of activations beside products of tiles: all in a first layer, a fifth beside weights from memory
_CYCLES_PER_VECTOR = 0.6  # of a vector operation on rows or windows
_SCALAR_CYCLES = 2.0  # of an element that is moved or computed alone
_TRANSPOSED_CYCLES = 1.0  # of an element that is read with a stride
_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Split", "Slice")
_MOVERS = (
    "Concat",
    "Expand",
    "Gather",
    "GatherElements",
    "GatherND",
    "Pad",
    "ScatterElements",
    "ScatterND",
    "Tile",
    "Transpose",
    "Where",
)
_WINDOWS = ("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
_CHOOSING = ("Gather", "GatherElements", "GatherND")
_SORTING = ("TopK", "Unique", "NonMaxSuppression")
_ALONE = (
    "AffineGrid",
    "Col2Im",
    "Compress",
    "Det",
    "GridSample",
    "MaxRoiPool",
    "Multinomial",
    "NonZero",
    "RandomNormal",
    "Resize",
    "RoiAlign",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """`cycles` of one core for the arithmetic, with what it loads from L1 and L2; bytes that it reads once besides.

    `operations` are multiplications and additions, or the scalar operations of what multiplies nothing; `unit` is what makes
    them: "fma", "dot", "tile" or "vector". `is_parallel`: its work is dealt to threads. While the first `overlap` of its work is
    done constants arrive: that of a product's first tile of rows, which meets each panel first. Behind products of tiles only
    panels that are prefetched do; those from L3 hide the better the less of the time they are on their way: half of what they
    take is seen where that is as long as the products. What is streamed
    arrives behind the first `streamed_overlap` of the work: of what goes over rows again and again the first trip waits for it.
    """

    cycles: float
    operations: int
    constant_bytes: int = 0
    streamed_bytes: int = 0
    unit: str = "fma"
    is_parallel: bool = True
    overlap: float = 1.0
    is_floor: bool = False  # of a template that has no model of its own
    memory_share: float = 1.0  # of the rate at which memory is read in order, at which its constants come from there
    places: int = 0  # in constants, which only a run knows: rows that indices choose
    streamed_overlap: float = 1.0
    constants_seen: float = UNHIDDEN  # of constants, the part that arithmetic does not hide

    @property
    def bytes_moved(self) -> int:
        return self.constant_bytes + self.streamed_bytes

    def wall_cycles(self, machine: Machine, threads: int = 1, constants_from: float = inf, streamed_from: float = 0.0) -> float:
        """From the launch to the end of the slowest thread, when all threads touched `constants_from` bytes since the constants
        were read, and `streamed_from`, no fewer than its own, since what is streamed was touched."""
        dealt = max(threads, machine.resident) if self.is_parallel else 1
        constants = machine.read_cycles(self.constant_bytes, constants_from, dealt)
        constants /= self.memory_share if constants_from > machine.l3.size_bytes else 1.0
        constants += machine.walk_cycles(self.constant_bytes, constants_from, dealt)
        if constants_from > machine.l3.size_bytes:
            constants += self.places * machine.place_cycles / dealt
        streamed = machine.read_cycles(self.streamed_bytes, max(self.streamed_bytes, streamed_from), dealt)
        work = self.cycles / dealt
        waking = machine.wake_cycles if dealt > 1 else 0.0
        waiting = _waiting(streamed, work * self.streamed_overlap, _UNHIDDEN_BY_TILES if self.unit == "tile" else UNHIDDEN)
        if self.unit == "tile" and machine.l2.size_bytes < constants_from / dealt <= machine.l3.size_bytes / dealt:
            waiting += constants * min(constants / (2 * work), 1.0) if work else constants
        else:
            waiting += _waiting(constants, work * self.overlap, self.constants_seen)
        return machine.launch_cycles + waking + work + waiting


def _waiting(fetched: float, hiding: float, unhidden: float = UNHIDDEN) -> float:
    """What is seen of bytes that arrive in `fetched` cycles while `hiding` cycles of arithmetic are done."""
    hidden = max(min(fetched, hiding), 0.0)
    return fetched - hidden + unhidden * hidden


@estimating
def floors(group: Group, machine: Machine) -> Estimate:
    """Of any group by its operators alone: what each computes for its elements, in vectors where it can."""
    operations = sum(operations_of(op.op_type) * elements_of(group, op) for op in group.ops)
    cycles = sum(_operator_cycles(group, op, machine) for op in group.ops)
    return with_bytes(Estimate(cycles, operations, unit="vector", is_floor=True), group)


@estimating
def with_bytes(estimate: Estimate, group: Group) -> Estimate:
    """The estimate with the bytes of a group's operands and results, each once."""
    sizes = bytes_of_values(group)
    constant = sum(size for name, size in sizes.items() if name in group.constants)
    return replace(estimate, constant_bytes=constant, streamed_bytes=sum(sizes.values()) - constant)


def bytes_of_values(group: Group) -> dict[str, int]:
    """What a group touches of each of its operands and results; of a table no more than what is chosen."""
    sizes = {name: group.types[name].size_bytes for name in (*group.inputs, *group.outputs)}
    for op in group.ops:
        if op.op_type in _CHOOSING and op.inputs[0] in sizes:
            sizes[op.inputs[0]] = min(sizes[op.inputs[0]], group.types[op.outputs[0]].size_bytes)
    return sizes


@estimating
def with_epilogue(estimate: Estimate, group: Group, machine: Machine, anchor: Op) -> Estimate:
    """The estimate of an anchor with the pointwise operators of its group."""
    return replace(estimate, cycles=estimate.cycles + epilogue_cycles(group, machine, anchor))


@estimating
def epilogue_cycles(group: Group, machine: Machine, anchor: Op) -> float:
    """Cycles of the pointwise operators of an anchor's group."""
    return sum(_operator_cycles(group, op, machine) for op in group.ops if op.outputs != anchor.outputs)


def elements_of(group: Group, op: Op) -> int:
    """Of the largest operand or result of an operator."""
    names = [name for name in (*op.inputs, *op.outputs) if name and name not in group.constants]
    return max((group.types[name].elements for name in names), default=0)


def _operator_cycles(group: Group, op: Op, machine: Machine) -> float:
    elements, kind = elements_of(group, op), group.types[op.outputs[0] or op.outputs[-1]]
    lanes = machine.of_items(kind.bytes_of(1)).lanes
    if op.op_type in _VIEWS:
        return 0.0
    if op.op_type in ("MatMul", "Gemm"):
        summed = group.types[op.inputs[0]].shape[0 if op.attribute("transA", 0) else -1]
        return kind.elements * summed / (machine.multiply_adds * lanes)
    if op.op_type in _MOVERS:
        return elements * (_TRANSPOSED_CYCLES if op.op_type == "Transpose" else 1 / lanes)
    if op.op_type in _WINDOWS:
        window = prod(op.attribute("kernel_shape", None) or (1,))
        return _CYCLES_PER_VECTOR * kind.elements * (window if window > 1 else elements / max(kind.elements, 1)) / lanes
    if op.op_type in _SORTING:
        return _SCALAR_CYCLES * elements * log2(max(elements, 2))
    if op.op_type in _ALONE:
        return 8 * _SCALAR_CYCLES * kind.elements
    if op.op_type in OF_ROWS:
        return _CYCLES_PER_VECTOR * operations_of(op.op_type) * elements / lanes
    return operator_body(group, op, machine).cycles(machine) * elements / lanes
