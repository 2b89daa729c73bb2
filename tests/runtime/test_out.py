"""Results go where the caller wants them: what may be given for outputs, and what is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import prefuse
import pytest
import torch
from onnx import parser
from prefuse.runtime.errors import InputError
from prefuse.runtime.executor import CompiledModel

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def compiled(text: str, **options: object) -> CompiledModel:
    head = '<ir_version: 10, opset_import: ["": 21]>\n'
    net = prefuse.compile(parser.parse_model(head + text), cache=False, **options)  # type: ignore[arg-type]
    assert isinstance(net, CompiledModel)
    return net


@pytest.fixture(scope="module")
def one() -> CompiledModel:
    return compiled("g (float[3,4] x) => (float[3,4] y) { y = Neg(x) }")


@pytest.fixture(scope="module")
def two() -> CompiledModel:
    return compiled("g (float[3,4] x) => (float[3,4] y, int64[4,3] z) { y = Neg(x) t = Transpose(x) z = Cast<to = 7>(t) }")


def test_a_result_is_written_into_what_is_given(one: CompiledModel) -> None:
    for call in (one, one.context()):
        out = np.full((3, 4), 7, np.float32)
        assert call(X, out=out) is out
        np.testing.assert_array_equal(out, -X)
        tensor = torch.full((3, 4), 7.0)
        assert call(torch.from_numpy(X), out=tensor) is tensor
        np.testing.assert_array_equal(tensor.numpy(), -X)
        assert call(x=X, out=(out,)) is out
        assert call(X, out=None) is not out


def test_several_results(two: CompiledModel) -> None:
    y, z = np.empty((3, 4), np.float32), np.empty((4, 3), np.int64)
    wholly: list[object] = [(y, z), [y, z], {"z": z, "y": y}]
    for out in wholly:
        y[:], z[:] = 0, 0
        results = two(X, out=out)
        assert isinstance(results, tuple)
        assert results[0] is y
        assert results[1] is z
        np.testing.assert_array_equal(y, -X)
        np.testing.assert_array_equal(z, X.T)
    partly: list[object] = [(None, z), {"z": z}]
    for given in partly:
        results = two(X, out=given)
        assert isinstance(results, tuple)
        assert results[1] is z
        np.testing.assert_array_equal(results[0], -X)


MEMORY = np.zeros(64, np.float32)
READ_ONLY = np.zeros((3, 4), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("out", "fault"),
    [
        (np.zeros((4, 3), np.float32), r"output 'y': float32\[4,3\] given"),
        (np.zeros((3, 4), np.float64), "float64"),
        (np.zeros((3, 4), ">f4"), r"float32\[3,4\] \(>f4\) given"),
        (np.zeros((3, 8), np.float32)[:, ::2], "is not contiguous, aligned and writable"),
        (np.zeros((4, 3), np.float32).T, "is not contiguous, aligned and writable"),
        (READ_ONLY, "is not contiguous, aligned and writable"),
        (np.frombuffer(bytearray(49), np.uint8)[1:].view(np.float32).reshape(3, 4), "is not contiguous, aligned and writable"),
        (torch.zeros(3, 5), r"float32\[3,5\] given"),
        (torch.zeros(4, 3).t(), "is not contiguous"),
        (torch.zeros(3, 4, requires_grad=True), "needs a gradient"),
        (torch.zeros(3, 4, device="meta"), "meta"),
        (3.0, "is float; give a NumPy array"),
        ((), "0 given, the model has 1 outputs"),
        ((None, None), "2 given, the model has 1 outputs"),
        ({"q": MEMORY}, "the model has no output 'q'; the outputs are y"),
    ],
)
def test_wrong_memory_is_refused(one: CompiledModel, out: object, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        one(X, out=out)


def test_shared_memory_is_refused(two: CompiledModel, one: CompiledModel) -> None:
    part = MEMORY[6:18].reshape(3, 4)
    for start in (0, 6, 17):
        with pytest.raises(InputError, match="output 'y': what is given shares memory with input 'x'"):
            one(part, out=MEMORY[start : start + 12].reshape(3, 4))
    np.testing.assert_array_equal(one(part, out=MEMORY[18:30].reshape(3, 4)), -part)
    bytes_of = np.zeros(200, np.uint8)
    y, z = bytes_of[:48].view(np.float32).reshape(3, 4), bytes_of[40:136].view(np.int64).reshape(4, 3)
    with pytest.raises(InputError, match="output 'z': what is given shares memory with output 'y'"):
        two(X, out=(y, z))


def test_an_input_may_have_the_name() -> None:
    net = compiled("g (float[3,4] out) => (float[3,4] y) { y = Neg(out) }")
    np.testing.assert_array_equal(net(out=X), -X)


def test_a_size_that_a_call_decides_is_not_given() -> None:
    net = compiled("g (float[3,4] x) => (int64[2,N] y) { y = NonZero(x) }")
    with pytest.raises(InputError, match="has a size that only the call decides"):
        net(X, out=np.empty((2, 12), np.int64))


def test_a_call_with_states_and_memory_allocates_nothing() -> None:
    text = "g (float[64,1024] x, float[64,1024] a) => (float[64,1024] y, float[64,1024] b) { b = Add(a, x) y = Neg(b) }"
    net = compiled(text, states={"b": "a"})
    x, out = np.ones((64, 1024), np.float32), np.empty((64, 1024), np.float32)
    session = net.context()
    session(x, out=out)
    tracemalloc.start()
    try:
        session(x, out=out)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(out, -2 * x)
