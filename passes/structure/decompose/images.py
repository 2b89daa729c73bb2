"""Operators on images: BatchNormalization, ConvTranspose, DeformConv, EyeLike, GlobalLpPool and MaxUnpool."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from .common import dims

_FLOAT, _DOUBLE = int(ir.DataType.FLOAT), int(ir.DataType.DOUBLE)
_MOST_DIAGONALS = 1 << 16  # rows and columns of an EyeLike, whose numbers are constants
_MOST_PHASES = 16  # of a ConvTranspose's output positions, that its template takes
_MOST_DEFORMED_DIMENSIONS = 3  # that GridSample has


def batch_normalization(node: ir.Node) -> str | None:
    """scale (x - mean) / sqrt(var + epsilon) + bias, of given statistics or, in training mode, of the batch's own.

    In training mode the running statistics move towards those of the batch, whose variance is that of the population.
    """
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return None
    rank = len(dims(x))
    working = _DOUBLE if any(v is not None and v.dtype == ir.DataType.DOUBLE for v in node.inputs) else _FLOAT
    column = [-1 if axis == min(1, rank - 1) else 1 for axis in range(rank)]
    training = node.attributes.get_int("training_mode", 0) != 0
    body = f"""whole = Cast<to={working}>(i0) column = Constant<value_ints={column}>()
        epsilon = Constant<value_float={node.attributes.get_float("epsilon", 1e-5)!r}>() least = Cast<to={working}>(epsilon) """
    for position, name in enumerate(("scale", "bias", "mean", "variance"), start=1):
        body += f"flat{position} = Cast<to={working}>(i{position}) given_{name} = Reshape(flat{position}, column) "
    if training:
        axes = [axis for axis in range(rank) if axis != min(1, rank - 1)]
        body += f"""axes = Constant<value_ints={axes}>() mean = ReduceMean<keepdims=1>(whole, axes) centred = Sub(whole, mean)
            squares = Mul(centred, centred) variance = ReduceMean<keepdims=1>(squares, axes) """
    else:
        body += "centred = Sub(whole, given_mean) variance = Identity(given_variance) "
    body += f"""safe = Add(variance, least) deviation = Sqrt(safe) factor = Div(given_scale, deviation)
        scaled = Mul(centred, factor) moved = Add(scaled, given_bias) y = Cast<to={int(x.dtype)}>(moved) """
    if training:
        body += _running_statistics(node, working)
    return body if training or len(node.outputs) == 1 else None


def _running_statistics(node: ir.Node, working: int) -> str:
    momentum = node.attributes.get_float("momentum", 0.9)
    body = f"""kept_share = Constant<value_float={momentum!r}>() kept = Cast<to={working}>(kept_share)
        one_number = Constant<value_float=1.0>() one = Cast<to={working}>(one_number) taken = Sub(one, kept)
        flat = Constant<value_ints=[-1]>() """
    for position, name in ((1, "mean"), (2, "variance")):
        given = node.inputs[2 + position]
        assert given is not None
        assert given.dtype is not None
        body += f"""kept_{name} = Mul(given_{name}, kept) taken_{name} = Mul({name}, taken)
            sum_{name} = Add(kept_{name}, taken_{name}) flat_{name} = Reshape(sum_{name}, flat)
            y{position} = Cast<to={int(given.dtype)}>(flat_{name}) """
    return body


def conv_transpose(node: ir.Node) -> str | None:
    """A matrix product whose columns Col2Im adds up, where the strides are so large that each output has few taps.

    None where they are not: the convolution template is faster up to 16 phases of output positions and does not take more.
    """
    x, weights, result = (dims(value) for value in (node.inputs[0], node.inputs[1], node.outputs[0]))
    rank, groups = len(x) - 2, node.attributes.get_int("group", 1)
    strides, dilations = (node.attributes.get_ints(name) or [1] * rank for name in ("strides", "dilations"))
    if prod(strides) <= _MOST_PHASES or len(result) != rank + 2:
        return None
    begins, ends = _cuts(node, x[2:], weights[2:], result[2:])
    image = [extent + min(end, 0) for extent, end in zip(result[2:], ends, strict=True)]
    if 0 in (*x, *weights) or min(image) < 1:
        return None
    channels, columns = weights[1] * groups, weights[1] * prod(weights[2:])
    body = f"""rows_shape = Constant<value_ints={[groups, x[1] // groups, columns]}>() rows = Reshape(i1, rows_shape)
        turned = Transpose<perm=[0, 2, 1]>(rows)
        places_shape = Constant<value_ints={[x[0], groups, x[1] // groups, prod(x[2:])]}>() places = Reshape(i0, places_shape)
        products = MatMul(turned, places)
        blocks_shape = Constant<value_ints={[x[0], groups * columns, prod(x[2:])]}>() blocks = Reshape(products, blocks_shape)
        image = Constant<value_ints={image}>() block = Constant<value_ints={list(weights[2:])}>()
        sums = Col2Im<strides={list(strides)}, dilations={list(dilations)}, pads={[*begins, *(max(end, 0) for end in ends)]}>(
            blocks, image, block)
        beyond = Constant<value_ints={[*[0] * (rank + 4), *(max(-end, 0) for end in ends)]}>() full = Pad(sums, beyond) """
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return body + "y = Identity(full)"
    return (
        body + f"bias_shape = Constant<value_ints={[channels, *[1] * rank]}>() bias = Reshape(i2, bias_shape) y = Add(full, bias)"
    )


def _cuts(
    node: ir.Node, extents: Sequence[int], kernel: Sequence[int], result: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """What a ConvTranspose's sums lose before and after each spatial axis; after it less than 0 where zeros are added.

    Its operator text says: `pads`, or what makes the result as large as `auto_pad` or `output_shape` ask.
    """
    rank = len(extents)
    strides, dilations = (node.attributes.get_ints(name) or [1] * rank for name in ("strides", "dilations"))
    sides = zip(extents, strides, dilations, kernel, result, strict=True)
    totals = [(extent - 1) * s + d * (k - 1) + 1 - out for extent, s, d, k, out in sides]
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if auto == "NOTSET" and "output_shape" not in node.attributes:
        begins = list((node.attributes.get_ints("pads") or [0] * (2 * rank))[:rank])
    elif auto == "VALID":
        begins = [0] * rank
    else:
        extra = node.attributes.get_ints("output_padding") or [0] * rank
        shared = [max(total + more, 0) for total, more in zip(totals, extra, strict=True)]
        begins = [whole // 2 if auto == "SAME_UPPER" else whole - whole // 2 for whole in shared]
    return begins, [total - begin for total, begin in zip(totals, begins, strict=True)]


def deform_conv(node: ir.Node) -> str | None:
    """The operand sampled at the displaced places of every window, times the weights.

    The samples are those of GridSample: linear between elements, 0 outside. Places are float64, so that bringing them into
    GridSample's range of -1 to 1 and back costs nothing.
    """
    x, weights, offset = (dims(node.inputs[position]) for position in range(3))
    rank = len(x) - 2
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    if dtype is None or not 1 <= rank <= _MOST_DEFORMED_DIMENSIONS or 0 in (*x, *weights, *offset):
        return None
    groups, kernel, places = node.attributes.get_int("offset_group", 1), weights[2:], offset[2:]
    taps = prod(kernel)
    body = f"""wide = Cast<to={_DOUBLE}>(i2)
        offsets_shape = Constant<value_ints={[x[0], groups, taps, rank, *places]}>() offsets = Reshape(wide, offsets_shape) """
    for axis in range(rank):
        body += _coordinates(node, axis, x[2 + axis], kernel, places)
    extra = [1] * (rank == 1)  # GridSample has two dimensions at least
    names = [f"place{axis}" for axis in reversed(range(rank))]
    if extra:
        body += "none = Sub(place0, place0) "
        names.append("none")
    body += f"""points = Concat<axis=-1>({", ".join(names)})
        grid_shape = Constant<value_ints={[x[0] * groups, *extra, taps * places[0], *places[1:], rank + len(extra)]}>()
        grid = Reshape(points, grid_shape)
        image_shape = Constant<value_ints={[x[0] * groups, x[1] // groups, *extra, *x[2:]]}>() image = Reshape(i0, image_shape)
        sampled = GridSample<align_corners=0, padding_mode="zeros">(image, grid)
        samples_shape = Constant<value_ints={[x[0], groups, x[1] // groups, taps, *places]}>()
        samples = Reshape(sampled, samples_shape) """
    return body + _deformed_product(node, x, weights, places, groups)


def _coordinates(node: ir.Node, axis: int, extent: int, kernel: Sequence[int], places: Sequence[int]) -> str:
    """Text that makes `place<axis>`: [image, offset group, tap, *places, 1], where along one axis each tap reads."""
    rank, taps = len(kernel), prod(kernel)
    strides, dilations, pads = (node.attributes.get_ints(name) for name in ("strides", "dilations", "pads"))
    step, spread, before = (strides or [1] * rank)[axis], (dilations or [1] * rank)[axis], (pads or [0] * rank)[axis]
    inner = prod(kernel[axis + 1 :])
    at_tap = [float(tap // inner % kernel[axis] * spread - before) for tap in range(taps)]
    at_place = [float(place * step) for place in range(places[axis])]
    column = [1, 1, taps, *[1] * rank]
    row = [1, 1, 1, *(extent if d == axis else 1 for d, extent in enumerate(places))]
    return f"""axis{axis} = Constant<value_int={axis}>() moved{axis} = Gather<axis=3>(offsets, axis{axis})
        taps{axis} = Constant<value = double[{taps}] {{{_numbers(at_tap)}}}>()
        column{axis} = Constant<value_ints={column}>() tap{axis} = Reshape(taps{axis}, column{axis})
        starts{axis} = Constant<value = double[{places[axis]}] {{{_numbers(at_place)}}}>()
        row{axis} = Constant<value_ints={row}>() start{axis} = Reshape(starts{axis}, row{axis})
        origin{axis} = Add(tap{axis}, start{axis}) at{axis} = Add(moved{axis}, origin{axis})
        factor{axis} = Constant<value = double {{{2 / extent!r}}}>()
        shift{axis} = Constant<value = double {{{1 / extent - 1!r}}}>()
        scaled{axis} = Mul(at{axis}, factor{axis}) normal{axis} = Add(scaled{axis}, shift{axis})
        behind{axis} = Constant<value_ints=[-1]>() place{axis} = Unsqueeze(normal{axis}, behind{axis}) """


def _deformed_product(node: ir.Node, x: Sequence[int], weights: Sequence[int], places: Sequence[int], offset_groups: int) -> str:
    """Text that makes `y` of the samples: the mask, the product with the weights of each group, the bias."""
    groups, taps = node.attributes.get_int("group", 1), prod(weights[2:])
    depth = x[1] // groups * taps
    body = ""
    has_mask = len(node.inputs) > 4 and node.inputs[4] is not None
    if has_mask:
        body += f"""mask_shape = Constant<value_ints={[x[0], offset_groups, 1, taps, *places]}>() mask = Reshape(i4, mask_shape)
            masked = Mul(samples, mask) """
    body += f"""columns_shape = Constant<value_ints={[x[0], groups, depth, prod(places)]}>()
        columns = Reshape({"masked" if has_mask else "samples"}, columns_shape)
        rows_shape = Constant<value_ints={[groups, weights[0] // groups, depth]}>() rows = Reshape(i1, rows_shape)
        product = MatMul(rows, columns) result_shape = Constant<value_ints={[x[0], weights[0], *places]}>() """
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return (
            body
            + f"""sums = Reshape(product, result_shape) bias_shape = Constant<value_ints={[-1, *[1] * len(places)]}>()
            bias = Reshape(i3, bias_shape) y = Add(sums, bias)"""
        )
    return body + "y = Reshape(product, result_shape)"


def eye_like(node: ir.Node) -> str | None:
    """1 where the column is the row plus k."""
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return None
    rows, columns = dims(x) if len(dims(x)) == 2 else dims(x) * 2
    result = node.attributes.get_int("dtype", 0) or int(x.dtype)
    if rows + columns > _MOST_DIAGONALS or 0 in (rows, columns):
        return None
    first = node.attributes.get_int("k", 0)
    return f"""columns = Constant<value_ints={list(range(columns))}>() down = Constant<value_ints={[rows, 1]}>()
        diagonals = Constant<value_ints={list(range(first, first + rows))}>() rows = Reshape(diagonals, down)
        ones = Equal(rows, columns) y = Cast<to={result}>(ones)"""


def global_lp_pool(node: ir.Node) -> str | None:
    """The p-norm over all spatial dimensions."""
    x = node.inputs[0]
    rank, order = len(dims(x)), node.attributes.get_int("p", 2)
    if x is None or x.dtype is None or rank < 3 or order < 1:
        return None
    body = f"axes = Constant<value_ints={list(range(2, rank))}>() "
    if order in (1, 2):
        return body + f"y = ReduceL{order}<keepdims=1>(i0, axes)"
    working = _DOUBLE if x.dtype == ir.DataType.DOUBLE else _FLOAT
    return (
        body
        + f"""whole = Cast<to={working}>(i0) sizes = Abs(whole)
        order = Constant<value = double {{{float(order)!r}}}>() power = CastLike(order, whole) raised = Pow(sizes, power)
        sum = ReduceSum<keepdims=1>(raised, axes) inverse = Constant<value = double {{{1 / order!r}}}>()
        root = CastLike(inverse, whole) norm = Pow(sum, root) y = Cast<to={int(x.dtype)}>(norm)"""
    )


def max_unpool(node: ir.Node) -> str | None:
    """Zeros with the elements scattered to their flat indices; a larger output_shape has zeros behind each dimension."""
    x = dims(node.inputs[0])
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    rank = len(x) - 2
    kernel = node.attributes.get_ints("kernel_shape")
    if dtype is None or kernel is None:
        return None
    strides, pads = node.attributes.get_ints("strides") or [1] * rank, node.attributes.get_ints("pads") or [0] * (2 * rank)
    spatial = zip(x[2:], strides, kernel, pads[:rank], pads[rank:], strict=True)
    shape = [*x[:2], *((extent - 1) * step - low - high + width for extent, step, width, low, high in spatial)]
    given = node.inputs[2] if len(node.inputs) > 2 else None
    sizes = shape if given is None else constant_array(given)
    if sizes is None or len(sizes) != len(shape):
        return None
    wanted = [int(extent) for extent in sizes]
    after = [a - b for a, b in zip(wanted, shape, strict=True)]
    if min(after) < 0 or 0 in wanted:
        return None
    rest = (
        f"ends = Constant<value_ints={[0] * len(shape) + after}>() y = Pad(whole, ends)" if any(after) else "y = Identity(whole)"
    )
    return f"""flat = Constant<value_ints=[-1]>() values = Reshape(i0, flat) places = Reshape(i1, flat)
        count = Constant<value_ints={[prod(shape)]}>() nothing = Constant<value_float=0.0>() zero = Cast<to={int(dtype)}>(nothing)
        zeros = Expand(zero, count) scattered = ScatterElements<axis=0>(zeros, places, values)
        shape = Constant<value_ints={shape}>() whole = Reshape(scattered, shape)
        {rest}"""


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(map(repr, values))
