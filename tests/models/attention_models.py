"""Random spellings of attention for property tests: how heads are split, scores scaled, masked and capped, results merged."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
from hypothesis import strategies as st
from prefuse.compiler.ir.facts import infer_facts

_MASKS = ("rows", "causal", "bias", "keep", "hide", "cap")


@dataclass(slots=True)
class _Sizes:
    batches: int
    heads: int
    queries: int
    keys: int
    depth: int
    width: int


@dataclass(slots=True)
class _Text:
    """A model in ONNX's text. `tapped` is the number of the value that is an output as well."""

    inputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)

    def input(self, *shape: int, dtype: str = "float") -> str:
        self.inputs.append(f"{dtype}[{','.join(map(str, shape))}] x{len(self.inputs)}")
        return f"x{len(self.inputs) - 1}"

    def ints(self, *numbers: int) -> str:
        self.constants.append(f"int64[{len(numbers)}] c{len(self.constants)} = {{{', '.join(map(str, numbers))}}}")
        return f"c{len(self.constants) - 1}"

    def number(self, number: float) -> str:
        self.constants.append(f"float c{len(self.constants)} = {{{number}}}")
        return f"c{len(self.constants) - 1}"

    def op(self, operator: str, *inputs: str) -> str:
        self.nodes.append(f"v{len(self.nodes)} = {operator}({', '.join(inputs)})")
        return f"v{len(self.nodes) - 1}"

    def transpose(self, value: str, *order: int) -> str:
        return self.op(f"Transpose<perm: ints = {list(order)}>", value)

    def model(self, *outputs: str) -> ir.Model:
        results = ", ".join(f"float[] {name}" for name in outputs)
        head = f"main ({', '.join(self.inputs)}) => ({results})\n<{', '.join(self.constants)}> {{"
        model = ir.from_onnx_text("\n".join(['<ir_version: 10, opset_import: ["": 21]>', head, *self.nodes, "}"]))
        for value in model.graph.outputs:
            value.type, value.shape = None, None
        infer_facts(model)
        return model


@st.composite
def attention_models(draw: st.DrawFn, tapped: bool = False) -> ir.Model:
    """A model of one attention; if `tapped`, some value on the way is an output, too."""
    sizes = _Sizes(*(draw(st.integers(1, most)) for most in (2, 3, 5, 6, 9, 9)))
    text = _Text()
    form = draw(st.sampled_from(("heads", "merged", "packed", "grouped", "flat")))
    queries, keys, values = _FORMS[form](text, sizes)
    where = draw(st.sampled_from(("nowhere", "scores", "divided", "queries", "keys", "both")))
    if where in ("queries", "both"):
        queries = text.op("Mul", queries, text.number(0.5))
    if where in ("keys", "both"):
        keys = text.op("Mul", keys, text.number(0.5))
    scores = text.op("MatMul", queries, keys)
    if where in ("scores", "divided"):
        scores = text.op("Mul" if where == "scores" else "Div", scores, text.number(1.5))
    if form == "flat":
        scores = text.op("Reshape", scores, text.ints(sizes.batches, sizes.heads, sizes.queries, sizes.keys))
    for mask in draw(st.lists(st.sampled_from(_MASKS), max_size=3, unique=True)):
        scores = _masked(text, scores, mask, sizes)
    weights = _weighted(
        text, draw(st.sampled_from(("plain", "zeros", "heads"))), text.op("Softmax<axis: int = -1>", scores), sizes
    )
    if form == "flat":
        weights = text.op("Reshape", weights, text.ints(sizes.batches * sizes.heads, sizes.queries, sizes.keys))
    result = text.op("MatMul", weights, values)
    if form != "flat" and draw(st.booleans()):
        shape = text.ints(sizes.batches, sizes.queries, sizes.heads * sizes.width)
        result = text.op("Reshape", text.transpose(result, 0, 2, 1, 3), shape)
    inner = [node.partition(" ")[0] for node in text.nodes[:-1] if "IsNaN" not in node and " = Split" not in node]
    return text.model(result, *([draw(st.sampled_from(inner))] if tapped else []))


def _heads(text: _Text, sizes: _Sizes) -> tuple[str, str, str]:
    queries, keys, values = (
        text.input(sizes.batches, sizes.heads, rows, columns)
        for rows, columns in ((sizes.queries, sizes.depth), (sizes.keys, sizes.depth), (sizes.keys, sizes.width))
    )
    return queries, text.transpose(keys, 0, 1, 3, 2), values


def _merged(text: _Text, sizes: _Sizes) -> tuple[str, str, str]:
    operands = []
    for rows, columns, order in (
        (sizes.queries, sizes.depth, (0, 2, 1, 3)),
        (sizes.keys, sizes.depth, (0, 2, 3, 1)),
        (sizes.keys, sizes.width, (0, 2, 1, 3)),
    ):
        whole = text.input(sizes.batches, rows, sizes.heads * columns)
        apart = text.op("Reshape", whole, text.ints(sizes.batches, rows, sizes.heads, columns))
        operands.append(text.transpose(apart, *order))
    return operands[0], operands[1], operands[2]


def _packed(text: _Text, sizes: _Sizes) -> tuple[str, str, str]:
    sizes.keys, sizes.width = sizes.queries, sizes.depth
    whole = text.input(sizes.batches, sizes.keys, 3 * sizes.heads * sizes.depth)
    apart = text.op("Reshape", whole, text.ints(sizes.batches, sizes.keys, 3, sizes.heads, sizes.depth))
    moved = text.transpose(apart, 2, 0, 3, 1, 4)
    parts = [text.op("Gather<axis: int = 0>", moved, text.ints(index)) for index in range(3)]
    queries, keys, values = (
        text.op("Reshape", part, text.ints(sizes.batches, sizes.heads, sizes.keys, sizes.depth)) for part in parts
    )
    return queries, text.transpose(keys, 0, 1, 3, 2), values


def _grouped(text: _Text, sizes: _Sizes) -> tuple[str, str, str]:
    sizes.heads *= 2
    queries = text.input(sizes.batches, sizes.heads, sizes.queries, sizes.depth)
    repeated = []
    for columns in (sizes.depth, sizes.width):
        shape = (sizes.batches, sizes.heads // 2, 1, sizes.keys, columns)
        few = text.op("Reshape", text.input(*shape[:2], *shape[3:]), text.ints(*shape))
        many = text.op("Expand", few, text.ints(*shape[:2], 2, *shape[3:]))
        repeated.append(text.op("Reshape", many, text.ints(sizes.batches, sizes.heads, sizes.keys, columns)))
    return queries, text.transpose(repeated[0], 0, 1, 3, 2), repeated[1]


def _flat(text: _Text, sizes: _Sizes) -> tuple[str, str, str]:
    batches = sizes.batches * sizes.heads
    queries = text.input(batches, sizes.queries, sizes.depth)
    return queries, text.input(batches, sizes.depth, sizes.keys), text.input(batches, sizes.keys, sizes.width)


_FORMS = {"heads": _heads, "merged": _merged, "packed": _packed, "grouped": _grouped, "flat": _flat}


def _masked(text: _Text, scores: str, mask: str, sizes: _Sizes) -> str:
    match mask:
        case "rows":
            return text.op("Add", scores, text.input(sizes.batches, 1, 1, sizes.keys))
        case "causal":
            return text.op("Add", text.input(sizes.queries, sizes.keys), scores)
        case "bias":
            return text.op("Add", scores, text.input(sizes.heads, sizes.queries, sizes.keys))
        case "keep":
            return text.op(
                "Where", text.input(sizes.batches, 1, sizes.queries, sizes.keys, dtype="bool"), scores, text.number(-1e4)
            )
        case "hide":
            return text.op("Where", text.input(1, 1, sizes.queries, sizes.keys, dtype="bool"), text.number(-3e38), scores)
        case _:
            return text.op("Mul", text.op("Tanh", text.op("Div", scores, text.number(5.0))), text.number(5.0))


def _weighted(text: _Text, way: str, probabilities: str, sizes: _Sizes) -> str:
    if way == "zeros":
        return text.op("Where", text.op("IsNaN", probabilities), text.number(0.0), probabilities)
    return text.op("Mul", probabilities, text.input(sizes.heads, 1, 1)) if way == "heads" else probabilities
