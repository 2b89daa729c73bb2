"""reassociate-product: where weighted sums of the same rows are multiplied by one constant, the rows are, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ..compiler.ir.facts import tensor_type
from ..compiler.ir.rewriter import Rejection
from ..compiler.pipeline import Context, Pass
from .association.readers import Reader, readers_of
from .association.rewriting import Rewriter
from .association.weighted_sums import weighted_sum
from .parallel.worth import LAUNCH_BYTES

_FLOPS_PER_BYTE = 8  # that a core computes in the time of one byte from memory


@dataclass(frozen=True)
class ReassociateProduct(Pass):
    """Multiply the rows that several weighted sums are made of, instead of each of the sums.

    Before:  c = MatMul(p, s);  x = Concat<axis=1>(a, c);  y = Gemm(x, w, b)         (at every step with other p and a)
    After:   q = MatMul(s, w_bottom);  d = Gemm(p, q, b);  y = Gemm(a, w_top, d)

    So it is in a decoder with attention: at every step, the states of the source are summed up by that step's weights and
    multiplied by the large weights of the output or of a recurrent cell, which then need not be read again.
    Legal always: a product of matrices is associative; sums are rounded in another order. Of recurrent operators, only one step
    for a batch of one is seen. Worth it when the time of the products that become smaller is more than that of the new one.
    """

    name: ClassVar[str] = "reassociate-product"
    launch_bytes: int = LAUNCH_BYTES  # what a further kernel costs

    def run(self, model: ir.Model, context: Context) -> bool:
        sums = [found for node in model.graph if (found := weighted_sum(node)) is not None]
        places = {node: place for place, node in enumerate(model.graph)} if sums else {}
        readers = {reader.node: reader for source in sums for reader in readers_of(source)}  # one sum for each
        families: dict[tuple[object, ...], list[Reader]] = defaultdict(list)
        for reader in sorted(readers.values(), key=lambda reader: places[reader.node]):
            families[_key(reader)].append(reader)
        rewriter, changed = Rewriter(model), False
        for family in families.values():
            fault = _costly(family, self.launch_bytes) or _shared_weight(family, self.launch_bytes)
            if fault is not None:
                context.reject(self.name, fault)
                continue
            rewriter.rewrite(family)
            changed = True
        return changed


def _key(reader: Reader) -> tuple[object, ...]:
    """Equal for readers that one product of the rows serves."""
    return reader.source.values, reader.weight, reader.depth_axis, reader.begin, reader.end


def _costly(family: Sequence[Reader], launch_bytes: int) -> Rejection | None:
    """Where the products that become smaller do not pay for that of the rows."""
    columns, terms, depth = family[0].columns, family[0].source.terms, family[0].source.depth
    saved = sum(_bytes(reader.source.rows, depth, columns) for reader in family)
    launches = sum(2 if reader.is_recurrent else 1 for reader in family) + 1
    cost = _bytes(terms, depth, columns) + sum(_bytes(reader.source.rows, terms, columns) for reader in family)
    if saved > cost + launches * launch_bytes:
        return None
    times = f"saves the time of {saved} bytes, and costs that of {cost} bytes and {launches} launches"
    reason = f"{len(family)} products of sums of %{family[0].source.values.name} stay: to multiply its rows {times}"
    return Rejection(reason, tuple(reader.node for reader in family))


def _bytes(rows: int, depth: int, columns: int) -> int:
    """The bytes that could be moved in the time of a product of float32."""
    moved = 4 * (rows * depth + depth * columns + rows * columns)
    return max(moved, 2 * rows * depth * columns // _FLOPS_PER_BYTE)


def _shared_weight(family: Sequence[Reader], launch_bytes: int) -> Rejection | None:
    """Whether a large weight would exist twice, because somebody reads it besides this family."""
    weight, nodes = family[0].weight, {reader.node for reader in family}
    others = [node for node in weight.consumers() if node not in nodes]
    if not others or tensor_type(weight).size_bytes <= launch_bytes:
        return None
    reason = f"products of sums of %{family[0].source.values.name} stay: %{weight.name} is also read by {others[0].op_type}"
    return Rejection(reason, (family[0].node, others[0]))
