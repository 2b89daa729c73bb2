"""ONNX files, bytes and protos to a graph. Weights in external files are memory-mapped, never read here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ..ir.scopes import subgraphs_of

EXTERNAL_FILES = "prefuse.external_files"  # key of a model's `meta`: names of the files with external data, in its folder
_BROKEN = "export the model again, or copy the whole file"


def read_onnx(path: Path) -> ir.Model:
    """Read an ONNX file: protobuf, or the text forms that onnx knows by their suffix (.onnxtxt, .textproto, .json).

    Raises:
        InvalidModelError: the file is missing, corrupt or cut short, or its external data is missing, short or elsewhere.
        UnsupportedModelError: it uses a part of ONNX that no graph here can hold.
    """
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
    return model_of_proto(proto, str(path), path.parent)


def parse_onnx(content: bytes) -> ir.Model:
    """The graph in the bytes of an ONNX file. Raises as `read_onnx`."""
    try:
        proto = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's DecodeError, which has no type stubs
        raise InvalidModelError("bytes", f"are no ONNX model: {_first_line(error)}", _BROKEN) from error
    return model_of_proto(proto, "bytes")


def model_of_proto(proto: onnx.ModelProto, where: str = "ModelProto", folder: Path | None = None) -> ir.Model:
    """The graph of a proto, which keeps the weights; `folder` is where its external data lies. Raises as `read_onnx`."""
    if not proto.HasField("graph") or not proto.opset_import:
        raise InvalidModelError(where, "has no graph or no opset: it is empty, cut short or no ONNX model", _BROKEN)
    if proto.graph.sparse_initializer:
        names = ", ".join(tensor.values.name for tensor in proto.graph.sparse_initializer)
        raise UnsupportedModelError(where, f"sparse initializers ({names})", "store them as dense tensors")
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises what it meets: KeyError, TypeError, ValueError and its own
        raise InvalidModelError(where, f"is no valid ONNX model: {_first_line(error)}", _BROKEN) from error
    external: set[str] = set()
    for tensor in _tensors(model.graph):
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(tensor, where, folder)
            external.add(os.fspath(tensor.location))
        elif isinstance(tensor, ir.serde.TensorProtoTensor):
            _check_inline(tensor, where)
    model.meta[EXTERNAL_FILES] = sorted(external)
    return model


def _tensors(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                yield attribute.as_tensor()
        for subgraph in subgraphs_of(node):
            yield from _tensors(subgraph)


def _check_external(tensor: ir.ExternalTensor, where: str, folder: Path | None) -> None:
    """Settle where the data of a tensor lies, and that it lies there whole, inside the model's own folder."""
    if folder is None:
        raise InvalidModelError(
            where,
            f"tensor {tensor.name} is in the external file {str(tensor.location)!r}, relative to an unknown folder",
            "give the path of the ONNX file",
        )
    location = os.fspath(tensor.location)
    base, path = os.path.realpath(folder), os.path.realpath(folder / location)
    if os.path.isabs(location) or not path.startswith(base.rstrip(os.sep) + os.sep):
        raise InvalidModelError(
            where, f"the data of tensor {tensor.name} is at {location!r}, outside the model's folder", "copy it beside the model"
        )
    try:
        status = os.stat(path)
    except OSError as error:
        raise InvalidModelError(
            where,
            f"the data of tensor {tensor.name} cannot be read from {location!r}: {error.strerror}",
            "copy it beside the model",
        ) from error
    if status.st_nlink > 1:
        raise InvalidModelError(where, f"the external file {location!r} is a hard link", "make it a copy of its own")
    offset, length = tensor.offset or 0, tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length != tensor.nbytes or offset + length > status.st_size:
        raise InvalidModelError(
            where,
            f"tensor {tensor.name} needs {tensor.nbytes} bytes, not {length} at {offset} in {location!r} of {status.st_size}",
            _BROKEN,
        )
    tensor.base_dir = os.fspath(folder) or "."


def _check_inline(tensor: ir.serde.TensorProtoTensor, where: str) -> None:
    """That a tensor inside the proto has as many bytes as its shape needs (typed fields are checked when read)."""
    proto = tensor.raw
    if proto.HasField("raw_data") and len(proto.raw_data) != tensor.nbytes:
        raise InvalidModelError(
            where,
            f"tensor {tensor.name} ({tensor.dtype}{tensor.shape}) has {len(proto.raw_data)} bytes of {tensor.nbytes}",
            _BROKEN,
        )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
