"""The seven classic patterns of fusion, each with the variants that are usually missed: which groups come out, or why none."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import prefuse
import pytest
from prefuse.compiler.debugging.oracle import relative_error
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Launch
from prefuse.tests.passes.classic.case import Case
from prefuse.tests.passes.classic.convolutions import BN_RELU, CONV_BN, CONV_BN_RELU
from prefuse.tests.passes.classic.products import ATTENTION, LINEAR_BN, LINEAR_BN_RELU, LINEAR_RELU
from prefuse.tests.sample import every
from torch import Tensor, nn

_TOLERANCE = 1e-5  # relative, of the 2-norm
PATTERNS = {
    "conv+bn+relu": CONV_BN_RELU,
    "conv+bn": CONV_BN,
    "linear+bn+relu": LINEAR_BN_RELU,
    "linear+bn": LINEAR_BN,
    "linear+relu": LINEAR_RELU,
    "bn+relu": BN_RELU,
    "attention": ATTENTION,
}
CASES = [pytest.param(case, id=f"{pattern}: {case.name}") for pattern, cases in PATTERNS.items() for case in cases]


@pytest.mark.parametrize("case", every(2, CASES))
def test_pattern(case: Case) -> None:
    """The other half of the cases tomorrow."""
    module, inputs = case.build()
    net = specialized(module, inputs)
    assert groups_of(net) == case.groups
    assert case.refusal in str(net.report())
    expected, actual = module(*inputs), net(*inputs)
    for one, other in zip(_row(actual), _row(expected), strict=True):
        assert relative_error(np.asarray(one), other.numpy()) <= _TOLERANCE


def specialized(module: nn.Module, inputs: tuple[Tensor, ...]) -> CompiledModel:
    """The program of a module for the shapes of these inputs."""
    model = prefuse.compile(module, inputs, cache=False)
    assert isinstance(model, SpecializedModel)
    net = model.specialize(*inputs)
    assert isinstance(net, CompiledModel)
    return net


def groups_of(net: CompiledModel) -> str:
    """What each launch computes, in order."""
    kernels = [step.kernel for step in net.plan.steps if isinstance(step, Launch)]
    templates = {kernel.symbol: kernel.template for kernel in net.plan.kernels}
    names = [re.sub(r"^k\d+_", "", name) for name in kernels]
    return " ".join(
        "attention" if templates[kernel] == "attention" else name for kernel, name in zip(kernels, names, strict=True)
    )


def _row(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
