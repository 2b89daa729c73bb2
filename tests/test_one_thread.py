"""References of tests start no threads beside those of the run's processes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import parser

MODEL = '<ir_version: 10, opset_import: ["": 21]> main (float[2] x) => (float[2] y) { y = Neg(x) }'


def session(options: object = None) -> onnxruntime.InferenceSession:
    model: onnx.ModelProto = parser.parse_model(MODEL)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def test_sessions_of_onnx_runtime_have_one_thread_unless_asked() -> None:
    assert session().get_session_options().intra_op_num_threads == 1
    asked = onnxruntime.SessionOptions()
    asked.intra_op_num_threads = 3
    assert session(asked).get_session_options().intra_op_num_threads == 3
    np.testing.assert_array_equal(session().run(None, {"x": np.ones(2, np.float32)})[0], [-1, -1])


def test_pools_have_as_many_threads_as_the_environment_says() -> None:
    """In a process of its own: tests of this one may have changed torch's."""
    count = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    result = subprocess.run(count, capture_output=True, text=True, check=True)
    assert int(result.stdout) == int(os.environ["OMP_NUM_THREADS"])
