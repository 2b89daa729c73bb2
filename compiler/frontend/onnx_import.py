"""ONNX files, bytes and protos to a graph. Weights in external files are memory-mapped, never read here."""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ..ir.scopes import subgraphs_of

EXTERNAL_FILES = "prefuse.external_files"  # key of a model's `meta`: names of the files with external data, in its folder
_PACKED = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}  # elements in one item of a typed field
_DATA_TYPES = frozenset(ir.DataType) - {ir.DataType.UNDEFINED}
_BROKEN = "export the model again, or copy the whole file"


def read_onnx(path: Path) -> ir.Model:
    """Read an ONNX file: protobuf, or the text forms that onnx knows by their suffix (.onnxtxt, .textproto, .json).

    Raises:
        InvalidModelError: the file is missing, corrupt or cut short, or its external data is missing, short or elsewhere.
        UnsupportedModelError: it uses a part of ONNX that no graph here can hold.
    """
    if _is_device(path):
        raise InvalidModelError(str(path), "is a device, which may have no end", "give the path of an ONNX file")
    try:
        proto = onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise InvalidModelError(str(path), "there is no such file", "give the path of an ONNX file") from None
    except OSError as error:
        raise InvalidModelError(
            str(path), f"cannot be read: {error.strerror}", "give the path of a readable ONNX file"
        ) from error
    except Exception as error:  # protobuf's DecodeError, onnx's ParseError, and what they let through
        raise InvalidModelError(str(path), f"is no ONNX model: {_first_line(error)}", _BROKEN) from error
    return model_of_proto(proto, str(path), path)


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # which reading it tells better
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def parse_onnx(content: bytes) -> ir.Model:
    """The graph in the bytes of an ONNX file. Raises as `read_onnx`."""
    try:
        proto = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's DecodeError, which has no type stubs
        raise InvalidModelError("bytes", f"are no ONNX model: {_first_line(error)}", _BROKEN) from error
    return model_of_proto(proto, "bytes")


def model_of_proto(proto: onnx.ModelProto, where: str = "ModelProto", file: Path | None = None) -> ir.Model:
    """The graph of a proto, which keeps the weights; `file` is what it was read from. Raises as `read_onnx`."""
    if not proto.HasField("graph") or not proto.opset_import:
        raise InvalidModelError(where, "has no graph or no opset: it is empty, cut short or no ONNX model", _BROKEN)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if _has_map(value.type):
            raise UnsupportedModelError(
                where, f"value {value.name} is a map", "export the model without ZipMap (skl2onnx: options={'zipmap': False})"
            )
    names = Counter(tensor.name for tensor in proto.graph.initializer)
    if twice := [name for name, number in names.items() if number > 1]:
        raise InvalidModelError(where, f"initializers of one name: {', '.join(twice)}", _BROKEN)
    if proto.graph.sparse_initializer:
        sparse = ", ".join(tensor.values.name for tensor in proto.graph.sparse_initializer)
        raise UnsupportedModelError(where, f"sparse initializers ({sparse})", "store them as dense tensors")
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises what it meets: KeyError, TypeError, ValueError and its own
        raise InvalidModelError(where, f"is no valid ONNX model: {_first_line(error)}", _BROKEN) from error
    external: set[str] = set()

    def checked(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(tensor, ir.ExternalTensor):
            external.add(os.fspath(tensor.location))
            return _placed(tensor, where, file)
        if isinstance(tensor, ir.serde.TensorProtoTensor):
            _check_inline(tensor, where)
        return tensor

    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        _replace_tensors(graph, checked)
    model.meta[EXTERNAL_FILES] = sorted(external)
    return model


def _has_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map or a sequence of maps."""
    return kind.HasField("map_type") or (kind.HasField("sequence_type") and _has_map(kind.sequence_type.elem_type))


def _replace_tensors(graph: ir.Graph, replacement: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    """Put the replacement of each tensor in its place, in initializers, attributes and subgraphs."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.const_value = replacement(value.const_value)
    for node in graph:
        for name, attribute in tuple(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                # as_tensor() would ask it for its size, which one of an unknown type does not have
                tensor = attribute.value
                if (found := replacement(tensor)) is not tensor:
                    node.attributes[name] = ir.AttrTensor(name, found)
        for subgraph in subgraphs_of(node):
            _replace_tensors(subgraph, replacement)


def _placed(tensor: ir.ExternalTensor, where: str, file: Path | None) -> ir.ExternalTensor:
    """The tensor at the real path of its data, which lies there whole, in a file beside the model."""
    location = os.fspath(tensor.location)
    if tensor.dtype == ir.DataType.STRING:
        raise InvalidModelError(where, f"tensor {tensor.name} is of strings, which no external file holds", _BROKEN)
    if min(tensor.shape.numpy(), default=0) < 0:
        raise InvalidModelError(where, f"tensor {tensor.name} has the shape {tensor.shape}", _BROKEN)
    if file is None:
        what = f"tensor {tensor.name} is in the external file {location!r}, relative to an unknown folder"
        raise InvalidModelError(where, what, "give the path of the ONNX file")
    if "\0" in location:
        raise InvalidModelError(where, f"the data of tensor {tensor.name} is at {location!r}", _BROKEN)
    path = file.parent / location
    if not _is_beside(path, file):
        what = f"the data of tensor {tensor.name} is at {location!r}, outside the model's folder"
        raise InvalidModelError(where, what, "copy it beside the model")
    try:
        size = os.stat(path).st_size
    except OSError as error:
        what = f"the data of tensor {tensor.name} cannot be read from {location!r}: {error.strerror}"
        raise InvalidModelError(where, what, "copy it beside the model") from error
    offset, length = tensor.offset or 0, tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length != tensor.nbytes or offset + length > size:
        what = f"tensor {tensor.name} needs {tensor.nbytes} bytes, not {length} at {offset} in {location!r} of {size}"
        raise InvalidModelError(where, what, _BROKEN)
    real = os.path.realpath(path)  # without a base folder: onnx_ir's own checks refuse links that are checked here
    return ir.ExternalTensor(
        real, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=str(tensor.name), doc_string=tensor.doc_string
    )


def _is_beside(path: Path, file: Path) -> bool:
    """Whether a path that a model names is in the folder of its file, and what it leads to too, or where that file really is.

    The caches of model hubs keep files under their hashes in one folder and link to them from another. No path may leave the
    model's folder by its own words.
    """
    named = os.path.normpath(os.path.join(os.path.abspath(file.parent), path))
    if not _is_inside(named, os.path.abspath(file.parent)):
        return False
    folders = os.path.realpath(file.parent), os.path.dirname(os.path.realpath(file))
    return any(_is_inside(os.path.realpath(path), folder) for folder in folders)


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _check_inline(tensor: ir.serde.TensorProtoTensor, where: str) -> None:
    """That a tensor inside the proto has a data type, and as many bytes or elements as its shape needs."""
    proto = tensor.raw
    if proto.data_type not in _DATA_TYPES:
        raise InvalidModelError(where, f"tensor {tensor.name} has data type {proto.data_type}, which ONNX does not have", _BROKEN)
    if min(proto.dims, default=0) < 0:
        raise InvalidModelError(where, f"tensor {tensor.name} has the shape {list(proto.dims)}", _BROKEN)
    if proto.HasField("raw_data"):
        found, needed, unit = len(proto.raw_data), tensor.nbytes, "bytes"
    else:
        found, needed, unit = _typed_elements(proto), math.prod(proto.dims), "elements"
    if found != needed:
        what = f"tensor {tensor.name} ({tensor.dtype}{tensor.shape}) has {found} {unit} of {needed}"
        raise InvalidModelError(where, what, _BROKEN)


def _typed_elements(proto: onnx.TensorProto) -> int:
    """How many elements the typed field of a tensor holds; those narrower than a byte may leave some of the last byte unused."""
    field = onnx.helper.tensor_dtype_to_field(proto.data_type)
    stored = len(getattr(proto, field))
    if proto.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        return stored // 2
    per_item = _PACKED.get(onnx.TensorProto.DataType.Name(proto.data_type), 1)
    if per_item == 1:
        return stored
    needed = math.prod(proto.dims)
    return needed if stored == -(-needed // per_item) else stored * per_item


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
