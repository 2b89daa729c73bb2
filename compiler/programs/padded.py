"""A program for one size called with smaller ones: its inputs are made longer, what counts of its results is cut out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.interchange import all_as_tensors, as_array, is_torch
from ...runtime.symbolic.dims import SymbolicSizeError
from ...runtime.symbolic.size_text import evaluator
from .specialize import Specialization

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..buckets.carry import Carries
    from .options import Options


@dataclass(frozen=True, slots=True)
class Padding:
    """Along which axes of inputs dimensions lie, by their names; and how those that may be padded lie in outputs."""

    inputs: tuple[Mapping[int, str], ...]
    outputs: tuple[Carries, ...]

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The sizes of a call."""
        return {name: shape[axis] for shape, axes in zip(shapes, self.inputs, strict=True) for axis, name in axes.items()}

    def longer(self, array: np.ndarray, position: int, padded: Mapping[str, int]) -> np.ndarray:
        """An input of these sizes; behind its end stands its last part again, with which nothing happens that did not before."""
        shape = [padded.get(self.inputs[position].get(axis, ""), size) for axis, size in enumerate(array.shape)]
        if tuple(shape) == array.shape:
            return array
        longer = np.empty(shape, array.dtype)
        longer[tuple(map(slice, array.shape))] = array
        for axis, (old, new) in enumerate(zip(array.shape, shape, strict=True)):
            if new > old:
                before = (slice(None),) * axis
                longer[(*before, slice(old, new))] = longer[(*before, slice(old - 1, old))]
        return longer

    def cut(self, array: np.ndarray, position: int, sizes: Mapping[str, int], padded: Mapping[str, int]) -> np.ndarray:
        """What counts of an output of a program for the sizes `padded`."""
        for carry in self.outputs[position]:
            before, size, behind = array.shape[: carry.axis], array.shape[carry.axis], array.shape[carry.axis + 1 :]
            most, inner = padded[carry.name], evaluator(str(carry.inner))(sizes)
            parts = array.reshape(*before, size // (most * inner), most, inner, *behind)
            kept = parts[(*(slice(None),) * (carry.axis + 1), slice(sizes[carry.name]))]
            array = kept.reshape(*before, size // most * sizes[carry.name], *behind)
        return np.ascontiguousarray(array)


@dataclass(frozen=True, slots=True)
class PaddedSpecialization(Specialization):
    """A program that is called with sizes up to its own, `padded`, of some dimensions."""

    padding: Padding = Padding((), ())
    padded: tuple[tuple[str, int], ...] = ()

    def run(self, callee: Callable[..., object], tensors: Sequence[object]) -> object:
        padded = dict(self.padded)
        arrays = [as_array(value, f"input {position}") for position, value in enumerate(tensors)]
        sizes = self.padding.sizes([array.shape for array in arrays])
        if all(sizes[name] == size for name, size in self.padded):
            return Specialization.run(self, callee, tensors)
        result = callee(*[self.padding.longer(array, position, padded) for position, array in enumerate(arrays)])
        row = result if isinstance(result, tuple) else (result,)
        cut: list[object] = [self.padding.cut(as_array(one, "result"), place, sizes, padded) for place, one in enumerate(row)]
        found = all_as_tensors(cut) if any(map(is_torch, tensors)) else cut
        return self.shaped(found[0] if len(found) == 1 else tuple(found), tensors)


def find_padding(model: ir.Model, names: Sequence[str], options: Options) -> Padding | str:
    """How inputs of a graph with symbolic sizes may be padded along these dimensions; or why not. The graph is changed."""
    from ..buckets.analysis import carried_outputs
    from ..ir.facts import source_of
    from ..ir.rewriter import Rejection
    from ..ir.symbolic.symbols import SizeDim, domain_of_model
    from ..pipeline import Context, Pass, parse_pipeline, run_pipeline
    from ..pipeline.pass_table import PASSES, STRUCTURE_PIPELINE

    domain = domain_of_model(model)
    passes = [one for one in parse_pipeline(STRUCTURE_PIPELINE, PASSES) if isinstance(one, Pass)]
    inputs = [
        {axis: str(dim.size) for axis, dim in enumerate(value.shape or ()) if isinstance(dim, SizeDim)}
        for value in model.graph.inputs
    ]
    try:
        run_pipeline(model, passes, Context(options.target, precision=options.precision, weights=options.weights))
        found = carried_outputs(model, names)
    except SymbolicSizeError as error:
        return str(error)
    if isinstance(found, Rejection):
        where = f" at {source_of(found.nodes[0])}" if found.nodes else ""
        return f"{found.reason}{where}"
    if domain is None or domain.cuts:
        return f"what is computed depends on {' and '.join(domain.cuts) if domain is not None else 'nothing'}"
    return Padding(tuple(inputs), found)
