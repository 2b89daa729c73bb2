"""PyTorch through torch.compile, at its default mode; it compiles at the first call."""

from __future__ import annotations

import torch
from prefuse.examples.models import MODELS
from torch import nn

from .engine import Run, Task
from .torch_eager import runner


def prepare(task: Task) -> Run:
    """See `Engine`."""
    module, _ = MODELS[task.model].build(task.small)
    compiled = torch.compile(module)
    assert isinstance(compiled, nn.Module)
    return runner(compiled, task)
