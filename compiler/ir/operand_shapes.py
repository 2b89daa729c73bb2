"""Which shapes the operands of an operator may have beside each other, where onnx's inference does not ask.

Kernels read as many elements as one operand promises, also of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import onnx_ir as ir

from ...runtime.symbolic.sizes import Size
from .constants import constant_array
from .symbolic.symbols import sizes_of

Dims = tuple[int, ...]
Fault = str | None
Rule = Callable[[ir.Node], Fault]
_POINT: ContextVar[int | None] = ContextVar("point", default=None)

# For each input in a row its shape: a letter is one extent everywhere, a number itself, "*" any extents, "*" with a letter the
# same ones everywhere; "|" stands between alternatives, of which the first that fits counts. An empty one is a scalar.
_SHAPES: dict[str, tuple[str, ...]] = {
    "AffineGrid": ("N 2 3|N 3 4",),
    "Attention": ("B H S D|B S Q", "B G T D|B T K", "B G T E|B T V", "*", "B I P J", "B I P L", "B"),
    "Conv": ("*", "M *", "M"),
    "ConvInteger": ("*", "M *", "|1", "|1|M"),
    "DeformConv": ("N *", "M *", "N *", "M", "N *"),
    "GridSample": ("N *", "N *"),
    "InstanceNormalization": ("N C *", "C", "C"),
    "MatMulInteger": ("K|* M K", "K|* K N", "|1|M|* M 1", "|1|N|* 1 N"),
    "MaxRoiPool": ("N C H W", "R 5"),
    "MaxUnpool": ("*D", "*D"),
    "NegativeLogLikelihoodLoss": ("N C *D", "N *D", "C"),
    "NonMaxSuppression": ("B S 4", "B C S"),
    "QLinearConv": ("*", "|1", "|1", "M *", "|1|M", "|1|M", "|1", "|1", "M"),
    "QLinearMatMul": ("K|* M K", *["|1|M|* M 1"] * 2, "K|* K N", *["|1|N|* 1 N"] * 2, *["|1|M|* M 1"] * 2),
    "RoiAlign": ("N C H W", "R 4", "R"),
    "SoftmaxCrossEntropyLoss": ("N C *D", "N *D", "C"),
}


def shape_rules(operator: str) -> tuple[Rule, ...]:
    """What to ask of the shapes of an operator's operands: each says what is wrong, None where nothing or a shape is unknown."""
    pattern = (_fits_pattern,) if operator in _SHAPES else ()
    return (*pattern, *_RULES.get(operator, ()))


def dims_of(value: ir.Value | None) -> Dims | None:
    """The extents of a value, None where one is unknown or the value is absent. What a call decides is known `at_point`."""
    sizes, point = sizes_of(value), _POINT.get()
    if sizes is None or (point is None and any(isinstance(size, Size) for size in sizes)):
        return None
    return tuple(int(size.values[point]) if isinstance(size, Size) else size for size in sizes)


@contextmanager
def at_point(place: int) -> Iterator[None]:
    """Inside, `dims_of` tells the extents at one point of the domain of sizes."""
    token = _POINT.set(place)
    try:
        yield
    finally:
        _POINT.reset(token)


def _fits_pattern(node: ir.Node) -> Fault:
    bound: dict[str, Dims] = {}
    for value, pattern in zip(node.inputs, _SHAPES[node.op_type], strict=False):
        dims = dims_of(value)
        if dims is None:
            continue
        fitting = (found for form in pattern.split("|") if (found := _bind(form.split(), dims, bound)) is not None)
        found = next(fitting, None)
        if found is None:
            known = ", ".join(f"{letter} = {list(of) if len(of) != 1 else of[0]}" for letter, of in bound.items())
            return f"has {_describe(value)}, where [{pattern.replace(' ', ', ')}] is asked for" + (
                f" with {known}" if known else ""
            )
        bound = found
    return None


def _bind(form: Sequence[str], dims: Dims, bound: dict[str, Dims]) -> dict[str, Dims] | None:
    """What letters stand for if a shape has this form, as far as `bound` knows them; None if it has not."""
    starred = [place for place, token in enumerate(form) if token.startswith("*")]
    if len(dims) < len(form) - len(starred) or (not starred and len(dims) != len(form)):
        return None
    spans: list[Dims] = []
    for place in range(len(form)):
        rest = len(form) - place - 1
        end = len(dims) - rest if place in starred else sum(map(len, spans)) + 1
        spans.append(dims[sum(map(len, spans)) : end])
    found = dict(bound)
    for token, span in zip(form, spans, strict=True):
        if token == "*":
            continue
        if span != ((int(token),) if token.isdigit() else found.setdefault(token, span)):
            return None
    return found


def _describe(value: ir.Value | None) -> str:
    assert value is not None
    assert value.shape is not None
    return f"{value.name} of shape {list(value.shape)}"


def _is_broadcast(dims: Dims, target: Dims) -> bool:
    """Whether a shape is broadcast to another one that stays as it is."""
    return len(dims) <= len(target) and all(a in (1, b) for a, b in zip(reversed(dims), reversed(target), strict=False))


def _statistics(node: ir.Node) -> Fault:
    """BatchNormalization: a number for each channel; a line of numbers is of one."""
    data = dims_of(node.inputs[0])
    if not data:
        return None
    channels = data[1] if len(data) > 1 else 1
    return _first_fault(node, range(1, 5), lambda dims: dims == (channels,), f"{channels} numbers")


def channels_of_groups(node: ir.Node, opset: int | None = None) -> Fault:
    """GroupNormalization: factors for each channel, before opset 21 for each group, and channels in equal groups.

    `opset` is the graph's, if it is left out; a branch or a body does not say.
    """
    data = dims_of(node.inputs[0])
    groups = node.attributes.get_int("num_groups", 1)
    if data is None or len(data) < 2:
        return None
    if groups < 1 or data[1] % groups:
        return f"has {data[1]} channels in {groups} groups"
    if opset is None:
        opset = 21 if node.graph is None else node.graph.opset_imports.get("", 21)
    expected = groups if opset < 21 else data[1]
    return _first_fault(node, range(1, 3), lambda dims: dims == (expected,), f"{expected} factors")


def _first_fault(node: ir.Node, places: Sequence[int], fits: Callable[[Dims], bool], wanted: str) -> Fault:
    for place in places:
        value = node.inputs[place] if place < len(node.inputs) else None
        dims = dims_of(value)
        if dims is not None and not fits(dims):
            return f"has {_describe(value)}, where {wanted} are asked for"
    return None


def _factors_of_rows(node: ir.Node) -> Fault:
    """Scale and bias are broadcast to the data, not to its rows alone: there may be others for each of them."""
    data = dims_of(node.inputs[0])
    if data is None:
        return None
    return _first_fault(node, range(1, len(node.inputs)), lambda dims: _is_broadcast(dims, data), f"factors for {list(data)}")


def _slope(node: ir.Node) -> Fault:
    data = dims_of(node.inputs[0])
    if data is None:
        return None
    return _first_fault(node, (1,), lambda dims: _is_broadcast(dims, data), f"slopes for {list(data)}")


def _summand(node: ir.Node) -> Fault:
    """Gemm: C is broadcast to the product."""
    product = None if not node.outputs else dims_of(node.outputs[0])
    if product is None:
        return None
    return _first_fault(node, (2,), lambda dims: _is_broadcast(dims, product), f"summands for {list(product)}")


def _filter(node: ir.Node) -> Fault:
    """The window that an attribute names is that of the weights; a transposed convolution has a bias for each of its channels."""
    place = 3 if node.op_type == "QLinearConv" else 1
    weight, window = dims_of(node.inputs[place]), node.attributes.get_ints("kernel_shape", ())
    if weight is None:
        return None
    if window and tuple(window) != weight[2:]:
        return f"has kernel_shape {list(window)} and weights {list(weight)}"
    if node.op_type != "ConvTranspose" or len(weight) < 2:
        return None
    channels = weight[1] * node.attributes.get_int("group", 1)
    return _first_fault(node, (2,), lambda dims: dims == (channels,), f"{channels} numbers")


def _scales(node: ir.Node) -> Fault:
    """Q/DQ: one scale, one for each place of an axis, or one for each block of it; zero points as many."""
    data, scale = (dims_of(value) for value in node.inputs[:2])
    if data is None or scale is None:
        return None
    block = node.attributes.get_int("block_size", 0)
    axis = node.attributes.get_int("axis", 1)
    axis += len(data) if axis < 0 else 0
    if block and 0 <= axis < len(data):
        wanted = {(*data[:axis], -(-data[axis] // block), *data[axis + 1 :])}
    else:
        wanted = {(), (1,)} | ({(data[axis],)} if 0 <= axis < len(data) else set())
    if scale not in wanted:
        return f"has {_describe(node.inputs[1])} for {list(data)}" + (f" in blocks of {block}" if block else f", axis {axis}")
    return _first_fault(node, (2,), lambda dims: dims == scale or prod(dims) == prod(scale) == 1, f"zero points {list(scale)}")


def _elements(node: ir.Node) -> Fault:
    """GatherElements and ScatterElements: indices lie within the data but along the axis; updates are as many."""
    data, indices = (dims_of(value) for value in node.inputs[:2])
    if data is None or indices is None or len(data) != len(indices):
        return None if data is None or indices is None else f"has data {list(data)} and indices {list(indices)}"
    if not data:
        return "has scalars, which have no axis"
    axis = node.attributes.get_int("axis", 0) % len(data)
    if any(index > extent for place, (index, extent) in enumerate(zip(indices, data, strict=True)) if place != axis):
        return f"has indices {list(indices)} beyond its data {list(data)}"
    return _first_fault(node, (2,), lambda dims: dims == indices, f"updates {list(indices)}")


def _places(node: ir.Node) -> Fault:
    """GatherND and ScatterND: the last axis of the indices counts axes of the data, the others are those of the updates."""
    data, indices = (dims_of(value) for value in node.inputs[:2])
    if data is None or indices is None:
        return None
    batches = node.attributes.get_int("batch_dims", 0)
    if not indices or not batches <= min(len(indices) - 1, len(data)) or data[:batches] != indices[:batches]:
        return f"has data {list(data)} and indices {list(indices)} with {batches} batch dimensions"
    if indices[-1] > len(data) - batches:
        return f"has indices {list(indices)} for the {len(data)} axes of {list(data)}"
    if node.op_type == "GatherND":
        return None
    updates = indices[:-1] + data[indices[-1] :]
    return _first_fault(node, (2,), lambda dims: dims == updates, f"updates {list(updates)}")


def _lengths(node: ir.Node) -> Fault:
    """ReverseSequence: a length for each batch; batches and steps are the two leading axes."""
    data = dims_of(node.inputs[0])
    axis, steps = node.attributes.get_int("batch_axis", 1), node.attributes.get_int("time_axis", 0)
    if {axis, steps} != {0, 1}:
        return f"has batch_axis {axis} and time_axis {steps}, where one is 0 and the other 1"
    if data is None or len(data) < 2:
        return None if data is None else f"has data {list(data)}, without two axes"
    return _first_fault(node, (1,), lambda dims: dims == (data[axis],), f"{data[axis]} lengths")


def _grid(node: ir.Node) -> Fault:
    """GridSample: a coordinate for each axis of the image."""
    data = dims_of(node.inputs[0])
    if data is None or len(data) < 3:
        return None
    axes = len(data) - 2
    return _first_fault(node, (1,), lambda dims: len(dims) == len(data) and dims[-1] == axes, f"points of {axes} coordinates")


def _offsets(node: ir.Node) -> Fault:
    """DeformConv: offsets for both axes of each element of a window, masks for each, at each place of the result."""
    weight, result = dims_of(node.inputs[1]), dims_of(node.outputs[0])
    if weight is None or result is None:
        return None
    elements = node.attributes.get_int("offset_group", 1) * prod(weight[2:])
    offsets, masks = ((result[0], count * elements, *result[2:]) for count in (len(weight) - 2, 1))
    fault = _first_fault(node, (2,), lambda dims: dims == offsets, f"offsets {list(offsets)}")
    return fault or _first_fault(node, (4,), lambda dims: dims == masks, f"masks {list(masks)}")


def _parts(node: ir.Node) -> Fault:
    """Split: parts of the data, whose extents along the axis sum to its own."""
    data, axis = dims_of(node.inputs[0]), node.attributes.get_int("axis", 0)
    if data is None or not -len(data) <= axis < len(data):
        return None
    axis %= len(data)
    parts = [dims_of(value) for value in node.outputs]
    known = [dims for dims in parts if dims is not None]
    if any((*dims[:axis], *dims[axis + 1 :]) != (*data[:axis], *data[axis + 1 :]) for dims in known):
        return f"has data {list(data)} and parts {list(map(list, known))}"
    total = sum(dims[axis] for dims in known)
    if total > data[axis] or (len(known) == len(parts) and total != data[axis]):
        return f"has {data[axis]} elements along its axis and parts of {total}"
    return None


def _condition(node: ir.Node) -> Fault:
    """Compress: no more conditions than there are slices, or elements where no axis is named."""
    data = dims_of(node.inputs[0])
    if data is None:
        return None
    axis = node.attributes.get_int("axis", -len(data) - 1) if "axis" in node.attributes else None
    count = prod(data) if axis is None else data[axis] if -len(data) <= axis < len(data) else None
    if count is None:
        return None
    return _first_fault(node, (1,), lambda dims: len(dims) == 1 and dims[0] <= count, f"at most {count} conditions")


def _letters(node: ir.Node) -> Fault:
    """Einsum: a letter stands for one extent, or for 1."""
    equation = node.attributes.get_string("equation", "").replace(" ", "").split("->")[0]
    extents: dict[str, int] = {}
    for term, value in zip(equation.split(","), node.inputs, strict=False):
        dims = dims_of(value)
        if dims is None:
            continue
        head, dots, tail = term.partition("...")
        if len(dims) < len(head) + len(tail) or (not dots and len(dims) != len(head)):
            return f"has {_describe(value)} for {term}"
        named = [*zip(head, dims, strict=False), *zip(tail, dims[len(dims) - len(tail) :], strict=True)]
        for letter, extent in named:
            before = extents.get(letter, 1)
            if 1 not in (before, extent) and before != extent:
                return f"has {_describe(value)} for {term}, where {letter} is {before}"
            extents[letter] = extent if before == 1 else before
    return None


def _blocks(node: ir.Node) -> Fault:
    """DepthToSpace takes apart channels, SpaceToDepth planes, into blocks without a rest."""
    data, size = dims_of(node.inputs[0]), node.attributes.get_int("blocksize", 1)
    if data is None:
        return None
    if size < 1 or len(data) != 4:
        return f"has blocks of {size} and data {list(data)}"
    parts = (data[1] % size**2,) if node.op_type == "DepthToSpace" else (data[2] % size, data[3] % size)
    return f"has data {list(data)}, which blocks of {size} do not divide" if any(parts) else None


def _columns(node: ir.Node) -> Fault:
    """Col2Im: channels of whole blocks, and a column for each place of a block."""
    data, image, block = dims_of(node.inputs[0]), constant_array(node.inputs[1]), constant_array(node.inputs[2])
    if data is None or image is None or block is None or len(data) != 3 or len(image) != len(block):
        return None
    axes = len(block)
    strides, dilations = (node.attributes.get_ints(name, [1] * axes) for name in ("strides", "dilations"))
    pads = node.attributes.get_ints("pads", [0] * (2 * axes))
    if min(*strides, *dilations, *block) < 1 or not len(strides) == len(dilations) == len(pads) // 2 == axes:
        return f"has blocks {block.tolist()}, strides {list(strides)}, dilations {list(dilations)} and pads {list(pads)}"
    extents = (int(image[i]) + pads[i] + pads[axes + i] - dilations[i] * (int(block[i]) - 1) - 1 for i in range(axes))
    columns = prod(extent // stride + 1 for extent, stride in zip(extents, strides, strict=True))
    if data[1] % prod(block.tolist()) or data[2] != columns:
        return f"has data {list(data)} for {columns} columns of blocks {block.tolist()}"
    return None


def _heads(node: ir.Node) -> Fault:
    """Attention: heads of queries in equal groups for each of keys, of one size."""
    query, key = (dims_of(value) for value in node.inputs[:2])
    if query is None or key is None or len(query) != len(key):
        return None
    if len(query) == 4:
        heads, of_keys, sizes = query[1], key[1], (query[3], key[3])
    else:
        heads, of_keys = (node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
        if heads < 1 or of_keys < 1 or query[2] % heads or key[2] % of_keys:
            return f"has queries {list(query)} in {heads} heads and keys {list(key)} in {of_keys}"
        sizes = query[2] // heads, key[2] // of_keys
    is_sound = heads == 0 or (of_keys > 0 and heads % of_keys == 0)
    return None if is_sound and sizes[0] == sizes[1] else f"has {heads} heads of {sizes[0]} for {of_keys} of {sizes[1]}"


def _rotation(node: ir.Node) -> Fault:
    """RotaryEmbedding: a cosine and a sine for each pair of what is rotated of a head."""
    data, heads = dims_of(node.inputs[0]), node.attributes.get_int("num_heads", 0)
    if data is None or len(data) not in (3, 4) or (len(data) == 3 and (heads < 1 or data[2] % heads)):
        return None if data is None else f"has data {list(data)} in {heads} heads"
    size = node.attributes.get_int("rotary_embedding_dim", 0) or (data[3] if len(data) == 4 else data[2] // heads)
    rows = (data[0], data[-2], size // 2)  # or rows of a table, of which the fourth input chooses
    fault = _first_fault(
        node, (1, 2), lambda dims: dims == rows or (len(dims) == 2 and dims[1] == rows[2]), f"factors {list(rows)}"
    )
    return fault or _first_fault(node, (3,), lambda dims: dims == rows[:2], f"places {list(rows[:2])}")


def _groups(node: ir.Node) -> Fault:
    """Channels and filters come in equal groups."""
    group = node.attributes.get_int("group", 1)
    if group < 1:
        return f"has group {group}"
    weights = node.inputs[3 if node.op_type == "QLinearConv" else 1]
    data, weight = (None if value is None else value.shape for value in (node.inputs[0], weights))
    if data is None or weight is None or len(data) < 2 or len(weight) < 2:
        return None
    channels, first, second = data[1], weight[0], weight[1]
    if not isinstance(channels, int) or not isinstance(first, int) or not isinstance(second, int):
        return None
    is_transposed = node.op_type == "ConvTranspose"
    expected = first if is_transposed else second * group
    if channels != expected or (not is_transposed and first % group) or channels % group:
        return f"has {channels} channels and weights {list(weight)} in {group} groups"
    return None


def _recurrent(node: ir.Node) -> Fault:
    """Weights, biases and states have the extents that X, the hidden size and the direction ask for, where these are known."""
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[node.op_type]
    directions = 2 if node.attributes.get_string("direction", "forward") == "bidirectional" else 1
    dims = [dims_of(value) for value in node.inputs]
    data, recurrence = dims[0], dims[2]
    hidden = node.attributes.get_int("hidden_size", 0) or (recurrence[-1] if recurrence else 0)
    if data is None or len(data) != 3 or not hidden:
        return None
    is_batch_first = node.attributes.get_int("layout", 0) == 1
    batch = data[0 if is_batch_first else 1]
    state = (batch, directions, hidden) if is_batch_first else (directions, batch, hidden)
    expected = {
        "W": (directions, gates * hidden, data[2]),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
        "sequence_lens": (batch,),
        "initial_h": state,
        "initial_c": state,
        "P": (directions, 3 * hidden),
    }
    for (name, wanted), found in zip(expected.items(), dims[1:], strict=False):
        if found is not None and found != wanted:
            return f"of {hidden} units in {directions} direction(s) has {name} {list(found)}, where {list(wanted)} is asked for"
    return None


_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose"), (_groups, _filter)),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), (_blocks,)),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), (_scales,)),
    **dict.fromkeys(("GatherElements", "ScatterElements"), (_elements,)),
    **dict.fromkeys(("GatherND", "ScatterND"), (_places,)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (_recurrent,)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), (_factors_of_rows,)),
    "Attention": (_heads,),
    "BatchNormalization": (_statistics,),
    "Col2Im": (_columns,),
    "Compress": (_condition,),
    "DeformConv": (_groups, _filter, _offsets),
    "Einsum": (_letters,),
    "Gemm": (_summand,),
    "GridSample": (_grid,),
    "GroupNormalization": (channels_of_groups,),
    "PRelu": (_slope,),
    "QLinearConv": (_groups, _filter),
    "ReverseSequence": (_lengths,),
    "RotaryEmbedding": (_rotation,),
    "Split": (_parts,),
}
