"""Random models for ranges of sizes, at five of them: right, or specialised for a reason.

`python -m tests.programs.test_sized_models FIRST COUNT` runs as many as one likes.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
import prefuse
import pytest
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.tests.models.sized_models import CHANNELS, sized_model
from prefuse.tests.sample import sample_number

_COUNT = 3  # a run
_SIZES = ((1, 1), (2, 2), (3, 7), (2, 33), (1, 40))  # of N and T
_TOLERANCE = 2e-3  # of values that exponentials and quotients of a few operators have made large


def check(seed: int) -> SymbolicModel:
    """Compile the model of a seed, for one size of N or several, and compare it with ONNX Runtime."""
    model, one = sized_model(seed), seed % 3 == 0
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    net = prefuse.compile(model, dims={"N": (2, 2) if one else (1, 3), "T": (1, 40)}, cache=False, threads=2)
    assert isinstance(net, SymbolicModel)
    for images, places in _SIZES:
        x = np.random.default_rng(seed + places).standard_normal((2 if one else images, places, CHANNELS)).astype(np.float32)
        found, expected = net(x), session.run(None, {"x": x})
        for got, wanted in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
            assert np.shape(got) == wanted.shape, f"seed {seed} at {x.shape}"
            np.testing.assert_allclose(got, wanted, _TOLERANCE, _TOLERANCE, err_msg=f"seed {seed} at {x.shape}")
    for note in net.notes:
        assert "one program" in note or "specialised, as " in note, note
    return net


@pytest.mark.parametrize("number", range(_COUNT))
def test_random_models_are_right_at_every_size(number: int) -> None:
    check(sample_number() % 100_000 * _COUNT + number)


def main(first: int, count: int) -> None:
    """Check so many seeds, and print what has no program for a range, and why."""
    for seed in range(first, first + count):
        refused = [note for note in check(seed).notes if "specialised" in note]
        print(f"seed {seed}: right" + "".join(f"\n  {note}" for note in refused), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
