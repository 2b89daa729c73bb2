"""Which kernels products would have with bfloat16 or float16 operands: all that the choice of formats asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ...compiler.ir.assignments.kernel_choice import AS_IT_IS, Ask, KernelChoice, NoKernel, Variant
from ...compiler.ir.assignments.operand_formats import Format, Formats
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.pipeline import Context
from ...kernels.cost.memory import MoveCosts, move_costs


@dataclass(slots=True)
class Predictions:
    """Of the products of one model in one narrow format, on the target of its compilation.

    Convolutions are thought to lie channels-last, as choose-layout makes them where narrow numbers are worth it.
    """

    model: ir.Model
    context: Context
    precision: Format
    ask: Ask = field(init=False)

    def __post_init__(self) -> None:
        self.ask = self.context.kernels_of(self.model)

    def multiplies_faster(self) -> bool:
        """Whether the target multiplies the format faster than float32."""
        return self.context.target.is_gpu or (self.precision == "bfloat16" and self.context.target.has("avx512_bf16"))

    def transforms_weights(self, node: ir.Node) -> bool:
        """Whether a convolution's kernel makes other numbers of its weights, as Winograd's does: rounding them gains nothing."""
        _, narrow = self._kernels(node)
        return isinstance(narrow, KernelChoice) and narrow.transforms_weights

    def matrix_fault(self, node: ir.Node, positions: Sequence[int]) -> str:
        """Why a product of matrices reads the operands at these positions as they are: its kernel then takes no longer.

        Empty if it need not, as where all products are asked to be narrow that the target multiplies no faster so.
        """
        if not self.multiplies_faster() or self.context.target.is_gpu:  # whose matrix unit takes no wide numbers
            return ""
        wide, narrow = self.ask(node, AS_IT_IS), self.ask(node, Variant(tuple((one, self.precision) for one in positions)))
        if isinstance(narrow, NoKernel):
            return f"no kernel reads it narrow: {narrow}"
        if isinstance(wide, NoKernel):
            return ""
        if narrow.unit == "fma":
            return "one by one narrow numbers are multiplied no faster"
        return _no_fewer(narrow, wide, [node.inputs[one] for one in positions], self._costs)

    def weights_fault(self, node: ir.Node, positions: Sequence[int]) -> str:
        """Why a product or recurrence whose format the target multiplies no faster reads the weights at these positions as they
        are: of many rows, making float32 of them takes longer than reading half the bytes saves. Empty if it need not."""
        wide, narrow = self.ask(node, AS_IT_IS), self.ask(node, Variant(tuple((one, self.precision) for one in positions)))
        if not (isinstance(wide, KernelChoice) and isinstance(narrow, KernelChoice)) or narrow.cycles <= wide.cycles:
            return ""
        return f"with narrow weights {narrow.template} would take {narrow.cycles:.0f} cycles, and takes {wide.cycles:.0f}"

    def convolution_fault(self, node: ir.Node, channels: int) -> str:
        """Why a convolution of so many channels a group stays float32: its kernel then takes no longer. Empty if it need not."""
        wide, narrow = self._kernels(node)
        if isinstance(narrow, NoKernel):
            return f"no kernel reads it narrow: {narrow}"
        if isinstance(wide, NoKernel):
            return ""
        fault = f"{channels} channels are no pairs, and " if channels % 2 else ""
        if channels % 2 and self.context.target.has_tiles:
            return f"{channels} channels are no pairs"
        if channels % 2 and narrow.unit == "fma" and not narrow.transforms_weights:
            return f"{fault}one by one narrow numbers are multiplied no faster"
        if self.context.target.is_gpu and narrow.cycles <= wide.cycles and _rounding_cycles(node.inputs[0], self._costs) == 0:
            return ""  # where a kernel waits for memory alone, what is stored in half the bytes still helps those around it
        reason = _no_fewer(narrow, wide, node.inputs[:1], self._costs)
        return fault + reason if reason else ""

    @property
    def _costs(self) -> MoveCosts:
        return move_costs(self.context.target.machine)

    def record(self, pass_name: str, node: ir.Node, formats: Formats) -> None:
        """Tell the context which kernel a convolution is expected to have that reads its operands in these formats."""
        choice = self.ask(node, Variant(tuple(formats.items()), channels_last=(0,), has_channels_last_results=True))
        if isinstance(choice, KernelChoice):
            self.context.predict(pass_name, node, choice)

    def _kernels(self, node: ir.Node) -> tuple[KernelChoice | NoKernel, KernelChoice | NoKernel]:
        """What computes a convolution channels-last of float32 operands, and of narrow ones."""
        formats = ((), tuple((position, self.precision) for position in (0, 1)))
        wide, narrow = (self.ask(node, Variant(one, channels_last=(0,), has_channels_last_results=True)) for one in formats)
        return wide, narrow


def _no_fewer(narrow: KernelChoice, wide: KernelChoice, rounded: Sequence[ir.Value | None], costs: MoveCosts) -> str:
    """Why a kernel of operands that are rounded first is not worth it; empty if it is."""
    cycles = narrow.cycles + sum(_rounding_cycles(image, costs) for image in rounded)
    if cycles < wide.cycles:
        return ""
    return f"{cycles:.0f} cycles ({narrow.unit}) are no fewer than {wide.cycles:.0f} ({wide.unit})"


def _rounding_cycles(image: ir.Value | None, costs: MoveCosts) -> float:
    """Of a kernel that rounds an image which no other kernel makes, and so none rounds as it stores it."""
    is_read = image is not None and image.is_graph_input() and has_static_type(image)
    return costs.copy(tensor_type(image).size_bytes) if image is not None and is_read else 0.0
