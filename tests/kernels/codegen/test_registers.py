"""What LLVM makes of the loops in which all the time goes: sums stay in registers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import prefuse
import pytest
import tvm
from onnx import parser
from prefuse.compiler.lowering import program
from prefuse.compiler.lowering.native import compile_module
from prefuse.kernels.groups.group import Group
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import Target
from tvm.ir import GlobalVar

from ..convolution.channels_last_cases import channels_last
from ..harness import operator

_LEAST_PRODUCTS = 8  # of a loop that is one over k


def assembly_of(group: Group, target: Target, template: str) -> list[str]:
    """The lines of the kernel of a group, which a template takes."""
    kernel = build_kernel(group, target)
    assert isinstance(kernel, BuiltKernel)
    assert kernel.template == template
    module = tvm.IRModule({GlobalVar("kernel"): kernel.function.with_attr("global_symbol", "kernel")})
    return str(compile_module(module, target).inspect_source("asm")).splitlines()


def innermost_loops(assembly: list[str]) -> list[list[str]]:
    """The lines of each loop that has no other jump or label in it, but those that tell source lines."""
    assembly = [line for line in assembly if not re.match(r"\.Ltmp\d+:", line)]
    labels = {match[1]: at for at, line in enumerate(assembly) if (match := re.match(r"(\.\w+):", line))}
    loops = []
    for end, line in enumerate(assembly):
        match = re.match(r"\s+j\w+\s+(\.\w+)", line)
        if match and (begin := labels.get(match[1], end)) < end:
            body = [text.split("#")[0].strip() for text in assembly[begin + 1 : end]]
            if not any(re.match(r"j\w+\s|\.\w+:", text) for text in body):
                loops.append(body)
    return loops


@pytest.mark.parametrize("width", [60, 64])
def test_no_sum_of_a_convolution_lies_on_the_stack(width: int) -> None:
    """LLVM unrolled the loop over a window's columns around that over channels, and kept a sum of each copy in memory."""
    shapes = (1, 512, 4, width), (64, 512, 3, 3)
    image, weight = (np.zeros(shape, np.float32) for shape in shapes)
    result = np.zeros((1, 64, 2, width - 2), np.float32)
    case = channels_last(operator("Conv", image, weight, expected=[result]), template="convolution_channels_last")
    target = Target("cpu", "avx512", 2)
    sums = [
        body
        for body in innermost_loops(assembly_of(case.group, target, "convolution_channels_last"))
        if sum("vfmadd" in line for line in body) >= _LEAST_PRODUCTS
    ]
    assert sums
    for body in sums:
        assert not [line for line in body if "(%rsp" in line and "zmm" in line]


@pytest.mark.parametrize(("level", "shape", "fewest"), [("avx2", (126, 768), 48), ("avx512", (128, 768), 24)])
def test_no_sum_of_a_product_lies_on_the_stack(level: str, shape: tuple[int, int], fewest: int) -> None:
    """Of several steps over k at once; LLVM kept sums of tiles of one vector in memory."""
    a, b = np.zeros(shape, np.float32), np.zeros((768, 768), np.float32)
    case = operator("MatMul", a, b, expected=[np.zeros(shape, np.float32)], template="matmul")
    group = replace(case.group, constants=frozenset(["x1"]))
    target = Target("cpu", level, 1)
    sums = [
        body for body in innermost_loops(assembly_of(group, target, "matmul")) if sum("vfmadd" in line for line in body) >= fewest
    ]
    assert sums
    for body in sums:
        assert not [line for line in body if "(%rsp" in line and "mm" in line]


def test_kernels_are_functions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in the host function, a recurrence had the sums of its tiles on the stack."""
    assembly = []

    def compiled(module: object, target: Target) -> object:
        result = compile_module(module, target)
        assembly.append(str(result.inspect_source("asm")))
        return result

    monkeypatch.setattr(program, "compile_module", compiled)
    body = "h = MatMul(x, w)  axis = Constant<value_int=0>()  y = CumSum(h, axis)"
    text = f"main (float[64,72] x, float[72,40] w) => (float[64,40] y) {{ {body} }}"
    prefuse.compile(parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}'), cache=False, threads=1)
    assert len(set(re.findall(r"\s(?:call|jmp)\S*\s+(prefuse_\w{32}_\w{32})@PLT", assembly[0]))) == 2
