"""References compute on one thread: those of their pools spin after each call, beside the tests of the run's other processes."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # programs of ours ask for none of these


def limit_pools() -> None:
    """Of the numerical libraries that this process and its children import from here on; what the environment says holds."""
    for name in _POOLS:
        os.environ.setdefault(name, "1")


@cache
def limit_sessions() -> None:
    """Of ONNX Runtime, which asks the environment for nothing: sessions whose options name no number of threads."""
    import onnxruntime

    made = onnxruntime.InferenceSession.__init__

    def alone(self: Any, path_or_bytes: Any, sess_options: Any = None, *rest: Any, **named: Any) -> None:
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        made(self, path_or_bytes, options, *rest, **named)

    onnxruntime.InferenceSession.__init__ = alone
