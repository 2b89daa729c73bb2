"""Files of models in stages: what is written is read back and runs without a compiler; all else is one ProgramFileError."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.runtime import staged_file
from prefuse.runtime.errors import OptionError, ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.procedure import ProgramStep
from prefuse.runtime.procedure_data import DataError, ProcedureWriter
from prefuse.runtime.program_file import read_program, write_program_members
from prefuse.runtime.staged import StagedModel

_HEADER = '<ir_version: 10, opset_import: ["": 21]>\n'
_WEIGHTS = ", ".join(f"{0.25 * number}" for number in range(1, 7))

# A loop whose body decides between two programs with weights of their own, captures, and stops by the data.
_NESTED = f"""main (float[6] x, int64 n, bool go) => (float[6] y, float[K,6] s)
    <float[6] w = {{{_WEIGHTS}}}> {{
    y, s = Loop(n, go, x) <body = body (int64 i, bool c, float[6] a) => (bool again, float[6] b, float[6] o) {{
        two = Constant<value_int=2>()
        rest = Mod(i, two)
        odd = Cast<to=9>(rest)
        b = If(odd) <then_branch = then () => (float[6] t) {{ p = Mul(a, w) t = Add(p, x) }},
                     else_branch = otherwise () => (float[6] e) {{ q = Add(a, w) e = Sin(q) }}>
        o = Neg(b)
        largest = ReduceMax<keepdims=0>(b)
        limit = Constant<value_float=50.0>()
        again = Less(largest, limit)
    }}>
}}"""

_SCAN = """main (float[3] start, float[3,4] xs, float[4,3] zs, float[2000] g) => (float[3] final, float[3,4] ys, float[4,3] ws) {
    most = ReduceMax<keepdims=0>(g)
    go = Cast<to=9>(most)
    final, ys, ws = If(go) <then_branch = then () => (float[3] f1, float[3,4] y1, float[4,3] w1) {
        f1, y1, w1 = Scan<num_scan_inputs=2, scan_input_axes=[1,0], scan_input_directions=[0,1],
                          scan_output_axes=[1,0], scan_output_directions=[1,0],
            body = body (float[3] a, float[3] x, float[3] z) => (float[3] b, float[3] y, float[3] w) {
                b = Add(a, x)
                y = Mul(b, z)
                w = Sub(b, x)
            }>(start, xs, zs)
    }, else_branch = otherwise () => (float[3] f2, float[3,4] y2, float[4,3] w2) {
        f2 = Neg(start)
        y2 = Neg(xs)
        w2 = Neg(zs)
    }>
}"""

_MAP = """main (seq(float[2]) s, float[2] k) => (seq(float[2]) y, int64 n, float[2] last) {
    y = SequenceMap(s, k) <body = body (float[2] a, float[2] c) => (float[2] o) { d = Mul(a, a) o = Add(d, c) }>
    n = SequenceLength(y)
    at = Constant<value_int=-1>()
    last = SequenceAt(y, at)
}"""

_SEQUENCES = """main (seq(float[N]) s, float[3] x) => (float[M] y, seq(float[N]) t, seq(float[N]) u) {
    front = Constant<value_int=0>()
    t = SequenceInsert(s, x, front)
    u = SequenceErase(t, front)
    y = ConcatFromSequence<axis=0>(t)
}"""

_OPTIONAL = """main (optional(float[2]) o) => (float[2] y) {
    has = OptionalHasElement(o)
    y = If(has) <then_branch = then () => (float[2] t) { v = OptionalGetElement(o) t = Neg(v) },
                 else_branch = otherwise () => (float[2] e) { e = Constant<value_floats=[1.0, 2.0]>() }>
}"""

_STRINGS = """main (float[2000] g) => (string[2] y) {
    most = ReduceMax<keepdims=0>(g)
    c = Cast<to=9>(most)
    y = If(c) <then_branch = then () => (string[2] t) { t = Constant<value_strings=["a", "é"]>() },
               else_branch = otherwise () => (string[2] e) { e = Constant<value_strings=["", "b"]>() }>
}"""

_FILL = """main (float[3000] x) => (int32[N,2] y) {
    most = ReduceMax<keepdims=0>(x)
    count = Cast<to=7>(most)
    axis = Constant<value_ints=[0]>()
    rows = Unsqueeze(count, axis)
    two = Constant<value_ints=[2]>()
    shape = Concat<axis=0>(rows, two)
    y = ConstantOfShape<value = int32[1] {7}>(shape)
}"""


def _floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _compiled(text: str) -> StagedModel:
    net = prefuse.compile(onnx.parser.parse_model(_HEADER + text), cache=False)
    program = net.programs[0] if hasattr(net, "programs") else net
    assert isinstance(program, StagedModel)
    return program


def _same(found: Any, wanted: Any) -> bool:
    """Whether results are equal to the bit."""
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(_same, found, wanted))
    if wanted is None:
        return found is None
    if wanted.dtype == object:
        return bool(found.tolist() == wanted.tolist())
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@pytest.fixture(scope="module")
def nested() -> StagedModel:
    return _compiled(_NESTED)


@pytest.fixture(scope="module")
def nested_file(nested: StagedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nested") / "nested.prefuse"
    nested.save(path)
    return path


def _programs(model: StagedModel) -> Iterator[CompiledModel]:
    for step in model.procedure.walk():
        if isinstance(step, ProgramStep):
            assert isinstance(step.program, CompiledModel)
            yield step.program


_DECISIONS = [np.full(2000, value, np.float32) for value in (0, 1)]  # too large to compile for their values
_SEQUENCE = [_floats(2), _floats(2, seed=1)]
_CASES: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "scan": (_SCAN, [(_floats(3), _floats(3, 4), _floats(4, 3), go) for go in _DECISIONS]),
    "map": (_MAP, [(_SEQUENCE, _floats(2)), (_SEQUENCE[:1], _floats(2))]),
    "sequences": (_SEQUENCES, [([], _floats(3)), ([_floats(4)], _floats(3))]),
    "optional": (_OPTIONAL, [(None,), (_floats(2),)]),
    "strings": (_STRINGS, [(go,) for go in _DECISIONS]),
    "fill": (_FILL, [(np.full(3000, rows, np.float32),) for rows in (0, 3)]),
}


@pytest.mark.parametrize("case", _CASES)
def test_round_trip(case: str, tmp_path: Path) -> None:
    text, calls = _CASES[case]
    net = _compiled(text)
    net.save(tmp_path / "a.prefuse")
    again = prefuse.load(tmp_path / "a.prefuse", verify=True)
    assert isinstance(again, StagedModel)
    assert (again.inputs, again.outputs, again.report()) == (net.inputs, net.outputs, net.report())
    for call in calls:
        assert _same(again(*call), net(*call))
    again.save(tmp_path / "b.prefuse")
    assert (tmp_path / "a.prefuse").read_bytes() == (tmp_path / "b.prefuse").read_bytes()


def test_nested_control_flow_round_trip(nested: StagedModel, nested_file: Path) -> None:
    again = prefuse.load(nested_file, verify=True)
    for trips, goes_on in ((0, True), (4, True), (5, False), (100, True)):
        call = (_floats(6), np.array(trips), np.array(goes_on))
        assert _same(again(*call), nested(*call))


def test_a_model_is_saved_over_the_file_that_it_is_mapped_from(nested_file: Path, tmp_path: Path) -> None:
    content, path = nested_file.read_bytes(), tmp_path / "x.prefuse"
    path.write_bytes(content)
    prefuse.load(path).save(path)
    assert path.read_bytes() == content


def test_weights_of_stages_are_mapped_and_aligned(nested_file: Path) -> None:
    model = prefuse.load(nested_file)
    assert isinstance(model, StagedModel)
    weights = [program.program.constants for program in _programs(model) if program.program.constants.size]
    assert weights
    assert all(array.ctypes.data % 64 == 0 and not array.flags.writeable for array in weights)


def test_a_stage_is_a_program_file(nested_file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(nested_file) as archive:
        assert archive.testzip() is None
        path = Path(archive.extract("stage-1.prefuse", tmp_path))
    assert read_program(path, verify=True).plan.inputs


def test_it_runs_where_no_compiler_is(nested: StagedModel, nested_file: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('onnx', 'onnx_ir', 'torch', 'onnxscript'): sys.modules[name] = None\n"
        "import numpy, prefuse\n"
        f"net = prefuse.load({str(nested_file)!r}, verify=True)\n"
        "y, s = net(x=numpy.ones(6, 'float32'), n=numpy.array(3), go=numpy.array(True))\n"
        "print(y.tolist(), s.shape, 'tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    results = nested(np.ones(6, np.float32), np.array(3), np.array(True))
    assert isinstance(results, tuple)
    y = results[0]
    assert done.stdout.strip() == f"{y.tolist()} (3, 6) False"


# ------------------------------------------------------------------------------------------------- what cannot be saved


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            """main (float[4,6] x) => (float[N] y) {
                z = Constant<value_int=0>()
                p = NonZero(x)
                r = Transpose<perm=[1,0]>(p)
                c = GatherND(x, r)
                y = CumSum(c, z)
            }""",
            "stage 2 is compiled for the shapes of each run",
        ),
        (
            "main (string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }",
            "StringConcat at y is computed",
        ),
    ],
)
def test_what_no_file_can_hold_is_named(text: str, fault: str, tmp_path: Path) -> None:
    net = prefuse.compile(onnx.parser.parse_model(_HEADER + text), cache=False)
    if hasattr(net, "programs"):
        net(*[np.array(["a"], object)] * 2)
    with pytest.raises(OptionError, match=fault):
        net.save(tmp_path / "x.prefuse")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------- corrupt files


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

    def changed(writer: ProcedureWriter, model: StagedModel) -> dict[str, object]:
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
    programs = list(_programs(nested))
    picks, refused = random.Random(0), 0
    for number in range(sum(1 for _ in _places(sound))):
        for hostile in picks.sample(_HOSTILE, 4):
            data = copy.deepcopy(sound)
            container, key = list(_places(data))[number]
            container[key] = copy.deepcopy(hostile)
            try:
                assert isinstance(staged_file._model(data, programs, np.zeros(512, np.uint8)), StagedModel)
            except ProgramFileError:
                refused += 1
    assert refused > 100


def test_constants_lie_inside_their_member() -> None:
    mapped = np.zeros(128, np.uint8)
    for entry in (
        {"type": [[4], "float32"], "offset": 128},
        {"type": [[33], "float32"], "offset": 0},
        {"type": [[4], "float32"], "offset": 4},
        {"type": [[4], "float32"], "offset": -64},
        {"type": [[4], "object"], "offset": 0},
        {"shape": [2], "strings": ["a"]},
        {"shape": [1], "strings": [1]},
    ):
        with pytest.raises(DataError):
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
    call = (_floats(6), np.array(4), np.array(True))
    wanted, found = nested(*call), 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[picks.randrange(len(content))] ^= 1 << picks.randrange(8)
        path.write_bytes(damaged)
        try:
            again = prefuse.load(path, verify=True)
        except ProgramFileError:
            found += 1
            continue
        assert _same(again(*call), wanted)
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
        (lambda members: members.update({"manifest.json": b'{"format": 9, "sha256": {}}'}), "this prefuse reads format 1"),
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


def _with_another_manifest(archive: zipfile.ZipFile, program: Any) -> str:
    write_program_members(archive, program)
    return "of another program"
