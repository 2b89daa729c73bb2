"""PyTorch through torch.compile, at its default mode; it compiles at the first call."""

from __future__ import annotations

import torch
from torch import nn
from torch._inductor import config as inductor

from ..nets import build
from .engine import Outputs, Run, Task
from .torch_eager import runner


def prepare(task: Task) -> Run:
    """See `Engine`."""
    module, _ = build(task.model, task.small, task.batch)
    compiled = torch.compile(module)
    assert isinstance(compiled, nn.Module)
    return runner(compiled, task)


def prepare_bfloat16(task: Task) -> Run:
    """With torch's automatic mixed precision, its weights frozen so that they are cast once."""
    inductor.freezing = True
    run = prepare(task)

    def run_in_bfloat16() -> Outputs:
        with torch.autocast("cpu", torch.bfloat16):
            return [output.float() if output.is_floating_point() else output for output in map(torch.as_tensor, run())]

    return run_in_bfloat16
