"""Sessions: states last from call to call, are apart in each session, and can be looked at, set, saved and loaded."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import parser
from prefuse.runtime.errors import CompileError, InputError, OptionError, ProgramFileError
from prefuse.runtime.executor import CompiledModel

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[4] x, float[4] sum, int64[1] count, bfloat16[2,3] last, bfloat16[2,3] given) =>
  (float[4] y, float[4] sum_new, int64[1] count_new, bfloat16[2,3] last_new) {
  sum_new = Add(sum, x)
  one = Constant<value_ints = [1]>()
  count_new = Add(count, one)
  last_new = Identity(given)
  y = Mul(sum_new, x)
}"""
PAIRS = {"sum_new": "sum", "count_new": "count", "last_new": "last"}
ONES = np.ones(4, np.float32)
GIVEN = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)


def compiled(text: str = TEXT, **changes: Any) -> CompiledModel:
    proto = parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in changes.items())
    net = prefuse.compile(proto, states=PAIRS, cache=False)
    assert isinstance(net, CompiledModel)
    return net


@pytest.fixture(scope="module")
def net() -> CompiledModel:
    return compiled(sum=np.full(4, 10, np.float32))


def test_states_vanish_from_the_signature(net: CompiledModel) -> None:
    assert net.input_names == ("x", "given")
    assert net.output_names == ("y",)
    assert repr(net.context().states) == "States(sum: float32[4], count: int64[1], last: bfloat16[2,3])"


def test_calls_leave_states_to_the_next(net: CompiledModel) -> None:
    session = net.context()
    for call in range(1, 4):
        y = session(ONES * call, GIVEN + call)
        total = 10 + call * (call + 1) / 2
        np.testing.assert_array_equal(y, np.full(4, total * call, np.float32))
        np.testing.assert_array_equal(session.states["sum"], np.full(4, total, np.float32))
        np.testing.assert_array_equal(session.states["count"], [call])
        np.testing.assert_array_equal(session.states["last"], GIVEN + call)
    session.states.reset("count")
    assert session.states["count"] == 0
    assert session.states["sum"][0] == 16
    session.states.reset()
    np.testing.assert_array_equal(session.states["sum"], np.full(4, 10, np.float32))


def test_the_model_has_a_session_of_its_own(net: CompiledModel) -> None:
    net.states.reset()
    other = net.context()
    net(ONES, GIVEN)
    net(ONES, GIVEN)
    assert net.states["count"] == 2
    assert other.states["count"] == 0


def test_what_is_read_and_set_is_copied(net: CompiledModel) -> None:
    states = net.context().states
    array = np.arange(4, dtype=np.float32)
    states["sum"] = array
    array += 1
    shown = states["sum"]
    np.testing.assert_array_equal(shown, [0, 1, 2, 3])
    shown += 1
    np.testing.assert_array_equal(states["sum"], [0, 1, 2, 3])
    states["last"] = torch.full((2, 3), 2.0, dtype=torch.bfloat16)
    np.testing.assert_array_equal(states["last"], np.full((2, 3), 2, ml_dtypes.bfloat16))
    states["sum"] = array[::-1]
    np.testing.assert_array_equal(states["sum"], [4, 3, 2, 1])


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("summ", ONES, "the model has no such state; did you mean 'sum'?"),
        ("sum", np.ones(5, np.float32), r"float32\[5\] given, it is float32\[4\]"),
        ("sum", np.ones((4, 1), np.float32), r"float32\[4,1\] given, it is float32\[4\]"),
        ("sum", np.ones(4), r"float64\[4\] given, it is float32\[4\]"),
        ("sum", [1, 2, 3, 4], "list is neither a NumPy array nor a torch tensor"),
    ],
)
def test_wrong_values_are_refused(net: CompiledModel, name: str, value: object, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        net.context().states[name] = value


def test_threads_with_a_session_each_keep_apart(net: CompiledModel) -> None:
    found: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        session = net.context()
        for _ in range(50):
            session(ONES * number, GIVEN)
        found[number] = session.states["sum"]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        np.testing.assert_array_equal(found[number], np.full(4, 10 + 50 * number, np.float32))


def test_a_session_that_is_called_is_not_looked_at(net: CompiledModel, tmp_path: Path) -> None:
    session = net.context()
    with session.states.lock:
        acts: list[Callable[[], object]] = [
            lambda: session.states["sum"],
            session.states.reset,
            lambda: session.states.save(tmp_path / "states.npz"),
            lambda: session(ONES, GIVEN),
        ]
        for act in acts:
            with pytest.raises(InputError, match="another thread is calling"):
                act()
    assert not list(tmp_path.iterdir())


def test_a_call_that_fails_leaves_states_as_they_were(net: CompiledModel) -> None:
    session = net.context()
    with pytest.raises(InputError):
        session(np.ones(5, np.float32), GIVEN)
    np.testing.assert_array_equal(session.states["sum"], np.full(4, 10, np.float32))
    session(ONES, GIVEN)
    assert session.states["count"] == 1


def test_states_go_through_a_file(net: CompiledModel, tmp_path: Path) -> None:
    first, second = net.context(), net.context()
    first(ONES, GIVEN)
    first(ONES * 2, GIVEN)
    first.states.save(tmp_path / "states.npz")
    second.states.load(tmp_path / "states.npz")
    for name in PAIRS.values():
        assert first.states[name].tobytes() == second.states[name].tobytes()
    np.testing.assert_array_equal(first(ONES, GIVEN), second(ONES, GIVEN))
    with np.load(tmp_path / "states.npz") as file:
        np.testing.assert_array_equal(file["sum"], np.full(4, 13, np.float32))


def test_a_program_of_a_file_has_its_states(net: CompiledModel, tmp_path: Path) -> None:
    session = net.context()
    session(ONES, GIVEN)
    session.states.save(tmp_path / "states.npz")
    net.save(tmp_path / "net.prefuse")
    loaded = prefuse.load(tmp_path / "net.prefuse")
    assert isinstance(loaded, CompiledModel)
    np.testing.assert_array_equal(loaded.states["sum"], np.full(4, 10, np.float32))
    loaded.states.load(tmp_path / "states.npz")
    np.testing.assert_array_equal(loaded(ONES, GIVEN), session(ONES, GIVEN))


def test_files_of_other_programs_are_refused(net: CompiledModel, tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    states = net.context().states
    other_weights = compiled(sum=np.full(4, 11, np.float32)).context().states
    other_weights.save(path)
    with pytest.raises(ProgramFileError, match="of another program"):
        states.load(path)
    states.load(path, any_program=True)
    np.testing.assert_array_equal(states["sum"], np.full(4, 11, np.float32))
    compiled(TEXT.replace("[4]", "[5]")).context().states.save(path)
    for any_program in (False, True):
        with pytest.raises(ProgramFileError, match=r"it holds other states than sum float32\[4\], count"):
            states.load(path, any_program=any_program)
    np.testing.assert_array_equal(states["sum"], np.full(4, 11, np.float32))


LARGE = """<ir_version: 10, opset_import: ["": 21]>
g (float[1,256] x, float[1,256] sum) => (float[1,256] y, float[1,256] sum_new) {
  h = MatMul(x, w)
  sum_new = Add(sum, h)
  y = Relu(sum_new)
}"""


def test_files_know_programs_by_weights_that_programs_share(tmp_path: Path) -> None:
    """Large ones, which lie in files of their own, or in the program's, and are the same weights there."""
    path, x = tmp_path / "states.npz", np.ones((1, 256), np.float32)

    def of_weight(scale: float) -> CompiledModel:
        proto = parser.parse_model(LARGE)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(256, dtype=np.float32) * scale, "w"))
        net = prefuse.compile(proto, states={"sum_new": "sum"}, cache=False)
        assert isinstance(net, CompiledModel)
        return net

    net = of_weight(2)
    assert net.program.shared, "the weight is none that programs share"
    net(x)
    net.states.save(path)
    with pytest.raises(ProgramFileError, match="of another program"):
        of_weight(3).states.load(path)
    net.save(tmp_path / "net.prefuse")
    loaded = prefuse.load(tmp_path / "net.prefuse")
    assert isinstance(loaded, CompiledModel)
    loaded.states.load(path)
    np.testing.assert_array_equal(loaded(x), x * 4)
    loaded.states.save(path)
    net.states.load(path)
    np.testing.assert_array_equal(net(x), x * 6)


def test_broken_files_are_refused(net: CompiledModel, tmp_path: Path) -> None:
    session, path = net.context(), tmp_path / "states.npz"
    session(ONES, GIVEN)
    session.states.save(path)
    sound = path.read_bytes()
    before = {name: session.states[name] for name in session.states}
    broken = [b"", sound[:100], sound[: len(sound) // 2], sound.replace(b"\x80?", b"\x80@")]
    for content in broken:
        assert content != sound
        path.write_bytes(content)
        with pytest.raises(ProgramFileError, match="no sound file of states"):
            session.states.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("states.json", json.dumps([1, 2]))
    with pytest.raises(ProgramFileError, match="no sound file of states"):
        session.states.load(path)
    with pytest.raises(ProgramFileError, match="no such file"):
        session.states.load(tmp_path / "none.npz")
    with pytest.raises(ProgramFileError, match="cannot be written"):
        session.states.save(tmp_path / "none" / "states.npz")
    for name, array in before.items():
        assert array.tobytes() == session.states[name].tobytes()


def _shaped(shape: str) -> bytes:
    """A file of an array whose header says that it is of another shape."""
    content = io.BytesIO()
    np.save(content, np.zeros(4, np.float32))
    header = content.getvalue()
    text = header[10:128].replace(b"(4,)", shape.encode()).rstrip()
    return header[:10] + text.ljust(117) + b"\n" + header[128:]


def test_damaged_members_are_refused(net: CompiledModel, tmp_path: Path) -> None:
    """Whatever zipfile, zlib and NumPy raise is an error of the file, and nothing grows while it is read."""
    session, path = net.context(), tmp_path / "states.npz"
    session.states.save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("a.npy", members["sum.npy"])
    for content in (inner.getvalue(), _shaped("(1<<60,)"), _shaped("(999999999999,)"), bytes(100_000), b""):
        with zipfile.ZipFile(path, "w") as archive:
            for name, member in members.items():
                archive.writestr(name, content if name == "sum.npy" else member)
        with pytest.raises(ProgramFileError, match="no sound file of states"):
            session.states.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    with pytest.raises(ProgramFileError, match="compressed"):
        session.states.load(path)
    assert not session.states["count"].any()


def test_a_model_without_states_says_so() -> None:
    plain = prefuse.compile(parser.parse_model(TEXT), cache=False)
    assert isinstance(plain, CompiledModel)
    for owner in (plain, plain.context()):
        with pytest.raises(OptionError, match="the model has no states"):
            _ = owner.states


def test_unknown_names_are_key_errors(net: CompiledModel) -> None:
    states = net.context().states
    assert "sum" in states
    assert "q" not in states
    assert len(states) == 3
    with pytest.raises(KeyError):
        _ = states["q"]
    with pytest.raises(CompileError):
        states.reset("q")
