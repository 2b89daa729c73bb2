"""Whether the inputs of a graph may be padded, and a program for one size that is called with smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...runtime.interchange import copied_results
from ...runtime.program_set.member import Member
from ...runtime.program_set.padding import Cut, Padding
from ...runtime.symbolic.dims import Dim, SymbolicSizeError
from .specialize import Specialization

if TYPE_CHECKING:
    import onnx_ir as ir

    from .options import Options


@dataclass(frozen=True, slots=True)
class PaddedSpecialization(Specialization):
    """A program that is called with sizes of some dimensions, `padded`, up to its own, the greatest of them."""

    padding: Padding = field(default_factory=lambda: Padding((), ()))
    padded: tuple[Dim, ...] = ()

    def run(self, callee: Callable[..., object], tensors: Sequence[object], out: object = None) -> object:
        result = self.padding.run(callee, tensors, {dim.name: dim.sizes[-1] for dim in self.padded})
        return self.shaped(result if out is None else copied_results(result, out, self.model.output_names), tensors)

    def member(self) -> Member:
        return replace(Specialization.member(self), padded=self.padded, padding=self.padding)


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
    cuts = (frozenset(Cut(carry.name, carry.axis, str(carry.inner)) for carry in carries) for carries in found)
    return Padding(tuple(inputs), tuple(cuts))
