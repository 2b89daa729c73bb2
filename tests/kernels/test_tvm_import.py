"""How TVM is imported: it finds torch only where that is loaded already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TVM = """
import threading

def looked_for():
    try:
        import torch
    except ImportError:
        return False
    return True

def look_in_a_thread():
    global of_a_thread
    of_a_thread = looked_for()

here = looked_for()
thread = threading.Thread(target=look_in_a_thread)
thread.start()
thread.join()
"""
_PROGRAM = """
import sys
{before}
import prefuse.kernels
import tvm
print(tvm.here, tvm.of_a_thread, tvm.looked_for(), type(tvm.__spec__.loader).__name__, len(sys.meta_path) - before)
"""


@pytest.mark.parametrize(("first", "is_found"), [("", False), ("import torch", True)])
def test_torch_is_hidden_from_tvm_alone_and_only_while_it_is_imported(first: str, is_found: bool, tmp_path: Path) -> None:
    """With modules of these names that import nothing else."""
    for name, text in (("tvm", _TVM), ("torch", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = _PROGRAM.format(before=f"{first}\nbefore = len(sys.meta_path)")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.stdout.split() == [str(is_found), "True", "True", "SourceFileLoader", "0"]
