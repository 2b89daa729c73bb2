"""choose-layout: activations of convolutional networks lie channels-last where that is faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.assignments.kernel_choice import KernelChoice
from ....compiler.ir.functions import drop_uncalled_groups
from ....compiler.ir.rewriter import Rejection
from ....compiler.pipeline import Context, Pass
from ....kernels.cost.memory import MoveCosts, move_costs
from .cut import OUTSIDE, Crossing, LayoutProblem, choose_layouts
from .forms import Flexible, conversion_bytes
from .joining import join_channels
from .nodes import flexible_form
from .rewriting import LayoutWriter

_TOO_DEAR = "conversions around it would cost more than channels-last saves"


@dataclass(frozen=True)
class ChooseLayout(Pass):
    """Choose for every group of convolutional networks whether its values lie channels-first or channels-last.

    Before:  c = prefuse.conv_relu(x, w);  y = MaxPool(c)
    After:   t = Transpose(x);  c = prefuse.conv_relu_channels_last(t, w)
             p = prefuse.maxpool_channels_last(c);  y = Transpose(p)

    A window (convolution, transposed convolution, pooling) is then a function with transposes around it, which its kernel reads
    through. Pointwise nodes, Concat, Pad, Resize, Slice, Split and means of positions work on other axes, with constants turned;
    products with constant weights have these reordered instead of a flattened image; tokens of vision transformers and the
    model's own transposes are channels-last already. Concats of channels then go into the function of a window that makes one of
    their pieces. The choice is that of the fewest estimated cycles of the whole graph, conversions counted once for all readers.
    Legal for windows of one spatial dimension or two, or three but for transposed convolutions, static shapes.
    """

    name: ClassVar[str] = "choose-layout"

    def run(self, model: ir.Model, context: Context) -> bool:
        found, images, ask = [], set[ir.Value](), context.kernels_of(model)
        for node in model.graph:
            form = flexible_form(model, node, context.target, ask, images)
            if isinstance(form, Rejection):
                context.reject(self.name, form)
            elif form is not None:
                found.append(form)
                if form.form == "window" or not form.operands or any(node.inputs[i] in images for i in form.operands):
                    images.update(form.images)
        if not any(one.form == "window" and one.last_cycles < one.first_cycles for one in found):
            return False
        chosen = choose_layouts(layout_problem(model.graph, found, move_costs(context.target.machine)))
        writer = LayoutWriter(model)
        for one, is_last in zip(found, chosen, strict=True):
            if choice := _kernel_of(one, is_last=is_last, is_direct=writer.reads_directly(one)):
                context.predict(self.name, one.node, choice)
            if is_last:
                writer.write(one)
            elif one.form == "window" and one.last_cycles < one.first_cycles:
                context.reject(self.name, Rejection(_TOO_DEAR, (one.node,)))
        writer.finish()
        if any(chosen):
            join_channels(model)
            drop_uncalled_groups(model)
        return any(chosen)


def _kernel_of(one: Flexible, *, is_last: bool, is_direct: bool) -> KernelChoice | None:
    """What computes a convolution in the layout that was chosen; None for other nodes, and where there is no template."""
    if one.kernels is None:
        return None
    choice = one.kernels.first if not is_last else one.kernels.direct if is_direct else one.kernels.last
    return choice if isinstance(choice, KernelChoice) else None


def layout_problem(graph: ir.Graph, found: list[Flexible], costs: MoveCosts) -> LayoutProblem:
    """The choice as numbers: nodes in the order of `found`, and every value that takes a kernel to convert."""
    numbers = {one.node: number for number, one in enumerate(found)}
    values = dict.fromkeys(
        value
        for one in found
        for value in (*(one.node.inputs[i] for i in one.operands), *one.images)
        if value is not None and conversion_bytes(value)
    )
    return LayoutProblem(
        [round(one.first_cycles) for one in found],
        [round(one.last_cycles) for one in found],
        [_crossing(value, found, numbers, costs) for value in values],
    )


def _crossing(value: ir.Value, found: list[Flexible], numbers: dict[ir.Node, int], costs: MoveCosts) -> Crossing:
    producer = value.producer()
    maker = OUTSIDE if producer is None else numbers.get(producer, OUTSIDE)
    if maker != OUTSIDE and value not in found[maker].images:
        maker = OUTSIDE
    readers, direct = set(), dict[int, int]()
    if value.is_graph_output():
        readers.add(OUTSIDE)
    for user, index in value.uses():
        number = numbers.get(user, OUTSIDE)
        if number == OUTSIDE or index not in found[number].operands:
            readers.add(OUTSIDE)
        elif index in found[number].direct:
            direct[number] = round(found[number].direct_cycles)
        else:
            readers.add(number)
    return Crossing(maker, tuple(sorted(readers)), round(costs.conversion(conversion_bytes(value))), tuple(direct.items()))
