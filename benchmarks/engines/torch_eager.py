"""PyTorch, eager."""

from __future__ import annotations

import torch
from torch import nn

from ..nets import build
from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    module, _ = build(task.model, task.small, task.batch)
    return runner(module, task)


def runner(module: nn.Module, task: Task) -> Run:
    """Runs `module` on the inputs of `task`, in inference mode."""
    torch.set_num_threads(task.threads)
    inputs = tuple(torch.from_numpy(array) for array in task.inputs.values())

    def run() -> Outputs:
        with torch.inference_mode():
            outputs = module(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return run
