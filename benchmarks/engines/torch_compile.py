"""PyTorch through torch.compile; it compiles at the first call.

Weights are frozen: only then are they packed for oneDNN, and convolutions and linear layers fused to what follows them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch._inductor import config as inductor

from .engine import Outputs, Ready, Task
from .torch_eager import built, runner


def prepare(task: Task) -> Ready:
    """At its default mode. See `Engine`."""
    return _prepare(task, None)


def prepare_max(task: Task) -> Ready:
    """With products by whichever kernel was the fastest when it compiled."""
    return _prepare(task, "max-autotune")


def prepare_bfloat16(task: Task) -> Ready:
    """With torch's automatic mixed precision; frozen weights are cast once."""
    ready = _prepare(task, None)

    def run_in_bfloat16() -> Outputs:
        with torch.autocast("cpu", torch.bfloat16):
            return [output.float() if output.is_floating_point() else output for output in map(torch.as_tensor, ready.run())]

    return replace(ready, run=run_in_bfloat16)


def _prepare(task: Task, mode: str | None) -> Ready:
    inductor.freezing = True
    module, seconds = built(task)
    compiled = torch.compile(module, mode=mode)
    assert isinstance(compiled, nn.Module)
    return Ready(runner(compiled, task), seconds, facts={"mode": mode or "default", "freezing": "on"})
