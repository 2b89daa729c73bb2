"""`import_model`: whatever a user calls a model becomes a graph in our dialect."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import onnx
import onnx_ir as ir

from ...runtime.errors import CompileError, InvalidModelError, OptionError
from ..ir.facts import infer_facts
from ..ir.names import name_nodes
from ..ir.validity import check_nodes
from ..ir.verifier import verify_model
from .attribute_values import check_attribute_values
from .normalize import normalize
from .old_operators import respell_groups
from .onnx_import import model_of_proto, parse_onnx, read_onnx
from .support import check_supported
from .torch_export import import_exported_program


def import_model(source: object, *, keeps_groups: bool = False) -> ir.Model:
    """The graph of an ONNX path, bytes or `ModelProto`, an `onnx_ir.Model` or a torch `ExportedProgram`.

    It is in the dialect that `normalize` describes, verified, with the facts of every value. `source` is not changed; weights
    are shared. `keeps_groups` as of `normalize`.

    Raises:
        InvalidModelError: it is missing, corrupt, or breaks the ONNX specification.
        UnsupportedModelError: it has operators or types that cannot be compiled; all of them are named.
        OptionError: it is not a model at all.
    """
    if isinstance(source, (str, os.PathLike)):
        return prepare_graph(read_onnx(Path(source)), os.fspath(source), keeps_groups=keeps_groups)
    if isinstance(source, bytes):
        return prepare_graph(parse_onnx(source), "model", keeps_groups=keeps_groups)
    if isinstance(source, onnx.ModelProto):
        return prepare_graph(model_of_proto(source), "model", keeps_groups=keeps_groups)
    if isinstance(source, ir.Model):
        return prepare_graph(source.clone(), "model", keeps_groups=keeps_groups)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.export.ExportedProgram):
        return prepare_graph(import_exported_program(source), "model", keeps_groups=keeps_groups)
    raise OptionError(
        "model",
        f"{type(source).__module__}.{type(source).__qualname__} is no model",
        "pass a torch.nn.Module, a torch.export.ExportedProgram, an ONNX path, bytes or ModelProto, or an onnx_ir.Model",
    )


def prepare_graph(model: ir.Model, where: str, *, keeps_groups: bool = False) -> ir.Model:
    """Bring a graph, which may be changed, into the dialect, infer its facts and check it. Raises as `import_model`."""
    try:
        model = normalize(model, where, keeps_groups=keeps_groups)
        check_supported(model)
        check_attribute_values(model)
        verify_model(model)
        infer_facts(model)
        respell_groups(model)
        check_nodes(model)
        name_nodes(model)
    except CompileError:
        raise
    except Exception as error:  # VerificationError, and whatever onnx and onnx_ir meet in a broken model
        raise InvalidModelError(where, f"is no valid ONNX model: {error}", "export the model again") from error
    return model
