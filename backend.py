"""prefuse as an ONNX backend: the interface that `onnx.backend` defines, for tools and test suites that speak it.

import prefuse.backend as backend
(y,) = backend.prepare(model).run([x])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

from .compiler.api import compile_model
from .runtime.errors import OptionError, UnsupportedModelError
from .runtime.signature import in_order
from .runtime.target import Target

if TYPE_CHECKING:
    from .compiler.programs.specialize import SpecializedModel
    from .runtime.executor import CompiledModel
    from .runtime.staged.staged_model import StagedModel

_INDICES = ("", "0")  # of devices of a kind
_TARGETS = {"CPU": "cpu", "CUDA": "cuda"}  # of the devices, as ONNX names them
_ARGUMENTS = ("target", "precision", "calibration", "states", "name", "cache", "progress")  # of prefuse.compile, beside options
_OF_RUNNER = ("rtol", "atol")  # what ONNX's test runner gives to whoever is there


class UnsupportedByBackendError(UnsupportedModelError, BackendIsNotSupposedToImplementIt):
    """A valid model that prefuse refuses: at once a `CompileError` and what ONNX's test runner takes for a refusal."""

    def __init__(self, refusal: UnsupportedModelError) -> None:
        super().__init__(refusal.where, refusal.what, refusal.fix)


class PrefuseRep(BackendRep):
    """A prepared model. A part of it may be compiled only when `run` brings the values that decide its shapes."""

    def __init__(self, model: onnx.ModelProto, target: str = "cpu", arguments: Mapping[str, object] | None = None) -> None:
        initializers = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in initializers]
        given: dict[str, Any] = {"target": target, "cache": False, **(arguments or {})}
        named = {name: given.pop(name) for name in _ARGUMENTS if name in given}
        self._model = _supported(compile_model, model, **named, options=given)

    @property
    def model(self) -> CompiledModel | StagedModel | SpecializedModel:
        """What `prefuse.compile` made."""
        return cast("CompiledModel | StagedModel | SpecializedModel", self._model)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs in the graph's order; `inputs` are arrays in the graph's order, by name, or one array alone.

        Raises:
            UnsupportedByBackendError: prefuse refuses the model for these inputs.
            InputError: they are not the model's.
        """
        result = _supported(self._model, *_in_order(inputs, self._inputs))
        return result if isinstance(result, tuple) else (result,)


class PrefuseBackend(Backend):
    """The interface itself. It has no state; `prepare` compiles."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PrefuseRep:
        """Compile a model, with the arguments of `prefuse.compile`. Nothing is kept in its cache unless `cache` says so.

        Raises:
            UnsupportedByBackendError: prefuse refuses it, or the device.
            CompileError: it is no valid model, or an argument is not one of `prefuse.compile`.
        """
        if not cls.supports_device(device):
            what, fix = f"no {device} device", "use CPU"
            if device.startswith("CUDA:") and cls.supports_device("CUDA"):
                what, fix = f"{device}: the first GPU alone is used", "use CUDA:0, and CUDA_VISIBLE_DEVICES to say which it is"
            raise UnsupportedByBackendError(UnsupportedModelError("device", what, fix))
        arguments = {name: value for name, value in kwargs.items() if name not in _OF_RUNNER}
        return PrefuseRep(model, _TARGETS[device.split(":")[0]], arguments)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Compile a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one operator once, at `opset_version` or the newest. `inputs` stand for its inputs that are not left out."""
        names = [name for name in dict.fromkeys(node.input) if name]
        arrays = [np.asarray(value) for value in _in_order(inputs, names)]
        graph = onnx.helper.make_graph(
            [node],
            node.op_type,
            [onnx.helper.make_tensor_value_info(name, _element_type(a), a.shape) for name, a in zip(names, arrays, strict=True)],
            [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name],
        )
        opset = kwargs.pop("opset_version", None) or onnx.defs.onnx_opset_version()
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        return cls.run_model(model, arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether this machine has a device, named as ONNX names them, and prefuse compiles for it."""
        kind, _, index = device.partition(":")
        try:
            Target.parse(_TARGETS[kind])
        except (KeyError, OptionError):
            return False
        return index in _INDICES


def _supported(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a call, its refusals raised as ONNX's runner knows them."""
    try:
        return function(*args, **kwargs)
    except UnsupportedModelError as refusal:
        raise UnsupportedByBackendError(refusal) from refusal


def _in_order(inputs: Any, names: Sequence[str]) -> list[Any]:
    """Inputs by the order of names. Raises InputError if they come by others."""
    if isinstance(inputs, Mapping):
        return list(in_order(names, (), inputs))
    return list(inputs) if isinstance(inputs, Sequence) else [inputs]


def _element_type(array: np.ndarray) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))


is_compatible = PrefuseBackend.is_compatible
prepare = PrefuseBackend.prepare
run_model = PrefuseBackend.run_model
run_node = PrefuseBackend.run_node
supports_device = PrefuseBackend.supports_device
