"""reassociate-product: chains of products by one constant are computed in the order that takes least time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....compiler.ir.facts import tensor_type
from ....compiler.ir.rewriter import Rejection
from ....compiler.pipeline import Context, Pass
from ....runtime.symbolic.sizes import estimating
from ..merge_parallel_matmul.worth import LAUNCH_BYTES
from .readers import Reader, is_read_by_none_but, readers_of
from .rewriting import Rewriter
from .weighted_sums import weighted_sum

_FLOPS_PER_BYTE = 8  # that a core computes in the time of one byte from memory


@dataclass(frozen=True)
class ReassociateProduct(Pass):
    """Multiply the rows that weighted sums are made of by a constant, instead of each of the sums: (P S) W becomes P (S W).

    Before:  c = MatMul(p, s);  x = Concat<axis=1>(a, c);  y = Gemm(x, w, b)         (at every step with other p and a)
    After:   q = MatMul(s, w_bottom);  d = Gemm(p, q, b);  y = Gemm(a, w_top, d)

    So it is in a decoder with attention: at every step, the states of the source are summed up by that step's weights and
    multiplied by the large weights of the output or of a recurrent cell, which then need not be read again.
    Where the rows are constant, too, their product is computed at compile time.
    Legal where the rows' product is finite if the sums' is, as that of float16 numbers need not be: a product of matrices is
    associative; sums are rounded in another order. Of recurrent operators, only one step
    for a batch of one is seen. Worth it when the chains take less time so: of products that share rows and constant, all; with
    the sums, where nothing else reads them.
    """

    name: ClassVar[str] = "reassociate-product"
    launch_bytes: int = LAUNCH_BYTES  # what a further kernel costs

    def run(self, model: ir.Model, context: Context) -> bool:
        rewriter, changed, again = Rewriter(model), False, True
        while again:  # a product that was made may be the sum that the next one of a chain reads
            again, faults = False, list[Rejection]()
            for family in _families(model.graph):
                if any(reader.is_stale for reader in family):
                    continue
                fault = _costly(family, self.launch_bytes) or _shared_weight(family, self.launch_bytes) or _too_large(family)
                if fault is not None:
                    faults.append(fault)
                    continue
                rewriter.rewrite(family)
                again = changed = True
        for fault in faults:
            context.reject(self.name, fault)
        return changed


def _families(graph: ir.Graph) -> list[list[Reader]]:
    """The products that read weighted sums, in the graph's order, by the product of rows that would serve them."""
    sums = [found for node in graph if (found := weighted_sum(node)) is not None]
    places = {node: place for place, node in enumerate(graph)} if sums else {}
    # One sum for each; what subgraphs read of a sum stays.
    readers = {reader.node: reader for source in sums for reader in readers_of(source) if reader.node in places}
    families: dict[tuple[object, ...], list[Reader]] = defaultdict(list)
    for reader in sorted(readers.values(), key=lambda reader: places[reader.node]):
        families[_key(reader)].append(reader)
    return list(families.values())


def _key(reader: Reader) -> tuple[object, ...]:
    """Equal for readers that one product of the rows serves."""
    return reader.source.values, reader.weight, reader.depth_axis, reader.begin, reader.end


@estimating
def _costly(family: Sequence[Reader], launch_bytes: int) -> Rejection | None:
    """Where the chains as they are cost no more than with the product of the rows, which is computed once for all of them."""
    source, columns = family[0].source, family[0].columns
    sums = {reader.source.node: reader.source for reader in family}.values()
    unread = [one for one in sums if is_read_by_none_but(one, family)]
    saved = sum(_bytes(reader.source.rows, source.depth, columns) for reader in family)
    saved += sum(_bytes(one.rows, one.terms, one.depth) for one in unread)
    cost = sum(_bytes(reader.source.rows, source.terms, columns) for reader in family)
    launches = sum(2 if reader.is_recurrent else 1 if reader.concat is not None else 0 for reader in family) - len(unread)
    if not source.is_of_constants:
        cost += _bytes(source.terms, source.depth, columns)
        launches += 1
    if saved > cost + launches * launch_bytes:
        return None
    times = f"saves the time of {saved} bytes, and costs that of {cost} bytes and {launches} launches"
    reason = f"{len(family)} products of sums of %{source.values.name} stay: to multiply its rows {times}"
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


def _too_large(family: Sequence[Reader]) -> Rejection | None:
    """Where the product of the rows may be beyond what float16 holds, as products of sums with small weights are not."""
    source, weight = family[0].source, family[0].weight
    if weight.dtype != ir.DataType.FLOAT16:
        return None
    sizes = [np.abs(array).max() for value in (source.values, weight) if (array := constant_array(value)) is not None]
    if len(sizes) == 2 and float(sizes[0]) * float(sizes[1]) * source.depth <= float(np.finfo(np.float16).max):
        return None
    return Rejection(f"products of sums of %{source.values.name} stay: of its rows they may be too large", (family[0].node,))
