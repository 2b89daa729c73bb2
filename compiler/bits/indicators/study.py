"""What indicators are asked: a model, data, what gets one format, and the formats."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, get_args

import numpy as np
import onnx_ir as ir

from ....runtime.errors import InputError, OptionError
from ...quantization.units import Unit as Product
from ...quantization.units import UnitFormat, fault_of, find_units
from .roundings import ROUNDINGS, UNCHANGED, Array

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, Array]
Range = tuple[float, float]

_QUANTIZED: tuple[UnitFormat, ...] = get_args(UnitFormat)
_SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node: the modules around it, from the outermost, and itself
_WRAPPER = "module."  # what our own export puts a module into


@dataclass(frozen=True)
class TorchModule:
    """The torch module that a model was exported from: called with a batch's arrays as tensors, by name, it returns the outputs.

    `modules` names the submodule that each product of the model is (of `torch.nn.Linear`, `Conv1d` to `Conv3d`, or another that
    multiplies by a parameter `weight`), by the name of its node.
    """

    module: torch.nn.Module
    modules: Mapping[str, str]

    @staticmethod
    def of(module: torch.nn.Module, model: ir.Model) -> TorchModule:
        """By what torch's exporter wrote of each node; products that it says nothing of are left out."""
        known = {name for name, _ in module.named_modules()}
        found = {}
        for product in find_units(model):
            scopes = literal_eval(product.node.metadata_props.get(_SCOPES, "[]"))
            names = [name.removeprefix(_WRAPPER) for name in scopes[:-1]]
            if names and names[-1] in known:
                found[product.name] = names[-1]
        return TorchModule(module, found)


@dataclass(frozen=True)
class Study:
    """A float model and calibration data, and the damage that is asked for: of each of `formats` for each of `units`.

    `units` are the names of products (nodes MatMul, Gemm, Conv with constant weights) that get one format, by the unit's name.
    `batches` are the inputs by name; `ranges` those of activations, by the name of the value, where they are known already: else
    the least and greatest that the batches have. `keeps_pairs`: as of `Calibrated`.

    Raises:
        InputError: no batches, or batches that lack an input or have NaNs.
        OptionError: an unknown format, or a unit of an unknown node.
    """

    model: ir.Model
    batches: Sequence[Batch]
    units: Mapping[str, tuple[str, ...]]
    formats: tuple[str, ...]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    torch: TorchModule | None = None
    keeps_pairs: bool = False

    def __post_init__(self) -> None:
        self._check_batches()
        for form in self.formats:
            if form not in ROUNDINGS:
                raise OptionError(f"format {form!r}", "it is unknown", f"give some of {', '.join(ROUNDINGS)}")
        for unit, names in self.units.items():
            for name in names:
                if name not in self.products:
                    what = f"{name!r} is no product of float32 activations by constant weights"
                    raise OptionError(f"unit {unit!r}", what, "give names of MatMul, Gemm or Conv nodes")

    @cached_property
    def products(self) -> Mapping[str, Product]:
        """All products of the model, by the names of their nodes, in the model's order."""
        return {product.name: product for product in find_units(self.model)}

    def can_have(self, unit: str, form: str) -> bool:
        """Whether all products of a unit can have a format."""
        products = [self.products[name] for name in self.units[unit]]
        narrow = next((one for one in _QUANTIZED if one == form), None)
        if narrow is not None:
            return not any(fault_of(product, narrow) for product in products)
        return not changes(form) or all(np.isfinite(product.weights).all() for product in products)

    def empty(self) -> Array:
        """[unit][format] of zeros, infinite where a unit cannot have a format."""
        rows = [[0.0 if self.can_have(unit, form) else np.inf for form in self.formats] for unit in self.units]
        return np.array(rows).reshape(len(self.units), len(self.formats))

    def _check_batches(self) -> None:
        if not self.batches:
            raise InputError("calibration", "there are no batches", "give at least one")
        wanted = [str(value.name) for value in self.model.graph.inputs]
        for number, batch in enumerate(self.batches):
            where = f"calibration, batch {number}"
            if missing := [name for name in wanted if name not in batch]:
                raise InputError(where, f"it has no input {missing[0]!r}", f"give {', '.join(wanted)}")
            for name, array in batch.items():
                if not isinstance(array, np.ndarray):
                    raise InputError(where, f"input {name!r} is a {type(array).__name__}", "give NumPy arrays")
                if array.dtype.kind == "f" and np.isnan(array).any():
                    raise InputError(where, f"input {name!r} has NaNs", "leave the batch out")


class Indicator(Protocol):
    """A way to predict damage: the squared relative error (2-norm) of the output that suffers most, over all batches together.

    Of an assignment it is the sum over its units, as errors of different units are nearly uncorrelated. Of several outputs that
    sum is an upper bound, as not the same one may suffer most from each unit.
    """

    name: ClassVar[str]

    def damages(self, study: Study) -> Array:
        """[unit][format] in the study's order: 0 for float32, infinite where a unit cannot have a format or results overflow."""
        ...


def changes(form: str) -> bool:
    """Whether a format rounds anything."""
    return form != UNCHANGED
