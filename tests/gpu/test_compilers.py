"""Binaries for GPUs made without one: what their headers say, barriers that wait for LDS, and errors of missing compilers."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.compiler.lowering.gpu import cuda_compiler, rocm_compiler
from prefuse.compiler.lowering.gpu.cuda_compiler import compile_cuda, find_nvcc, find_nvrtc
from prefuse.compiler.lowering.gpu.device_module import cuda_source, wavefront_threads
from prefuse.compiler.lowering.gpu.rocm_compiler import compile_rocm, find_lld
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models import MODELS
from prefuse.kernels.codegen.grids import BLOCK_THREADS, DeviceFunction
from prefuse.runtime.errors import CompileError, OptionError, ProgramFileError
from prefuse.runtime.gpu.binary import architecture_of
from prefuse.runtime.hardware.gpu import has_mfma
from prefuse.runtime.target import Target, check_binary

from ..compiler.terminal import Terminal
from ..kernels.harness import build, operator
from ..sample import every
from .simulator import CUDA, simulated_cubin
from .test_device import small_model

AMD = ("gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201")
_LDS_STORE = re.compile(r"\bds_(write|store)")
_LDS_WAIT = re.compile(r"s_waitcnt\b.*lgkmcnt\(0\)|s_wait_(ds|dscnt|loadcnt_ds)cnt 0x0|s_wait_dscnt 0x0")
_BARRIER = re.compile(r"\bs_barrier(_signal)?\b")


def kernels(target: Target) -> dict[str, DeviceFunction]:
    """What shares memory in blocks: a product, a convolution, a reduction, a normalization; and kernels that do not."""
    x = np.zeros((80, 90), np.float32)
    has_unit = target.kind == "cuda" or has_mfma(target.level)
    cases = (
        operator(
            "MatMul",
            x,
            x.T.copy(),
            template="gpu_mma_matmul" if has_unit else "gpu_matmul",
        ),
        operator("ReduceSum", x, np.array([1]), template="gpu_reduction"),
        operator("Softmax", x, template="gpu_normalization", expected=[x]),
        operator("Conv", np.zeros((1, 8, 9, 9), np.float32), np.zeros((16, 8, 3, 3), np.float32), template="gpu_convolution"),
        operator("Tanh", x),
        operator("Sub", x, np.array(-0.0, np.float32)),
    )
    return {f"k{number}": build(case, target).function for number, case in enumerate(cases)}


def rocm_assembly(level: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The assembly of `kernels`; no linker is needed for that."""
    monkeypatch.setattr(rocm_compiler, "_link", bytes)
    target = Target("rocm", level)
    return compile_rocm(kernels(target), target).assembly


def unwaited_barriers(assembly: str) -> list[int]:
    """Lines of barriers before which a store to LDS may be outstanding."""
    faults, stored = [], False
    for number, line in enumerate(assembly.splitlines()):
        stored = (stored or bool(_LDS_STORE.search(line))) and not _LDS_WAIT.search(line)
        if stored and _BARRIER.search(line):
            faults.append(number)
    return faults


@pytest.mark.parametrize("level", AMD)
def test_barriers_wait_for_lds(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = rocm_assembly(level, monkeypatch)
    assert len(_BARRIER.findall(assembly)) >= 14
    assert len(_LDS_STORE.findall(assembly)) >= 6
    assert unwaited_barriers(assembly) == []
    sizes = set(map(int, re.findall(r"\.max_flat_workgroup_size: *(\d+)", assembly)))
    assert sizes == {BLOCK_THREADS}


def test_the_barrier_that_tvm_emits_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the check above can fail."""
    monkeypatch.setattr(rocm_compiler, "_with_waiting_barriers", lambda module: module)
    assert unwaited_barriers(rocm_assembly("gfx942", monkeypatch))


@pytest.mark.parametrize("level", AMD)
def test_code_objects(level: str) -> None:
    try:
        find_lld()
    except CompileError as error:
        pytest.skip(str(error))
    target = Target("rocm", level)
    binary = compile_rocm(kernels(target), target).code_object
    assert architecture_of(binary) == f"rocm:{level}"
    check_binary(binary, target, "kernels.hsaco")


def test_wavefronts() -> None:
    assert wavefront_threads(Target("rocm", "gfx942")) == 64
    assert wavefront_threads(Target("rocm", "gfx1100")) == 32


@pytest.mark.parametrize("level", ["sm_80", "sm_90", "sm_100"])
def test_cubins(level: str) -> None:
    if not find_nvcc() and not find_nvrtc():
        pytest.skip("neither nvcc nor NVRTC is here")
    target = Target("cuda", level)
    binary = compile_cuda(cuda_source(kernels(target), target), level)
    assert architecture_of(binary) == f"cuda:{level}"
    check_binary(binary, target, "kernels.cubin")


def test_literals_have_no_address() -> None:
    """-0.0 is told by its bits, which TVM's C code would read as a number by way of their address."""
    x = np.zeros((3, 5), np.float32)
    for dtype in (np.float32, np.float64, np.float16):
        source = cuda_source({"k": build(operator("Mul", x.astype(dtype), np.array(-0.0, dtype)), CUDA).function}, CUDA)
        assert not re.search(r"&\(-?\d", source), source


def by_warpgroups() -> str:
    """The CUDA C of a product by warpgroups with tensor maps, and of a kernel without either."""
    half = np.zeros((128, 64), np.float16)
    how = {"template": "gpu_wgmma_matmul", "tile": "128x64x64*8"}
    case = operator("Gemm", half, half, transB=1, template=how["template"], expected=[np.zeros((128, 128), np.float16)])
    case = replace(case, group=replace(case.group, configuration=how))
    functions = {"product": build(case, CUDA).function, "other": build(operator("Tanh", half.astype(np.float32)), CUDA).function}
    return cuda_source(functions, CUDA)


def test_warpgroups_that_deal_registers_know_how_many_they_begin_with() -> None:
    """Which one block a multiprocessor tells; also where NVRTC has no cuda.h that defines tensor maps."""
    source = by_warpgroups()
    bounds = set(re.findall(r"__launch_bounds__\(([\d, ]+)\) (\w+?)_\d+\(", source))
    assert {name: "," in text for text, name in bounds} == {"product": True, "other": False}
    assert source.index("__CUDACC_RTC__") < source.index("struct alignas(64) CUtensorMap") < source.index("#include")


def test_cubins_by_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_nvrtc():
        pytest.skip("NVRTC is not here")
    monkeypatch.setattr(cuda_compiler, "find_nvcc", lambda: "")
    assert architecture_of(compile_cuda(cuda_source(kernels(CUDA), CUDA), "sm_90")) == "cuda:sm_90"
    assert architecture_of(compile_cuda(by_warpgroups(), "sm_90a")) == "cuda:sm_90"
    with pytest.raises(CompileError, match=r"NVRTC failed for sm_90: .*error"):
        compile_cuda("not C", "sm_90")


def test_an_architecture_that_the_compiler_does_not_know() -> None:
    if not find_nvcc():
        pytest.skip("nvcc is not here")
    with pytest.raises(CompileError, match="CUDA compiler: nvcc failed for sm_12: "):
        compile_cuda("", "sm_12")


def test_missing_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "find_nvcc", lambda: "")
    monkeypatch.setattr(cuda_compiler, "find_nvrtc", lambda: None)
    with pytest.raises(CompileError, match=r"neither nvcc nor NVRTC; .*pip install nvidia-cuda-nvrtc"):
        compile_cuda("", "sm_90")
    monkeypatch.setattr(rocm_compiler, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(CompileError, match=r"no ld.lld; pip install ziglang"):
        find_lld()


@pytest.mark.parametrize("text", ["cuda:sm90", "cuda:gfx942", "rocm:sm_90", "rocm", "cuda:sm_90,threads=2", "gpu"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(OptionError):
        Target.parse(text)


@pytest.mark.parametrize("text", ["cuda:sm_90", "cuda:sm_90a", "rocm:gfx942", "rocm:gfx90a"])
def test_targets_round_trip(text: str) -> None:
    assert str(Target.parse(text)) == text
    with pytest.raises(OptionError, match="has no CPU threads"):
        Target.parse(text, threads=2)


def test_binaries_of_others_are_refused(tmp_path: Path) -> None:
    cubin = simulated_cubin(tmp_path, architecture=80)
    with pytest.raises(ProgramFileError, match="a binary for cuda:sm_80, the plan is for cuda:sm_90"):
        check_binary(cubin, CUDA, "kernels.cubin")
    with pytest.raises(ProgramFileError, match="no binary for a GPU"):
        check_binary(b"\x7fELF", CUDA, "kernels.cubin")
    check_binary(cubin, Target("cuda", "sm_80a"), "kernels.cubin")


def test_operators_without_gpu_kernel_are_named() -> None:
    """All of them, in one error. (LLVM would end the process on an exponential of float64 for an AMD GPU.)"""
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4] x, double[4] z) => (float[4] y, double[4] w) {
      y = Sinh(x)
      w = Exp(z)
    }"""
    with pytest.raises(
        CompileError, match=r"2 operators .*Sinh at .*no sinhf of float32 in TVM.*; Exp at .*no exp of float64 in TVM"
    ):
        prefuse.compile(onnx.parser.parse_model(text), target="rocm:gfx942", cache=False)


def test_what_the_linker_says_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(relocatable: bytes) -> bytes:
        raise CompileError("linker", "it has failed", "")

    monkeypatch.setattr(rocm_compiler, "_link", fail)
    with pytest.raises(CompileError, match="linker: it has failed"):
        compile_rocm(kernels(Target("rocm", "gfx942")), Target("rocm", "gfx942"))


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx1100"])
def test_command_line(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`compile` writes a program with a binary on a machine without GPU, `inspect` shows it."""
    try:
        prefuse.compile(small_model(), target=target, cache=False)
    except CompileError as error:
        if "this machine has" not in error.what:
            raise
        pytest.skip(str(error))
    terminal = Terminal(monkeypatch, capsys)
    model, program = tmp_path / "m.onnx", tmp_path / "m.prefuse"
    onnx.save(small_model(), model)
    terminal("compile", model, "--no-cache", "--target", target, "-o", program)
    shown = terminal("inspect", program)
    assert re.search(rf"code for {target}: [\d.]+ KiB, \d+ functions", shown), shown


_LOAD_WITHOUT_COMPILER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tvm", "tvm_ffi", "torch", "onnx", "onnx_ir", "onnxruntime", "scipy", "networkx"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import prefuse
print(type(prefuse.load(sys.argv[1])).__name__)
"""


@pytest.mark.parametrize("name", every(5, list(MODELS)))
def test_example_models_for_amd(name: str, tmp_path: Path) -> None:
    """Some each day: compiled for a GPU with a matrix unit, and read where there is numpy alone."""
    try:
        find_lld()
    except CompileError as error:
        pytest.skip(str(error))
    module, tensors = MODELS[name].build(small=True)
    net = prefuse.compile(module, tensors, target="rocm:gfx942", precision="bfloat16", cache=False)
    assert isinstance(net, SpecializedModel)
    assert any(kernel.template.startswith("gpu_") for kernel in net.plan.kernels)
    path = tmp_path / "net.prefuse"
    net.save(path)
    command = [sys.executable, "-c", _LOAD_WITHOUT_COMPILER, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "CompiledModel"
