"""What in a model nothing behind the frontend could ever take, found before any work is done."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import onnx
import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from ..ir.facts import schema_of, source_of
from .contrib.rewrite import refusal_of

# Operators that ONNX defines and nothing here takes.
_REFUSED = {
    "ai.onnx.ml.CastMap": "maps are no tensors",
    "ai.onnx.ml.CategoryMapper": "nothing here computes it, as it does LabelEncoder; write one of these",
    "ai.onnx.ml.DictVectorizer": "maps are no tensors",
    "ai.onnx.ml.ZipMap": "maps are no tensors; export the model without it",
    "ai.onnx.preview.training.Gradient": "export the gradient's own operators: only the exporter knows what it differentiates",
}
_SIX_BITS = (ir.DataType.FLOAT6E2M3, ir.DataType.FLOAT6E3M2)
_TYPES = (ir.TensorType, ir.SequenceType, ir.OptionalType)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A node or value that stops compilation: where it comes from, what it is, and why it cannot be taken."""

    where: str
    subject: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.subject}: {self.reason}"


def unsupported_parts(model: ir.Model) -> tuple[Unsupported, ...]:
    """Operators that nothing defines, and inputs and outputs that nothing holds."""
    return (*_unsupported_nodes(model), *_unsupported_values(model))


def check_supported(model: ir.Model) -> None:
    """Raise one `UnsupportedModelError` that names all of `unsupported_parts`, if there are any."""
    raise_unsupported(unsupported_parts(model))


def raise_unsupported(parts: tuple[Unsupported, ...]) -> None:
    """Raise one `UnsupportedModelError` that names all of them, if there are any."""
    if len(parts) == 1:
        raise UnsupportedModelError(parts[0].where, f"{parts[0].subject}: {parts[0].reason}", "replace it in the model")
    if parts:
        listed = "".join(f"\n  {part}" for part in parts)
        raise UnsupportedModelError("model", f"{len(parts)} parts cannot be compiled:{listed}\n", "replace them in the model")


def _unsupported_nodes(model: ir.Model) -> Iterator[Unsupported]:
    imports = model.graph.opset_imports
    for node in model.graph.all_nodes():
        if node.op_identifier() in model.functions:
            continue
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        schema = schema_of(node, imports)
        if schema is None and node.domain != "":
            reason = refusal_of(node) or "an operator outside ONNX, without a function body in the model"
            yield Unsupported(source_of(node), name, reason)
        elif schema is None:
            known = difflib.get_close_matches(node.op_type, _operator_names(), 1)
            hint = f"; the nearest is {known[0]}" if known and known[0] != node.op_type else ""
            yield Unsupported(source_of(node), name, f"no operator of ONNX opset {imports['']}{hint}")
        elif name in _REFUSED:
            yield Unsupported(source_of(node), name, _REFUSED[name])
        elif name == "ConvTranspose" and _has_two_sizes(node):
            reason = "ONNX's text and its shape inference differ in the size that output_padding gives with auto_pad; give pads"
            yield Unsupported(source_of(node), name, reason)
        elif name == "OptionalGetElement" and node.inputs[0] is not None and node.inputs[0].dtype in _SIX_BITS:
            yield Unsupported(source_of(node), name, "numbers of 6 bits, which ONNX's Identity, and so nothing here, hands on")
        elif schema.deprecated and name != "GroupNormalization":  # whose text in the opset that withdraws it can be followed
            yield Unsupported(source_of(node), name, f"withdrawn in ONNX opset {schema.since_version}")


def _has_two_sizes(node: ir.Node) -> bool:
    """Whether a ConvTranspose asks for a result of its input's extents times its strides, and for more elements beside."""
    is_same = node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME") and "output_shape" not in node.attributes
    return is_same and any(node.attributes.get_ints("output_padding", ()))


def _unsupported_values(model: ir.Model) -> Iterator[Unsupported]:
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            if value.type is not None and not isinstance(value.type, _TYPES):
                yield Unsupported(f"{kind} {value.name}", str(value.type), "neither a dense tensor nor a sequence or optional")


@cache
def _operator_names() -> list[str]:
    return sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
