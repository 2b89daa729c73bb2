"""The command line, through the function that the script calls."""

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser
from prefuse.compiler.cli import main

STATIC = """<ir_version: 8, opset_import: ["": 18]> main (float[2,4] x, float[4] b) => (float[2,4] y) {
  z = Add(x, b)
  i = Identity(z)
  y = Relu(i)
}"""


class Terminal:
    """Runs the command line and keeps what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, status: int = 0) -> str:
        self._monkeypatch.setattr(sys, "argv", ["prefuse", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        output = self._capsys.readouterr()
        assert exit_info.value.code == status, output
        return output.out if status == 0 or "--json" in arguments else output.out + output.err

    def json(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        found = json.loads(self(*arguments, "--json", status=status))
        assert isinstance(found, dict)
        return found


@pytest.fixture
def prefuse_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def cli_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests of the command line."""
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with the model STATIC."""
    onnx.save(parser.parse_model(STATIC), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"
