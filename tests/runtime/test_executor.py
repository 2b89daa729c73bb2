"""Calls of a compiled model: NumPy and torch, by position and name, from several threads, and what a caller can get wrong."""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from prefuse.runtime.cpu_device import CpuArena
from prefuse.runtime.errors import ArenaMemoryError, InputError, OptionError
from prefuse.runtime.executor import CompiledModel, Context, load
from prefuse.runtime.plan import Buffer, Extent, Launch, Plan, Port, Region, Role, Space, TensorType
from prefuse.runtime.program_file import Program
from prefuse.tests.runtime.tiny_program import ELEMENTS, expected
from torch._subclasses import FakeTensorMode


class FakeExecutable:
    """Notes the arguments of calls, makes another call in its place if asked to, and writes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.call: Callable[..., None] = lambda *addresses: None

    def bind(self, arena: object, states: object = None) -> FakeExecutable:
        return self

    bind_profile = bind

    def __call__(self, *addresses: int) -> None:
        self.calls.append(addresses)
        self.call(*addresses)


class FakeDevice:
    """A device that runs nothing, for programs without native code."""

    torch_devices = frozenset(["cpu"])
    gives_zeros = True

    def __init__(self) -> None:
        self.executable = FakeExecutable()

    def load(self, program: Program) -> FakeExecutable:
        return self.executable

    def allocate(self, size_bytes: int, part_bytes: int = 0) -> CpuArena:
        return CpuArena(size_bytes)


def model_of(
    inputs: dict[str, TensorType], outputs: dict[str, TensorType], arena_bytes: int = 64
) -> tuple[CompiledModel, FakeExecutable]:
    """A model of any signature on a fake device."""
    plan = Plan(
        "cpu:avx2,threads=1",
        tuple(Port(name, kind, name) for name, kind in inputs.items()),
        tuple(Port(name, kind, name) for name, kind in outputs.items()),
        (Space("arena", arena_bytes),),
        (Buffer("h", Role.ACTIVATION, arena_bytes, "arena", 0),),
        (),
        (),
    )
    device = FakeDevice()
    return CompiledModel(Program(plan, b"", np.empty(0, np.uint8), {}), device), device.executable


def bounded_model(shape: tuple[int, ...], axis: int) -> tuple[CompiledModel, FakeExecutable]:
    """A model of x: float32[1] whose two outputs have an axis of a size that a run decides, one size for both."""
    kind = TensorType(shape, "float32")
    ports = tuple(Port(name, kind, name, (Extent(axis, "n"),)) for name in ("y", "z"))
    plan = Plan("cpu:avx2,threads=1", (Port("x", TensorType((1,), "float32"), "x"),), ports, (), (), (), ())
    device = FakeDevice()
    return CompiledModel(Program(plan, b"", np.empty(0, np.uint8), {}), device), device.executable


def fill(shape: tuple[int, ...], count: int) -> Callable[..., None]:
    """A program that writes 0, 1, 2, ... to y, the same from 100 on to z, and their common size behind both."""

    def call(x: int, y: int, z: int, n: int) -> None:
        for address, first in ((y, 0), (z, 100)):
            values = np.arange(first, first + int(np.prod(shape)), dtype=np.float32)
            ctypes.memmove(address, values.ctypes.data, values.nbytes)
        ctypes.c_int64.from_address(n).value = count

    return call


@pytest.mark.parametrize(("shape", "axis"), [((6,), 0), ((6, 2), 0), ((2, 6), 1), ((2, 6, 3), 1)])
@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_outputs_are_cut_to_what_a_run_found(shape: tuple[int, ...], axis: int, count: int) -> None:
    model, executable = bounded_model(shape, axis)
    executable.call = fill(shape, count)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    want = np.take(whole, np.arange(count), axis)
    x = np.zeros(1, np.float32)
    for call in (model, model.context()):
        for offset, got in zip((0, 100), arrays(call(x)), strict=True):
            np.testing.assert_array_equal(got, want + offset)
            assert got.flags.c_contiguous
            assert got.base is None or got.base.nbytes <= 2 * got.nbytes, "a small result keeps a large buffer alive"
        for offset, tensor in zip((0, 100), tensors(call(torch.from_numpy(x))), strict=True):
            np.testing.assert_array_equal(tensor.numpy(), want + offset)
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes


def arrays(results: object) -> tuple[np.ndarray, ...]:
    """The outputs of a call with NumPy arrays."""
    found = results if isinstance(results, tuple) else (results,)
    assert all(isinstance(result, np.ndarray) for result in found)
    return found


def tensors(results: object) -> tuple[torch.Tensor, ...]:
    """The outputs of a call with torch tensors."""
    found = results if isinstance(results, tuple) else (results,)
    assert all(isinstance(result, torch.Tensor) for result in found)
    return found


def test_numpy_in_numpy_out(tiny: CompiledModel, x: np.ndarray) -> None:
    (y,) = arrays(tiny(x))
    np.testing.assert_array_equal(y, expected(x))
    np.testing.assert_array_equal(tiny(x=x), y)


def test_torch_in_torch_out(tiny: CompiledModel, x: np.ndarray) -> None:
    (y,) = tensors(tiny(torch.from_numpy(x)))
    np.testing.assert_array_equal(y.numpy(), expected(x))
    assert not tensors(tiny(torch.from_numpy(x).requires_grad_()))[0].requires_grad


def test_strided_and_unaligned_inputs_are_copied(tiny: CompiledModel, x: np.ndarray) -> None:
    np.testing.assert_array_equal(arrays(tiny(np.repeat(x, 2)[::2]))[0], expected(x))
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(arrays(tiny(unaligned))[0], expected(x))


def test_strided_tensors_are_copied(tiny: CompiledModel, x: np.ndarray) -> None:
    strange = torch.from_numpy(np.repeat(x, 2))[::2]
    assert not strange.is_contiguous()
    np.testing.assert_array_equal(tiny(strange), expected(x))


def reading(kind: TensorType) -> tuple[CompiledModel, list[np.ndarray]]:
    """A model of one input, and what it has read from there."""
    model, executable = model_of({"x": kind}, {"y": kind})
    seen: list[np.ndarray] = []

    def call(x: int, y: int) -> None:
        room = (ctypes.c_char * kind.size_bytes).from_address(x)
        seen.append(np.frombuffer(bytes(room), kind.dtype).reshape(kind.shape))

    executable.call = call
    return model, seen


def test_tensors_that_say_what_to_make_of_their_bytes_are_copied() -> None:
    """A conjugate has the bytes of what it is the conjugate of, and its imaginary part those of the negative."""
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    model, seen = reading(TensorType((2,), "complex64"))
    assert z.conj().is_conj()
    model(z.conj())
    np.testing.assert_array_equal(seen[0], [1 - 2j, 3 + 4j])
    one = z[:1]
    model, seen = reading(TensorType((1,), "float32"))
    assert one.conj().imag.is_neg()
    assert one.conj().imag.is_contiguous()
    model(one.conj().imag)
    np.testing.assert_array_equal(seen[0], [-2])


def test_copies_are_the_model_and_pickles_are_refused(tiny: CompiledModel) -> None:
    assert copy.copy(tiny) is tiny
    assert copy.deepcopy({"net": tiny})["net"] is tiny
    with pytest.raises(OptionError, match=r"no pickle holds; save it to a file, net\.save\(path\)"):
        pickle.dumps(tiny)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 2.5), ("float32", 2), ("bfloat16", 2.5), ("int64", -3), ("int4", 7), ("bool", True)],
)
def test_numbers_are_tensors_without_dimensions(dtype: str, value: float) -> None:
    model, executable = model_of({"x": TensorType((), dtype)}, {"y": TensorType((), dtype)})
    found = []
    executable.call = lambda *addresses: found.append(ctypes.string_at(addresses[0], np.dtype(dtype).itemsize))
    model(value)
    assert found == [np.array(value, dtype).tobytes()]


@pytest.mark.parametrize(
    ("dtype", "value"), [("int64", 2.5), ("int8", 128), ("uint8", -1), ("int4", 8), ("bool", 1), ("int64", 10**30)]
)
def test_numbers_that_the_type_does_not_hold(dtype: str, value: float) -> None:
    model, _ = model_of({"x": TensorType((), dtype)}, {"y": TensorType((), dtype)})
    with pytest.raises(InputError, match=f"input 'x': the number {value} is no {dtype}"):
        model(value)


def test_results_of_two_calls_are_apart(tiny: CompiledModel, x: np.ndarray) -> None:
    for kind in (np.asarray, torch.from_numpy):
        first, second = tiny(kind(x)), tiny(kind(x + 1))
        np.testing.assert_array_equal(first, expected(x))
        np.testing.assert_array_equal(second, expected(x + 1))


def test_read_only_inputs_and_any_alignment(tiny: CompiledModel, x: np.ndarray) -> None:
    x.flags.writeable = False
    np.testing.assert_array_equal(tiny(x), expected(x))
    room = np.empty(ELEMENTS + 16, np.float32)
    for shift in range(16):
        shifted = room[shift : shift + ELEMENTS]
        shifted[:] = x
        np.testing.assert_array_equal(tiny(shifted), expected(x))


def test_contiguous_inputs_are_not_copied() -> None:
    kind = TensorType((2, 3), "float32")
    model, executable = model_of({"a": kind, "b": kind}, {"y": kind})
    a, b = np.zeros((2, 3), np.float32), torch.zeros(2, 3)
    (y,) = tensors(model(a, b=b))
    assert executable.calls == [(a.ctypes.data, b.data_ptr(), y.data_ptr())]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 1)])
def test_types_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    kind = TensorType(shape, dtype)
    model, _ = model_of({"x": kind}, {"y": kind, "z": kind})
    y, z = arrays(model(np.zeros(shape, dtype)))
    assert (y.shape, y.dtype.name) == (z.shape, z.dtype.name) == (shape, dtype)
    t, _ = tensors(model(torch.zeros(shape, dtype=getattr(torch, dtype))))
    assert (tuple(t.shape), t.dtype) == (shape, getattr(torch, dtype))


def test_numpy_scalars_and_subclasses_are_taken() -> None:
    model, executable = model_of({"x": TensorType((), "float32")}, {"y": TensorType((), "float32")})
    model(np.float32(3))
    model(np.array(3, np.float32).view(np.ma.MaskedArray))
    assert len(executable.calls) == 2


@pytest.mark.parametrize(
    ("inputs", "named", "fault"),
    [
        ((), {}, "inputs: x not given; the inputs are x"),
        ((1, 2), {}, "inputs: 2 given, the model takes 1; give x"),
        ((), {"xx": 1}, "input 'xx': the model has no such input; did you mean 'x'?"),
        ((), {"image": 1}, "input 'image': the model has no such input; the inputs are x"),
        ((1,), {"x": 1}, "input 'x': given twice"),
        (([1.0],), {}, "input 'x': list is neither a NumPy array nor a torch tensor; give float32[1000]"),
        (([np.zeros(1000, "f4")],), {}, "input 'x': list is neither a NumPy array nor a torch tensor; give a list of inputs as"),
        (({"x": np.zeros(1000, "f4")},), {}, "input 'x': dict is neither a NumPy array nor a torch tensor; give a dictionary of"),
        (
            (np.zeros(999, "f4"),),
            {},
            "input 'x': float32[999] given, the model takes float32[1000]; compile the model for this shape",
        ),
        ((np.zeros((1, 1000), "f4"),), {}, "float32[1,1000] given, the model takes float32[1000]; give 1 dimensions, not 2"),
        ((np.zeros(1000),), {}, "float64[1000] given, the model takes float32[1000]; convert it to float32"),
        (
            (np.zeros(1000, ">f4"),),
            {},
            "float32[1000] in the other byte order (>f4) given, the model takes float32[1000]; convert it to float32: x.astype(",
        ),
        (
            (torch.zeros(1000, dtype=torch.float64),),
            {},
            "float64[1000] given, the model takes float32[1000]; convert it to float32",
        ),
        ((torch.zeros(1000, 1),), {}, "float32[1000,1] given"),
        (
            (torch.zeros(1000, device="meta"),),
            {},
            "takes dense tensors on the CPU; this one has no elements",
        ),
        (
            (torch.zeros(1000).to_sparse(),),
            {},
            "takes dense tensors on the CPU; call .to_dense() on it",
        ),
    ],
)
def test_wrong_inputs(tiny: CompiledModel, inputs: tuple[object, ...], named: dict[str, object], fault: str) -> None:
    with pytest.raises(InputError) as raised:
        tiny(*inputs, **named)
    assert fault in str(raised.value)


class Wrapper(torch.Tensor):
    """A tensor that says what it is and keeps its elements in another, as sharded and quantized tensors do."""

    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("nobody asked for a computation")


def freed() -> torch.Tensor:
    tensor = torch.ones(ELEMENTS)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("tensor", [freed(), Wrapper(torch.ones(ELEMENTS)), FakeTensorMode().from_tensor(torch.ones(ELEMENTS))])
def test_tensors_without_memory_are_refused(tiny: CompiledModel, tensor: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"input 'x': a [A-Za-z]+ without memory"):
        tiny(tensor)


def test_strided_tensors_without_memory_are_refused() -> None:
    model, executable = model_of({"x": TensorType((3, 2), "float32")}, {"y": TensorType((3, 2), "float32")})
    tensor = torch.ones(2, 3).t()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="input 'x': a Tensor without memory"):
        model(tensor)
    assert not executable.calls


def test_calls_inside_what_traces_torch_are_refused_and_do_no_harm(tiny: CompiledModel, x: np.ndarray) -> None:
    with pytest.raises(InputError, match="input 'x': a Tensor without memory"):
        torch.vmap(tiny)(torch.ones(2, ELEMENTS))
    fresh, tensor = CompiledModel(tiny.program), torch.from_numpy(x)
    with FakeTensorMode(), pytest.raises(InputError, match="output 'y': a FakeTensor without memory"):
        fresh(tensor)
    np.testing.assert_array_equal(fresh(tensor), expected(x))


def test_empty_tensors_need_no_memory() -> None:
    empty = TensorType((0, 3), "float32")
    model, executable = model_of({"x": empty}, {"y": empty})
    assert tensors(model(torch.empty(0, 3)))[0].shape == (0, 3)
    assert len(executable.calls) == 1


def test_type_that_torch_lacks() -> None:
    kind = TensorType((2,), "float8_e3m4")
    model, _ = model_of({"x": TensorType((2,), "float32")}, {"y": kind})
    with pytest.raises(InputError, match=r"output 'y': torch has no float8_e3m4; call with NumPy arrays"):
        model(torch.zeros(2))
    assert arrays(model(np.zeros(2, "f4")))[0].dtype == ml_dtypes.float8_e3m4


def test_failed_calls_keep_their_context(tiny: CompiledModel, x: np.ndarray) -> None:
    for _ in range(3):
        with pytest.raises(InputError):
            tiny(x[:5])
    np.testing.assert_array_equal(tiny(x), expected(x))


def test_threads_share_a_model(tiny: CompiledModel) -> None:
    """Each thread's results are those of its own inputs, bitwise, and of every repetition."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32)
        context = tiny.context()
        calls: list[CompiledModel | Context] = [tiny, context]
        wrong.extend(seed for call in calls * 200 if not np.array_equal(np.asarray(call(x)), expected(x)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_context_is_for_one_thread_at_a_time() -> None:
    model, executable = model_of({}, {"y": TensorType((1,), "float32")})
    context = model.context()
    inside, leave = threading.Event(), threading.Event()

    def hold(*addresses: int) -> None:
        inside.set()
        leave.wait(10)

    executable.call = hold
    thread = threading.Thread(target=context)
    thread.start()
    inside.wait(10)
    with pytest.raises(InputError, match="another thread is calling it; give each thread its own"):
        context()
    leave.set()
    thread.join()
    context()


def test_results_do_not_share_memory(tiny: CompiledModel, x: np.ndarray) -> None:
    first = tiny(x)
    second = tiny(-x)
    np.testing.assert_array_equal(first, expected(x))
    np.testing.assert_array_equal(second, expected(-x))


def test_save_and_load(tiny: CompiledModel, tmp_path: Path, x: np.ndarray) -> None:
    tiny.save(tmp_path / "copy.prefuse")
    copy = load(tmp_path / "copy.prefuse")
    (tmp_path / "copy.prefuse").unlink()  # the mapping outlives the name
    np.testing.assert_array_equal(copy(x), expected(x))
    assert copy.plan == tiny.plan
    assert [port.name for port in (*copy.inputs, *copy.outputs)] == ["x", "y"]


def test_report(tiny: CompiledModel) -> None:
    report = tiny.report()
    for line in ("tiny for cpu:", "input x: float32[1000]", "memory arena: 3.97 KiB", "elementwise: 2 launches", "slow paths:"):
        assert line in report


def test_arena_too_large() -> None:
    model, _ = model_of({}, {}, 1 << 60)
    with pytest.raises(ArenaMemoryError, match=f"no memory for {1 << 60} bytes"):
        model()


def test_plan_of_the_tiny_program_is_shown(tiny: CompiledModel) -> None:
    assert tiny.plan.steps[0] == Launch("add", (Region("x", 0, 4000), Region("b", 0, 4000)), (Region("h", 0, 4000),), label="add")
