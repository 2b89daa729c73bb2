"""Folders for a moment: gone afterwards, also those of processes that were killed, and one error where there is no place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from prefuse.runtime import temporary_folder as module
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import load
from prefuse.runtime.temporary_folder import temporary_folder, write_temporary

_MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
_COMPILE = """
import os, sys, tempfile
import prefuse
from pathlib import Path
from prefuse.runtime.errors import CompileError
model = '<ir_version: 10, opset_import: ["": 21]> main (float[64] x) => (float[64] y) { y = Tanh(x) }'
import onnx_ir
try:
    prefuse.compile(onnx_ir.from_onnx_text(model), cache=sys.argv[1])
except CompileError as error:
    print("refused:", error)
kept = [name for name in os.listdir(sys.argv[1]) if not name.endswith(".object")]
print("left:", kept, [name for name in os.listdir(os.environ["TMPDIR"]) if name != "ballast"])
"""


def test_a_folder_is_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(KeyboardInterrupt), temporary_folder() as folder:
        write_temporary(folder / "library.so", b"code")
        raise KeyboardInterrupt
    assert not folder.exists()
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module._remove_abandoned.cache_clear()
    yesterday = time.time() - 25 * 3600
    for name in ("prefuse-abcdefgh", "prefuse-new_____", "prefuse-benchmark-ab", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.o").write_bytes(b"code")
        if "new" not in name:
            os.utime(tmp_path / name, (yesterday, yesterday))
    with temporary_folder():
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "prefuse-benchmark-ab", "prefuse-new_____"]


def test_no_place_for_a_library(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(CompileError, match="missing: no place for temporary files: No such file or directory; free space"):
        load(tiny_file)


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a file system of its own")
def test_a_full_folder_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    """With the cache healthy: LLVM would end the process. Code of kernels that was compiled before is good, and stays there."""
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    cache.mkdir()
    fill = f"mount -t tmpfs -o size=64k tmpfs {temporary} && head -c 60k /dev/zero > {temporary}/ballast"
    if subprocess.run([*_MOUNT, fill], check=False, capture_output=True).returncode:
        pytest.skip("this system gives users no file systems of their own")
    command = f'{fill} && exec "$0" -c "$1" "$2"'
    result = subprocess.run(
        [*_MOUNT, command, sys.executable, _COMPILE, str(cache)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    refused, left = result.stdout.splitlines()
    assert refused.startswith(f"refused: {temporary}: no place for temporary files: No space left on device")
    assert left == "left: [] []"
