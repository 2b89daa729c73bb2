"""Concrete shapes for symbolic ones: a model with named dimensions becomes one with numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ...runtime.errors import InputError
from ...runtime.symbolic.sizes import Domain, SizeLike
from ..ir.facts import data_type, infer_facts
from ..ir.symbolic.symbols import shape_of_sizes

_LONGEST = 100  # characters of an expression of dimensions
RULES_KEY = "prefuse.size_rules"  # in the `meta` of a model: `ProgramRules`, what torch assumes of the sizes of its inputs
SIZES_KEY = "prefuse.sizes"  # metadata of a model: for which sizes it was exported, and why, for its report


def is_number_tensor(value: ir.Value) -> bool:
    """Whether a value is what a program can take: not a sequence, an optional or strings."""
    return (value.type is None or isinstance(value.type, ir.TensorType)) and value.dtype != ir.DataType.STRING


def is_dynamic(model: ir.Model) -> bool:
    """Whether an input of the model has a dimension that is not a number."""
    tensors = [value for value in model.graph.inputs if is_number_tensor(value)]
    return any(value.shape is None or not value.shape.is_static() for value in tensors)


def bind_dtypes(model: ir.Model, dtypes: Mapping[str, str]) -> ir.Model:
    """The model with the element types of inputs that have none; a copy (weights shared) where there are such inputs."""
    if all(value.dtype is not None for value in model.graph.inputs if value.name in dtypes):
        return model
    bound = model.clone()
    for value in bound.graph.inputs:
        if value.dtype is None and value.name in dtypes:
            value.dtype = data_type(dtypes[str(value.name)])
    return bound


def bind_dimensions(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    """A copy of `model` (weights shared) whose inputs have the given shapes; inputs left out must be static already.

    Every symbol that an input names is replaced wherever it stands, and the facts of all values are inferred anew.

    Raises:
        InputError: a shape does not fit its input, or two inputs give one symbol two values.
        InvalidModelError: a node does not take inputs of these shapes.
    """
    bindings = dimension_bindings(model, shapes)
    bound = model.clone()
    for node in bound.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([_number_of(dim, bindings) for dim in value.shape])
    for value in bound.graph.inputs:
        if value.name in shapes:
            value.shape = ir.Shape(tuple(shapes[str(value.name)]))
    infer_facts(bound)
    return bound


def bind_domain(model: ir.Model, domain: Domain | None, sizes: Mapping[str, int]) -> ir.Model:
    """A copy of `model` (weights shared) for all sizes of a domain; `sizes` are those of symbols that have but one.

    The facts of all values are inferred anew.
    """
    bound = model.clone()
    for node in bound.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                value.shape = _forget_unknown(value.shape)
    for value in bound.graph.inputs:
        if value.shape is not None and not value.shape.is_static():
            dims = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
            sized = [dim if isinstance(dim, int) else sizes.get(dim) or _size_of(dim, domain) for dim in dims]
            value.shape = shape_of_sizes(sized)
    infer_facts(bound)
    return bound


def _size_of(name: str, domain: Domain | None) -> SizeLike:
    assert domain is not None, f"{name} has no size"
    return domain.size(name)


def dimension_bindings(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The number that each symbol of the inputs stands for.

    Raises:
        InputError: a shape is missing or does not fit its input, or two inputs give one symbol two values.
    """
    known = [str(value.name) for value in model.graph.inputs]
    for name in shapes:
        if name not in known:
            raise InputError(f"input {name}", "the model has no such input", f"its inputs are {', '.join(known)}")
    bindings: dict[str, int] = {}
    for value in filter(is_number_tensor, model.graph.inputs):
        declared, where = value.shape, f"input {value.name}"
        if value.name not in shapes:
            if declared is None or not declared.is_static():
                raise InputError(where, f"its shape {declared or 'unknown'} is not concrete", "give it a shape")
            continue
        shape = shapes[str(value.name)]
        if declared is None:
            continue
        if len(declared) != len(shape):
            raise InputError(where, f"rank {len(shape)} (shape {list(shape)}) for {declared}", f"pass rank {len(declared)}")
        for axis, (dim, size) in enumerate(zip(declared, shape, strict=True)):
            if isinstance(dim, int):
                fits, expected = dim == size, str(dim)
            else:
                expected = str(dim)
                fits = dim.value is None or bindings.setdefault(dim.value, size) == size
                expected = f"{dim} = {bindings[dim.value]}" if dim.value is not None else expected
            if not fits:
                raise InputError(where, f"shape {list(shape)} for {declared}", f"dimension {axis} must be {expected}")
    return bindings


def _number_of(dim: int | ir.SymbolicDim, bindings: Mapping[str, int]) -> int | None:
    """A dimension that a file records, in numbers; None where symbols in it are not bound, so that inference may replace it.

    Names are any text. What is evaluated is short, and arithmetic that ends: of powers no file says how large they become.
    """
    if isinstance(dim, int) or dim.value is None or dim.value in bindings:
        return dim if isinstance(dim, int) else bindings.get(str(dim.value))
    if len(dim.value) > _LONGEST or "**" in dim.value:
        return None
    try:
        found = dim.evaluate(bindings)
    except (ValueError, TypeError, ArithmeticError):  # it is no expression
        return None
    return found if isinstance(found, int) else None


def _forget_unknown(shape: ir.Shape) -> ir.Shape:
    """The shape with expressions of unbound symbols made anonymous, so that inference may replace them."""
    return ir.Shape([dim if isinstance(dim, int) else None for dim in shape])
