"""`prefuse doctor`: what this machine has for us, and what its processor does in a cycle."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import click
from rich.table import Table

from ...runtime.errors import OptionError
from ...runtime.fit_file import Fit, default_fit_file, find_fit, forget_fit, keep_fit
from ...runtime.hardware import tile_state
from ...runtime.hardware.cores import usable_cores
from ...runtime.hardware.machine import Machine, host_machine
from ...runtime.target import Target, best_cpu_level, host_cpu_flags, host_cpu_model
from ..api import open_cache
from ..pipeline.progress import ConsoleProgress
from .common import JSON, show, table

_REQUIRED = ("apache-tvm", "onnx", "onnx-ir", "numpy", "ml_dtypes", "scipy", "networkx")
_PACKAGES = {name: f"pip install {name}" for name in _REQUIRED} | {
    "onnxruntime": "pip install onnxruntime, to quantize, and for bisect and run --compare",
    "torch": "pip install torch onnxscript, to compile PyTorch modules",
    "onnxscript": "pip install onnxscript, to compile PyTorch modules",
    "transformers": "pip install transformers, for text generation",
    "matplotlib": "pip install matplotlib, for drawings of bits and memory",
    "pillow": "pip install pillow, for ImageDecoder",
    "openvino": "pip install openvino, to compare with it",
    "nvidia-cuda-nvrtc": "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl, to compile for NVIDIA GPUs",
    "ziglang": "pip install ziglang, to link, and to compile for AMD GPUs without LLD",
}
_LINKERS = ("ld", "ld.lld", "cc", "gcc", "clang")  # one of them, or the one in the package ziglang
_TOOLS = {
    "g++": "g++, for the simulators of GPUs",
    "nvcc": "the CUDA toolkit, or the package nvidia-cuda-nvrtc",
    "ld.lld": "LLD, to compile for AMD GPUs",
}
_FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for: what was found (empty: nothing), and what would bring it."""

    subject: str
    found: str
    advice: str = ""


@click.command("doctor")
@click.option(
    "--fit",
    is_flag=True,
    help="Measure this machine's processor for some ten seconds, longer where L3 is large, and estimate costs by that.",
)
@click.option("--forget", is_flag=True, help="Forget what --fit measured of this machine's processor.")
@JSON
def command(fit: bool, forget: bool, as_json: bool) -> None:
    """Say what this machine can run, and what to install.

    Exits with status 1 if nothing can be compiled, for want of a CPU with AVX2, a linker, or a package that is always needed.
    """
    if fit and forget:
        raise OptionError("--forget", "is given beside --fit", "give one of them")
    if fit:
        _measure()
    if forget:
        forget_fit(host_cpu_model(), Target.parse("cpu").vector_lanes)
    machine = _machine()
    sections = {"Machine": machine, "GPUs": _gpus(), "Toolchains": _tools(), "Packages": _packages()}
    tables = [
        table(title, ("what", "found"), [(one.subject, one.found or f"none ({one.advice})") for one in findings])
        for title, findings in sections.items()
    ]
    data = {title.lower(): [asdict(one) for one in findings] for title, findings in sections.items()}
    show(as_json, {**data, "fit": _fit_data()}, *tables, *_fit_parts())
    required = [*machine, sections["Toolchains"][0], *sections["Packages"][: len(_REQUIRED)]]
    sys.exit(0 if all(one.found for one in required if one.advice) else 1)


def _measure() -> None:
    """Measure this machine's processor and keep the numbers, for all later compilations."""
    from ..lowering.machine_fit import fit_host  # which imports tvm

    target = Target.parse("cpu")
    keep_fit(fit_host(target, ConsoleProgress()), host_cpu_model(), target.vector_lanes)


def _fit() -> tuple[Machine, Fit | None] | None:
    """The row of this machine's processor and its fit; nothing where the machine cannot run prefuse."""
    try:
        lanes = Target.parse("cpu").vector_lanes
    except OptionError:
        return None
    return host_machine(host_cpu_model(), lanes), find_fit(host_cpu_model(), lanes)


def _fit_data() -> dict[str, object] | None:
    """The row and the fit in use as JSON values; nothing where there is no row."""
    if (found := _fit()) is None:
        return None
    row, fit = found
    return {"core": row.name, "row": row.as_fit(), "file": str(default_fit_file()), "in_use": fit and asdict(fit)}


def _fit_parts() -> list[str | Table]:
    """The numbers that costs are estimated by beside those of the row."""
    if (found := _fit()) is None:
        return []
    row, fit = found
    if fit is None:
        return [f"Costs are estimated by what is known of {row.name}; prefuse doctor --fit measures what this machine does."]
    rows = [
        (name, f"{number:g}", f"{fit.numbers[name]:g}", f"{fit.spread[name]:.1%}" if name in fit.spread else "")
        if name in fit.numbers
        else (name, f"{number:g}", "", "")
        for name, number in row.as_fit().items()
    ]
    refused = [f"{name} is the one that is known: {reason}" for name, reason in fit.refused.items()]
    title = f"Costs are estimated by what was measured on {fit.measured}"
    return [table(title, ("number", f"known of {row.name}", "measured", "spread"), rows), *refused]


def _machine() -> list[Finding]:
    try:
        level = best_cpu_level()
    except OptionError:
        level = ""
    flags = " ".join(flag for flag in _FLAGS if flag in host_cpu_flags())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cache = open_cache(True)
    assert cache is not None
    return [
        Finding("python", platform.python_version()),
        Finding("cpu", cpu_name()),
        Finding("cpu level", level, "prefuse needs an x86-64 CPU with AVX2 and FMA"),
        Finding("cpu features", flags),
        *_tiles(),
        Finding("cores of this process", str(usable_cores())),
        Finding("memory", f"{memory / 2**30:.1f} GiB"),
        Finding("memory of this process", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB at most so far"),
        Finding("cache", f"{cache.folder} ({cache.state()})"),
    ]


def _tiles() -> list[Finding]:
    """Whether the system lets this process use the tile registers of AMX, where the CPU has them."""
    if "amx_tile" not in host_cpu_flags():
        return []
    refusal = tile_state.refusal()
    return [Finding("AMX tiles", f"not granted: {refusal}" if refusal else "granted by the system")]


def cpu_name() -> str:
    """What the maker calls this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[Finding]:
    nvidia = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    amd = _output("rocm-smi", "--showproductname", "--csv")
    return [Finding("NVIDIA", nvidia, "no GPU or no driver"), Finding("AMD", amd, "no GPU or no driver")]


def _tools() -> list[Finding]:
    linker = next(filter(None, map(shutil.which, _LINKERS)), "ziglang" if find_spec("ziglang") else "")
    tools = [Finding(name, shutil.which(name) or "", f"install {what}") for name, what in _TOOLS.items()]
    return [Finding("linker", linker, "install binutils, or pip install ziglang"), *tools]


def _packages() -> list[Finding]:
    findings = []
    for name, advice in _PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        findings.append(Finding(name, found, advice))
    return findings


def _output(*command: str) -> str:
    """What a program prints, its lines joined; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
