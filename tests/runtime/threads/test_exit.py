"""Processes that end while daemon threads call programs: what these read from files stays as long as the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import prefuse
import pytest
from prefuse.tests.models.chains import chain_input, product_chain
from prefuse.tests.models.skips import skip_chain, skip_input

_FOREVER = """
import atexit, time
def call_on():
    seen, end = calls, time.monotonic() + 5
    while calls < seen + 20 and thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    print(calls - seen)
atexit.register(call_on)  # before whatever prefuse has, so that it is called after it
import sys, threading, numpy as np, prefuse
net, x, calls = prefuse.load(sys.argv[1]), np.load(sys.argv[2]), 0
def forever():
    global calls
    while True:
        net(x)
        calls += 1
thread = threading.Thread(target=forever, daemon=True)
thread.start()
while not calls:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["mapped", "streamed", "spilled"])
def test_files_stay_at_exit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))
    model, x = (skip_chain(), skip_input()) if kind == "spilled" else (product_chain(), chain_input())
    prefuse.compile(model, threads=2, memory_limit=None if kind == "mapped" else "60%")
    (path,) = tmp_path.rglob("*.prefuse")
    assert bool(list(path.parent.glob("*.constant"))) is (kind == "mapped")
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, "-c", _FOREVER, str(path), str(tmp_path / "x.npy")]
    result = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert result.stderr == ""
    assert int(result.stdout) >= 20
