"""The zero point of an image of integers: what pads it, and what makes sums of words those of elements less their zero point."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder
from ..formats.format import Format
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast

_EACH_BYTE = 0x01010101  # of a word


def zero_point_of(form: ChannelsLast, builder: KernelBuilder) -> Expr | None:
    """What is subtracted from each element of the image that a form's anchor reads, int32; None: nothing."""
    name = form.inner.zero_points.get(form.anchor.inputs[0])
    return None if name is None else builder.bind(tirx.Cast("int32", GroupValues(form.inner, builder).read(name, ())))


@dataclass(frozen=True)
class ImageZero:
    """The zero point of the first operand of a form's anchor, whose products are of a format."""

    form: ChannelsLast
    builder: KernelBuilder
    format: Format

    def value(self) -> Expr | None:
        """What is subtracted from each element, int32; None: nothing."""
        return zero_point_of(self.form, self.builder)

    def padding(self, k_pack: int) -> Expr:
        """The element of `k_pack` channels that stands for zero around the image."""
        zero = self.value()
        if zero is None:
            return 0
        if k_pack == 1:
            return tirx.Cast(self.form.inner.types[self.form.anchor.inputs[0]].dtype, zero)
        return self.builder.bind((zero & tirx.const(255, "int32")) * tirx.const(_EACH_BYTE, "int32"))

    def factor(self) -> Expr | None:
        """What the sums over k of the weights are multiplied by, for sums of words to begin with (matmul.py); None: with 0."""
        zero = self.value()
        if self.format.k_pack == 1 or (zero is None and not self.format.offset):
            return None
        factor = tirx.const(-self.format.offset, "int32")
        return factor if zero is None else self.builder.bind(factor - zero)
