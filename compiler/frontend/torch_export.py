"""PyTorch to a graph: an `nn.Module` with example inputs, or an `ExportedProgram`. The weights stay torch's."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

import onnx_ir as ir

from ...runtime.errors import CompileError, InputError, UnsupportedModelError
from ...runtime.interchange import as_array
from ..ir.cloning import copy_value
from ..ir.facts import data_type
from ..ir.names import fresh_name
from ..ir.scopes import subgraphs_of
from ..ir.states import declare_states
from .dimensions import RULES_KEY
from .pytree import Container, Structure, flatten, leaf_paths, unflatten_arguments
from .torch_complex import without_complex_numbers
from .torch_decompositions import with_new_values, with_views_of_copies, without_misread_calls
from .torch_forms.operators import translations
from .torch_forms.recurrences import any_number_of_steps
from .torch_sizes import Assumptions, SizeRules, guards_of, program_rules, size_rules

if TYPE_CHECKING:
    import torch

_STACK_KEY = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)
_COMPILER = f"{Path(__file__).parents[1]}{os.sep}"  # what of our own runs while torch traces; the user's may lie beside it
_PREFIX = "module."  # of the parameters' names, because the module that is exported holds the user's


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """The graph of a module, whose outputs are the tensors of its result from left to right; the structure of the result; and
    for which sizes the graph holds, where those are not in the types of its inputs.
    """

    model: ir.Model
    result: Structure
    sizes: SizeRules | None = None


def export_module(
    module: torch.nn.Module,
    arguments: Structure,
    leaves: Sequence[torch.Tensor],
    free_axes: Sequence[Collection[int]] | None = None,
) -> ExportedModule:
    """Export a module for one signature, or for any sizes of some axes, as in evaluation mode.

    `arguments` is the structure of the pair (positional, keyword arguments); `leaves` are its tensors, which become the inputs
    of the graph in that order. The module is not changed; the weights are referenced, not copied.

    Args:
        free_axes: of each tensor, the axes whose sizes may differ from the example's: torch may find that they may not, or not
            freely, which the result's `sizes` say.

    Raises:
        CompileError: torch cannot trace the module.
        UnsupportedModelError: operators of it have no ONNX form; all are named, with their source lines. Or one has none as it
            is called there.
    """
    import torch

    results: list[Structure] = []

    class FlatModule(torch.nn.Module):
        """The module between a row of tensors and a row of tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: torch.Tensor) -> tuple[object, ...]:
            positional, named = unflatten_arguments(arguments, tensors)
            structure, outputs = flatten(self.module(*positional, **named), "output")
            results.append(structure)
            return tuple(outputs)

    names = input_names(module, arguments)
    with _evaluation_mode(module), _quiet():
        program = _trace(FlatModule(), tuple(leaves), free_axes)
        sizes = None if free_axes is None else size_rules(program, names)
        model, changed, lost = _translate(program, input_names=names)
        sizes = None if sizes is None else replace(sizes, guards=guards_of(program))
    _tell_of_lost_changes(lost)
    _forget_wrapper(model)
    changed = {buffer.removeprefix(_PREFIX): content for buffer, content in changed.items()}
    _declare_states(model, _separate_names(model, changed))
    return ExportedModule(model, results[-1], sizes)


def import_exported_program(program: torch.export.ExportedProgram) -> ir.Model:
    """The graph of an exported program; its dynamic dimensions stay symbolic, and `RULES_KEY` in its `meta` says what torch
    assumes of them.

    Raises:
        UnsupportedModelError: operators of it have no ONNX form; all are named, with their source lines. Or one has none as it
            is called there.
    """
    _require_real(program)
    assumptions, rules = Assumptions(program), program_rules(program)
    with _quiet():
        model, changed, lost = _translate(program)
    _tell_of_lost_changes(lost)
    if rules is not None:
        model.meta[RULES_KEY] = rules
    if broken := assumptions.broken():
        what = f"torch's exporter takes an operator apart in a way that holds only where {broken}"
        raise UnsupportedModelError(
            "torch.export.ExportedProgram", what, "export it for such sizes, or compile the module itself"
        )
    _declare_states(model, _separate_names(model, changed))
    return model


def _require_real(program: torch.export.ExportedProgram) -> None:
    """Raise UnsupportedModelError for complex inputs and outputs: the graph's would be of their parts, and have another shape."""
    import torch

    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for name in (*program.graph_signature.user_inputs, *program.graph_signature.user_outputs):
        value = values.get(str(name))
        if isinstance(value, torch.Tensor) and value.is_complex():
            fix = "compile the module itself, or give and take torch.view_as_real of it"
            raise UnsupportedModelError("torch.export.ExportedProgram", f"{name} is of complex numbers", fix)


def _trace(
    module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], free_axes: Sequence[Collection[int]] | None
) -> torch.export.ExportedProgram:
    import torch

    automatic = torch.export.Dim.AUTO
    free = None if free_axes is None else (tuple(dict.fromkeys(axes, automatic) for axes in free_axes),)
    try:
        with _without_graph_dump(), any_number_of_steps():
            return torch.export.export(module, tensors, dynamic_shapes=free, strict=False)
    except CompileError:
        raise
    except Exception as error:  # whatever the user's forward or torch's tracer raises
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CompileError(
            _user_line(error),
            f"torch.export cannot trace the module: {type(error).__name__}: {lines[0].strip()}",
            "see that forward() runs with these inputs and that no Python branch depends on the value of a tensor",
        ) from error


def _translate(
    program: torch.export.ExportedProgram, input_names: Sequence[str] | None = None
) -> tuple[ir.Model, dict[str, torch.Tensor], list[str]]:
    """The graph; the buffers that the program changes, whose new values are the last outputs of the graph; and the inputs that it
    changes in place without returning them, which the graph does not."""
    try:
        program = without_misread_calls(without_complex_numbers(program))
        exported = _exported(program, input_names)
        assert exported.exported_program is not None, "torch's exporter keeps what it exports"
        signature = exported.exported_program.graph_signature
        changed = list(signature.buffers_to_mutate.values())
        if changed:
            exported = _exported(with_new_values(exported.exported_program), input_names)
    except Exception as error:  # torch's errors of this step are private
        missing = _operators_without_translation(program)
        if missing:
            raise UnsupportedModelError(
                missing[0][0] if len(missing) == 1 else f"{len(missing)} operators",
                "no ONNX form of " + "; ".join(f"{name} ({where})" for where, name in missing),
                "replace them in the module",
            ) from error
        raise _untranslated(error) from error
    model = exported.model.clone()  # the exporter leaves uses by branches that it has dropped
    made = list(model.graph.outputs)
    model.graph.outputs[:] = made[len(changed) :] + made[: len(changed)]
    _cast_outputs(model, program)
    contents = dict(program.named_buffers())
    given = dict(zip(signature.user_inputs, input_names or signature.user_inputs, strict=True))
    returned = signature.user_outputs
    lost = [str(given[name]) for value, name in signature.user_inputs_to_mutate.items() if value not in returned]
    return model, {name: contents[name] for name in changed}, lost


def _tell_of_lost_changes(inputs: Sequence[str]) -> None:
    """Warn of inputs that the module changes in place, and its program does not."""
    if inputs:
        what = f"the module changes {', '.join(inputs)} in place, which its program leaves as they are"
        warnings.warn(f"{what}; return what they become", stacklevel=2)


def _cast_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> None:
    """Give each output the type that torch gives it. Where the last operator computes in a wider type (sums of bfloat16),
    torch's exporter casts its result for all readers, and makes what was not cast the output."""
    import torch
    from torch.export.graph_signature import ConstantArgument, OutputKind

    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    results = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    names = [one.name for one in results if not isinstance(one, ConstantArgument)]  # constants are no outputs of the graph
    for place, (name, made) in enumerate(zip(names, list(model.graph.outputs)[: len(names)], strict=True)):
        wanted = values.get(name)
        if not isinstance(wanted, torch.Tensor) or wanted.is_complex() or made.producer() is None or made.dtype is None:
            continue
        dtype = data_type(str(wanted.dtype).removeprefix("torch."))
        if dtype != made.dtype:
            cast = ir.Value(name=made.name, type=ir.TensorType(dtype), shape=made.shape)
            made.name = fresh_name(model, f"{made.name}.wide")
            model.graph.append(ir.node("Cast", [made], {"to": dtype}, outputs=[cast], name=cast.name))
            model.graph.outputs[place] = cast


def _separate_names(model: ir.Model, changed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each value a name of its own, and return the buffers that change by theirs. Inputs keep their names, then weights.

    torch's exporter calls them as the user does, whatever it has called the results of operators.
    """
    graph = model.graph
    given, weights = {value.name for value in graph.inputs}, {*graph.initializers, *changed}
    renamed = {name: fresh_name(model, name) for name in sorted(weights) if name in given}
    for name in renamed.keys() & graph.initializers.keys():
        graph.initializers[name].name = renamed[name]
    for node in graph.all_nodes():
        bound = [value for subgraph in subgraphs_of(node) for value in subgraph.inputs]
        for value in (*node.outputs, *bound):
            if value.name in given or value.name in weights:
                value.name = fresh_name(model, str(value.name))
    return {renamed.get(name, name): content for name, content in changed.items()}


def _declare_states(model: ir.Model, changed: Mapping[str, torch.Tensor]) -> None:
    """Make buffers states that the last outputs renew, in their order; the buffers' contents are what they are at first."""
    if not changed:
        return
    pairs: dict[str, str] = {}
    for place, (name, content) in enumerate(changed.items(), len(model.graph.outputs) - len(changed)):
        value = model.graph.outputs[place]
        made = copy_value(value)  # for a name of its own: it may be another output, too, or an input
        made.name = fresh_name(model, f"{name}.new")
        made.dtype = data_type(str(content.dtype).removeprefix("torch."))  # torch leaves it to the copy into the buffer
        model.graph.append(ir.node("Cast", [value], {"to": made.dtype}, outputs=[made], name=made.name))
        model.graph.outputs[place] = made
        if name not in model.graph.initializers:  # nothing reads it
            tensor = ir.Tensor(as_array(content, name), name=name)
            unread = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
            model.graph.register_initializer(unread)
        pairs[made.name] = name
    declare_states(model, pairs)


def _exported(program: torch.export.ExportedProgram, input_names: Sequence[str] | None) -> torch.onnx.ONNXProgram:
    """What torch's exporter makes of a program; where it stops at a view, of the program whose views are of copies."""
    import torch

    def export(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram:
        with any_number_of_steps():
            exported = torch.onnx.export(
                program,
                (),
                input_names=input_names,
                custom_translation_table=translations(),
                dynamo=True,
                optimize=False,
                verbose=False,
                external_data=False,
            )
        assert exported is not None
        return exported

    try:
        return export(program)
    except Exception as error:  # torch's errors of this step are private
        call = _failed_call(_causes(error))
        if call is None or call.target is not torch.ops.aten.view.default:
            raise
    return export(with_views_of_copies(program))


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from, the first cause last."""
    causes = [error]
    while cause := causes[-1].__cause__:
        causes.append(cause)
    return causes


def _failed_call(causes: Sequence[BaseException]) -> torch.fx.Node | None:
    """The call of an exported program that raised errors of torch's exporter; None if they come from none."""
    import torch

    frames = [frame for cause in causes for frame, _ in walk_tb(cause.__traceback__)]
    calls = [node for frame in frames if isinstance(node := frame.f_locals.get("node"), torch.fx.Node)]  # private to torch
    return calls[-1] if calls else None


def _untranslated(error: BaseException) -> UnsupportedModelError:
    """What a failed translation means to the user: which call, where in the source, and why; what to do, if ours refused it."""
    causes = _causes(error)
    call = _failed_call(causes)
    where, what = "torch.onnx", "the module"
    if call is not None:
        where, what = _source_line(str(call.meta.get("stack_trace", ""))) or call.name, str(call.target)
    refusal = next((cause for cause in causes if isinstance(cause, UnsupportedModelError)), None)
    if refusal is not None:
        return UnsupportedModelError(where, f"no ONNX form of {what}: {refusal.what}", refusal.fix)
    reason = next(iter(str(causes[-1]).splitlines()), type(causes[-1]).__name__)
    return UnsupportedModelError(where, f"cannot translate {what}: {reason}", "compute it otherwise in forward()")


def _operators_without_translation(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """Source line and name of each operator that the exporter knows no translation of; empty if it cannot be asked."""
    try:
        from torch.onnx._internal.exporter import _core, _dispatching, _registration

        registry = _registration.ONNXRegistry.from_torchlib()
        for operator, translation in translations().items():
            registry.register_op(operator, translation)
        decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
        calls = [node for node in decomposed.graph.nodes if node.op == "call_function"]
        missing = [node for node in calls if _dispatching.dispatch(node, registry)[0] is None]
    except Exception:  # private to torch, and only asked for a better message
        return []
    found = [(_source_line(str(node.meta.get("stack_trace", ""))) or str(node.name), str(node.target)) for node in missing]
    return list(dict.fromkeys(found))


def _source_line(stack_trace: str) -> str:
    """ "file:line" of the innermost frame of a stack trace that is neither torch's nor ours."""
    frames = [":".join(frame) for frame in _FRAME.findall(stack_trace)]
    users = [frame for frame in frames if "-packages/torch/" not in frame and not frame.startswith(__file__)]
    return (users or frames or [""])[-1]


def _user_line(error: BaseException) -> str:
    """ "file:line" of the innermost frame of the user's code that an exception passed, else of a library's that is not torch."""
    own, library, trace = "", "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith((_COMPILER, "<")):
            if "-packages/" not in path:
                own = f"{path}:{trace.tb_lineno}"
            elif "-packages/torch/" not in path:
                library = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return own or library or "forward()"


def input_names(module: torch.nn.Module, arguments: Structure) -> list[str]:
    """One name for each tensor: that of the parameter of forward(), and the path inside it."""
    import inspect

    assert isinstance(arguments, Container)
    positional, named = arguments.children
    assert isinstance(positional, Container)
    parameters = iter(inspect.signature(module.forward).parameters.values())
    names: list[str] = []
    parameter = None
    for index, child in enumerate(positional.children):
        if parameter is None or parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            parameter = next(parameters)
        variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += leaf_paths(child, f"{parameter.name}_{index}" if variadic else parameter.name)
    names += leaf_paths(named)
    if len(set(names)) != len(names):
        raise InputError("forward()", f"two tensors would get one name among {names}", "rename a parameter")
    return names


def _forget_wrapper(model: ir.Model) -> None:
    """Take our own wrapper out of parameter names and stack traces."""
    for value in list(model.graph.initializers.values()):
        if value.name is not None and value.name.startswith(_PREFIX):
            value.name = value.name.removeprefix(_PREFIX)
    for node in model.graph.all_nodes():
        trace = node.metadata_props.get(_STACK_KEY)
        if trace is not None:
            frames = re.split(r"(?m)^(?= *File \")", trace)
            node.metadata_props[_STACK_KEY] = "".join(frame for frame in frames if __file__ not in frame)


@contextmanager
def _evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and back as it was."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _without_graph_dump() -> Iterator[None]:
    """Pass on what is written to the error stream, but for the thousands of lines with which torch reports a failed trace."""
    written, dump = io.StringIO(), ""
    try:
        with redirect_stderr(written):
            yield
    except Exception as error:
        dump = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        sys.stderr.write(written.getvalue().replace(dump, "").lstrip("\n") if dump else written.getvalue())


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the exporter logs and warns of: none of it is for the user of a compiled model."""
    names = "torch.onnx._internal.exporter", "torch.fx.experimental.symbolic_shapes", "onnx_ir._convenience"
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
