"""Program files: what is written is read back; whatever else a file holds is one ProgramFileError and never a crash."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import prefuse
import pytest
import safetensors.numpy
from prefuse.runtime.archive import ConstantSource
from prefuse.runtime.cpu_device import CpuDevice
from prefuse.runtime.errors import CompileError, DeviceError, ProgramFileError, ScratchFileError
from prefuse.runtime.executor import load
from prefuse.runtime.plan import Buffer, Plan, Role, Space, TensorType
from prefuse.runtime.plan_text import print_plan
from prefuse.runtime.program_file import Program, _places, read_program, save_program, write_program
from prefuse.runtime.target import Target, host_cpu_flags
from prefuse.tests.runtime.tiny_program import CONSTANT_OFFSET, ELEMENTS, bias, tiny_plan, write_tiny

Members = dict[str, bytes]


@pytest.fixture
def path(tmp_path: Path, tiny_file: Path) -> Path:
    """A copy of the tiny program to damage."""
    return Path(shutil.copy(tiny_file, tmp_path / "tiny.prefuse"))


def rewrite(path: Path, change: Callable[[Members], None], compression: int = zipfile.ZIP_STORED) -> None:
    """Change the members of a program and write them as any zip program would, hashes made right again."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def set_manifest(**values: object) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members["manifest.json"] = json.dumps({**json.loads(members["manifest.json"]), **values}).encode()

    return change


def set_member(name: str, content: bytes, **values: object) -> Callable[[Members], None]:
    """Another content, whose hash is right, and other values of the manifest."""

    def change(members: Members) -> None:
        members[name] = content
        hashes = {**json.loads(members["manifest.json"])["sha256"], name: hashlib.sha256(content).hexdigest()}
        set_manifest(sha256=hashes, **values)(members)

    return change


def set_plan(plan: Plan) -> Callable[[Members], None]:
    return set_member("plan.txt", print_plan(plan).encode(), target=plan.target)


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """What tells the most bytes that Python has held since then; tracing, which slows all else, ends with the context."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_round_trip(path: Path, tiny_library: bytes) -> None:
    program = read_program(path)
    assert program.plan == tiny_plan()
    assert program.library == tiny_library
    assert program.manifest["name"] == "tiny"
    constants = program.constants
    assert constants.ctypes.data % 64 == 0
    assert not constants.flags.writeable
    np.testing.assert_array_equal(constants[CONSTANT_OFFSET:].view(np.float32), bias())


def test_weights_are_safetensors(path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        archive.extract("constants.safetensors", tmp_path)
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    weights = safetensors.numpy.load_file(tmp_path / "constants.safetensors")
    np.testing.assert_array_equal(weights["b"], bias())
    assert weights["a"] == np.float32(3)
    assert weights["a"].shape == ()


def test_equal_programs_are_equal_files(tmp_path: Path, tiny_library: bytes) -> None:
    first, second = write_tiny(tmp_path / "a", tiny_library), write_tiny(tmp_path / "b", tiny_library)
    assert first.read_bytes() == second.read_bytes()


def test_saved_copy_is_the_same_file(path: Path, tmp_path: Path) -> None:
    save_program(tmp_path / "copy.prefuse", read_program(path))
    assert (tmp_path / "copy.prefuse").read_bytes() == path.read_bytes()


def test_a_program_can_be_saved_over_itself(path: Path) -> None:
    content = path.read_bytes()
    save_program(path, read_program(path))
    assert path.read_bytes() == content


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e5m2", "bool", "uint64"])
def test_constants_of_any_type(dtype: str, tmp_path: Path) -> None:
    array = np.ones((2, 3), dtype)
    kind = TensorType((2, 3), dtype)
    buffer = Buffer("w/ü", Role.CONSTANT, kind.size_bytes, "constants", 64)
    plan = Plan(str(Target.parse("cpu")), (), (), (Space("constants", 128),), (buffer,), (), ())
    write_program(tmp_path / "p", plan, b"", [ConstantSource("w/ü", kind, 64, lambda: array)], {})
    found = read_program(tmp_path / "p").constants[64:]
    assert found.tobytes() == array.tobytes()


def test_writing_holds_one_constant_at_a_time(tmp_path: Path) -> None:
    count, size = 8, 1 << 23
    buffers = tuple(Buffer(f"w{i}", Role.CONSTANT, size, "constants", i * size) for i in range(count))
    plan = Plan(str(Target.parse("cpu")), (), (), (Space("constants", count * size),), buffers, (), ())
    kind = TensorType((size,), "uint8")
    sources = [ConstantSource(b.name, kind, b.offset or 0, lambda: np.ones(size, np.uint8)) for b in buffers]
    with traced_memory() as peak_bytes:
        write_program(tmp_path / "p", plan, b"", sources, {})
        assert peak_bytes() < 2.5 * size


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, tiny_library: bytes) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"old")

    def interrupt() -> np.ndarray:
        raise KeyboardInterrupt

    sources = (
        ConstantSource("a", TensorType((), "float32"), 0, interrupt),
        ConstantSource("b", TensorType((1000,), "float32"), 128, bias),
    )
    with pytest.raises(KeyboardInterrupt):
        write_program(path, tiny_plan(), tiny_library, sources, {})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_folder(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ProgramFileError, match="cannot be written"):
        save_program(tmp_path / "no" / "p", read_program(path))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda members: members.pop("plan.txt"), "not the members of a program"),
        (lambda members: members.update({"/etc/passwd": b""}), "not the members of a program"),
        (lambda members: members.update({"../plan.txt": b""}), "not the members of a program"),
        (lambda members: members.clear(), "it holds nothing, not the members"),
        (lambda members: members.update({"library.so": b"junk"}), "library.so: its hash is not the one in the manifest"),
        (lambda members: members.update({"plan.txt": b"plan 2 t\n"}), "plan.txt: its hash is not the one in the manifest"),
        (lambda members: members.update({"manifest.json": b"{}"}), "not the manifest of a program"),
        (lambda members: members.update({"manifest.json": b"[]"}), "not the manifest of a program"),
        (lambda members: members.update({"manifest.json": b"{"}), "not a sound program file"),
        (lambda members: members.update({"manifest.json": b"[" * 100_000}), "not a sound program file"),
        (lambda members: members.update({"manifest.json": b"\xff"}), "not a sound program file"),
        (lambda members: members.update({"constants.safetensors": b""}), "the weights are not where they should be"),
        (lambda members: members.update({"constants.safetensors": b"\xff" * 64}), "the weights are not where they should be"),
        (set_manifest(format=99), "a program of format 99; this prefuse reads format 5"),
        (set_manifest(tvm="0.1"), "made with apache-tvm '0.1'; installed is"),
        (set_manifest(target="cpu:avx2,threads=9"), "is not the plan's"),
        (set_plan(replace(tiny_plan(), target="tpu")), "unknown target 'tpu'"),
        (set_plan(replace(tiny_plan(), steps=())), "plan.txt: output y: byte 0 is never written"),
    ],
)
def test_wrong_members(path: Path, change: Callable[[Members], None], fault: str) -> None:
    rewrite(path, change)
    with pytest.raises(ProgramFileError) as raised:
        read_program(path)
    assert fault in str(raised.value)
    assert str(path) in str(raised.value)


def test_another_cpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: frozenset({"fma"}))
    with pytest.raises(ProgramFileError, match=r"this CPU lacks avx2, f16c.* compile the model again on this machine"):
        read_program(path)


def test_no_permission_for_tiles(tmp_path: Path, tiny_library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset(Target("cpu", "amx").missing_features()) | host_cpu_flags()
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: flags)
    monkeypatch.setattr("prefuse.runtime.hardware.tile_state.refusal", lambda: "arch_prctl: Operation not permitted")
    path = write_tiny(tmp_path / "tiles.prefuse", tiny_library, tiny_plan("cpu:amx,threads=2"))
    with pytest.raises(DeviceError, match=r'amx.*AMX tiles \(arch_prctl: Operation not permitted\).*target="cpu:avx512"'):
        load(path)
    assert Target.parse("cpu").level == "avx512bf16"
    monkeypatch.setattr("prefuse.runtime.hardware.tile_state.refusal", lambda: "")
    assert Target.parse("cpu").level == "amx"
    load(path)


def test_zip_bomb(path: Path) -> None:
    rewrite(path, lambda members: members.update({"plan.txt": bytes(1 << 26)}), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with traced_memory() as peak_bytes:
        with pytest.raises(ProgramFileError, match="compressed or encrypted"):
            read_program(path)
        assert peak_bytes() < 1 << 24


def test_unaligned_weights(path: Path, tiny_library: bytes) -> None:
    """A zip made by others puts the weights at any place: refused, because kernels and sharing rely on it."""
    faults = []
    for more in (b"\0", b"\0\0"):  # at most one of which puts them at a multiple of 64 bytes
        rewrite(path, set_member("library.so", tiny_library + more))
        try:
            read_program(path)
        except ProgramFileError as error:
            faults.append(error.what)
    assert set(faults) == {"the weights are not where they should be"}


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x05\x06" + bytes(18)])
def test_no_zip(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ProgramFileError):
        read_program(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProgramFileError, match="no such file"):
        read_program(tmp_path / "none.prefuse")
    with pytest.raises(ProgramFileError, match="cannot be read"):
        read_program(tmp_path)


def test_truncation_anywhere(path: Path) -> None:
    content = path.read_bytes()
    for length in [*range(0, len(content), max(1, len(content) // 200)), *range(len(content) - 200, len(content))]:
        path.write_bytes(content[:length])
        with pytest.raises(ProgramFileError):
            read_program(path)


def test_bit_flips_anywhere(path: Path) -> None:
    """A flipped bit is found, or changes nothing that is read."""
    content = path.read_bytes()
    original = read_program(path)
    weights = (original.constants.tobytes(), original.constants_header)
    picks = random.Random(0)
    structure = content.index(b"constants.safetensors") - 30  # the header of the weights and what follows
    places = [picks.randrange(len(content)) for _ in range(150)] + [picks.randrange(structure, len(content)) for _ in range(450)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << picks.randrange(8)
        path.write_bytes(damaged)
        try:
            program = read_program(path)
        except ProgramFileError:
            continue
        same = (program.plan, program.library, program.manifest) == (original.plan, original.library, original.manifest)
        assert same, place
        assert (program.constants.tobytes(), program.constants_header) == weights, place


@pytest.mark.parametrize("place", [0, 3, CONSTANT_OFFSET, CONSTANT_OFFSET + 4 * ELEMENTS - 1])
def test_any_damaged_weight_is_found(path: Path, place: int) -> None:
    """A table of indices among them would have the kernel read anywhere."""
    content = path.read_bytes()
    start = content.index(bias()[:4].tobytes()) - CONSTANT_OFFSET
    path.write_bytes(content[: start + place] + bytes([content[start + place] ^ 16]) + content[start + place + 1 :])
    with pytest.raises(ProgramFileError, match=r"constants\.safetensors: its hash"):
        read_program(path)


@pytest.mark.parametrize("kind", [DeviceError, ScratchFileError])
def test_what_the_device_lacks_is_no_fault_of_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[CompileError]
) -> None:
    def refuse(device: CpuDevice, program: Program) -> None:
        raise kind("device", "it has no such units")

    monkeypatch.setattr(CpuDevice, "load", refuse)
    with pytest.raises(kind, match="device: it has no such units"):
        prefuse.load(path)


@pytest.mark.parametrize("entry", [None, {}, [], {"data_offsets": [0.0, 64.0]}, {"data_offsets": [0]}, {"data_offsets": 3}])
def test_headers_of_shared_constants_that_say_no_place(entry: object) -> None:
    with pytest.raises(ProgramFileError, match="it does not say where"):
        _places("shared.safetensors", json.dumps({"0" * 64: entry}).encode())


def test_a_header_of_shared_constants_that_is_a_list() -> None:
    assert _places("shared.safetensors", b"[]") == {}


def test_the_folder_is_known_wherever_the_process_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    assert read_program(path.name).folder == path.parent
