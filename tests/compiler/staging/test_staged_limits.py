"""Memory limits of models that need several programs: a share is kept by all together, bytes are not promised."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.runtime.errors import OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import planned_bytes
from prefuse.runtime.staged.procedure import ProgramStep
from prefuse.runtime.staged.staged_model import StagedModel

TEXT = """<ir_version: 10, opset_import: ["": 21]> main (float[5,256] x, int64 n, bool go) => (float[5,256] y) {
  a = MatMul(x, w0) b = Tanh(a) c = MatMul(b, w1) d = Tanh(c) e = MatMul(d, w2) f = Tanh(e) g = MatMul(f, w3)
  y = Loop(n, go, g) <body = body (int64 i, bool going, float[5,256] p) => (bool again, float[5,256] q) {
    again = Identity(going) s = MatMul(p, w4) t = Tanh(s) u = MatMul(t, w5) v = Tanh(u) r = MatMul(v, w6) q = Tanh(r)
  }>
}"""


def model() -> onnx.ModelProto:
    rng, made = np.random.default_rng(0), onnx.parser.parse_model(TEXT)
    for number in range(7):
        weights = rng.standard_normal((256, 256), np.float32) / np.float32(16)
        made.graph.initializer.append(onnx.numpy_helper.from_array(weights, f"w{number}"))
    return made


def total(net: StagedModel) -> int:
    """Bytes that all programs take together."""
    programs = [step.program for step in net.program.procedure.walk() if isinstance(step, ProgramStep)]
    assert len(programs) == 2
    assert all(isinstance(program, CompiledModel) for program in programs)
    return sum(planned_bytes(program.plan) for program in programs if isinstance(program, CompiledModel))


def test_a_share_is_that_of_all_programs_together() -> None:
    free, limited = (prefuse.compile(model(), threads=2, cache=False, memory_limit=limit) for limit in (None, "80%"))
    assert isinstance(free, StagedModel)
    assert isinstance(limited, StagedModel)
    assert total(limited) <= 0.8 * total(free)
    x = np.random.default_rng(1).standard_normal((5, 256), np.float32)
    for trips in (3, 0, 2):
        inputs = x, np.array(trips), np.array(True)
        np.testing.assert_array_equal(limited(*inputs), free(*inputs))


@pytest.mark.parametrize("limit", ["600KiB", 10**9])
def test_bytes_that_each_program_would_take_are_refused(limit: object) -> None:
    with pytest.raises(OptionError, match="would be the limit of each") as error:
        prefuse.compile(model(), threads=2, cache=False, memory_limit=limit)
    assert error.value.where == "memory_limit"
    assert "share" in error.value.fix
