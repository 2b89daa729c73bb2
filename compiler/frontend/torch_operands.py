"""Operands of types that ONNX or torch's exporter does not take: booleans as numbers, bounds of which one has a fraction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAMES = ["addr", "clamp", "clamp_max", "clamp_min", "clip", "cummax", "cummin", "fmax", "fmin", "heaviside", "isclose"]


def operators_of_numbers() -> list[Any]:
    """The overloads that ONNX has for numbers, and torch for booleans, too."""
    import torch

    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in _NAMES]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads() if name in ("default", "Tensor")]
    return [*overloads, aten.max.dim, aten.min.dim]


def has_operands_of_other_types(call: dict[str, Any]) -> bool:
    """Whether a call of one of them, by the names of its parameters, has to be written as `of_one_type` does."""
    import torch

    values = [one.meta.get("val") if isinstance(one, torch.fx.Node) else one for one in call.values()]
    return any(map(_is_boolean, values)) or _are_mixed(call.get("min"), call.get("max"))


def of_one_type(operator: Any) -> Callable[..., Any]:
    """The operator by way of numbers of one type; False is 0, True 1, and results are booleans again where all operands are."""
    import torch

    is_clamp = operator._opname.startswith(("clamp", "clip"))

    def decomposed(*operands: Any, **named: Any) -> Any:
        values = [*operands, *named.values()]
        if not any(map(_is_boolean, values)) and not (is_clamp and _are_mixed(*values[1:])):
            return NotImplemented
        common = _common_type(values, is_clamp)
        number = torch.int32 if common is torch.bool else common

        def taken(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return one.to(number) if _is_boolean(one) or is_clamp else one
            return float(one) if is_clamp and isinstance(one, int) and number.is_floating_point else one

        found = operator(*map(taken, operands), **{name: taken(one) for name, one in named.items()})
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        results[0] = results[0].to(common)
        return results[0] if isinstance(found, torch.Tensor) else tuple(results)

    return decomposed


def _common_type(values: Iterable[Any], has_bounds: bool) -> torch.dtype:
    """What torch brings operands to; Python's numbers count where they are bounds, not axes or factors."""
    import torch

    common = torch.bool
    for one in values:
        if isinstance(one, torch.Tensor):
            common = torch.promote_types(common, one.dtype)
        elif has_bounds and isinstance(one, int | float):
            common = torch.result_type(torch.empty(1, dtype=common), one)
    return common


def _are_mixed(low: Any = None, high: Any = None) -> bool:
    """Whether two bounds are Python's numbers of which one has a fraction."""
    return {type(low), type(high)} == {int, float}


def _is_boolean(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dtype is torch.bool
