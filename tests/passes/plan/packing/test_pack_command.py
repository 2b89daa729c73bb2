"""`prefuse pack`: blocks in a CSV file get their places."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefuse.compiler.cli import cli, main


def said(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(cli, ["pack", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def packed_json(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return found


def test_pack(tmp_path: Path) -> None:
    """Three blocks of which two live at a time; in the result each has its place, which stays if it is given back."""
    blocks, packed = tmp_path / "blocks.csv", tmp_path / "packed.csv"
    blocks.write_text("id,lower,upper,size\na,0,2,100\nb,1,3,50\nc,2,4,100\n")
    found = packed_json(blocks, "-o", packed)
    assert (found["total_bytes"], found["bound_bytes"], found["blocks"]) == (150, 150, 3)
    rows = [row.split(",") for row in packed.read_text().split()]
    assert rows[0] == ["id", "lower", "upper", "size", "offset"]
    assert {row[0] for row in rows[1:]} == {"a", "b", "c"}
    assert packed_json(packed)["total_bytes"] == 150
    assert "so it is the least" in said(blocks)
    assert "nothing fits" in said(blocks, "--capacity", "149", status=1)


def test_odd_files(tmp_path: Path) -> None:
    """A byte order mark, columns in another order, blank lines, times below 0 and far apart, no block at all."""
    blocks, packed = tmp_path / "blocks.csv", tmp_path / "packed.csv"
    blocks.write_bytes("\ufeffsize, upper ,id,lower\r\n4,2,a,-3\r\n\r\n0,9,b,0\r\n7,5,c,1\r\n".encode())
    assert packed_json(blocks, "-o", packed)["total_bytes"] == 11
    assert packed.read_text().splitlines()[0] == "size,upper,id,lower,offset"
    blocks.write_text(f"lower,upper,size\n{-(2**60)},{2**60},{2**59}\n0,1,3\n")
    assert packed_json(blocks)["total_bytes"] == 2**59 + 3
    blocks.write_text("id,lower,upper,size\n")
    assert packed_json(blocks, "-o", packed, "--capacity", "0")["total_bytes"] == 0
    assert packed.read_text().split() == ["id,lower,upper,size,offset"]


def test_quick_packings_are_not_searched_for(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks.csv"
    blocks.write_text("lower,upper,size,offset\n0,4,8,0\n2,5,8,\n")
    assert [packed_json(blocks, "--effort", effort)["nodes"] > 0 for effort in ("quick", "default", "max")] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lower,upper\n0,1\n", "has no column size"),
        ("lower,upper,size\n0,1,big\n", "line 2.*no whole numbers"),
        ("lower,upper,size\n0,1,2\n3,3,1\n", "line 3.*is no block"),
        ("lower,upper,size\n0,1,-2\n", "is no block"),
        ("lower,upper,size\n0,1\n", "no whole numbers"),
        ("lower,upper,size,offset\n0,2,8,0\n1,3,8,4\n", "pinned to the same bytes"),
        (f"lower,upper,size\n0,1,{1 << 61}\n", "above 2.60"),
        ("", "has no column lower"),
        ("lower,upper,size,size\n0,1,2,3\n", "has the column size 2 times"),
        ("lower,upper,size\n0,1,2,3\n", "line 2: 4 cells for 3 columns"),
        ("lower,upper,size\n\n0,1,2\n\n3,3,1\n", "line 5.*is no block"),
        ('lower,upper,size\n0,1,"2\n', "is no CSV file"),
        ("lower;upper;size\n0;1;2\n", "has no column lower"),
    ],
)
def test_blocks_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    blocks = tmp_path / "blocks.csv"
    blocks.write_text(text)
    monkeypatch.setattr(sys, "argv", ["prefuse", "pack", str(blocks)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
