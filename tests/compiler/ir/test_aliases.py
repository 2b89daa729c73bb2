"""What needs no memory of its own: contiguous parts, and Concats that their producers write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.compiler.ir.aliases import Aliases, find_aliases, part_offsets
from prefuse.compiler.ir.facts import infer_facts
from prefuse.tests.scaling import assert_scales


def model_of(body: str, parameters: str = "float[1,4] x", results: str = "float[1,N] y") -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 21]>\nmain ({parameters}) => ({results}) {{\n{body}\n}}'
    model = ir.from_onnx_text(text)
    for value in model.graph.outputs:
        value.shape = None
    infer_facts(model)
    return model


def aliases_of(model: ir.Model) -> Aliases:
    return find_aliases(model.graph, model.graph.outputs)


def places_of(aliases: Aliases) -> dict[str, tuple[str, int]]:
    return {str(value.name): (str(place.value.name), place.offset_bytes) for value, place in aliases.places.items()}


def part(op_type: str, shape: Sequence[int], operands: Sequence[np.ndarray], outputs: int = 1, **attributes: int) -> ir.Node:
    """A node of one operator on a tensor of `shape`, with its facts."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="main")
    constants = []
    for number, array in enumerate(operands):
        tensor = ir.Tensor(array, name=f"c{number}")
        constants.append(ir.Value(name=f"c{number}", const_value=tensor))
        graph.register_initializer(constants[-1])
    made = [ir.Value(name=f"y{number}") for number in range(outputs)]
    graph.append(ir.node(op_type, [x, *constants], attributes, outputs=made))
    infer_facts(ir.Model(graph, ir_version=10))
    return graph[0]


def expected_offset(part_of: np.ndarray) -> int | None:
    """Where a part of an array of consecutive numbers begins, if it is a run of them."""
    flat = part_of.reshape(-1)
    return int(flat[0]) if (flat == np.arange(flat[0], flat[0] + flat.size)).all() else None


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
BOUNDS = st.integers(-6, 6)


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.data())
def test_a_slice_is_a_part_where_numpy_says_so(shape: list[int], data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), max_size=3, unique_by=lambda axis: axis % len(shape)))
    cuts = [slice(None)] * len(shape)
    for axis in axes:
        step = data.draw(st.sampled_from([1, 1, 1, 2, -1]))
        inside = st.integers(-shape[axis], shape[axis] - 1)  # where steps go down, ONNX clamps to the first, NumPy takes none
        cuts[axis] = slice(data.draw(BOUNDS if step > 0 else inside), data.draw(BOUNDS), step)
    rows = [[getattr(cuts[axis], name) for axis in axes] for name in ("start", "stop")]
    operands = [*rows, axes, [cuts[axis].step for axis in axes]]
    whole = np.arange(np.prod(shape)).reshape(shape)
    cut = whole[tuple(cuts)]
    node = part("Slice", shape, [np.array(row, np.int64) for row in operands])
    assert part_offsets(node) == (None if cut.size == 0 or expected_offset(cut) is None else (expected_offset(cut),))


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.data())
def test_a_gather_is_a_part_where_numpy_says_so(shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[axis]
    first = data.draw(st.integers(-extent, extent - 1))
    indices = data.draw(st.sampled_from([np.array(first), np.array([first]), np.array([[first], [first + 1]]), np.array([])]))
    inside = indices.size > 0 and int(indices.max()) < extent and not (indices.min() < 0 <= indices.max())
    node = part("Gather", shape, [indices.astype(np.int64)], axis=axis)
    expected = expected_offset(np.arange(np.prod(shape)).reshape(shape).take(indices, axis)) if inside else None
    assert part_offsets(node) == (None if expected is None else (expected,))


@pytest.mark.parametrize(
    ("shape", "axis", "expected"), [((1, 6, 2), 1, (0, 4)), ((6,), 0, (0, 2)), ((2, 6), 1, None), ((1, 1, 6), -1, (0, 2))]
)
def test_pieces_of_a_split(shape: tuple[int, ...], axis: int, expected: tuple[int, ...] | None) -> None:
    assert part_offsets(part("Split", shape, [np.array([2, 4])], 2, axis=axis)) == expected


def test_an_index_out_of_range_is_left_to_the_kernel() -> None:
    assert part_offsets(part("Gather", (3, 2), [np.array(3)], axis=0)) is None
    assert part_offsets(part("Gather", (3, 2), [np.array([2, 3])], axis=0)) is None


def test_producers_write_a_concat_in_place() -> None:
    aliases = aliases_of(model_of("a = Relu(x)\n b = Neg(x)\n c = Concat<axis=1>(a, b)\n y = Abs(c)"))
    assert places_of(aliases) == {"a": ("c", 0), "b": ("c", 16)}
    assert list(aliases.free.values()) == [()]
    assert aliases.rejections == ()


def test_concats_that_grow_are_nested() -> None:
    """The features of a dense block: each Concat is of all values before it, which lie together already."""
    body = "a = Relu(x)\n b = Neg(a)\n c = Concat<axis=1>(a, b)\n d = Abs(c)\n e = Concat<axis=1>(a, b, d)\n y = Neg(e)"
    aliases = aliases_of(model_of(body))
    assert places_of(aliases) == {"a": ("e", 0), "b": ("e", 16), "c": ("e", 0), "d": ("e", 32)}
    assert aliases.rejections == ()


def test_a_concat_is_written_into_the_callers_memory() -> None:
    aliases = aliases_of(model_of("a = Relu(x)\n b = Neg(x)\n y = Concat<axis=1>(a, b)"))
    assert places_of(aliases) == {"a": ("y", 0), "b": ("y", 16)}


def test_views_of_parts() -> None:
    body = "h = Relu(x)\n p, q = Split<axis=1, num_outputs=2>(h)\n f = Flatten<axis=0>(q)\n y = Neg(f)"
    assert places_of(aliases_of(model_of(body))) == {"p": ("h", 0), "q": ("h", 8), "f": ("h", 8)}


PIECES = {
    "an input": ("a = Relu(x)\n c = Concat<axis=1>(x, a)\n y = Neg(c)", "16 bytes of %c are copied: %x is an input of the graph"),
    "twice": ("a = Relu(x)\n c = Concat<axis=1>(a, a)\n y = Neg(c)", "16 bytes of %c are copied: %a comes twice"),
    "a constant": (
        "k = Constant<value_floats=[1.0, 2.0]>()\n a = Relu(x)\n z = Constant<value_ints=[1, -1]>()\n k1 = Reshape(k, z)\n"
        "c = Concat<axis=1>(k1, a)\n y = Neg(c)",
        "8 bytes of %c are copied: %k is constant",
    ),
    "a part": (
        "h = Relu(x)\n p, q = Split<axis=1, num_outputs=2>(h)\n a = Neg(q)\n c = Concat<axis=1>(p, a)\n y = Neg(c)",
        "8 bytes of %c are copied: %p is a part of %h",
    ),
    "most of it": ("a = Relu(x)\n c = Concat<axis=1>(x, a, x)\n y = Neg(c)", "Concat is computed: %x is an input of the graph"),
    "in rows": (
        "t = Transpose<perm=[1,0]>(x)\n a = Relu(t)\n b = Neg(t)\n c = Concat<axis=1>(a, b)\n y = Neg(c)",
        "Concat is computed: its pieces come 4 times each in %c",
    ),
    "in another": (
        "a = Relu(x)\n b = Neg(x)\n c = Concat<axis=1>(a, b)\n d = Concat<axis=1>(b, c)\n e = Add(d, d)\n y = Neg(e)",
        "16 bytes of %d are copied: %b is a part of %c",
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_why_a_piece_is_copied(name: str) -> None:
    body, reason = PIECES[name]
    assert [rejection.reason for rejection in aliases_of(model_of(body)).rejections] == [reason]


def test_parts_of_vectors() -> None:
    """Where kernels load vectors of 16 bytes, what would begin in the middle of one is computed, or copied."""
    body = "a = Relu(x)\n b, c = Split<axis=1, num_outputs=2>(a)\n d = Neg(b)\n e = Neg(c)\n y = Add(d, e)"
    model = model_of(body, "float[1,8] x")
    assert places_of(find_aliases(model.graph, model.graph.outputs, 16)) == {"b": ("a", 0), "c": ("a", 16)}
    model = model_of(body, "float[1,6] x")
    aliases = find_aliases(model.graph, model.graph.outputs, 16)
    assert aliases.places == {}
    assert [one.reason for one in aliases.rejections] == ["Split is computed: a part begins at no multiple of 16 bytes"]
    model = model_of("a = Relu(x)\n b = Neg(x)\n c = Concat<axis=1>(a, b)\n y = Abs(c)", "float[1,6] x")
    aliases = find_aliases(model.graph, model.graph.outputs, 16)
    assert places_of(aliases) == {"a": ("c", 0)}
    reason = "24 bytes of %c are copied: %b would begin at no multiple of 16 bytes"
    assert [one.reason for one in aliases.rejections] == [reason]


def test_outputs_have_memory_of_their_own() -> None:
    body = "a = Relu(x)\n z = Neg(x)\n c = Concat<axis=1>(a, z)\n y, b = Split<axis=1, num_outputs=2>(c)"
    aliases = aliases_of(model_of(body, results="float[1,4] z, float[1,4] y"))
    assert places_of(aliases) == {"a": ("c", 0)}
    assert [rejection.reason for rejection in aliases.rejections] == [
        "16 bytes of %c are copied: %z is an output of the graph",
        "Split is computed: %y is an output of the graph",
    ]


def dense_block(layers: int) -> ir.Model:
    lines, names = ["a0 = Relu(x)"], ["a0"]
    for number in range(layers):
        lines += [f"c{number} = Concat<axis=1>({names[-1]}, x)", f"a{number + 1} = Neg(c{number})"]
        names.append(f"c{number}")
    return model_of("\n".join([*lines, f"y = Neg(a{layers})"]))


def test_time_is_near_linear() -> None:
    def prepare(layers: int) -> Callable[[], object]:
        model = dense_block(layers)
        return lambda: aliases_of(model)

    assert_scales(prepare, 100, 200, 3.0)
