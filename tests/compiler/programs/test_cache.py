"""The cache of programs: shared, bounded, and never in the way."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from prefuse.compiler.programs.cache import ProgramCache, _version_of
from prefuse.runtime.errors import ProgramFileError, UnsupportedModelError
from prefuse.runtime.plan import Plan
from prefuse.runtime.program_file import write_program
from prefuse.runtime.target import Target
from prefuse.tests.runtime.tiny_program import bias, write_tiny

KEYS = [f"{number:064x}" for number in range(4)]
EMPTY = Plan(str(Target.parse("cpu")), (), (), (), (), (), ())


def write_empty(path: Path, library: bytes = b"code") -> None:
    write_program(path, EMPTY, library, (), {"name": "empty"})


class Counter:
    """A build that counts how often it was asked."""

    def __init__(self, size_bytes: int = 4) -> None:
        self.count = 0
        self.size_bytes = size_bytes

    def __call__(self, path: Path) -> None:
        self.count += 1
        write_empty(path, bytes(self.size_bytes))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_program_is_built_once(tmp_path: Path) -> None:
    build = Counter()
    first = ProgramCache(tmp_path).load(KEYS[0], build)
    second = ProgramCache(tmp_path).load(KEYS[0], build)
    assert build.count == 1
    assert first.library == second.library
    assert visible(tmp_path) == [f"{KEYS[0]}.prefuse"]


def test_a_corrupt_entry_is_built_again(tmp_path: Path) -> None:
    cache, build = ProgramCache(tmp_path), Counter()
    cache.load(KEYS[0], build)
    path = tmp_path / f"{KEYS[0]}.prefuse"
    path.write_bytes(path.read_bytes()[:100])
    cache.load(KEYS[0], build)
    assert build.count == 2


def test_a_flipped_weight_is_built_again(tmp_path: Path) -> None:
    cache, count = ProgramCache(tmp_path), []

    def build(path: Path) -> None:
        count.append(path)
        write_tiny(path, b"code")

    first = cache.load(KEYS[0], build).constants.tobytes()
    path = tmp_path / f"{KEYS[0]}.prefuse"
    content = bytearray(path.read_bytes())
    content[content.index(bias()[:4].tobytes()) + 7] ^= 1
    path.write_bytes(content)
    assert cache.find(KEYS[0]) is None
    assert not path.exists()
    assert cache.load(KEYS[0], build).constants.tobytes() == first
    assert len(count) == 2


def test_threads_that_ask_together_build_once(tmp_path: Path) -> None:
    cache, count = ProgramCache(tmp_path), []

    def build(path: Path) -> None:
        count.append(1)
        time.sleep(0.2)
        write_empty(path)

    threads = [threading.Thread(target=cache.load, args=(KEYS[0], build)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
    assert visible(tmp_path) == [f"{KEYS[0]}.prefuse"]


def _load_slowly(folder: Path, log: Path) -> None:
    def build(path: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        write_empty(path)

    ProgramCache(folder).load(KEYS[0], build)


def test_processes_that_ask_together_build_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_load_slowly, args=(folder, log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "built\n"
    assert visible(folder) == [f"{KEYS[0]}.prefuse"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_stopped_leaves_no_lock(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import signal, time, sys
from pathlib import Path
from prefuse.compiler.programs.cache import ProgramCache
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def build(path):
    print("building", flush=True)
    time.sleep(60)
ProgramCache(Path({str(tmp_path)!r})).load({KEYS[0]!r}, build)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"building\n"
    process.send_signal(number)
    process.wait(timeout=20)
    process.stdout.close()
    if number is signal.SIGINT:
        assert visible(tmp_path) == []
    build = Counter()
    begin = time.monotonic()
    ProgramCache(tmp_path).load(KEYS[0], build)
    assert time.monotonic() - begin < 5
    assert build.count == 1
    assert visible(tmp_path) == [f"{KEYS[0]}.prefuse"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_one_where_a_program_may_be_built_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    build = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ProgramCache(tmp_path).load(KEYS[0], build).library == bytes(4)
    assert build.count == 1
    assert visible(tmp_path) == [f"{KEYS[0]}.prefuse"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(path: Path) -> None:
        raise UnsupportedModelError("model", "cannot be compiled")

    with pytest.raises(UnsupportedModelError):
        ProgramCache(tmp_path).load(KEYS[0], build)
    assert visible(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache, build = ProgramCache(tmp_path / "file" / "cache"), Counter()
    with pytest.warns(UserWarning, match="compiling without one"):
        cache.load(KEYS[0], build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        cache.load(KEYS[0], build)
    cache.write_note(KEYS[0], {})
    assert build.count == 2
    assert cache.note(KEYS[0]) is None


def test_a_full_disk_is_done_without(tmp_path: Path) -> None:
    cache, count = ProgramCache(tmp_path), []

    def build(path: Path) -> None:
        count.append(path)
        if path.parent == tmp_path:
            raise ProgramFileError(str(path), "cannot be written") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_empty(path)

    with pytest.warns(UserWarning, match="No space left"):
        program = cache.load(KEYS[0], build)
    assert program.library == b"code"
    assert len(count) == 2
    assert not count[1].exists()
    assert visible(tmp_path) == []


def test_the_programs_used_longest_ago_go_first(tmp_path: Path) -> None:
    cache, build = ProgramCache(tmp_path, limit_bytes=35_000), Counter(10_000)
    for age, key in enumerate(KEYS[:3]):
        cache.load(key, build)
        os.utime(tmp_path / f"{key}.prefuse", (1000 + age, 1000 + age))
    cache.load(KEYS[0], build)
    cache.load(KEYS[3], build)
    assert build.count == 4
    assert visible(tmp_path) == [f"{key}.prefuse" for key in (KEYS[0], KEYS[2], KEYS[3])]


def test_only_our_own_files_are_ever_removed(tmp_path: Path) -> None:
    for name in ("thesis.prefuse", "notes.json", ".draft.tmp"):
        (tmp_path / name).write_bytes(bytes(5000))
        os.utime(tmp_path / name, (1, 1))
    abandoned = tmp_path / f".{KEYS[1]}.prefuse.123.abcd.tmp"
    abandoned.touch()
    os.utime(abandoned, (1, 1))
    ProgramCache(tmp_path, limit_bytes=1).load(KEYS[0], Counter())
    assert visible(tmp_path) == [".draft.tmp", f"{KEYS[0]}.prefuse", "notes.json", "thesis.prefuse"]


def test_the_version_is_that_of_what_files_hold(tmp_path: Path) -> None:
    """Not of when they were installed."""
    source = tmp_path / "kernels" / "matmul.py"
    source.parent.mkdir()
    source.write_text("a = 1")
    first = _version_of(tmp_path)
    os.utime(source, (0, 0))
    assert _version_of(tmp_path) == first
    source.write_text("a = 2")
    assert _version_of(tmp_path) != first


def test_notes(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path)
    assert cache.note(KEYS[0]) is None
    cache.write_note(KEYS[0], {"a": [1, None]})
    assert cache.note(KEYS[0]) == {"a": [1, None]}
    path = tmp_path / f"{KEYS[0]}.json"
    content = path.read_bytes()
    for damaged in (b"{", b"", content.replace(b"[1,", b"[3,"), content[:-1]):
        path.write_bytes(damaged)
        assert cache.note(KEYS[0]) is None
    assert visible(tmp_path) == [f"{KEYS[0]}.json"]
