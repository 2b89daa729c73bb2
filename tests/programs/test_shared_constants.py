"""Specialisations of one model have its weights once: in memory, in the cache, and in the file of a model in stages."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.constants import shared
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import SHARED
from prefuse.runtime.program_file import save_program

WIDTH = 256
WEIGHT_BYTES = 4 * WIDTH * WIDTH
TARGET = "cpu:avx2"  # whose products pack weights in one way for all these lengths


def dynamic_model(seed: int = 0) -> onnx.ModelProto:
    """y = Tanh(x W1) W2 + b for rows that are not known."""
    random = np.random.default_rng(seed)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[T,{WIDTH}] x) => (float[T,{WIDTH}] y) {{ h = MatMul(x, w1) a = Tanh(h) m = MatMul(a, w2) y = Add(m, b) }}"""
    )
    for name, shape in (("w1", (WIDTH, WIDTH)), ("w2", (WIDTH, WIDTH)), ("b", (WIDTH,))):
        array = random.standard_normal(shape).astype(np.float32) / 16
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def expected(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w1, w2, b = (onnx.numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer)
    found: np.ndarray = np.tanh(x @ w1) @ w2 + b
    return found


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, WIDTH)).astype(np.float32)


def constants_of(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{shared.SUFFIX}"))


@pytest.mark.parametrize("is_cached", [False, True])
def test_weights_of_all_lengths_are_in_memory_once(tmp_path: Path, is_cached: bool) -> None:
    model = dynamic_model()
    net = prefuse.compile(model, target=TARGET, cache=tmp_path if is_cached else False)
    assert isinstance(net, SpecializedModel)
    for count in (64, 96, 100, 129):
        x = rows(count)
        np.testing.assert_allclose(np.asarray(net(x)), expected(model, x), atol=1e-4)
    held = [one for program in net.programs for one in program.program.shared.values()]  # type: ignore[union-attr]
    assert len(held) == 8
    assert len({one.data.ctypes.data for one in held}) == 2
    sizes = [path.stat().st_size for path in constants_of(tmp_path)]
    assert len(sizes) == (2 if is_cached else 0)
    assert all(WEIGHT_BYTES <= size - 64 < WEIGHT_BYTES + 4096 for size in sizes), "what comes before and a checksum"
    places = {one.data.ctypes.data % 4096 for one in held}
    assert all(place % 64 == 0 for place in places)
    assert len(places) == 2, "constants at equal places of their pages compete for the same sets of L1"
    assert all(path.stat().st_size < WEIGHT_BYTES for path in tmp_path.glob("*.prefuse"))


def test_weights_of_programs_with_states_are_copies_of_mapped_ones(tmp_path: Path) -> None:
    """Those of a temporary program have no file of their own where this process has them already."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> main (float[64,{WIDTH}] x, float[64,{WIDTH}] s) =>
        (float[64,{WIDTH}] y, float[64,{WIDTH}] n) {{ y = MatMul(x, w1) n = Add(s, y) }}"""
    )
    model.graph.initializer.append(dynamic_model().graph.initializer[0])
    x = rows(64)
    for cache in (False, tmp_path):
        plain = prefuse.compile(model, target=TARGET, cache=cache)
        kept = prefuse.compile(model, target=TARGET, cache=cache, states={"n": "s"})
        for _ in range(2):
            np.testing.assert_array_equal(kept(x), plain(x, np.zeros_like(x))[0])  # type: ignore[index]


def test_equal_weights_of_two_models_are_one(tmp_path: Path) -> None:
    first, second = (prefuse.compile(dynamic_model(), target=TARGET, cache=tmp_path) for _ in range(2))
    other = prefuse.compile(dynamic_model(1), target=TARGET, cache=tmp_path)
    found = [set(net.specialize(rows(64)).program.shared.values()) for net in (first, second, other)]  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert not found[0] & found[2]


def test_another_process_finds_them(tmp_path: Path) -> None:
    code = "import sys, numpy, prefuse; m, t, c, x = sys.argv[1:]; prefuse.compile(m, target=t, cache=c)(numpy.load(x))"
    model = tmp_path / "m.onnx"
    onnx.save(dynamic_model(), model)
    np.save(tmp_path / "x.npy", rows(64))
    subprocess.run([sys.executable, "-c", code, model, TARGET, tmp_path / "cache", tmp_path / "x.npy"], check=True)
    before = {path: path.stat().st_ino for path in constants_of(tmp_path / "cache")}
    assert len(before) == 2
    net = prefuse.compile(model, target=TARGET, cache=tmp_path / "cache")
    x = rows(80)
    np.testing.assert_allclose(np.asarray(net(x)), expected(dynamic_model(), x), atol=1e-4)
    assert {path: path.stat().st_ino for path in constants_of(tmp_path / "cache")} == before


def test_damaged_or_missing_constants_are_made_again(tmp_path: Path) -> None:
    model, x = dynamic_model(), rows(64)
    wanted = prefuse.compile(model, target=TARGET, cache=tmp_path)(x)
    first, second = constants_of(tmp_path)
    content = bytearray(first.read_bytes())
    content[1000] ^= 1
    first.write_bytes(content)
    gc.collect()  # what is in memory needs no file
    np.testing.assert_array_equal(prefuse.compile(model, target=TARGET, cache=tmp_path)(x), wanted)
    second.unlink()
    gc.collect()
    np.testing.assert_array_equal(prefuse.compile(model, target=TARGET, cache=tmp_path)(x), wanted)
    assert constants_of(tmp_path) == [first, second]


def test_a_saved_program_is_whole(tmp_path: Path) -> None:
    x = rows(64)
    net = prefuse.compile(dynamic_model(), target=TARGET, cache=tmp_path / "cache")
    wanted = net(x)
    net.save(tmp_path / "net.prefuse")
    del net
    gc.collect()
    shutil.rmtree(tmp_path / "cache")
    loaded = prefuse.load(tmp_path / "net.prefuse")
    assert isinstance(loaded, CompiledModel)
    np.testing.assert_array_equal(loaded(x), wanted)
    assert {buffer.offset for buffer in loaded.plan.buffers if buffer.space == SHARED} == {None}
    assert "memory shared: " in loaded.report()  # which have no offsets, but take memory
    loaded.save(tmp_path / "copy.prefuse")
    assert (tmp_path / "copy.prefuse").read_bytes() == (tmp_path / "net.prefuse").read_bytes()
    again = prefuse.load(tmp_path / "copy.prefuse")
    assert isinstance(again, CompiledModel)
    assert set(again.program.shared.values()) == set(loaded.program.shared.values())


def test_a_program_of_a_cache_is_not_whole(tmp_path: Path) -> None:
    prefuse.compile(dynamic_model(), target=TARGET, cache=tmp_path)(rows(64))
    (path,) = tmp_path.glob("*.prefuse")
    shutil.copy(path, tmp_path / "mine")
    assert isinstance(prefuse.load(tmp_path / "mine"), CompiledModel)  # its constants are beside it
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(path, tmp_path / "elsewhere")
    gc.collect()
    with pytest.raises(ProgramFileError, match="a constant of the program cannot be read: No such file"):
        prefuse.load(tmp_path / "elsewhere" / path.name)


@pytest.mark.parametrize("contents", [{}, {"w1": "0" * 64}, {"w1": "../../secret"}, []])
def test_contents_that_are_not_the_plans(tmp_path: Path, contents: object) -> None:
    net = prefuse.compile(dynamic_model(), target=TARGET, cache=False).specialize(rows(64))  # type: ignore[union-attr]
    assert isinstance(net, CompiledModel)
    save_program(tmp_path / "x", replace(net.program, manifest={**net.program.manifest, "contents": contents}))
    with pytest.raises(ProgramFileError, match="its shared weights are not those of the plan"):
        prefuse.load(tmp_path / "x")


class Changing(torch.nn.Module):
    """A layer whose weights its user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x).tanh()
        return found


def test_changed_parameters_are_not_taken_for_the_old_ones() -> None:
    module = Changing()
    net = prefuse.compile(module, target=TARGET, cache=False)
    for count in (64, 80):
        x = torch.from_numpy(rows(count))
        torch.testing.assert_close(net(x), module(x).detach(), atol=1e-4, rtol=1e-4)
        module.linear.weight.data.mul_(-0.5)  # which changes no version that autograd counts


def test_stages_of_a_file_share_their_weights(tmp_path: Path) -> None:
    """Two branches of an If multiply by the same weights."""
    model = dynamic_model()
    both = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[64,{WIDTH}] x) => (float[64,{WIDTH}] y) {{
          s = ReduceSum<keepdims = 0>(x) z = CastLike(zero, s) c = Greater(s, z)
          y = If (c) <then_branch = t () => (float[64,{WIDTH}] a) {{ p = MatMul(x, w1) a = Tanh(p) }},
                      else_branch = e () => (float[64,{WIDTH}] b) {{ q = MatMul(x, w1) b = Relu(q) }}> }}"""
    )
    both.graph.initializer.append(model.graph.initializer[0])
    both.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    net = prefuse.compile(both, target=TARGET, cache=False)
    net.save(tmp_path / "net")
    with zipfile.ZipFile(tmp_path / "net") as archive:
        assert WEIGHT_BYTES < archive.getinfo("shared.safetensors").file_size < WEIGHT_BYTES + 4096
    loaded, x = prefuse.load(tmp_path / "net"), rows(64)
    for choice in (x, -x):
        np.testing.assert_array_equal(loaded(choice), net(choice))
