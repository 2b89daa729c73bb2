"""The command line, through the function that the script calls."""

import json
import sys
from typing import Any

import pytest
from prefuse.compiler.cli import main


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
