"""PyTorch, eager; images channels-last where the model has convolutions of them, as its documentation advises for CPUs."""

from __future__ import annotations

import time

import torch
from torch import nn

from ..nets import build
from .engine import Outputs, Ready, Run, Task


def prepare(task: Task) -> Ready:
    """See `Engine`."""
    module, seconds = built(task)
    return Ready(runner(module, task), seconds, facts={"layout": "channels last" if _has_images(module) else "as it is"})


def built(task: Task) -> tuple[nn.Module, float]:
    """The module, and the seconds that making it took: other engines get a file."""
    begin = time.perf_counter()
    module, _ = build(task.model, task.small, task.batch)
    if _has_images(module):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which types of torch do not know
    return module, time.perf_counter() - begin


def runner(module: nn.Module, task: Task) -> Run:
    """Runs `module` on the inputs of `task`, in inference mode."""
    torch.set_num_threads(task.threads)
    inputs = tuple(torch.from_numpy(array) for array in task.inputs.values())
    if _has_images(module):
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs)

    def run() -> Outputs:
        with torch.inference_mode():
            outputs = module(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return run


def _has_images(module: nn.Module) -> bool:
    return any(isinstance(one, nn.Conv2d) for one in module.modules())
