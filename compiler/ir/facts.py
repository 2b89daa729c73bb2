"""What is known of a value or a node: types, shapes and the torch source line.

Facts are the `type` and `shape` of each `onnx_ir.Value`. They are computed node by node with ONNX's own inference functions, so
that a pass re-infers only what it has made, and the whole model costs one linear walk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16, float8 and int4 with NumPy)
import numpy as np
import onnx
import onnx_ir as ir
from onnx.shape_inference import InferenceError, infer_node_outputs

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ...runtime.plan import TensorType
from .bodies import body_fault, infer_parameters
from .cloning import copy_facts
from .constants import constant_tensor
from .kinds import KIND_OF_OPERATOR, Kind
from .scopes import read_values, subgraphs_of
from .symbolic.shapes import Question, infer_sizes
from .symbolic.symbols import SizeDim, as_sizes, constant_sizes, shape_of_sizes, sizes_of

SOURCE_KEY = "prefuse.source"  # metadata of a node made from others: their sources
ORIGINS_KEY = "prefuse.origins"  # metadata of a node made from others: the names of the imported nodes that it stands for, JSON
KEPT_FLOAT_KEY = "prefuse.kept_float"  # metadata of a product: why it was not quantized with the others
_STACK_KEY = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_POOLS, _POOLS_OPSET = ("AveragePool", "LpPool", "MaxPool"), 22
_MAX_KNOWN_ELEMENTS = 64  # constants up to this size are shown to inference: shapes, axes, pads, scales
_MAX_ANSWERS = 4096  # of inference that are remembered: models repeat their layers, and each pass leaves most nodes as they are


@dataclass(frozen=True, slots=True)
class Fact:
    """What inference finds of a value; `shape` is None where even the rank is unknown."""

    type: ir.TypeProtocol
    shape: ir.Shape | None


def dtype_name(dtype: ir.DataType) -> str:
    """NumPy or ml_dtypes name of an ONNX element type: FLOAT is "float32", BFLOAT16 is "bfloat16".

    Raises:
        InvalidModelError: the type has no dense form (strings, undefined).
    """
    if dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise InvalidModelError(dtype.name.lower(), "has no dense element type", "remove it from the model")
    return dtype.numpy().name


def data_type(name: str) -> ir.DataType:
    """The ONNX element type of a NumPy or ml_dtypes name; the inverse of `dtype_name`."""
    return ir.DataType.from_numpy(np.dtype(name))


def has_static_type(value: ir.Value) -> bool:
    """Whether `value` is a dense tensor whose element type and dimensions are all known: numbers, or a call's sizes."""
    is_tensor = isinstance(value.type, ir.TensorType) and value.dtype != ir.DataType.UNDEFINED
    return is_tensor and value.shape is not None and all(isinstance(dim, (int, SizeDim)) for dim in value.shape)


def tensor_type(value: ir.Value) -> TensorType:
    """The static type of `value`.

    Raises:
        InvalidModelError: the element type or a dimension of an input is unknown or symbolic.
        UnsupportedModelError: that of an operator's result is.
    """
    if not has_static_type(value):
        producer = value.producer()
        shape = "unknown" if value.shape is None else str(value.shape)
        dtype = "unknown" if value.dtype is None else value.dtype.name.lower()
        what = f"value {value.name} has element type {dtype} and shape {shape}"
        if producer is None:
            raise InvalidModelError(f"input {value.name}", what, "give concrete shapes to the model's inputs")
        fix = "give concrete shapes to the model's inputs; shapes that only a run decides are not supported yet"
        raise UnsupportedModelError(source_of(producer), what, fix)
    assert value.dtype is not None
    return TensorType(sizes_of(value) or (), dtype_name(value.dtype))


def source_of(node: ir.Node) -> str:
    """Where a node comes from: the innermost frame of the user's code as "file:line", else the node's name, else its operator."""
    metadata = node.metadata_props
    if SOURCE_KEY in metadata:
        return metadata[SOURCE_KEY]
    if frames := _FRAME.findall(metadata.get(_STACK_KEY, "")):
        users = [frame for frame in frames if "-packages/torch/" not in frame[0]]
        return ":".join((users or frames)[-1])
    return node.name or node.op_type


def origins_of(name: str | None, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the imported nodes that a node of this name and metadata stands for: its own, if no pass has made it."""
    found = json.loads(metadata.get(ORIGINS_KEY, "[]"))
    return tuple(map(str, found)) or ((name,) if name else ())


def infer_facts(model: ir.Model) -> None:
    """Give every value that ONNX can infer its element type and shape, in one forward walk.

    Facts that follow from the inputs replace recorded ones; a recorded dimension stays where inference finds none, and so do all
    in a branch of an If from the first node on that does not fit: nothing may take it.

    Raises:
        InvalidModelError: a node's inputs do not fit its operator.
    """
    inference = _Inference(model)
    for value in model.graph.initializers.values():
        set_constant_facts(value)
    for node in model.graph:
        inference.visit(node)


def infer_node(node: ir.Node, model: ir.Model) -> None:
    """Give the outputs of one node their facts, from those of its inputs.

    For a call of a model-local function the values of its body get theirs too. A body called with several types keeps those
    of the call inferred last: call this before reading a body that may be shared so.

    Raises:
        InvalidModelError: the node's inputs do not fit its operator.
    """
    _Inference(model).visit(node)


def infer_types(node: ir.Node, model: ir.Model, opsets: Mapping[str, int] | None = None) -> list[Fact | None]:
    """What inference says of each output of a node of an ONNX operator, without recording it; None where it says nothing.

    `opsets` are those of the function that the node is in; None: the model's.

    Raises:
        InvalidModelError: the node's inputs do not fit its operator.
    """
    return _Inference(model, opsets).infer(node)


class _Inference:
    """One walk: the opsets in force, and what the parameters of the function being walked stand for."""

    def __init__(self, model: ir.Model, opsets: Mapping[str, int] | None = None) -> None:
        self._model = model
        self._opsets = model.graph.opset_imports if opsets is None else opsets
        self._arguments: dict[ir.Value, ir.Value | None] = {}
        self._attributes: Mapping[str, ir.Attr] | None = None  # of the call whose body is walked
        self._calls: list[ir.OperatorIdentifier] = []

    def visit(self, node: ir.Node) -> None:
        function = self._model.functions.get(node.op_identifier())
        if function is not None:
            self._visit_call(node, function)
            return
        if fault := body_fault(node):
            raise InvalidModelError(source_of(node), f"{node.op_type}: {fault}", "correct the model")
        infer_parameters(node)
        for graph in subgraphs_of(node):
            # torch exports x.squeeze(0) as an If on the dimension, of which one branch fits.
            with suppress(InvalidModelError) if node.op_type == "If" else nullcontext():
                self._visit_subgraph(graph)
        for output, fact in zip(node.outputs, self.infer(node), strict=True):
            _record(output, fact)

    def infer(self, node: ir.Node) -> list[Fact | None]:
        """Inferred facts of each output of a node that calls no function of the model."""
        nothing: list[Fact | None] = [None] * len(node.outputs)
        if node.op_type == "Constant" and node.domain == "" and (tensor := constant_tensor(node.outputs[0])) is not None:
            return [Fact(ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy()))]
        schema = _schema_for_inference(node, self._opsets)
        reads = read_values(node)
        if schema is None or any(value.type is None for value in reads):
            return nothing
        known = self._known_tensors(node)
        question = _question(node, self._opsets, known)
        if (answer := _ANSWERS.get(question)) is not None:  # at once: another thread may clear them
            return self._with_sizes(node, answer, known)
        facts = nothing if schema.deprecated else self._ask(node, schema, reads, known)  # which refuses all that is withdrawn
        if (supplied := _supplied(node, reads)) is not None:
            facts = [supplied]
        if question is not None:
            if len(_ANSWERS) >= _MAX_ANSWERS:
                _ANSWERS.clear()
            _ANSWERS[question] = facts
        return self._with_sizes(node, facts, known)

    def _with_sizes(self, node: ir.Node, facts: list[Fact | None], known: Mapping[str, ir.TensorProtocol]) -> list[Fact | None]:
        """The facts with the sizes that a call decides, where operands have such."""
        numbers: dict[int, np.ndarray] = {}
        domain = None
        for place, value in enumerate(node.inputs):
            for dim in () if value is None or value.shape is None else value.shape:
                domain = dim.size.domain if isinstance(dim, SizeDim) else domain
            source = self._argument(value)
            if (sizes := constant_sizes(source)) is not None:
                numbers[place] = sizes
                domain = next((size.domain for size in sizes.flat if not isinstance(size, int)), domain)
            elif (
                value is not None
                and (tensor := known.get(str(value.name))) is not None
                and (
                    tensor.dtype.is_integer() or node.op_type == "Resize"  # by scales
                )
            ):
                found = as_sizes(tensor.numpy())
                numbers |= {} if found is None else {place: found}
        if domain is None:
            return facts
        shapes = tuple(sizes_of(value) for value in node.inputs)
        inferred = [None if fact is None else fact.shape for fact in facts]
        is_pointwise = node.domain == "" and KIND_OF_OPERATOR.get(node.op_type, Kind.OPAQUE) <= Kind.BROADCAST
        found_shapes = infer_sizes(Question(node, shapes, numbers), inferred, domain, is_pointwise=is_pointwise)
        return [
            fact if fact is None or shape is None else Fact(fact.type, shape_of_sizes(shape))
            for fact, shape in zip(facts, found_shapes, strict=True)
        ]

    def _argument(self, value: ir.Value | None) -> ir.Value | None:
        """What a parameter of the functions being walked stands for."""
        while value is not None and value in self._arguments:
            value = self._arguments[value]
        return value

    def _ask(
        self, node: ir.Node, schema: onnx.defs.OpSchema, reads: list[ir.Value], known: dict[str, ir.TensorProtocol]
    ) -> list[Fact | None]:
        """What ONNX's own inference says of each output."""
        try:
            types = {str(value.name): _type_proto(value) for value in reads}
            data = {name: ir.serde.serialize_tensor(_shown(tensor, node, name)) for name, tensor in known.items()}
            imports = [onnx.helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
            found = _answers(schema, self._proto(node), types, data, None, imports)
        except (InferenceError, onnx.checker.ValidationError) as error:
            message = (
                str(error).strip().splitlines()[-1].removeprefix("[ShapeInferenceError] ").removeprefix("[TypeInferenceError] ")
            )
            shapes = ", ".join(f"{value.name}: {_describe(value)}" for value in reads)
            raise InvalidModelError(
                source_of(node), f"{node.op_type} does not fit its inputs ({shapes}): {message}", "correct the model"
            ) from error
        return [_fact(found.get(str(output.name))) for output in node.outputs]

    def _visit_call(self, node: ir.Node, function: ir.Function) -> None:
        identifier = function.identifier()
        if identifier in self._calls:
            raise InvalidModelError(source_of(node), f"function {function.domain}.{function.name} calls itself", "unroll it")
        saved = self._opsets, self._attributes
        same_types = True
        for parameter, argument in zip(function.inputs, (*node.inputs, *[None] * len(function.inputs)), strict=False):
            self._arguments[parameter] = argument
            if argument is not None and (parameter.type, parameter.shape) != (argument.type, argument.shape):
                same_types = False
                copy_facts(argument, parameter)
        attributes = {**function.attributes, **node.attributes}
        self._opsets, self._attributes = function.opset_imports, {k: self._resolved(v) for k, v in attributes.items()}
        self._calls.append(identifier)
        for child in function:
            for output in child.outputs:
                output.shape = output.shape if same_types else None  # a dimension of another call's types must not survive
            self.visit(child)
        self._calls.pop()
        self._opsets, self._attributes = saved
        for output, result in zip(node.outputs, function.outputs, strict=False):
            _record(output, None if result.type is None else Fact(result.type, result.shape))

    def _visit_subgraph(self, graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            set_constant_facts(value)
        for child in graph:
            self.visit(child)

    def _known_tensors(self, node: ir.Node) -> dict[str, ir.TensorProtocol]:
        """Small constants among the inputs of a node, by the name they have there: of a Split, the sizes of all its parts."""
        known, most = {}, max(_MAX_KNOWN_ELEMENTS, len(node.outputs))
        for value in node.inputs:
            source = self._argument(value)
            tensor = None if source is None else constant_tensor(source)
            if value is not None and tensor is not None and tensor.size <= most:
                known[str(value.name)] = tensor
        return known

    def _resolved(self, attribute: ir.Attr) -> ir.Attr:
        """The attribute of the caller that a reference attribute stands for, else the attribute itself."""
        if not attribute.is_ref() or self._attributes is None:
            return attribute
        actual = self._attributes.get(str(attribute.ref_attr_name))
        return attribute if actual is None else ir.Attr(attribute.name, actual.type, actual.value)

    def _proto(self, node: ir.Node) -> onnx.NodeProto:
        proto = ir.serde.serialize_node(node)
        if any(attribute.is_ref() for attribute in node.attributes.values()):
            del proto.attribute[:]
            resolved = [self._resolved(attribute) for attribute in node.attributes.values()]
            proto.attribute.extend(
                ir.serde.serialize_attribute(one) for one in resolved if not one.is_ref() and one.value is not None
            )
        return proto


def _answers(schema: onnx.defs.OpSchema, proto: onnx.NodeProto, types: dict[str, onnx.TypeProto], *more: Any) -> Any:
    """The types of a node's outputs by name. What takes float16 and, before a later opset, no bfloat16 (SplitToSequence, which
    torch exports) is asked for float16, of which the same is true."""
    try:
        return infer_node_outputs(schema, proto, types, *more)
    except (InferenceError, onnx.checker.ValidationError):
        changed = [_replaced(one, ir.DataType.BFLOAT16, ir.DataType.FLOAT16) for one in types.values()]
        if not any(changed):
            raise
        found = infer_node_outputs(schema, proto, types, *more)
        for one in found.values():
            _replaced(one, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        return found


def _replaced(kind: onnx.TypeProto, old: ir.DataType, new: ir.DataType) -> bool:
    """Whether a tensor, or those of a sequence, had one element type; they have the other now."""
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    is_old = kind.HasField("tensor_type") and kind.tensor_type.elem_type == old
    if is_old:
        kind.tensor_type.elem_type = int(new)
    return is_old


def _supplied(node: ir.Node, reads: Sequence[ir.Value]) -> Fact | None:
    """The output of an operator of which ONNX infers no shape, or not always; None of all others."""
    kind, shape = (reads[0].type, reads[0].shape) if reads else (None, None)
    if kind is None or shape is None:
        return None
    if (node.domain, node.op_type) == ("", "GroupNormalization"):
        return Fact(kind, shape)
    if (node.domain, node.op_type) == ("ai.onnx.ml", "ArrayFeatureExtractor") and reads[1].shape is not None:
        counts = list(reads[1].shape)
        if all(isinstance(count, int) for count in counts):  # all indices count; a vector is one row
            return Fact(kind, ir.Shape([*(shape[:-1] if len(shape) > 1 else [1]), prod(counts)]))
    return None


# Answers by question: all that inference reads of a node, in which names play no part.
_ANSWERS: dict[Hashable, list[Fact | None]] = {}
_PLAIN = frozenset(getattr(ir.AttributeType, name) for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS"))


def _question(node: ir.Node, opsets: Mapping[str, int], known: Mapping[str, ir.TensorProtocol]) -> Hashable:
    """What inference reads of a node, to be compared; None where that is more than plain attributes and operands are tensors."""
    attributes = node.attributes.values()
    if any(one.is_ref() or one.type not in _PLAIN for one in attributes):
        return None
    if any(value is not None and not isinstance(value.type, ir.TensorType) for value in node.inputs):
        return None
    if any(tensor.dtype == ir.DataType.STRING for tensor in known.values()):
        return None
    given = tuple((one.name, one.type, tuple(one.value) if one.type.name.endswith("S") else one.value) for one in attributes)
    operands = tuple(None if value is None else _operand(value, known.get(str(value.name))) for value in node.inputs)
    outputs = tuple(bool(output.name) for output in node.outputs)
    return node.domain, node.op_type, tuple(opsets.items()), given, operands, outputs


def _operand(value: ir.Value, tensor: ir.TensorProtocol | None) -> Hashable:
    """Type, shape and, where it is known, content of an input."""
    dims = None if value.shape is None else tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return value.dtype, dims, None if tensor is None else (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())


def _shown(tensor: ir.TensorProtocol, node: ir.Node, name: str) -> ir.TensorProtocol:
    """A constant as inference takes it."""
    if node.op_type == "Range" and tensor.size == 1:
        return ir.Tensor(_range_operand(tensor.numpy()), name=name)
    return tensor


def _range_operand(number: np.ndarray) -> np.ndarray:
    """What ONNX infers a Range's length from: no vector, as its body of AffineGrid gives it, and no number of 16 bits."""
    wide = number.dtype if number.dtype.itemsize > 2 else np.int64 if number.dtype == np.int16 else np.float64
    return number.reshape(()).astype(wide)


def schema_of(node: ir.Node, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    """The ONNX schema of a node's operator at the version imported; None for an operator that ONNX does not know."""
    version = opsets.get(node.domain, opsets.get("ai.onnx") if node.domain == "" else None)
    return None if version is None else _schema(node.op_type, version, node.domain)


def _schema_for_inference(node: ir.Node, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    """The schema whose inference is right: before opset 22 that of pools counts, with ceil_mode, a window beyond the input."""
    schema = schema_of(node, opsets)
    if schema is None or node.domain != "" or node.op_type not in _POOLS:
        return schema
    return _schema(node.op_type, max(schema.since_version, _POOLS_OPSET), "")


@cache
def _schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def set_constant_facts(value: ir.Value) -> None:
    """Give a constant the type and shape of its tensor, whatever is recorded for it."""
    tensor = value.const_value
    if tensor is not None:
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())


def _record(value: ir.Value, fact: Fact | None) -> None:
    """Store an inferred fact; a dimension that inference could not find keeps what was recorded for it."""
    if fact is None:
        return
    value.type = copy(fact.type)
    if fact.shape is None:
        return
    old, new = value.shape, fact.shape.copy()
    if old is not None and len(old) == len(new):
        new = ir.Shape(before if after == ir.SymbolicDim(None) else after for before, after in zip(old, new, strict=True))
    value.shape = new


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if value.type is not None:
        ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _fact(proto: onnx.TypeProto | None) -> Fact | None:
    if proto is None or proto.WhichOneof("value") is None:
        return None
    found = ir.serde.deserialize_type_proto_for_type(proto)
    return None if found is None else Fact(found, ir.serde.deserialize_type_proto_for_shape(proto))


def _describe(value: ir.Value) -> str:
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    return dtype + ("[?]" if value.shape is None else "[" + ",".join(str(dim) for dim in value.shape) + "]")
