"""References of tests start no threads beside those of the run's processes."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnxruntime
import torch
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
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
