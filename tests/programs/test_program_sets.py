"""One file for the programs of several sizes: each call gives the bits that the model gave, whatever is wrong is said."""

from __future__ import annotations

import json
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper, parser
from prefuse.compiler.cli import cli
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.archive import archive_member, manifest_text, new_archive, write_member
from prefuse.runtime.program_set.program_set import ProgramSet

_HEAD = '<ir_version: 10, opset_import: ["": 20]>'
SIMILARITY = parser.parse_model(
    _HEAD + "similarity (float[N,32] query, float[M,32] keys) => (float[N,M] scores)"
    " { columns = Transpose<perm=[1, 0]>(keys) scores = MatMul(query, columns) }"
)
RECURRENT = parser.parse_model(_HEAD + "gru (float[N,T,8] x) => (float[N,1,T,16] y) { y, h = GRU<hidden_size=16>(x, w, r, b) }")
for name, shape in {"w": (1, 48, 8), "r": (1, 48, 16), "b": (1, 96)}.items():
    array = (np.random.default_rng(0).standard_normal(shape) / 4).astype(np.float32)
    RECURRENT.graph.initializer.append(numpy_helper.from_array(array, name))


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def same(a: object, b: object) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


def compiled(model: object, *inputs: object, **options: object) -> SpecializedModel:
    net = prefuse.compile(model, inputs or None, cache=False, threads=1, **options)  # type: ignore[arg-type]
    assert isinstance(net, SpecializedModel)
    return net


def reloaded(net: SpecializedModel | ProgramSet, folder: Path) -> ProgramSet:
    net.save(folder / "set.prefuse")
    loaded = prefuse.load(folder / "set.prefuse")
    assert isinstance(loaded, ProgramSet)
    return loaded


@pytest.fixture(scope="module")
def similarity() -> SpecializedModel:
    return compiled(SIMILARITY, dims={"N": (1, 40), "M": (2, 50)})


def test_ranges_of_two_dimensions(similarity: SpecializedModel, tmp_path: Path) -> None:
    loaded = reloaded(similarity, tmp_path)
    session = loaded.context()
    for n, m in ((1, 2), (7, 9), (40, 50), (33, 3), (1, 50)):
        query, keys = floats(n, 32), floats(m, 32)
        expected = similarity(query, keys)
        assert same(loaded(query, keys), expected)
        assert same(session(keys=keys, query=query), expected)
    found = loaded(torch.from_numpy(query), torch.from_numpy(keys))
    assert isinstance(found, torch.Tensor)
    assert same(found.numpy(), expected)
    out = np.full((33, 3), np.nan, np.float32)
    for call in (loaded, session):
        out[:] = np.nan
        assert call(floats(33, 32), keys=floats(3, 32), out=out) is out
        assert same(out, similarity(floats(33, 32), floats(3, 32)))
        with pytest.raises(prefuse.CompileError, match="out"):
            call(floats(33, 32), floats(4, 32), out=out)
    assert loaded.input_names == ("query", "keys")
    assert loaded.output_names == ("scores",)
    assert [port.type.shape for port in loaded.inputs] == [(40, 32), (50, 32)]
    assert "keys float32[4..50,32]" in loaded.report()
    again = reloaded(loaded, tmp_path)
    assert same(again(query, keys), expected)


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ((floats(41, 32), floats(2, 32)), r"no program of similarity is for query \[41, 32\], keys \[2, 32\]"),
        ((floats(3, 32), floats(1, 32)), "no program"),
        ((floats(3, 31), floats(2, 32)), "no program"),
        ((floats(32), floats(2, 32)), "no program"),
        ((floats(3, 32),), "keys not given"),
        ((floats(3, 32), floats(3, 32).astype(np.float64)), "float64"),
        ((floats(3, 32), [[1.0] * 32]), "list"),
    ],
)
def test_inputs_without_a_program(similarity: SpecializedModel, tmp_path: Path, inputs: tuple[object, ...], what: str) -> None:
    with pytest.raises(prefuse.CompileError, match=what):
        reloaded(similarity, tmp_path)(*inputs)


def test_nothing(similarity: SpecializedModel, tmp_path: Path) -> None:
    loaded = reloaded(similarity, tmp_path)
    empty = loaded(floats(0, 32), floats(7, 32))
    assert isinstance(empty, np.ndarray)
    assert empty.shape == (0, 7)
    assert same(loaded.context()(floats(3, 32), floats(0, 32)), np.empty((3, 0), np.float32))
    assert tuple(loaded(torch.empty(0, 32), torch.ones(7, 32)).shape) == (0, 7)  # type: ignore[attr-defined]
    with pytest.raises(prefuse.CompileError, match="no program"):
        loaded(floats(0, 32), floats(51, 32))
    total = parser.parse_model(_HEAD + "total (float[N,8] x) => (float[1,8] y) { y = ReduceSum<keepdims=1>(x, a) }")
    total.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "a"))
    with pytest.raises(prefuse.CompileError, match="no program"):  # a sum of nothing is a number
        reloaded(compiled(total, dims={"N": (1, 40)}), tmp_path)(floats(0, 8))


def test_nothing_by_which_a_size_is_divided(tmp_path: Path) -> None:
    """The middle extent of the result is (B * N) // (64 * B)."""
    text = """(float[B,N] x) => (float[B,M,64] y) {
        whole = Shape(x) rows = Slice(whole, zero, one) rest = Constant<value_ints=[-1, 64]>()
        shape = Concat<axis=0>(rows, rest) z = Reshape(x, shape) y = Neg(z) }"""
    model = parser.parse_model(_HEAD + "main " + text)
    for name, number in (("zero", 0), ("one", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), name))
    loaded = reloaded(compiled(model, dims={"B": (1, 8), "N": (64, 640, 64)}), tmp_path)
    x = floats(3, 128)
    assert same(loaded(x), -x.reshape(3, 2, 64))
    assert any("//" in sized.text for port in loaded._members[0].model.outputs for sized in port.sizes)
    with pytest.raises(prefuse.CompileError, match="no program"):
        loaded(floats(0, 128))


def test_padded_sizes(tmp_path: Path) -> None:
    """Recurrences have no program for a range of sequences: few are padded to those of a program, whose results are cut."""
    net = compiled(RECURRENT, dims={"T": (1, 12), "N": (2, 3)})
    results = {(t, n): net(floats(n, t, 8)) for t, n in ((1, 2), (5, 3), (7, 2), (8, 2), (12, 3))}
    loaded = reloaded(net, tmp_path)
    assert any(member.padded for member in loaded.members)
    for (t, n), expected in results.items():
        assert same(loaded(floats(n, t, 8)), expected)
        assert same(loaded.context()(floats(n, t, 8)), expected)
        row = expected if isinstance(expected, tuple) else (expected,)
        for call in (net, net.context(), loaded, loaded.context()):  # of a longer result, what is given takes a copy
            outs = [np.full_like(one, np.nan) for one in row]
            call(floats(n, t, 8), out=outs)
            assert all(map(same, outs, row))
            with pytest.raises(prefuse.CompileError, match=r"what is given is|given, the model takes"):
                call(floats(n, t, 8), out=[one[:, :, :0] for one in outs])


def test_calls_of_several_sizes_share_their_weights(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).eval()
    net = compiled(module)
    calls = [torch.from_numpy(floats(rows, 64)) for rows in (30, 40, 50)]
    expected = [net(x) for x in calls]
    loaded = reloaded(net, tmp_path)
    assert len(loaded.members) == 3
    for x, result in zip(calls, expected, strict=True):
        assert torch.equal(loaded(x), result)  # type: ignore[arg-type]
    assert (tmp_path / "set.prefuse").stat().st_size < 2 * 2 * 64 * 512 * 4  # one packing of both matrices, and code
    with pytest.raises(prefuse.CompileError, match=r"input float32\[30,64\]"):
        loaded(floats(41, 64))


class _Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        grown = x.expand(3, *x.shape[1:]) * 2 if x.shape[0] == 1 else x + x.mean(0)
        return {"sum": grown + 1, "mean": grown.mean(1)}


def test_results_of_other_names(tmp_path: Path) -> None:
    """torch names the results of each export as it likes: those for one row are others."""
    net = compiled(_Pair().eval(), dims={"x": {0: (1, 9)}})
    for rows in (1, 4, 9):
        x = torch.from_numpy(floats(rows, 6))
        expected = net(x)
        assert isinstance(expected, dict)
        found = reloaded(net, tmp_path)(x)
        assert isinstance(found, tuple)
        assert all(torch.equal(a, b) for a, b in zip(expected.values(), found, strict=True))


def test_out_by_name_is_by_the_names_of_the_set(tmp_path: Path) -> None:
    made = compiled(_Pair().eval(), dims={"x": {0: (1, 9)}})
    for rows in (1, 4, 9):
        x = torch.from_numpy(floats(rows, 6))
        made(x)
    net = reloaded(made, tmp_path)
    for rows in (1, 4, 9):
        x = torch.from_numpy(floats(rows, 6))
        expected: Any = net(x)
        place = torch.zeros_like(expected[0])
        found: Any = net(x, out={net.output_names[0]: place})
        assert found[0] is place
        assert torch.equal(place, expected[0])


class _Even(torch.nn.Module):
    """Holds for even numbers of rows from a size on that no check of a few points sees."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] * y.shape[0] != 1201 * 1203 else x + 1


def test_what_torch_assumes_is_checked_at_all_sizes(tmp_path: Path) -> None:
    """One point of a million is another graph: few points do not show it, the file would be wrong there."""
    net = compiled(_Even(), dims={"x": {0: (1150, 1300)}, "y": {0: (1150, 1300)}})
    net(floats(1150, 2), floats(1150, 2))
    with pytest.raises(prefuse.CompileError, match="x_0 = 1201, y_0 = 1203"):
        net.save(tmp_path / "set.prefuse")
    assert not list(tmp_path.iterdir())


class _Switched(torch.nn.Module):
    def forward(self, x: torch.Tensor, doubled: bool = False, other: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if doubled else x + (1 if other is None else other)


@pytest.mark.parametrize("dims", [None, {"x": {0: (2, 40)}}])
@pytest.mark.parametrize("second", [(True, None), (False, torch.ones(1, 8))])
def test_calls_that_differ_in_more_than_sizes(tmp_path: Path, dims: object, second: tuple[object, ...]) -> None:
    net = compiled(_Switched().eval(), **({} if dims is None else {"dims": dims}))
    x = torch.ones(4, 8)
    net(x, False, None)
    net(torch.ones(3, 8), *second)
    with pytest.raises(prefuse.CompileError, match="differ in more than sizes"):
        net.save(tmp_path / "set.prefuse")
    net.specialize(x, False, None).save(tmp_path / "one.prefuse")
    assert not (tmp_path / "set.prefuse").exists()


def test_states_are_refused(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            return self.total * 1

    net = compiled(Sum())
    for rows in (3, 4):
        net(torch.ones(rows, 8))
    with pytest.raises(prefuse.CompileError, match="keeps states"):
        net.save(tmp_path / "set.prefuse")


def test_nothing_compiled_yet(tmp_path: Path) -> None:
    with pytest.raises(prefuse.CompileError, match="not compiled yet"):
        compiled(torch.nn.Linear(4, 4)).save(tmp_path / "set.prefuse")


def test_threads_share_a_set(similarity: SpecializedModel, tmp_path: Path) -> None:
    loaded = reloaded(similarity, tmp_path)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for n in range(1, 40, 3):
            query, keys = floats(n, 32), floats(2 + (n * seed) % 49, 32)
            if not same(loaded(query, keys), similarity(query, keys)):
                wrong.append((n, seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_profile_and_plan(similarity: SpecializedModel, tmp_path: Path) -> None:
    loaded = reloaded(similarity, tmp_path)
    with pytest.raises(prefuse.CompileError, match=r"net.specialize\(...\).plan"):
        _ = loaded.plan
    assert loaded.specialize(floats(7, 32), floats(9, 32)).plan.dims
    with pytest.raises(prefuse.CompileError, match="keeps none"):
        _ = loaded.context().states


# Faults of the file ---------------------------------------------------------------------------------------------------


def with_programs(path: Path, changed: object) -> Path:
    """The file with other words of its programs, and the manifest that they have."""
    import hashlib

    target = path.with_name("changed.prefuse")
    text = json.dumps(changed).encode()
    with zipfile.ZipFile(path) as old, new_archive(target) as new:
        manifest = json.loads(old.read("manifest.json"))
        manifest["sha256"]["programs.json"] = hashlib.sha256(text).hexdigest()
        write_member(new, "programs.json", text)
        for info in old.infolist():
            if info.filename.startswith("sizes-"):
                with archive_member(new, info.filename) as inner, zipfile.ZipFile(old.open(info.filename)) as member:
                    for one in member.infolist():
                        write_member(inner, one.filename, member.read(one.filename))
        write_member(new, "manifest.json", manifest_text(manifest))
    return target


@pytest.fixture(scope="module")
def padded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("padded") / "set.prefuse"
    net = compiled(RECURRENT, dims={"T": (5, 8), "N": (2, 2)})
    net(floats(2, 5, 8))
    net.save(path)
    return path


def told(path: Path) -> dict[str, object]:
    with zipfile.ZipFile(path) as archive:
        found = json.loads(archive.read("programs.json"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("padded", [["T", 5, 16, 1]], "does not have along axis"),
        ("padded", [["T", 9, 8, 1]], "no range"),
        ("padded", [["T", 0, 8, 1]], "no range"),
        ("padded", [["T", 5, True, 1]], "should be"),
        ("padded", [], "padded sizes that are none"),
        ("inputs", [], "no list of 1"),
        ("inputs", [[[1, "T"], [7, "N"]]], "along axis 7"),
        ("inputs", [[[1, "N"]]], "no input has T"),
        ("outputs", [[["T", 9, "1"]]], "along axis 9"),
        ("outputs", [[["T", 0, "3"]]], "does not have along axis 0"),
        ("outputs", [[["T", 0, "0"]]], "does not have along axis 0"),
        ("outputs", [[["T", 0, "__import__('os')"]]], "cannot be computed"),
        ("outputs", [[["N", 2, "1"]]], "does not have along axis 2"),
    ],
)
def test_programs_that_are_no_set(padded_file: Path, key: str, value: object, what: str) -> None:
    data = told(padded_file)
    programs = data["programs"]
    assert isinstance(programs, list)
    place = next(number for number, one in enumerate(programs) if one is not None)
    programs[place][key] = value
    with pytest.raises(prefuse.CompileError, match=what):
        prefuse.load(with_programs(padded_file, data))


@pytest.mark.parametrize("data", [[], {"name": 3, "programs": []}, {"name": "x", "programs": []}, {"name": "x"}])
def test_other_data(padded_file: Path, data: object) -> None:
    with pytest.raises(prefuse.CompileError, match=r"programs\.json"):
        prefuse.load(with_programs(padded_file, data))


def test_nothing_of_a_padded_size(padded_file: Path) -> None:
    """The results of a padded program have the greatest size."""
    found = prefuse.load(padded_file)(floats(2, 0, 8))
    assert isinstance(found, np.ndarray)
    assert found.shape == (2, 1, 0, 16)


def test_the_file_as_it_was_loads(padded_file: Path) -> None:
    loaded = prefuse.load(with_programs(padded_file, told(padded_file)))
    assert same(loaded(floats(2, 6, 8)), prefuse.load(padded_file)(floats(2, 6, 8)))


def test_a_broken_file(padded_file: Path, tmp_path: Path) -> None:
    content = padded_file.read_bytes()
    path = tmp_path / "broken.prefuse"
    for size in (0, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(prefuse.CompileError):
            prefuse.load(path)


# The command line -----------------------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path) -> None:
    onnx.save(SIMILARITY, tmp_path / "similarity.onnx")
    out = tmp_path / "similarity.prefuse"
    arguments = ["compile", str(tmp_path / "similarity.onnx"), "-o", str(out), "--no-cache", "--threads", "1"]
    result = CliRunner().invoke(cli, [*arguments, "--dims", "N=2:8:2", "--dims", "M=4:4"])
    assert result.exit_code == 0, result.output
    assert "N=2..8 by 2" in result.output
    query, keys = floats(6, 32), floats(4, 32)
    np.testing.assert_allclose(np.asarray(prefuse.load(out)(query, keys)), query @ keys.T, rtol=1e-4, atol=1e-4)
    for verb in ("inspect", "run"):
        result = CliRunner().invoke(cli, [verb, str(out)])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(cli, ["profile", str(out)])
    assert result.exit_code == 1 or isinstance(result.exception, prefuse.CompileError)
    for wrong in (["--dims", "N=2"], ["--dims", "N=a:b", "--dims", "M=1:2"], ["--dims", "N=1:2", "--shape", "keys=4,32"]):
        result = CliRunner().invoke(cli, [*arguments, *wrong])
        assert result.exit_code != 0
