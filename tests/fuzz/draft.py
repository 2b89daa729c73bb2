"""A model that grows operator by operator; ONNX's own inference says what each of them makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

T = TypeVar("T")
Shape = tuple[int, ...]
FLOAT: np.dtype = np.dtype(np.float32)
DOUBLE: np.dtype = np.dtype(np.float64)
HALF: np.dtype = np.dtype(np.float16)
INT8: np.dtype = np.dtype(np.int8)
UINT8: np.dtype = np.dtype(np.uint8)
INT32: np.dtype = np.dtype(np.int32)
INT64: np.dtype = np.dtype(np.int64)
BOOL: np.dtype = np.dtype(bool)
_SPELLED = {
    "tensor(float)": FLOAT,
    "tensor(double)": DOUBLE,
    "tensor(float16)": HALF,
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16),
    "tensor(bool)": BOOL,
    **{f"tensor({name})": np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}
_SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 7, 8, 11, 13)
_MAX_ELEMENTS = 3000
_ODD = (0.0, -0.0, np.nan, np.inf, -np.inf, 0.5, -0.5, 1.5, 2.5)
_TAME = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5)


class NotPossibleError(Exception):
    """The operator does not exist, or not so, in this opset."""


class Draft:
    """A graph in the making: `types` says element type and shape of each value that is known to have them.

    Args:
        odd: whether numbers may be NaN or infinite, and integers of any size.
    """

    def __init__(self, rng: np.random.Generator, opset: int, odd: bool) -> None:
        self.rng, self.opset, self.odd = rng, opset, odd
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.types: dict[str, tuple[np.dtype, Shape]] = {}
        self.made: dict[str, onnx.TypeProto] = {}
        self._declared: dict[str, onnx.TypeProto] = {}
        self._names = 0

    # Choices

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(0, len(choices)))]

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def shape(self, min_rank: int = 0, max_rank: int = 5, *, nonempty: bool = False) -> Shape:
        while True:
            found = tuple(self.pick(_SIZES[nonempty:]) for _ in range(self.integer(min_rank, max_rank)))
            if np.prod(found, dtype=np.int64) <= _MAX_ELEMENTS:
                return found

    def axis(self, rank: int) -> int:
        return self.integer(-rank, rank - 1)

    def axes(self, rank: int, least: int = 0) -> list[int]:
        """Different axes in any order, some of them counted from the end."""
        chosen = self.rng.permutation(rank)[: self.integer(least, rank)]
        return [int(axis) - rank * self.chance(0.4) for axis in chosen]

    def dtype(self, op_type: str, position: int = 0, kinds: str = "fiub") -> np.dtype:
        """A type that the operator's schema allows, mostly float32. Kinds: f(loat), i(nt), u(nsigned), b(ool)."""
        schema = self.schema(op_type)
        spelled = schema.inputs[min(position, len(schema.inputs) - 1)].types
        allowed = [_SPELLED[name] for name in sorted(spelled) if name in _SPELLED and kind_of(_SPELLED[name]) in kinds]
        if not allowed:
            raise NotPossibleError(op_type)
        return FLOAT if FLOAT in allowed and self.chance(0.6) else self.pick(allowed)

    def schema(self, op_type: str) -> onnx.defs.OpSchema:
        try:
            schema = onnx.defs.get_schema(op_type, self.opset)
        except onnx.defs.SchemaError:
            raise NotPossibleError(op_type) from None
        if schema.deprecated:
            raise NotPossibleError(op_type)
        return schema

    # Values

    def numbers(self, dtype: np.dtype, shape: Shape) -> np.ndarray:
        """Some of each kind of number that the type has."""
        if dtype == BOOL:
            return self.rng.random(shape) < 0.5
        if kind_of(dtype) in "iu":
            info = np.iinfo(dtype)
            low, high = (info.min, info.max) if self.odd and self.chance(0.3) else (max(info.min, -9), 9)
            return self.rng.integers(low, high, shape, dtype, endpoint=True)
        found = self.rng.standard_normal(shape) * 2
        few = self.rng.random(shape) < 0.1
        return np.where(few, self.rng.choice(_ODD if self.odd else _TAME, shape), found).astype(dtype)

    def value(self, array: np.ndarray, constant: float = 0.35) -> str:
        """An input of the graph with this value, or a constant (with this probability)."""
        array = np.asarray(array)
        name = self.name("c" if self.chance(constant) else "x")
        if name.startswith("c"):
            self.initializers.append(numpy_helper.from_array(array, name))
        else:
            self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape))
            self.feeds[name] = array
        self.types[name] = array.dtype, array.shape
        return name

    def ints(self, *numbers: int) -> str:
        """A list of int64, nearly always a constant."""
        return self.value(np.array(numbers, INT64), 0.95)

    def fresh(self, dtype: np.dtype, shape: Shape, constant: float = 0.35) -> str:
        return self.value(self.numbers(dtype, shape), constant)

    def finite(self, dtype: np.dtype, shape: Shape, constant: float = 0.35) -> str:
        """A value without NaN and infinities, for operators of which ONNX does not say what they make of them."""
        array = self.numbers(dtype, shape)
        return self.value(np.where(np.isfinite(array), array, dtype.type(1)).astype(dtype), constant)

    def tensor(self, dtype: np.dtype, min_rank: int = 0, max_rank: int = 5, *, nonempty: bool = False) -> str:
        """A value made before, if one fits, or a new one."""
        fitting = [
            name
            for name, (of, shape) in self.types.items()
            if of == dtype and min_rank <= len(shape) <= max_rank and not (nonempty and 0 in shape) and name in self.made
        ]
        if fitting and self.chance(0.8):
            return self.pick(fitting)
        return self.fresh(dtype, self.shape(min_rank, max_rank, nonempty=nonempty), 0.1)

    def shape_of(self, name: str) -> Shape:
        return self.types[name][1]

    def like(self, name: str) -> str:
        """A value of a shape that broadcasts with another's."""
        dtype, shape = self.types[name]
        kept = tuple(1 if self.chance(0.3) else size for size in shape)
        return self.fresh(dtype, kept[self.integer(0, len(kept)) if self.chance(0.4) else 0 :])

    # Operators

    def name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node. Attributes that are None are left out.

        Raises:
            NotPossibleError: ONNX's checker or its inference refuses it.
        """
        self.schema(op_type)
        names = self._add("", op_type, inputs, outputs, attributes)
        self._infer(names)
        return names

    def contrib(
        self, op_type: str, *inputs: str, results: Sequence[tuple[np.dtype, Shape] | None], **attributes: Any
    ) -> list[str]:
        """Add a node of com.microsoft, whose results ONNX cannot infer; of None nothing is said, and none is asked for."""
        names = self._add("com.microsoft", op_type, inputs, len(results), attributes)
        for position, (name, result) in enumerate(zip(names, results, strict=True)):
            if result is None:
                self.nodes[-1].output[position] = ""
            else:
                self.declare(name, *result)
        return names

    def _add(self, domain: str, op_type: str, inputs: Sequence[str], outputs: int, attributes: dict[str, Any]) -> list[str]:
        names = [self.name("y") for _ in range(outputs)]
        node = helper.make_node(op_type, inputs, names, domain=domain)
        for key, value in attributes.items():
            if value is not None:  # of an empty list the helper must be told the type
                kind = onnx.AttributeProto.INTS if value == [] else None
                node.attribute.append(helper.make_attribute(key, value, attr_type=kind))
        self.nodes.append(node)
        return names

    def since(self, opset: int) -> bool:
        return self.opset >= opset

    def declare(self, name: str, dtype: np.dtype, shape: Sequence[int | None]) -> None:
        """Say what inference did not find out; None is an unknown size."""
        self.made[name] = self._declared[name] = helper.make_tensor_type_proto(TENSOR_OF[dtype], shape)
        if None not in shape:
            self.types[name] = dtype, tuple(size for size in shape if size is not None)

    def _infer(self, names: Sequence[str]) -> None:
        try:
            model = self.model([])
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        except Exception as error:
            self.nodes.pop()
            raise NotPossibleError(str(error)) from error
        found = {info.name: info.type for info in inferred.graph.value_info}
        for name in names:
            if name not in found:
                self.nodes.pop()
                raise NotPossibleError(f"no type of {name}")
            self.made[name] = kind = found[name]
            dims = kind.tensor_type.shape.dim if kind.HasField("tensor_type") and kind.tensor_type.HasField("shape") else None
            if dims is not None and all(dim.HasField("dim_value") for dim in dims):
                dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
                self.types[name] = np.dtype(dtype), tuple(dim.dim_value for dim in dims)

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The model whose outputs are these values."""
        graph = helper.make_graph(
            self.nodes,
            "main",
            self.inputs,
            [onnx.ValueInfoProto(name=name, type=self.made[name]) for name in outputs],
            self.initializers,
            value_info=[
                onnx.ValueInfoProto(name=name, type=kind) for name, kind in self._declared.items() if name not in outputs
            ],
        )
        others = sorted({node.domain for node in self.nodes} - {""})
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in others)]
        return helper.make_model(graph, opset_imports=imports, ir_version=min(10, onnx.IR_VERSION))

    def finished(self) -> onnx.ModelProto:
        """The model; its outputs are what no node reads, and some of what one does.

        Raises:
            NotPossibleError: it has no output, or ONNX's checker refuses it.
        """
        read = {name for node in self.nodes for name in node.input}
        outputs = [name for name in self.made if name not in read or self.chance(0.2)]
        outputs = [name for name in outputs if _is_declarable(self.made[name])]
        model = self.model(outputs)
        try:
            onnx.checker.check_model(model, full_check=True)
        except Exception as error:
            raise NotPossibleError(str(error)) from error
        if not outputs:
            raise NotPossibleError("no outputs")
        return model


def _is_declarable(kind: onnx.TypeProto) -> bool:
    """Whether ONNX's checker takes it as the type of an output: a tensor's rank must be known."""
    return bool(kind.HasField("sequence_type") or (kind.HasField("tensor_type") and kind.tensor_type.HasField("shape")))


def kind_of(dtype: np.dtype) -> str:
    """f(loat), i(nt), u(nsigned), b(ool)."""
    return "f" if dtype == np.dtype(ml_dtypes.bfloat16) else dtype.kind


TENSOR_OF = {np.dtype(dtype): helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for dtype in _SPELLED.values()}
assert TENSOR_OF[FLOAT] == TensorProto.FLOAT
