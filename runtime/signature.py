"""The inputs and outputs of a program as a call has them: what may be given, where its bytes are, what results are made of."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .errors import InputError
from .hardware.array_address import data_address
from .interchange import elements_address, in_output_order, misplaced, number_array
from .plan import Plan, Port
from .symbolic.size_text import evaluator

if TYPE_CHECKING:
    import torch


_MOST_SIGNATURES = 4096  # kept, of combinations of sizes
_new_array = np.empty  # looked up once: a call takes about a microsecond


class Signature:
    """The ports of a program, prepared for calls.

    With `is_sized` each call has one of its own; `dimensions` are the sizes that a call has decided, for the program.
    """

    is_sized = False
    dimensions: np.ndarray | None = None

    def __init__(self, plan: Plan, devices: frozenset[str], *, has_patterns: bool = True) -> None:
        """`has_patterns`: an output of torch's is kept to make others like it, which takes as much memory as one."""
        positions = {buffer: position for position, buffer in enumerate(plan.counts)}
        self.inputs = tuple(_Tensor(port, "input", positions, devices) for port in plan.inputs)
        self.outputs = tuple(_Tensor(port, "output", positions, devices, has_pattern=has_patterns) for port in plan.outputs)
        self.counts = len(positions)  # sizes of outputs that a run decides
        self.names = tuple(port.name for port in plan.inputs)
        self.arity = len(self.inputs)

    def given(self, out: object, addresses: Sequence[int]) -> list[np.ndarray | torch.Tensor | None]:
        """What a caller gives for the outputs, in their order; None where nothing. `addresses` are those of the inputs.

        Raises:
            InputError: it cannot be written to as it is: another number of arrays, a name that no output has, another type or
                shape, not contiguous or read-only; or it shares memory with an input or another output.
        """
        values = in_output_order(out, tuple(expected.name for expected in self.outputs))
        taken = list(zip(addresses, self.inputs, strict=True))
        for value, expected in zip(values, self.outputs, strict=True):
            if value is None:
                continue
            address = expected.given_address(value)
            for start, other in taken:
                if max(start, address) < min(start + other.size_bytes, address + expected.size_bytes):
                    raise expected.refused(f"shares memory with {other.where}", "give it memory of its own")
            taken.append((address, expected))
        return values


class _Tensor:
    """One input or output of a call: checks what comes in, makes what goes out, and says where their bytes are."""

    def __init__(
        self, port: Port, kind: str, counts: Mapping[str, int], devices: frozenset[str], *, has_pattern: bool = False
    ) -> None:
        self.name = port.name
        self._has_pattern = has_pattern
        self._devices = devices
        self._extents = {extent.axis: counts[extent.buffer] for extent in port.extents}
        self._dtype = np.dtype(port.type.dtype)
        self._shape = port.type.shape
        self.where = f"{kind} {port.name!r}"
        self.size_bytes = port.type.size_bytes
        self._is_complex = self._dtype.kind == "c"
        self._torch_dtype: torch.dtype | None = None
        self._pattern: torch.Tensor | None = None

    def array_address(self, array: np.ndarray, kept: list[object]) -> int:
        """Address of an input's elements; of a copy, put into `kept`, where they are not in order."""
        if (array.dtype is not self._dtype and array.dtype != self._dtype) or array.shape != self._shape:
            order = "" if array.dtype.isnative else f" in the other byte order ({array.dtype.str})"
            raise self._mismatch(array.dtype.name, array.shape, order)
        if not array.flags.carray:
            array = np.require(array, requirements=["C", "A"])
            kept.append(array)
        return data_address(array)

    def tensor_address(self, tensor: torch.Tensor, kept: list[object]) -> int:
        """As `array_address`, for a torch tensor."""
        if tensor.dtype is not (self._torch_dtype or self._torch_type()) or tensor.shape != self._shape:
            raise self._mismatch(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if not tensor.is_cpu or tensor.layout is not sys.modules["torch"].strided:
            self._check_place(tensor)
        address = elements_address(tensor, self.where)
        if not tensor.is_contiguous() or tensor.is_neg() or (self._is_complex and tensor.is_conj()):
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
            kept.append(tensor)
            address = tensor.data_ptr()
        return address

    def _check_place(self, tensor: torch.Tensor) -> None:
        """Take a tensor that is not on the CPU if the device can read it there."""
        torch = sys.modules["torch"]
        if tensor.layout is not torch.strided or str(tensor.device) not in self._devices:
            raise misplaced(tensor, self.where)

    def given_address(self, value: object) -> int:
        """Address of what a caller gives for an output. Raises InputError if a program cannot write there."""
        if self._extents:
            raise self.refused("has a size that only the call decides", "leave it out, or give None")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            if value.dtype is not (self._torch_dtype or self._torch_type()) or value.shape != self._shape:
                raise self._mismatch(str(value.dtype).removeprefix("torch."), tuple(value.shape))
            if not value.is_cpu or value.layout is not torch.strided:
                self._check_place(value)
            if not value.is_contiguous() or value.is_neg() or (self._is_complex and value.is_conj()) or value.requires_grad:
                raise self.refused("is not contiguous, or needs a gradient", "give one that torch.empty makes")
            return elements_address(value, self.where)
        if not isinstance(value, np.ndarray):
            raise self.refused(f"is {type(value).__name__}", "give a NumPy array or a torch tensor")
        if value.dtype != self._dtype or value.shape != self._shape:
            raise self._mismatch(value.dtype.name, value.shape, "" if value.dtype.isnative else f" ({value.dtype.str})")
        if not value.flags.carray:
            raise self.refused("is not contiguous, aligned and writable", "give one that np.empty makes")
        return data_address(value)

    def refused(self, what: str, fix: str) -> InputError:
        """What is wrong with what a caller gives for this output."""
        return InputError(f"out, {self.where}", f"what is given {what}", fix)

    def new_array(self, addresses: list[int]) -> np.ndarray:
        """A new array for an output; its address is added to `addresses`."""
        array = _new_array(self._shape, self._dtype)
        addresses.append(data_address(array))
        return array

    def new_tensor(self, addresses: list[int], place: torch.device | None) -> torch.Tensor:
        """As `new_array`, for torch."""
        if place is not None or not self._has_pattern:
            tensor: torch.Tensor = sys.modules["torch"].empty(self._shape, dtype=self._torch_type(), device=place or "cpu")
        else:
            if self._pattern is None:  # torch makes a tensor like another faster than one of a shape and a type
                pattern = sys.modules["torch"].empty(self._shape, dtype=self._torch_type(), device="cpu")
                elements_address(pattern, self.where)  # else no tensor like it would ever have any
                self._pattern = pattern
            tensor = sys.modules["torch"].empty_like(self._pattern)
        addresses.append(elements_address(tensor, self.where))
        return tensor

    def cut(self, result: np.ndarray | torch.Tensor, counts: np.ndarray) -> np.ndarray | torch.Tensor:
        """An output of the size that the run has found; contiguous, and not the owner of more than twice its memory."""
        if not self._extents:
            return result
        axes = range(len(self._shape))
        part = result[tuple(slice(int(counts[self._extents[axis]]) if axis in self._extents else None) for axis in axes)]
        if part.shape == result.shape:
            return result
        is_most = 2 * part.nbytes >= result.nbytes
        if isinstance(part, np.ndarray):
            return part if is_most and part.flags.c_contiguous else part.copy()
        return part if is_most and part.is_contiguous() else part.clone(memory_format=sys.modules["torch"].contiguous_format)

    def as_array(self, value: object) -> np.ndarray:
        """An input that is neither exactly an array nor a tensor: subclasses of arrays and numbers are taken."""
        if isinstance(value, np.ndarray | np.generic):
            return np.asarray(value)
        if isinstance(value, int | float) and not self._shape:
            return number_array(value, self._dtype.name, self.where)
        what = f"{type(value).__name__} is neither a NumPy array nor a torch tensor"
        raise InputError(self.where, what, unpacked(value) or f"give {self._describe(self._dtype.name, self._shape)}")

    def _torch_type(self) -> torch.dtype:
        if self._torch_dtype is None:
            found = getattr(sys.modules["torch"], self._dtype.name, None)
            if found is None:
                raise InputError(self.where, f"torch has no {self._dtype.name}", "call with NumPy arrays")
            self._torch_dtype = found
        return self._torch_dtype

    def _mismatch(self, dtype: str, shape: tuple[int, ...], order: str = "") -> InputError:
        found, wanted = self._describe(dtype, shape) + order, self._describe(self._dtype.name, self._shape)
        if len(shape) != len(self._shape):
            fix = f"give {len(self._shape)} dimensions, not {len(shape)}"
        elif shape != self._shape:
            fix = "compile the model for this shape"
        else:
            fix = f"convert it to {self._dtype.name}" + (f": x.astype({self._dtype.name!r})" if order else "")
        return InputError(self.where, f"{found} given, the model takes {wanted}", fix)

    @staticmethod
    def _describe(dtype: str, shape: tuple[int, ...]) -> str:
        return f"{dtype}[{','.join(map(str, shape))}]"


def in_order(names: Sequence[str], inputs: Sequence[object], named: Mapping[str, object]) -> tuple[object, ...]:
    """Positional and named inputs of a call in the order of `names`, the model's inputs.

    Raises:
        InputError: one is missing, unknown or given twice.
    """
    if len(inputs) > len(names):
        raise InputError("inputs", f"{len(inputs)} given, the model takes {len(names)}", f"give {', '.join(names) or 'none'}")
    by_name = dict(zip(names, inputs, strict=False))
    for name, value in named.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"the inputs are {', '.join(names) or 'none'}"
            raise InputError(f"input {name!r}", "the model has no such input", fix)
        if name in by_name:
            raise InputError(f"input {name!r}", "given twice, by position and by name", "give it once")
        by_name[name] = value
    if missing := [name for name in names if name not in by_name]:
        fix = unpacked(inputs[0]) if len(inputs) == 1 else ""
        raise InputError("inputs", f"{', '.join(missing)} not given", fix or f"the inputs are {', '.join(names)}")
    return tuple(by_name[name] for name in names)


def unpacked(value: object) -> str:
    """How to give tensors that came as one dictionary or list, as other runtimes take them; empty for anything else."""
    if isinstance(value, Mapping):
        return "give a dictionary of inputs as model(**inputs)"
    are_tensors = isinstance(value, list | tuple) and value and all(getattr(one, "ndim", 0) for one in value)
    return "give a list of inputs as model(*inputs)" if are_tensors else ""


class SizedSignature(Signature):
    """The ports of a program some of whose sizes a call decides.

    As a signature it is that of the largest call; `at` gives that of one call.
    """

    is_sized = True

    def __init__(self, plan: Plan, devices: frozenset[str]) -> None:
        super().__init__(plan, devices)
        self._plan = plan
        self._devices = devices
        self._known: dict[tuple[tuple[int, ...], ...], Signature] = {}  # by the shapes of the inputs

    def at(self, inputs: Sequence[object]) -> Signature:
        """The signature of a call with inputs of these shapes; it still checks their types and whatever is no size.

        Raises:
            InputError: a size is outside of its range, or two inputs give one name two sizes.
        """
        shapes = tuple(tuple(getattr(value, "shape", ())) for value in inputs)
        if not all(shapes) and len(inputs) == 1 and (fix := unpacked(inputs[0])):
            raise InputError("inputs", f"{type(inputs[0]).__name__} given", fix)
        found = self._known.get(shapes)
        if found is None:
            found = self._made(shapes)
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            self._known[shapes] = found
        return found

    def _made(self, shapes: Sequence[tuple[int, ...]]) -> Signature:
        sizes = sizes_of_call(self._plan, shapes)
        ports = [tuple(_at(port, sizes) for port in some) for some in (self._plan.inputs, self._plan.outputs)]
        plan = replace(self._plan, inputs=ports[0], outputs=ports[1])
        signature = Signature(plan, self._devices, has_patterns=False)  # many are kept
        signature.dimensions = np.array([sizes[dim.name] for dim in self._plan.dims], np.int32)
        return signature


def sizes_of_call(plan: Plan, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The size of each dimension of a plan, in a call with inputs of these shapes.

    Raises:
        InputError: one is outside of its range, or two inputs give one name two sizes.
    """
    found: dict[str, tuple[int, str]] = {}
    for port, shape in zip(plan.inputs, shapes, strict=True):
        where = f"input {port.name!r}"
        if len(shape) != len(port.type.shape):
            what = f"{len(shape)} dimensions given, the model takes {port.type_text}"
            raise InputError(where, what, f"give {len(port.type.shape)} dimensions")
        for sized in port.sizes:
            size, name = shape[sized.axis], sized.text
            before, place = found.setdefault(name, (size, where))
            if before != size:
                what = f"dimension {sized.axis} is {size}, and {name} is {before} by {place}"
                raise InputError(where, what, f"give inputs of one {name}")
    for dim in plan.dims:
        size, where = found[dim.name]
        if size not in dim.sizes:
            step = f" in steps of {dim.multiple}" if dim.multiple > 1 else ""
            what = f"{dim.name} is {size}, the program is for {dim.least} to {dim.greatest}{step}"
            raise InputError(where, what, f"compile the model for more sizes: dims={{{dim.name!r}: (least, greatest)}}")
    return {name: size for name, (size, _) in found.items()}


def _at(port: Port, sizes: Mapping[str, int]) -> Port:
    """A port with the shape that it has in one call."""
    if not port.sizes:
        return port
    shape = list(port.type.shape)
    for sized in port.sizes:
        shape[sized.axis] = evaluator(sized.text)(sizes)
    return replace(port, type=replace(port.type, shape=tuple(shape)), sizes=())
