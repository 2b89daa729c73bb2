"""What the command line writes: whole or not at all, never in the place of a device, and with all that it refers to."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from stat import S_ISCHR, S_ISFIFO
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from prefuse.compiler.bits.mixed.plan import BitsPlan
from prefuse.compiler.cli import output
from prefuse.compiler.cli.common import CompileArguments, show, table, warn_of_ignored
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.served import Served
from prefuse.compiler.programs.symbolic import SymbolicSource

from .terminal import Terminal, cli_cache, model, prefuse_cli

__all__ = ["cli_cache", "model", "prefuse_cli"]


def test_links_stay_and_devices_are_written_to(prefuse_cli: Terminal, model: Path, tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    for verb, suffix, status in (("run", "npz", 1), ("opt", "onnx", 0), ("compile", "prefuse", 1)):
        path = tmp_path / f"null.{suffix}"
        path.symlink_to("/dev/null")
        prefuse_cli(verb, model, "-o", path, status=status)
        assert path.is_symlink()
    assert S_ISCHR(Path("/dev/null").stat().st_mode)
    for verb, suffix in (("run", ".npz"), ("opt", ".onnx"), ("compile", ".prefuse")):
        link.with_suffix(suffix).symlink_to(real.with_suffix(suffix))
        prefuse_cli(verb, model, "-o", link.with_suffix(suffix))
        assert link.with_suffix(suffix).is_symlink()
        assert real.with_suffix(suffix).stat().st_size > 0


def test_a_program_is_not_written_to_a_pipe(prefuse_cli: Terminal, model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.prefuse")
    assert "is a device or a pipe" in prefuse_cli("compile", model, "-o", tmp_path / "pipe.prefuse", status=1)
    assert S_ISFIFO((tmp_path / "pipe.prefuse").stat().st_mode)


def test_packing_in_place_keeps_what_was_there(prefuse_cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "b.csv", "id,lower,upper,size\n1,0,2,8\n2,1,3,8\n"
    path.write_text(text)

    def full(self: object, rows: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", full)
        assert "cannot be written" in prefuse_cli("pack", path, "-o", path, status=1)
    assert path.read_text() == text
    prefuse_cli("pack", path, "--alignment", 1 << 30)
    prefuse_cli("pack", path, "-o", path)
    assert "offset" in path.read_text()
    assert "Invalid value for '--alignment'" in prefuse_cli("pack", path, "--alignment", 10**19, status=2)


def test_plans_of_two_processes_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / ".plan.json.tmp").mkdir()  # what another one is writing
    BitsPlan({"a": "int8"}).save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["units"] == {"a": "int8"}


def large(folder: Path) -> Path:
    """A model whose weights are in m.onnx.data."""
    found = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> main (float[2,64] x) => (float[2,64] y) { h = MatMul(x, w) y = Relu(h) }"""
    )
    found.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    onnx.save(found, folder / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    return folder / "m.onnx"


def test_large_models_in_place(prefuse_cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file and its weights are whole until the new one is, and so are the new ones after it."""
    path = large(tmp_path)
    before = (tmp_path / "m.onnx.data").read_bytes()
    monkeypatch.setattr(output, "_MOST_MESSAGE_BYTES", 0)
    text = prefuse_cli.json("opt", path, "--pipeline", "canonicalize", "-o", path)["graph"]
    assert "MatMul" in text
    assert (tmp_path / "m.onnx.data").read_bytes() == before
    written = onnx.load(path, load_external_data=False)
    assert written.graph.initializer[0].external_data[0].value == "m.onnx.2.data"
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(path).graph.initializer[0]), np.ones((64, 64)))

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx, "save", full)
    content, names = path.read_bytes(), sorted(one.name for one in tmp_path.iterdir())
    assert "cannot be written" in prefuse_cli("opt", path, "--pipeline", "canonicalize", "-o", path, status=1)
    assert path.read_bytes() == content
    assert sorted(one.name for one in tmp_path.iterdir()) == names


def test_tensors_of_attributes_are_written_too(tmp_path: Path) -> None:
    found = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> main (float[4] x) => (float[4] y) {
          b = Constant<value: tensor = float[4] {1, 2, 3, 4}>()
          y = Add(x, b)
        }"""
    )
    found.graph.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(np.arange(1, 5, dtype=np.float32)))  # raw bytes
    onnx.save(found, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0, convert_attribute=True)
    (tmp_path / "other").mkdir()
    output.write_model(import_model(tmp_path / "m.onnx"), tmp_path / "other" / "m.onnx")
    (tmp_path / "w.bin").unlink()
    onnx.checker.check_model(tmp_path / "other" / "m.onnx")
    written = onnx.load(tmp_path / "other" / "m.onnx")
    tensors = [*written.graph.initializer, *(node.attribute[0].t for node in written.graph.node if node.op_type == "Constant")]
    np.testing.assert_array_equal(numpy_helper.to_array(tensors[0]), [1, 2, 3, 4])


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    show(True, {"a": float("inf"), "b": [float("nan"), 1.5, True, None], "c": {"d": -float("inf")}, "e": "NaN"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": None, "b": [None, 1.5, True, None], "c": {"d": None}, "e": "NaN"}


def test_lines_of_files_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    show(False, {}, "model.py:100: x", table(":100:", ("at", "n"), [("a:100:", 1)]))
    assert capsys.readouterr().out.count(":100:") == 3


def test_options_that_a_program_ignores_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_ignored(Path("x.prefuse"), CompileArguments(), {})
    assert capsys.readouterr().err == ""
    warn_of_ignored(Path("x.prefuse"), CompileArguments(threads=4, no_cache=True), {"x": (1,)})
    assert "--threads, --no-cache, --shape changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "bisect"])
@pytest.mark.parametrize("kind", ["seq(float[2])", "optional(float[2])", "string[2]"])
def test_inputs_that_cannot_be_made_up(prefuse_cli: Terminal, tmp_path: Path, verb: str, kind: str) -> None:
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({kind} s, float[2] x) => ({kind} t, float[2] y)'
    onnx.save(parser.parse_model(text + " { t = Identity(s) y = Relu(x) }"), tmp_path / "m.onnx")
    said = prefuse_cli(verb, tmp_path / "m.onnx", status=1)
    assert f"a {kind.partition('(')[0].partition('[')[0].replace('seq', 'sequence')}" in said
    assert "cannot be made up" in said


def test_strings_are_compared(prefuse_cli: Terminal, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (string[2] t, seq(float[2]) q) {
        t = Cast<to = 8>(x)
        q = SequenceConstruct(x, x)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    found = prefuse_cli.json("run", tmp_path / "m.onnx", "--compare", "onnxruntime", "--repeat", 1)
    assert {name: one["relative_error"] for name, one in found["outputs"].items()} == {"t": 0.0, "q[0]": 0.0, "q[1]": 0.0}
    text = text.replace("string[2] t, ", "").replace("t = Cast<to = 8>(x)", "")
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    prefuse_cli("bisect", tmp_path / "m.onnx")


def test_ranges_without_programs(prefuse_cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> main (float[N,64] x) => (float[N,64] y) { y = Relu(x) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    made, path = SymbolicSource._made, tmp_path / "m.prefuse"

    def none(self: SymbolicSource, sizes: Any) -> Served:
        return Served(self._around(sizes), None, "it is odd") if sizes["N"] > 32 else made(self, sizes)

    monkeypatch.setattr(SymbolicSource, "_made", none)
    compile_to = ("compile", tmp_path / "m.onnx", "-o", path, "--dims")
    said = prefuse_cli(*compile_to, "N=40:64", status=1)
    assert "no range of sizes has a program" in said
    assert "it is odd" in said
    prefuse_cli(*compile_to, "N=1:32")
    path.unlink()
    prefuse_cli(*compile_to, "N=1:64")
    assert path.exists()


def test_other_faults_of_files_are_one_line(prefuse_cli: Terminal, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", "/root/x")

    monkeypatch.setattr("prefuse.compiler.cli.cli", denied)
    assert prefuse_cli("inspect", model, status=1).startswith("error: /root/x: Permission denied")
