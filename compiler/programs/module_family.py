"""A module exported once for signatures that differ in sizes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ..frontend.pytree import Structure

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..frontend.torch_sizes import SizeRules
    from .specialize import TensorKey

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
LEAST_SIZE = 2  # of a free axis of what is exported: torch makes sizes of 0 and 1 constants
_SEEN = 64  # calls of a family that are remembered


@dataclass(frozen=True, slots=True)
class SizedGraph:
    """The graph of a module for any sizes that `sizes` allow, the structure of its result, and a key of the graph.

    `state` is what the module was when it was exported.
    """

    model: ir.Model
    result: Structure
    sizes: SizeRules
    digest: str
    state: str

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
        """The graph for inputs of these shapes. Raises CompileError."""
        from ..frontend.dimensions import SIZES_KEY, bind_dimensions

        model = bind_dimensions(self.model, shapes)
        model.metadata_props[SIZES_KEY] = f"exported once for any sizes of {self.sizes.free()}"
        return model


@dataclass(slots=True)
class ModuleFamily:
    """The calls of a module with tensors of the same types but for sizes, and the graph for all of them, once there is one.

    `reason` says why the last call has a graph of its own, if so; once it `has_failed`, all others will.
    """

    graph: SizedGraph | None = None
    free: tuple[frozenset[int], ...] = ()  # the axes of each tensor that the graph was to be exported for
    reason: str = ""
    has_failed: bool = False
    _seen: list[Shapes] = field(default_factory=list)

    def saw(self, types: Sequence[TensorKey]) -> None:
        """Remember the sizes of a call."""
        if (shapes := _shapes(types)) not in self._seen:
            self._seen = [*self._seen, shapes][-_SEEN:]

    def refuse(self, reason: str) -> None:
        """Give each call a graph of its own from now on."""
        self.graph, self.reason, self.has_failed = None, reason, True

    def free_axes(self, types: Sequence[TensorKey]) -> tuple[frozenset[int], ...]:
        """The axes of each tensor along which a call differs from others; those of the graph stay free."""
        shapes = _shapes(types)
        known = self.free or tuple(frozenset[int]() for _ in shapes)
        return tuple(
            already | {axis for other in self._seen for axis, size in enumerate(shape) if other[number][axis] != size}
            for number, (shape, already) in enumerate(zip(shapes, known, strict=True))
        )


def family_key(structure: Structure, types: Sequence[TensorKey]) -> tuple[Structure, tuple[tuple[int, str], ...]]:
    """What calls of one family have in common: their structure, and the ranks and element types of their tensors."""
    return structure, tuple((len(shape), dtype) for shape, dtype in types)


def _shapes(types: Sequence[TensorKey]) -> Shapes:
    return tuple(shape for shape, _ in types)
