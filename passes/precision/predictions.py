"""Whether kernels would be faster with bfloat16 or float16 operands: all that the choice of formats asks of the cost model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx_ir as ir

from ...compiler.ir.matching import static_shape
from ...compiler.ir.operand_formats import Format
from ...compiler.ir.residual_branches import convolutions_on_branches
from ...compiler.pipeline import Context
from ...kernels.cost.amx import tile_convolution_cycles
from ...kernels.cost.convolution import channels_last_cycles, has_fewer_pairs_of_taps, in_pairs, pays_to_fill_pairs
from ...kernels.cost.winograd import PAIRED_TILES, winograd_choice
from ...runtime.precision import TOLERANCES
from ..layout.choose_layout.extents import convolution_extents, phase_extents


@dataclass(slots=True)
class Predictions:
    """Of the products of one model, on the target of its compilation."""

    model: ir.Model
    context: Context
    on_branches: frozenset[ir.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.on_branches = convolutions_on_branches(self.model)

    def multiplies_faster(self, precision: Format) -> bool:
        """Whether the target multiplies a format faster than float32."""
        return precision == "bfloat16" and self.context.target.has("avx512_bf16")

    def needs_even_rows(self, has_constant_weights: bool) -> bool:
        """Whether dot products need an even depth; constant weights, and rows of A, may otherwise be padded with zeros."""
        return self.context.target.has_tiles or not has_constant_weights

    def transforms_weights(self, node: ir.Node) -> bool:
        """Whether a convolution will be Winograd's, which transforms its weights in float32: rounding them gains nothing."""
        target = self.context.target
        is_plane = node.op_type == "Conv" and len(static_shape(node.outputs[0]) or ()) == 4
        if not is_plane or target.has_tiles or not TOLERANCES[self.context.precision].winograd_outputs:
            return False
        one = replace(convolution_extents(node), element_bytes=2)
        paired_tiles = PAIRED_TILES if target.multiplies_pairs and node in self.on_branches else 0
        choice = winograd_choice(one, target.machine, self.context.precision, paired_tiles=paired_tiles)
        direct = channels_last_cycles(in_pairs(one), target.machine)
        return choice is not None and choice.cycles < direct

    def odd_channels_fault(self, node: ir.Node, channels: int) -> str:
        """Why a convolution of an odd number of channels a group stays as it is; empty where a copy with one more pays."""
        target, fault = self.context.target, f"{channels} channels are no pairs"
        if node.op_type != "Conv":
            return fault
        one = replace(convolution_extents(node), element_bytes=2)
        has_neighbours = one.kernel[1] > 1 and one.dilations[1] == 1
        pays = target.multiplies_pairs and pays_to_fill_pairs(one, target.machine)
        if pays and not has_fewer_pairs_of_taps(one):
            return ""
        if has_neighbours:
            return f"{fault}: a kernel may round taps of a row as it reads them"
        return f"{fault}, and a copy with one more would cost more than it saves" if one.groups == 1 and not pays else fault

    def tile_unit_fault(self, node: ir.Node) -> str:
        """Why a convolution stays float32 on CPUs with AMX, whose dot products of vectors have half the rate of FMAs."""
        target = self.context.target
        if not target.has_tiles:
            return ""
        one = convolution_extents(node) if node.op_type == "Conv" else phase_extents(node)
        tiles, vectors = tile_convolution_cycles(one, 1, target.machine), channels_last_cycles(one, target.machine)
        return "" if tiles < vectors else f"{tiles:.0f} cycles on tiles are no fewer than {vectors:.0f} on vectors in float32"
