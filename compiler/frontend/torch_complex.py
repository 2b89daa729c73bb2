"""Complex numbers as their real and imaginary parts: operators that take or give them are written in operators of the parts.

torch's exporter has ONNX forms of few of them, of which a tensor of complex numbers is one of pairs, [..., 2]. The rules of the
parts are those of torch's own ComplexTensor. Fourier transforms stay: the exporter has forms of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .torch_complex_rules import prepare_rules

if TYPE_CHECKING:
    import torch

_KEPT = ["view_as_real", "view_as_complex", "_fft_c2c", "_fft_c2r", "_fft_r2c"]
# Operators that do to both parts what they do to real numbers; torch has no rules for them.
_OF_EACH_PART = ["alias", "diag_embed", "diagonal_copy", "gather", "index_copy", "index_put", "index_select", "masked_select"]
_OF_EACH_PART += ["put", "scatter", "scatter_add", "unfold", "unsafe_split"]
_OF_EACH_PART += [f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3)]
_OF_REAL_NUMBERS = ["complex", "polar"]


def without_complex_numbers(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with operators of complex numbers taken apart; itself if it has none.

    A tensor of complex numbers is between view_as_complex and view_as_real then, or an argument or result of a transform.
    """
    import torch

    if find_spec("torch._subclasses.complex_tensor") is None:
        return program  # an older torch: the exporter takes what it has forms of
    kept = {getattr(torch.ops.aten, name).default for name in _KEPT}
    before: list[set[Any]] = []  # an operator that comes back has no parts
    while (found := _operators(program) - kept) and found not in before:
        before.append(found)
        program = program.run_decompositions({one: _decomposition(one) for one in found})
    return program


def _decomposition(operator: Any) -> Callable[..., Any]:
    """What takes a call of an operator apart: torch's parts of it, unless there is a rule for the parts of its numbers."""
    import torch
    from torch._subclasses.complex_tensor._ops.common import COMPLEX_OPS_TABLE

    prepare_rules()
    has_rule = operator in COMPLEX_OPS_TABLE or operator.overloadpacket in COMPLEX_OPS_TABLE or operator._opname in _OF_EACH_PART
    if not has_rule and any("Tensor" in str(parameter.type) for parameter in operator._schema.arguments):
        composed = torch.export.default_decompositions()
        if operator in composed and operator._can_decompose():
            parts: Callable[..., Any] = composed[operator]
            return parts
        if operator in torch._decomp.decomposition_table:
            return _where_complex(torch._decomp.decomposition_table[operator])
    return _by_parts(operator)


def _where_complex(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of calls with complex operands; those of real ones stay whole."""
    from torch.utils._pytree import tree_leaves

    def decomposed(*operands: Any, **named: Any) -> Any:
        is_complex = any(map(_is_complex, tree_leaves((operands, named))))
        return decomposition(*operands, **named) if is_complex else NotImplemented

    return decomposed


def _operators(program: torch.export.ExportedProgram) -> set[Any]:
    """The operators of which a call has complex operands or results."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = set()
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            given = tree_leaves((node.args, node.kwargs))
            values = [one.meta.get("val") if isinstance(one, torch.fx.Node) else one for one in (*given, node)]
            if any(map(_is_complex, tree_leaves(values))):
                found.add(node.target)
    return found


def _by_parts(operator: Any) -> Callable[..., Any]:
    """The operator of complex numbers by way of its rule for their parts; NotImplemented where there is none."""
    import torch
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops.common import lookup_complex
    from torch.utils._pytree import tree_leaves, tree_map

    def joined(value: Any) -> Any:
        return _pairs(value.re, value.im) if isinstance(value, ComplexTensor) else value

    def decomposed(*operands: Any, **named: Any) -> Any:
        leaves = tree_leaves((operands, named))
        if not any(map(_is_complex, leaves)) and operator._opname not in _OF_REAL_NUMBERS:
            return NotImplemented
        part = _type_of_parts(leaves)
        if not any(isinstance(one, torch.Tensor) for one in leaves):
            return _made(operator, operands, {**named, "dtype": part})

        def taken(value: Any) -> Any:
            if isinstance(value, complex):
                return ComplexTensor(torch.full((), value.real, dtype=part), torch.full((), value.imag, dtype=part))
            return ComplexTensor(*_parts(value)) if _is_complex(value) and isinstance(value, torch.Tensor) else value

        if operator._opname in _OF_EACH_PART:
            return tree_map(_pairs, *(operator(*given, **keywords) for given, keywords in _both_parts((operands, named))))
        operands, named = tree_map(taken, (operands, named))
        rule = lookup_complex(operator, *operands, **named)
        return NotImplemented if rule is None else tree_map(joined, rule(*operands, **named))

    return decomposed


def _made(operator: Any, operands: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """What an operator makes of sizes and numbers, of which complex ones have two parts."""
    import torch
    from torch.utils._pytree import tree_leaves

    real, imaginary = (operator(*given, **keywords) for given, keywords in _both_parts((operands, named)))
    return _pairs(real, imaginary if any(isinstance(one, complex) for one in tree_leaves(operands)) else torch.zeros_like(real))


def _both_parts(values: Any) -> tuple[Any, Any]:
    """A structure with the real parts of its complex tensors and numbers, and with their imaginary ones."""
    import torch
    from torch.utils._pytree import tree_map

    def part(value: Any, place: int) -> Any:
        is_number = _is_complex(value) and not isinstance(value, torch.dtype)
        return _parts(value)[place] if is_number else value

    return tree_map(lambda one: part(one, 0), values), tree_map(lambda one: part(one, 1), values)


def _parts(value: Any) -> tuple[Any, Any]:
    """The real and imaginary parts of a tensor or of one of Python's numbers."""
    import torch

    if isinstance(value, complex):
        return value.real, value.imag
    pairs = torch.view_as_real(value)
    return pairs.select(-1, 0), pairs.select(-1, 1)


def _pairs(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def _type_of_parts(values: Iterable[Any]) -> torch.dtype:
    """The type of the parts of the widest complex numbers among tensors, types and Python's numbers."""
    import torch

    parts = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
    types = [one.dtype if isinstance(one, torch.Tensor) else one for one in values]
    widest = [one for one in (torch.complex128, torch.complex64, torch.complex32) if one in types]
    return parts[widest[0]] if widest else torch.get_default_dtype()


def _is_complex(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return value.is_complex()
    return isinstance(value, complex) or (isinstance(value, torch.dtype) and value.is_complex)
