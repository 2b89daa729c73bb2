"""A function of tensors as a module, and the comparison of its program with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prefuse
import torch
from torch import Tensor, nn


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def check(function: Callable[..., Any], *inputs: Tensor, tolerance: float = 1e-5, **options: Any) -> Any:
    """The program's results have the types, shapes and numbers of torch's; returns the program."""
    module = Applied(function).eval()
    wanted = module(*(value.clone() for value in inputs))
    net = prefuse.compile(module, inputs, cache=False, **{"threads": 2, **options})
    found = net(*inputs)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    return net
