"""Files of models in stages that are not what was written: each is one ProgramFileError."""

from __future__ import annotations

import copy
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.program_file import write_program_members
from prefuse.runtime.staged import staged_file
from prefuse.runtime.staged.procedure_data import DataError, ProcedureWriter
from prefuse.runtime.staged.staged import StagedProgram
from prefuse.runtime.staged.staged_model import StagedModel

from .staged_models import floats, is_same, programs_of


def _loop(model: Any) -> Any:
    return model["procedure"]["steps"][0]


def _first_program(data: Any) -> Any:
    """The first step of kind "program" anywhere in the values."""
    if isinstance(data, dict) and data.get("step") == "program":
        return data
    children = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return next((found for child in children if (found := _first_program(child))), None)


def _deep(model: Any) -> None:
    for _ in range(100):
        inner = {**_loop(model), "body": model["procedure"]}
        model["procedure"] = {**model["procedure"], "steps": [inner]}


_HOST = {"step": "host", "source": "s", "reads": [], "writes": ["z"]}


def _host_step(**function: object) -> Callable[[Any], None]:
    step = {**_HOST, "function": {"name": "SequenceEmpty", "attributes": {}, "source": "s", **function}}
    return lambda model: model["procedure"]["steps"].append(step)


_CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.pop("procedure"), "an object with"),
    (lambda m: m.update(name=3), "3 is no text"),
    (lambda m: m["inputs"].pop(), "the model: inputs: 2, not 3"),
    (lambda m: m["inputs"][0].update(name="n"), "two inputs of one name"),
    (lambda m: m["inputs"][0].update(type=[[1 << 62, 1 << 62], "float32"]), "no array has the shape"),
    (lambda m: m["inputs"][0].update(type=[[2], "object"]), "unknown element type"),
    (lambda m: m["procedure"].update(steps=[]), "output 'y' is not there"),
    (lambda m: m["procedure"].update(captured=["y"]), "'y' is captured and not there"),
    (lambda m: m["procedure"]["constants"].update(c=99), "number 99 of"),
    (lambda m: m["procedure"]["constants"].update(c=True), "is no integer"),
    (lambda m: _loop(m).update(step="while"), "a step of kind 'while'"),
    (lambda m: _loop(m).update(step=["loop"]), "a step of kind"),
    (lambda m: _loop(m).update(extra=1), "an object with"),
    (lambda m: _loop(m).update(trips="later"), "reads 'later', which is not there"),
    (lambda m: _loop(m).update(initial=[""]), "a carried value left out"),
    (lambda m: _loop(m).update(initial=["x", "x"]), "inputs of the body: 3, not 4"),
    (lambda m: _loop(m).update(writes=["y", "s", "t"]), "outputs: 2, not 3 or more"),
    (lambda m: _loop(m).update(scan_types=[]), "outputs of the body: 3, not 2"),
    (lambda m: _loop(m).update(scan_types=[[[-1], "float32"]]), "no array has the shape"),
    (lambda m: _loop(m)["body"].update(captured=["nowhere"]), "reads 'nowhere', which is not there"),
    (lambda m: _first_program(m).update(program=-1), "number -1 of"),
    (lambda m: _first_program(m).update(program={}), "an object with"),
    (lambda m: _first_program(m).update(reads=[]), "inputs: "),
    (_host_step(name="system"), "the host has no operator 'system'"),
    (_host_step(attributes={"axis": 1}), "SequenceEmpty has no attribute 'axis'"),
    (_host_step(name="Split", attributes={"axis": 0.5}), "is no integer"),
    (_host_step(name="ConstantOfShape", attributes={"value": {"constant": 1 << 40}}), "number 1099511627776 of"),
    (_host_step(name="SequenceAt"), "s: 0 inputs"),
    (_deep, "more than 64 bodies in one another"),
]


@pytest.mark.parametrize(("change", "fault"), _CHANGES)
def test_a_procedure_that_makes_no_sense(
    change: Callable[[Any], object], fault: str, nested: StagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ProcedureWriter.model

    def changed(writer: ProcedureWriter, model: StagedProgram) -> dict[str, object]:
        data: dict[str, object] = json.loads(json.dumps(write(writer, model)))
        change(data)
        return data

    monkeypatch.setattr(ProcedureWriter, "model", changed)
    nested.save(tmp_path / "x.prefuse")
    with pytest.raises(ProgramFileError) as raised:
        prefuse.load(tmp_path / "x.prefuse")
    assert f"{tmp_path / 'x.prefuse'}: stages.json" in str(raised.value)
    assert fault in str(raised.value)


_HOSTILE: list[object] = [None, True, -1, 1 << 70, 0.5, "", "x", [], {}, [[]], [1], ["x"], {"x": 1}, float("nan")]


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in JSON values, as a container and a key."""
    for key, child in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(child, (dict, list)):
            yield from _places(child)


def test_any_value_in_any_place_is_a_model_or_one_error(nested: StagedModel, nested_file: Path) -> None:
    with zipfile.ZipFile(nested_file) as archive:
        sound = json.loads(archive.read("stages.json"))
    programs = list(programs_of(nested))
    picks, refused = random.Random(0), 0
    for number in range(sum(1 for _ in _places(sound))):
        for hostile in picks.sample(_HOSTILE, 4):
            data = copy.deepcopy(sound)
            container, key = list(_places(data))[number]
            container[key] = copy.deepcopy(hostile)
            try:
                assert isinstance(staged_file._model(data, programs, np.zeros(512, np.uint8)), StagedProgram)
            except ProgramFileError:
                refused += 1
    assert refused > 100


def test_constants_lie_inside_their_member() -> None:
    mapped = np.zeros(128, np.uint8)
    for entry, fault in (
        ({"type": [[4], "float32"], "offset": 128}, "not in 128 bytes"),
        ({"type": [[33], "float32"], "offset": 0}, "not in 128 bytes"),
        ({"type": [[4], "float32"], "offset": 4}, "not in 128 bytes"),
        ({"type": [[4], "float32"], "offset": -64}, "not in 128 bytes"),
        ({"type": [[4], "object"], "offset": 0}, "unknown element type"),
        ({"shape": [2], "strings": ["a"]}, "do not fill their shape"),
        ({"shape": [1], "strings": [1]}, "do not fill their shape"),
    ):
        with pytest.raises(DataError, match=fault):
            staged_file._constant(entry, mapped)


def test_truncation_anywhere(nested_file: Path, tmp_path: Path) -> None:
    content, path = nested_file.read_bytes(), tmp_path / "x.prefuse"
    for length in range(0, len(content), len(content) // 50):
        path.write_bytes(content[:length])
        with pytest.raises(ProgramFileError):
            prefuse.load(path)


def test_a_file_cut_behind_a_stage_is_not_taken_for_that_stage(nested_file: Path, tmp_path: Path) -> None:
    """What is left ends as the file of a program does."""
    with zipfile.ZipFile(nested_file) as archive:
        end = archive.getinfo("manifest.json").header_offset
    (tmp_path / "x.prefuse").write_bytes(nested_file.read_bytes()[:end])
    with pytest.raises(ProgramFileError, match="does not begin with its first member"):
        prefuse.load(tmp_path / "x.prefuse")


def test_bit_flips_anywhere(nested: StagedModel, nested_file: Path, tmp_path: Path) -> None:
    """A flipped bit is found, or changes nothing that a call could notice."""
    content, path, picks = nested_file.read_bytes(), tmp_path / "x.prefuse", random.Random(0)
    call = (floats(6), np.array(4), np.array(True))
    wanted, found = nested(*call), 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[picks.randrange(len(content))] ^= 1 << picks.randrange(8)
        path.write_bytes(damaged)
        try:
            again = prefuse.load(path)
        except ProgramFileError:
            found += 1
            continue
        assert is_same(again(*call), wanted)
    assert found > 20


def _members(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Change the members of a file and write them as any zip program would."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda members: members.pop("stage-1.prefuse"), "does not hold the members of a model in stages"),
        (lambda members: members.update({"plan.txt": b""}), "does not hold the members of a model in stages"),
        (lambda members: members.update({"stages.json": b"{}"}), "stages.json: its hash is not the one in the manifest"),
        (lambda members: members.update({"manifest.json": b"[]"}), "not the manifest of a model in stages"),
        (lambda members: members.update({"manifest.json": b"[" * 100_000}), "not a sound program file"),
        (lambda members: members.update({"manifest.json": b'{"format": 9, "sha256": {}}'}), "this prefuse reads format 3"),
    ],
)
def test_wrong_members(change: Callable[[dict[str, bytes]], object], fault: str, nested_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.prefuse"
    path.write_bytes(nested_file.read_bytes())
    _members(path, change)
    with pytest.raises(ProgramFileError, match=fault):
        prefuse.load(path)


def test_a_stage_of_another_model_is_found(nested: StagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are sound files of their own: their manifests' hashes say that they belong here."""
    monkeypatch.setattr(staged_file, "write_program_members", _with_another_manifest)
    nested.save(tmp_path / "x.prefuse")
    with pytest.raises(ProgramFileError, match=r"stage-1\.prefuse: manifest\.json: its hash"):
        prefuse.load(tmp_path / "x.prefuse")


def _with_another_manifest(archive: zipfile.ZipFile, program: Any, *, has_shared: bool) -> str:
    write_program_members(archive, program, has_shared=has_shared)
    return "of another program"
