"""Code of kernels is compiled once, and found by what it computes: in memory, in a folder, and never what was damaged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.compiler.lowering import kernel_objects, native
from prefuse.runtime.executor import CompiledModel

ROWS = 23
FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "Abs": np.abs,
    "Neg": np.negative,
}


def model(operators: str, seed: int = 0) -> onnx.ModelProto:
    """Products by weights of 8 columns, each followed by an operator."""
    names = operators.split()
    nodes = "".join(f"m{place} = MatMul(a{place}, w{place}) a{place + 1} = {name}(m{place}) " for place, name in enumerate(names))
    found = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[{ROWS},8] a0) => (float[{ROWS},8] a{len(names)}) {{ {nodes} }}"""
    )
    random = np.random.default_rng(seed)
    for place in range(len(names)):
        weight = random.standard_normal((8, 8)).astype(np.float32)
        found.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{place}"))
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels each object was compiled of; nothing is in memory at first."""
    found: list[int] = []
    compile_functions = native.compile_functions

    def counted(functions: Mapping[str, Any], target: Any) -> bytes:
        found.append(len(functions))
        return compile_functions(functions, target)

    monkeypatch.setattr(kernel_objects, "compile_functions", counted)
    monkeypatch.setattr(kernel_objects, "_kept", {})
    return found


def build(operators: str, seed: int = 0, cache: Path | bool = False, **options: Any) -> CompiledModel:
    """A program, checked against NumPy in float64."""
    source = model(operators, seed)
    net = prefuse.compile(source, cache=cache, target="cpu:avx2", **options)
    assert isinstance(net, CompiledModel)
    x = np.random.default_rng(5).standard_normal((ROWS, 8)).astype(np.float32)
    wanted = x.astype(np.float64)
    for name, weight in zip(operators.split(), source.graph.initializer, strict=True):
        wanted = FUNCTIONS[name](wanted @ onnx.numpy_helper.to_array(weight))
    np.testing.assert_allclose(np.asarray(net(x)), wanted, rtol=1e-4, atol=1e-4)
    return net


def test_equal_kernels_are_compiled_once(compiled: list[int]) -> None:
    build("Tanh Relu Abs")
    build("Tanh Relu Abs", seed=1)  # of other weights
    assert compiled == [3]
    build("Tanh Relu")  # most of what is there
    assert compiled == [3]
    build("Neg Tanh")  # a third of it: compiled with what is new
    assert compiled == [3, 2]
    build("Relu Abs Neg Tanh")  # two objects have a Tanh each
    assert compiled == [3, 2]


def test_targets_and_threads_count(compiled: list[int]) -> None:
    build("Tanh Relu", threads=1)
    build("Tanh Relu", threads=2)
    assert compiled == [2, 2]


def test_a_program_with_counters_has_the_same_kernels(compiled: list[int]) -> None:
    build("Tanh Relu")
    net = build("Tanh Relu", profile=True)
    assert compiled == [2]
    assert len(net.profile(np.ones((ROWS, 8), np.float32), runs=2).steps) == len(net.plan.steps)


@pytest.mark.parametrize("damage", [None, "flipped", "empty", "cut"])
def test_objects_in_a_folder(compiled: list[int], tmp_path: Path, damage: str | None) -> None:
    build("Tanh Relu", cache=tmp_path)
    (path,) = tmp_path.glob(f"*{kernel_objects.SUFFIX}")
    content = bytearray(path.read_bytes())
    flipped = content.copy()
    flipped[len(flipped) // 2] ^= 1
    if damage is not None:
        path.write_bytes({"flipped": flipped, "empty": bytearray(), "cut": content[:-1]}[damage])
    kernel_objects._kept.clear()
    build("Tanh Relu", seed=1, cache=tmp_path)
    assert compiled == ([2] if damage is None else [2, 2])
    assert path.read_bytes() == content


def test_no_folder_is_done_without(compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_objects.KernelObjects, "_path", lambda self, keys: tmp_path / "none" / "x")
    build("Tanh Relu", cache=tmp_path)
    build("Tanh Relu", seed=1, cache=tmp_path)
    assert compiled == [2]


def test_memory_is_bounded(compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_objects, "_KEPT_BYTES", 1)
    for operators in ("Tanh", "Neg", "Neg", "Tanh"):
        build(operators)
    assert compiled == [1, 1, 1]
    assert len(kernel_objects._kept) == 1


def test_what_may_be_written_in_place_is_said_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kernels in a module LLVM is told the same: an update in place then always copied what it updates, if it came before
    a kernel that has nothing in place, by the order of their names."""
    texts: list[str] = []
    compile_module = native.compile_module

    def seen(module: Any, target: Any, imported: str = "") -> Any:
        result = compile_module(module, target, imported)
        texts.append(str(result.inspect_source("ll")))
        return result

    monkeypatch.setattr(native, "compile_module", seen)
    monkeypatch.setattr(kernel_objects, "_kept", {})
    body = "m = MatMul(x, w) one = ScatterND(m, places, rows) y = MatMul(one, w) s = Softmax(y)"
    text = f"main (float[40,64] x, int64[2,1] places, float[2,64] rows) => (float[40,64] s) {{ {body} }}"
    source = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    source.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    net = prefuse.compile(source, cache=False, target="cpu:avx2", threads=2)
    assert isinstance(net, CompiledModel)
    heads = [re.findall(r"^define dllexport .*@prefuse_\w{32}_\w{32}\(.*$", text, re.MULTILINE) for text in texts]
    heads = [some for some in heads if some]
    assert sorted(len(some) for some in heads) == [1, 2]  # the update; the product and the Softmax
    for some in heads:
        assert {"noalias" in head for head in some} == {len(some) == 2}
    kept = sum(len(one.keys) for one in kernel_objects._kept.values())
    prefuse.compile(source, cache=False, target="cpu:avx2", threads=2)
    assert kept == sum(len(one.keys) for one in kernel_objects._kept.values()) == 3
