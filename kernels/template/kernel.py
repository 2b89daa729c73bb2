"""What templates share: the builder, the loop over a tensor's elements, and the finished kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.shapes import same_shape
from ...runtime.symbolic.sizes import Size, SizeLike, hint_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index, KernelBuilder, row_major, unravel
from ..codegen.gpu_builder import GpuBuilder
from ..cost.operations import operations_of
from ..cost.pointwise import LoopBody, narrowing, pointwise_body, widening
from ..expressions.pointwise import POINTWISE
from ..formats.bfloat16 import multiplies_words
from ..formats.format import Format
from ..groups.configuration import Configuration
from ..groups.group import Group, Op
from .contract import BuiltKernel, Operand
from .values import GroupValues

_SHORT_EPILOGUE = 12  # operations: no transcendental function beside scales, bias, activation, residual and rounding
_BLOCK_VECTORS = 64  # vectors of a block of a flat loop: large enough to amortise the loop, small enough to balance threads


def new_builder(target: Target, configuration: Configuration | None = None) -> KernelBuilder:
    """The builder of the target's kernels: a CPU's, or a GPU's, where an iteration of a parallel loop is a thread.

    With a configuration, if only an empty one, the kernel lists its choices.
    """
    if target.is_gpu:
        return GpuBuilder(configuration)
    has_bfloat16 = target.has("avx512_bf16")
    return KernelBuilder(target.machine, target.threads, has_bfloat16=has_bfloat16, configuration=configuration)


def machine_of(target: Target, dtype: str) -> Machine:
    """The target's machine, with lanes of a type."""
    return target.machine.of_items(np.dtype(dtype).itemsize)


def result_machine(group: Group, target: Target) -> Machine:
    """The same for loops that store all outputs of a group: for the widest of them."""
    return target.machine.of_items(max(np.dtype(group.types[name].dtype).itemsize for name in group.outputs))


def pointwise_cost(group: Group) -> int:
    """Scalar operations per element of the group's pointwise operators, a transcendental one counting for twelve."""
    return sum(operations_of(op.op_type) for op in group.ops if op.op_type in POINTWISE)


def has_short_epilogue(group: Group, number_format: Format) -> bool:
    """Whether the epilogue of sums in this format is so short that it may be repeated for each register of a tile: of words of
    bytes, whose products take a fourth of the time that those of floats do."""
    return number_format.longest_chain is None and number_format.k_pack > 1 and pointwise_cost(group) <= _SHORT_EPILOGUE


def anchor_bodies(group: Group, anchor: Op, machine: Machine) -> tuple[LoopBody, LoopBody]:
    """What a loop does to read a vector of an anchor's first operand, and to store one of its result: with what is pointwise
    before and after it."""
    name, result = anchor.inputs[0], anchor.outputs[0]
    sources = _sources(group, name)
    before = [op for op in group.ops if op.outputs[0] in sources and op.outputs[0] not in group.inputs]
    after = [op for op in group.ops if op is not anchor and op.op_type in POINTWISE and op.outputs[0] not in sources]
    elements = group.types[name].elements
    read = [one for one in sources if one in group.inputs and group.types[one].elements == elements]
    made = {one for op in after for one in op.outputs} | {result}
    beside = {one for op in after for one in op.inputs if one and one not in made and group.types[one].elements > 1}
    load = pointwise_body(group, before, machine) + LoopBody(widening(group.types[name].dtype), loads=len(read))
    rounded = narrowing(group.types[result].dtype, machine)
    store = pointwise_body(group, after, machine) + LoopBody(rounded, loads=len(beside), stores=len(group.outputs))
    return load, store


def _sources(group: Group, name: str) -> set[str]:
    """A value and all that pointwise operators compute it from."""
    found, waiting = set[str](), [name]
    while waiting:
        value = waiting.pop()
        if value and value not in found:
            found.add(value)
            waiting += group.producers[value].inputs if value in group.producers else ()
    return found


def map_elements(
    builder: KernelBuilder, shape: tuple[SizeLike, ...], lanes: int, work: SizeLike, element: Callable[[Index], None]
) -> None:
    """Call `element` once for each index of `shape`, vectorised along the last dimension and dealt to the threads.

    On a GPU `lanes` divide that dimension: neighbours that a thread takes. `work` is the estimated number of scalar operations of
    the whole.
    """
    if prod(shape) == 0:
        return
    *outer, inner = shape or (1,)
    if isinstance(builder, GpuBuilder):
        with builder.chunks(prod(shape) // lanes, work) as i:
            index = unravel(i, (*outer, inner // lanes))
            with builder.neighbours(lanes) as e:
                element((*index[:-1], index[-1] * lanes + e) if lanes > 1 else index)
        return
    rows = prod(outer)
    if isinstance(rows, Size) or rows > 1:
        with builder.chunks(rows, work) as row:
            index = unravel(row, outer)
            builder.vector_loop(inner, lanes, lambda i: element((*index, i)))
        return
    leading = (0,) * len(outer)
    block = lanes * _BLOCK_VECTORS
    if isinstance(inner, Size):
        with builder.chunks(-(-inner // block), work) as b:
            begin = builder.bind(b * block)
            end = builder.bind(tirx.min(begin + block, inner))
            builder.dynamic_vector_loop(begin, end, lanes, lambda i: element((*leading, i)))
        return
    whole = inner // block
    if whole:
        with builder.chunks(whole, work) as b:
            builder.vector_loop(block, lanes, lambda i: element((*leading, b * block + i)))
    if inner - whole * block:
        builder.vector_loop(inner - whole * block, lanes, lambda i: element((*leading, whole * block + i)))


def store_outputs(values: GroupValues, index: Index) -> None:
    """Store the element at `index` of all outputs of a group, which have one shape."""
    store_elements(values.builder, values.group, index, result_elements(values, index))


def result_elements(values: GroupValues, index: Index) -> list[Expr]:
    """The element at `index` of each output of a group."""
    results = [values.read(name, index) for name in values.group.outputs]
    if len(results) > 1 and not values.builder.is_grid:  # all before the first is stored, in place of what another reads
        results = [values.builder.name(result) for result in results]
    return results


def store_elements(builder: KernelBuilder, group: Group, index: Index, results: Sequence[Expr]) -> None:
    """Store these elements of the outputs of a group."""
    for name, result in zip(group.outputs, results, strict=True):
        kind = group.types[name]
        builder.store(builder.parameter(name, kind.elements, kind.dtype), row_major(index, kind.shape), result)


def narrowest_lanes(builder: KernelBuilder, group: Group) -> int:
    """Lanes of a loop that stores all outputs of the group: those of the widest type."""
    return min(builder.lanes(group.types[name].dtype) for name in group.outputs)


def finish(
    template: str,
    builder: KernelBuilder,
    group: Group,
    *,
    flops: int,
    packed: dict[str, Operand] | None = None,
    inplace: tuple[tuple[int, str], ...] = (),
) -> BuiltKernel:
    """The kernel with its parameters in calling order: operands in order of first use, then the group's outputs.

    `packed` gives, for parameters that are not simply inputs of the group, the packed constants that they are.
    `inplace` pairs outputs, by their number, with operands whose memory they may take: the kernel reads each element of these
    before it writes it.
    """
    builder.load_dimensions()
    for name in group.outputs:  # an output that is never stored (it has no elements) is still a parameter
        if name not in builder.parameter_names:
            builder.parameter(name, group.types[name].elements, group.types[name].dtype)
    operands = [name for name in builder.parameter_names if name not in group.outputs]
    builder.order_parameters((*operands, *group.outputs))
    function = builder.function(aliased=bool(inplace))
    return BuiltKernel(
        template,
        function,
        tuple((packed or {}).get(name, Operand(name)) for name in operands),
        builder.workspace_bytes,
        builder.barrier_bytes,
        tuple((output, operands.index(name)) for output, name in inplace if name in operands),
        hint_of(flops),
        builder.tiles or ("bfloat16" if not builder.is_grid and multiplies_words(function) else "float32"),
        builder.work,
        choices=tuple(builder.choices),
    )


def same_place_operands(group: Group) -> tuple[tuple[int, str], ...]:
    """Inputs that a pointwise group reads only at the element that it writes, so that an output, by its number, may alias them.

    That is where all values have the shape of the outputs, or broadcast to it.
    """
    free = [name for name in group.inputs if name not in group.constants]
    types = group.types
    return tuple(
        (number, name)
        for number, output in enumerate(group.outputs)
        for name in free
        if types[name].bits == types[output].bits and same_shape(types[name].shape, types[output].shape)
    )


def epilogue_operands(builder: KernelBuilder, group: Group, anchor: Op) -> tuple[tuple[int, str], ...]:
    """Inputs that the epilogue alone reads, and only at the element that it then stores, so that an output, by its number, may
    alias them: in a kernel that computes the epilogue once for each element.

    Gemm adds its third operand where it stores, too. None on GPUs, whose grids follow each other, where views or others stand
    around the anchor, and where no state is read: kernels that may write where they read are slower by 1%.
    """
    if builder.is_grid or not group.updates_state or any(op is not anchor and op.op_type not in POINTWISE for op in group.ops):
        return ()
    operands = anchor.inputs[:2] if anchor.op_type == "Gemm" else anchor.inputs
    before = set(group.zero_points.values()).union(*(_sources(group, name) for name in operands))
    shape = group.types[anchor.outputs[0]].shape
    return tuple(
        (number, name)
        for number, name in same_place_operands(group)
        if name not in before and group.outputs[number] not in anchor.outputs[1:] and same_shape(group.types[name].shape, shape)
    )


def minimum(a: Expr, b: Expr) -> Expr:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.min(a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.max(a, b)
