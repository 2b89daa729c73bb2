"""What the verbs write to files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from ...runtime.errors import OptionError
from ...runtime.files.whole_file import is_special, whole_file

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

_MOST_MESSAGE_BYTES = 1_900_000_000  # protobuf holds less than 2 GiB


def check_output(path: Path, option: str = "--output", *, is_replaced: bool = False) -> None:
    """Raise OptionError early if a file could not be written to `path` after minutes of work. `is_replaced`: it is written by
    putting another file in its place, which what is no file does not allow."""
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise OptionError(option, f"{path} is a folder, or lies in none", "give the path of a file")
    if is_replaced and is_special(path):
        raise OptionError(option, f"{path} is a device or a pipe", "give the path of a file")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file of arrays with any names (`numpy.savez` takes no "file"), whole or not at all.

    Raises:
        OptionError: it cannot be written there.
    """
    import numpy as np

    try:
        with whole_file(path) as place, ZipFile(place, "w", allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as error:
        raise OptionError("--output", f"{path} cannot be written: {error.strerror or error}", "check the folder") from error


def write_model(graph: ir.Model, path: Path) -> None:
    """Write a model to .onnx, or as text to .txt, whole or not at all.

    Weights that the model has in other files are written, too: into it, or where they are more than a message holds, beside it
    into `path`.data, or if that is there, `path`.2.data and so on: an older file may hold weights of the model itself.

    Raises:
        OptionError: it cannot be written there.
    """
    import onnx_ir as ir

    from ..ir.printer import print_model

    values = chain.from_iterable(body.initializers.values() for body in graph.graphs())
    is_large = sum(value.const_value.nbytes for value in values if value.const_value is not None) > _MOST_MESSAGE_BYTES
    try:
        with whole_file(path, keeps_link=not is_large) as place:  # the data lie beside what is opened
            if path.suffix == ".txt":
                place.write_text(print_model(graph))
                return
            _load_attributes(graph)
            if is_large:
                _write_large(graph, place, _unused_name(path))
            else:
                ir.save(ir.external_data.load_to_model(graph), place, format="protobuf")
    except OSError as error:
        raise OptionError("--output", f"{path} cannot be written: {error.strerror or error}", "check the folder") from error


def _load_attributes(model: ir.Model) -> None:
    """Read tensors of attributes whose contents are in other files: onnx_ir does so for those of initializers only."""
    import onnx_ir as ir

    for node in chain(model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for name, attribute in tuple(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                (tensor,) = ir.external_data.convert_tensors_from_external([attribute.value])
                node.attributes[name] = ir.AttrTensor(name, tensor)


def _write_large(model: ir.Model, place: Path, data: str) -> None:
    """Write a model and its weights, these to a new file beside it."""
    import onnx_ir as ir

    try:
        ir.save(model, place, format="protobuf", external_data=data)
    except BaseException:
        with suppress(OSError):
            place.with_name(data).unlink(missing_ok=True)
        raise


def _unused_name(path: Path) -> str:
    """Of a file for the weights of a model at `path`."""
    names = chain([f"{path.name}.data"], (f"{path.name}.{number}.data" for number in count(2)))
    return next(name for name in names if not os.path.lexists(path.with_name(name)))
