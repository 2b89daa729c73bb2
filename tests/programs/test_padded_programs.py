"""Padding that is called harmless is: whatever stands behind the end of inputs, no bit of what counts of the results changes.

`python -m tests.programs.test_padded_programs FIRST COUNT` checks as many random models as one likes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
import torch
from onnx import numpy_helper, parser
from prefuse.compiler.frontend.dimensions import bind_domain
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.options import parse_options
from prefuse.compiler.programs.padded import find_padding
from prefuse.compiler.programs.served import bucket, bucket_range
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.program_set.padding import Padding
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.tests.models.sized_models import sized_model
from prefuse.tests.sample import sample_number

_COUNT = 2  # random models of a run
_DIMS = {"N": (2, 5), "T": (2, 12)}
_SIZES, _PADDED = {"N": 3, "T": 5}, {"N": 5, "T": 9}


def written(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model with random weights."""
    model, random = parser.parse_model('<ir_version: 10, opset_import: ["": 20]>' + text), np.random.default_rng(0)
    for name, shape in weights.items():
        model.graph.initializer.append(numpy_helper.from_array((random.standard_normal(shape) / 4).astype(np.float32), name))
    return model


_GRU = written(
    "gru (float[T,N,8] x) => (float[T,1,N,16] y) { y, h = GRU<hidden_size=16>(x, w, r, b) }",
    w=(1, 48, 8), r=(1, 48, 16), b=(1, 96),
)  # fmt: skip
_IMAGES = written(
    "images (float[N,3,9,9] x) => (float[N,10] y, float[M] z) { h = Conv(x, w) r = Relu(h)"
    " s = Constant<value_floats=[1.0, 1.0, 2.0, 2.0]>() p = Resize<mode = \"cubic\", exclude_outside = 1>(r, , s)"
    " f = Flatten(p) y = MatMul(f, v)"
    " k = Constant<value_ints=[-1]>() z = Reshape(y, k) }",
    w=(4, 3, 3, 3), v=(784, 10),
)  # fmt: skip
_LAST = written(
    "last (float[T,N,8] x) => (float[1,N,16] h) { y, h = GRU<hidden_size=16>(x, w, r, b) }",
    w=(1, 48, 8), r=(1, 48, 16), b=(1, 96),
)  # fmt: skip


def padding_of(model: onnx.ModelProto, names: tuple[str, ...]) -> Padding | str:
    box = [Dim(name, *ends) for name, ends in _DIMS.items()]
    bound = bind_domain(import_model(model), Domain(box, {dim.name: dim.greatest for dim in box}), {})
    return find_padding(bound, names, parse_options("cpu", "float32", {}))


def results(found: object) -> list[np.ndarray]:
    return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]


def expected(model: onnx.ModelProto, x: np.ndarray) -> list[Any]:
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x}))


def check_padding(model: onnx.ModelProto, padding: Padding, names: tuple[str, ...], seed: int) -> None:
    """Call the program for padded sizes with the same inputs before three paddings, and compare with the inputs alone."""
    random = np.random.default_rng(seed)
    padded = {name: size for name, size in _PADDED.items() if name in names}
    x = random.standard_normal([_SIZES["N"], _SIZES["T"], 8]).astype(np.float32)
    whole = padding.longer(x, 0, padded)
    net = prefuse.compile(model, cache=False, threads=2)
    poisons = [whole, np.full_like(whole, np.nan), random.standard_normal(whole.shape).astype(np.float32) * 1e6]
    cuts = []
    for poison in poisons:
        given = poison.copy()
        given[tuple(map(slice, x.shape))] = x
        sizes = padding.sizes([x.shape])
        cuts.append([padding.cut(one, place, sizes, padded) for place, one in enumerate(results(net(given)))])
    for first, nan, noise, wanted in zip(*cuts, expected(model, x), strict=True):
        np.testing.assert_array_equal(first.view(np.int32), nan.view(np.int32), err_msg=f"seed {seed}, padded {names}")
        np.testing.assert_array_equal(first.view(np.int32), noise.view(np.int32), err_msg=f"seed {seed}, padded {names}")
        assert first.shape == wanted.shape, f"seed {seed}, padded {names}"
        np.testing.assert_allclose(first, wanted, 1e-4, 1e-4, err_msg=f"seed {seed}, padded {names}")


def check(seed: int) -> list[str]:
    """Check the paddings that a random model may have, and say which these are."""
    model, harmless = sized_model(seed), []
    for names in (("N",), ("T",), ("N", "T")):
        padding = padding_of(model, names)
        if isinstance(padding, Padding):
            harmless.append("".join(names))
            check_padding(model, padding, names, seed)
    return harmless


@pytest.mark.parametrize("number", range(_COUNT))
def test_random_models_do_not_see_their_padding(number: int) -> None:
    check(sample_number() % 100_000 * _COUNT + number)


def test_some_random_models_may_be_padded() -> None:
    """Else the test above checks nothing."""
    found = [isinstance(padding_of(sized_model(seed), ("T",)), Padding) for seed in range(12)]
    assert 1 <= sum(found) < 12


def right(net: SymbolicModel, model: onnx.ModelProto, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        x = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
        found, again = results(net(x)), results(net(x))
        for got, twice, wanted in zip(found, again, expected(model, x), strict=True):
            assert got.shape == wanted.shape
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, twice)
            np.testing.assert_allclose(got, wanted, 1e-4, 1e-4)


def compiled(model: onnx.ModelProto, dims: Mapping[str, tuple[int, ...]]) -> SymbolicModel:
    net = prefuse.compile(model, dims=dims, cache=False, threads=2)
    assert isinstance(net, SymbolicModel)
    return net


def test_batches_of_a_recurrence_are_padded() -> None:
    """Sequences by twos and fours, of any length."""
    net = compiled(_GRU, {"N": (2, 4), "T": (3, 6)})
    padded, exact = net.notes
    assert padded.startswith("sizes T=3..6, N=3..4: padded to N=4, which no result shows: one program; none for a range, as ")
    assert "GRU at y" in padded
    assert exact == "sizes T=3..6, N=2..2: one program"
    right(net, _GRU, (3, 2, 8), (4, 3, 8), (5, 4, 8), (6, 3, 8))
    x = torch.randn(5, 3, 8)
    found = net(x)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), expected(_GRU, x.numpy())[0], 1e-4, 1e-4)


def test_a_last_state_is_of_the_steps_that_a_call_has() -> None:
    net = compiled(_LAST, {"N": (2, 4), "T": (3, 4)})
    assert [note.split(":")[0] for note in net.notes] == ["sizes T=3..4, N=3..4", "sizes T=3..4, N=2..2"]
    right(net, _LAST, (3, 2, 8), (3, 3, 8), (4, 3, 8))


def test_images_of_a_batch_are_padded() -> None:
    net = compiled(_IMAGES, {"N": (3, 11, 2)})
    assert [note.split(":")[0] for note in net.notes] == ["sizes N=10..10 by 2", "sizes N=4..4 by 2", "sizes N=6..8 by 2"]
    right(net, _IMAGES, (4, 3, 9, 9), (6, 3, 9, 9), (8, 3, 9, 9))


def test_what_is_not_harmless_is_specialised_and_says_why() -> None:
    model = written("volume (float[N,T,T] x) => (float[N] y) { y = Det(x) }")
    net = compiled(model, {"N": (2, 2), "T": (3, 6)})
    assert "not padded, as Det mixes along T" in net.report()
    right(net, model, (2, 3, 3), (2, 5, 5))


def test_sizes_of_buckets() -> None:
    dim = Dim("N", 3, 50, 5)
    assert [bucket(dim, size) for size in dim.sizes] == [5, 15, 15, 30, 30, 30, 50, 50, 50, 50]
    assert all(bucket(dim, bucket(dim, size)) == bucket(dim, size) >= size for size in dim.sizes)
    assert [bucket_range(dim, size).sizes for size in (5, 25)] == [range(5, 6, 5), range(20, 31, 5)]


def main(first: int, count: int) -> None:
    """Check so many seeds, and print which of their dimensions may be padded."""
    for seed in range(first, first + count):
        print(f"seed {seed}: harmless along {check(seed) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))


def test_a_scalar_of_a_padded_call_has_no_axes() -> None:
    text = "gru (float[T,N,8] x, float[4] k) => (float[T,1,N,16] y, float s)"
    text += " { y, h = GRU<hidden_size=16>(x, w, r, b) s = ReduceSum<keepdims=0>(k) }"
    model = written(text, w=(1, 48, 8), r=(1, 48, 16), b=(1, 96))
    net = prefuse.compile(model, dims={"T": (1, 12), "N": (2, 3)}, cache=False)
    for length in (5, 8):
        found: Any = net(np.ones((length, 2, 8), np.float32), np.ones(4, np.float32))
        y, s = found
        assert (y.shape, s.shape) == ((length, 1, 2, 16), ())
