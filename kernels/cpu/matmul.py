"""MatMul and Gemm, batched and broadcast, with their pointwise followers in the tile store."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..builder import Buffer, Expr, Index, KernelBuilder, row_major, unravel
from ..group import Group, Op
from ..template import BuiltKernel, Operand, Pack, Refusal
from ..values import GroupValues, pointwise_obstacle, split_anchor
from .common import finish, new_builder
from .tile_product import PackPanels, Plane, TileProduct, choose_tile, emit

_ACCUMULATORS = {"float16": "float32", "bfloat16": "float32"}
_TYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32", "uint64")


@dataclass(frozen=True)
class _Operands:
    """A product in normal form: out[batch, m, n]. `a_transposed` means that A is stored [k, m], `b_transposed` B as [n, k].

    `a_shape` and `b_shape` are the batch dimensions of each operand, aligned with `batch`, 1 where it broadcasts.
    """

    batch: tuple[int, ...]
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    m: int
    n: int
    k: int
    a_transposed: bool = False
    b_transposed: bool = False


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one MatMul or Gemm with pointwise followers of its output's shape."""
    anchor, followers = split_anchor(group)
    if anchor is None or anchor.op_type not in ("MatMul", "Gemm"):
        return Refusal("has no matrix product")
    a, b = anchor.inputs[:2]
    dtype = group.types[a].dtype
    if dtype not in _TYPES:
        return Refusal(f"no product of {dtype}")
    if reason := pointwise_obstacle(group):
        return Refusal(reason)
    form = _normal_form(group, anchor)
    builder = new_builder(target)
    accumulator = _ACCUMULATORS.get(dtype, dtype)
    constant_a, constant_b = a in group.constants, b in group.constants
    # Columns of a constant B are filled up when packed; others are read where they are, if there is one vector of them.
    staged_b = not constant_b and (form.b_transposed or form.n < builder.lanes(accumulator))
    padded = constant_b or staged_b
    lanes = builder.lanes(accumulator)
    tile = choose_tile(
        form.m, form.n, form.k, lanes, target.vector_registers, shifted_loads=not padded and form.n % lanes != 0, b_padded=padded
    )
    packs: dict[str, Pack] = {}
    if constant_a:
        packs[a] = _panels(form.a_shape, form.m, form.k, tile.rows, lines_last=form.a_transposed)
    if constant_b:
        packs[b] = _panels(form.b_shape, form.n, form.k, tile.columns, lines_last=not form.b_transposed)
    if constant_a and constant_b and a == b:
        return Refusal("both operands are one constant")
    read_a = _reader(builder, group, a, form.a_shape, form, accumulator, packs.get(a), "a", tile.rows, constant_a)
    read_b = _reader(builder, group, b, form.b_shape, form, accumulator, packs.get(b), "b", tile.columns, constant_b or staged_b)
    out = group.outputs[0]
    out_type = group.types[out]
    result = anchor.outputs[0]
    shape = group.types[result].shape

    def store(batch: Expr, m: Expr, r: Expr, n: Expr, value: Expr) -> None:
        index = _output_index(form, shape, batch, m, n)
        total = _with_bias(GroupValues(group, builder), anchor, group, index, value)
        total = total if dtype == accumulator else tirx.Cast(dtype, total)
        values = GroupValues(group, builder, {result: lambda _: total})
        element = values.read(out, index) if followers else total
        offset = (batch * form.m + m) * form.n + n
        builder.store(builder.parameter(out, out_type.elements, out_type.dtype), offset, element)

    product = TileProduct(
        prod(form.batch),
        form.m,
        Plane(form.n, form.n, form.n),
        (form.k,),
        tile,
        accumulator,
        read_a,
        read_b,
        store,
        a_padded=constant_a,
        b_padded=padded,
    )
    emit(builder, product, a_bytes=group.types[a].size_bytes, b_bytes=group.types[b].size_bytes)
    packed = {name: Operand(name, pack) for name, pack in packs.items()}
    return finish("matmul", builder, group, flops=product.flops, packed=packed)


def _normal_form(group: Group, anchor: Op) -> _Operands:
    a, b = (group.types[name].shape for name in anchor.inputs[:2])
    if anchor.op_type == "Gemm":
        transposed_a, transposed_b = bool(anchor.attribute("transA", 0)), bool(anchor.attribute("transB", 0))
        m, k = reversed(a) if transposed_a else a
        n = b[0] if transposed_b else b[1]
        return _Operands((), (), (), m, n, k, transposed_a, transposed_b)
    a = (1, *a) if len(a) == 1 else a
    b = (*b, 1) if len(b) == 1 else b
    rank = max(len(a), len(b)) - 2
    a_batch = (1,) * (rank - len(a) + 2) + a[:-2]
    b_batch = (1,) * (rank - len(b) + 2) + b[:-2]
    batch = tuple(y if x == 1 else x for x, y in zip(a_batch, b_batch, strict=True))
    if prod(b_batch) == 1 and a_batch == batch:  # one B for all: the batch is more rows
        return _Operands((), (), (), prod(batch) * a[-2], b[-1], a[-1])
    return _Operands(batch, a_batch, b_batch, a[-2], b[-1], a[-1])


def _panels(batch: tuple[int, ...], lines: int, depth: int, tile: int, *, lines_last: bool) -> PackPanels:
    rank = len(batch)
    shape = (*batch, depth, lines) if lines_last else (*batch, lines, depth)
    order = (*range(rank), rank + 1, rank) if lines_last else (*range(rank), rank, rank + 1)
    return PackPanels(shape, order, rank, 1, tile)


def _reader(  # type: ignore[no-untyped-def]
    builder: KernelBuilder,
    group: Group,
    name: str,
    batch_shape,
    form: _Operands,
    accumulator: str,
    pack,
    side: str,
    width: int,
    panelled: bool,
):
    """How the tile loads one operand: from packed panels, from a staged copy in panels, or from where it lies."""
    kind = group.types[name]
    lines, depth = (form.m, form.k) if side == "a" else (form.n, form.k)
    transposed = form.a_transposed if side == "a" else not form.b_transposed  # lines run fastest in memory
    panels = -(-lines // width)
    batches = prod(batch_shape)
    if panelled and pack is None:
        buffer = builder.workspace(batches * panels * depth * width, accumulator)
        _stage(builder, group, name, buffer, batches, lines, depth, width, transposed, accumulator)
    elif panelled:
        packed = pack.packed_type(kind)
        buffer = builder.parameter(name, packed.elements, kind.dtype)
    else:
        buffer = builder.parameter(name, kind.elements, kind.dtype)

    def read(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
        (k,) = ks
        base = _batch_offset(form.batch, batch_shape, batch)
        if panelled:
            offset = ((base * panels + panel) * depth + k) * width + line
        elif transposed:
            offset = (base * depth + k) * lines + start + line
        else:
            offset = (base * lines + start + line) * depth + k
        value = buffer[offset]
        return value if str(value.ty) == accumulator else tirx.Cast(accumulator, value)

    return read


def _stage(
    builder: KernelBuilder, group: Group, name: str, buffer: Buffer, batches: int, lines: int, depth: int, width: int,
    transposed: bool, accumulator: str,
) -> None:  # fmt: skip
    """Copy an operand into panels of the workspace, filled up with zeros."""
    values = GroupValues(group, builder)
    panels = -(-lines // width)
    with builder.chunks(batches * panels, batches * panels * depth * width) as chunk:
        batch, panel = builder.bind(tirx.floordiv(chunk, panels)), builder.bind(tirx.floormod(chunk, panels))
        with builder.loop(depth, name="k") as k, builder.loop(width, name="line") as line:
            at = panel * width + line
            inside = tirx.min(at, lines - 1)
            offset = (batch * depth + k) * lines + inside if transposed else (batch * lines + inside) * depth + k
            value = tirx.Cast(accumulator, values.load(name, offset))
            builder.store(buffer, (chunk * depth + k) * width + line, tirx.Select(at < lines, value, tirx.const(0, accumulator)))


def _batch_offset(batch: tuple[int, ...], own: tuple[int, ...], position: Expr) -> Expr:
    """Number of the operand's matrix that belongs to a batch position."""
    if own == batch:
        return position
    index = unravel(position, batch)
    return row_major(tuple(0 if extent == 1 else i for i, extent in zip(index, own, strict=True)), own)


def _output_index(form: _Operands, shape: tuple[int, ...], batch: Expr, m: Expr, n: Expr) -> Index:
    """Index of the anchor's output; rows are unravelled where a batch was folded into them, and 1-D operands have none."""
    rank = len(shape)
    if form.batch:
        lead = unravel(batch, form.batch)
        return (*lead, m, n) if rank == len(lead) + 2 else (*lead, n if form.m == 1 and shape[-1] == form.n else m)[:rank]
    if rank <= 1:
        return () if rank == 0 else ((n,) if form.m == 1 and shape[0] == form.n else (m,))
    if prod(shape) != form.m * form.n or shape[-1] != form.n or prod(shape[:-1]) != form.m:
        return unravel(m * form.n + n, shape)
    return (*unravel(m, shape[:-1]), n)


def _with_bias(values: GroupValues, anchor: Op, group: Group, index: Index, value: Expr) -> Expr:
    """alpha * value + beta * C, for Gemm."""
    if anchor.op_type != "Gemm":
        return value
    dtype = str(value.ty)
    alpha, beta = anchor.attribute("alpha", 1.0), anchor.attribute("beta", 1.0)
    if alpha != 1.0:
        value = value * tirx.const(alpha, dtype)
    if len(anchor.inputs) > 2 and anchor.inputs[2] and beta != 0.0:
        bias = anchor.inputs[2]
        shape = group.types[bias].shape
        tail = index[len(index) - len(shape) :]
        element = values.read(bias, tuple(0 if extent == 1 else i for i, extent in zip(tail, shape, strict=True)))
        element = tirx.Cast(dtype, element)
        value = value + (element * tirx.const(beta, dtype) if beta != 1.0 else element)
    return value
