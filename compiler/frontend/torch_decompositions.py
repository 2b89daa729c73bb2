"""Calls that torch's exporter would misread or cannot take as they are, written in others before it sees them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ...runtime.errors import UnsupportedModelError
from .torch_operands import has_operands_of_other_types, of_one_type, operators_of_numbers

if TYPE_CHECKING:
    import torch

_SECOND_NAMES = ["divide", "greater", "greater_equal", "less", "less_equal", "multiply", "not_equal", "subtract", "true_divide"]


def without_misread_calls(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with operators taken apart of which it has a call that torch's exporter would translate into another one.

    Label smoothing of a cross entropy, shares of classes in place of labels, and one row without a batch; projections of an LSTM,
    whose steps are then written out; the divisor of an average pool; second names of operators, for which it does not bring
    operands to one type; booleans where ONNX has numbers alone; bounds of which one has a fraction.
    """
    import torch

    aten = torch.ops.aten
    misread: dict[Callable[..., Any], Callable[[dict[str, Any]], bool]] = {
        **{getattr(aten, name).Tensor: lambda call: True for name in _SECOND_NAMES},
        aten.cross_entropy_loss.default: lambda call: (
            call["label_smoothing"] != 0.0 or _is_floating(call["target"]) or call["self"].meta["val"].ndim == 1
        ),
        aten.lstm.input: lambda call: _has_projections(call["params"], call["has_biases"]),
        aten.avg_pool2d.default: lambda call: call["divisor_override"] is not None,
        aten.avg_pool3d.default: lambda call: call["divisor_override"] is not None,
        **dict.fromkeys(operators_of_numbers(), has_operands_of_other_types),
    }
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node.target in misread]
    found = {node.target for node in calls if misread[node.target](_arguments(node))}
    if not found:
        return program
    pools = {aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
    table = torch.export.default_decompositions()
    ours = {target: _with_divisor(target, axes) for target, axes in pools.items()}
    ours |= {target: of_one_type(target) for target in operators_of_numbers()}
    decomposed: torch.export.ExportedProgram = program.run_decompositions({one: ours.get(one) or table[one] for one in found})
    return decomposed


def with_views_of_copies(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program whose views are of contiguous copies, so that they hold whatever strides the exporter gives what they view.

    It takes operators apart after the trace, and the result of the parts may have other strides than that of the whole: attention
    under a mask whose heads are its last dimension in memory, as in T5 and Swin. In ONNX a copy is nothing and a view a Reshape.
    """
    import torch

    def view_of_copy(x: torch.Tensor, size: list[int]) -> torch.Tensor:
        copy = torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format)
        viewed: torch.Tensor = torch.ops.aten._unsafe_view.default(copy, size)
        return viewed

    copied: torch.export.ExportedProgram = program.run_decompositions({torch.ops.aten.view.default: view_of_copy})
    return copied


def with_new_values(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A decomposed program whose first outputs are the new values of the buffers that it changes.

    torch's exporter drops new values that are no outputs, with all that only they need.
    """
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ExportGraphSignature, OutputKind
    from torch.utils._pytree import tree_structure

    given = program.graph_signature
    outputs = [
        replace(spec, kind=OutputKind.USER_OUTPUT, target=None) if spec.kind is OutputKind.BUFFER_MUTATION else spec
        for spec in given.output_specs
    ]
    calls = deepcopy(program.module_call_graph)
    assert calls[0].signature is not None, "the first call is that of the whole module"
    calls[0].signature.out_spec = tree_structure(tuple(range(len(outputs))))
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(given.input_specs, outputs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """What a call passes to each parameter of its operator, the defaults included."""
    assert not isinstance(node.target, str)
    parameters = node.target._schema.arguments  # type: ignore[attr-defined]  # an overload has one
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    positional = {parameter.name: argument for parameter, argument in zip(parameters, node.args, strict=False)}
    return defaults | positional | node.kwargs


def _is_floating(argument: Any) -> bool:
    return bool(argument.meta["val"].is_floating_point())


def _has_projections(parameters: list[Any], has_biases: bool) -> bool:
    """Whether layers of an LSTM have, after two weights and two biases if any, a projection's weight [projected, hidden].

    If not, another layer's first weight stands in its place, which has the four gates' rows as the first layer's does.
    """
    place = 4 if has_biases else 2
    if len(parameters) <= place:
        return False
    rows, candidate = (parameters[index].meta["val"].shape[0] for index in (0, place))
    return bool(rows != candidate)


def _with_divisor(pool: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """An average pool over `axes` axes that divides its sums by a given number, by way of one without."""

    def decomposed(
        x: Any,
        kernel_size: list[int],
        stride: tuple[int, ...] = (),
        padding: int | list[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return NotImplemented
        if ceil_mode:
            what = "with ceil_mode and divisor_override"
            raise UnsupportedModelError(str(pool), what, "multiply the result of a pool without divisor_override")
        elements = prod(kernel_size) if len(kernel_size) > 1 else kernel_size[0] ** axes
        return pool(x, kernel_size, stride, padding) * (elements / divisor_override)

    return decomposed
