"""What `prefuse memory` shows: the same bytes as the program's, the same times as the prediction's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from prefuse.compiler.cli import main
from prefuse.runtime.report import size
from prefuse.tests.models.chains import product_chain


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chain") / "chain.onnx"
    ir.save(product_chain(), path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["prefuse", "memory", *map(str, arguments), "--threads", "2"])
    with pytest.raises(SystemExit) as info:
        main()
    output = capsys.readouterr()
    assert info.value.code == 0, output
    return output.out


def test_a_measured_view_within_a_limit(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture = tmp_path / "view.html", tmp_path / "view.png"
    arguments = [chain, "--memory-limit", "60%", "--measure", "--runs", 3, "--html", page, "--png", picture, "--json"]
    found: dict[str, Any] = json.loads(run(monkeypatch, capsys, *arguments))
    memory = found["memory"]
    assert memory["arena_bytes"] == found["arena_bytes"] >= found["bound_bytes"]
    assert memory["arena_bytes"] + memory["weights_bytes"] <= found["limit_bytes"]
    weights = [one for one in found["buffers"] if one["kind"] == "weight" and not one["name"].endswith(" before")]
    assert len(weights) == len([bar for bar in found["predicted"] if bar["kind"] == "copy"])
    assert len(weights) == len([bar for bar in found["measured"] if bar["kind"] == "copy"])
    assert all(0 <= bar["begin_us"] <= bar["end_us"] for bar in found["predicted"])
    assert max(bar["end_us"] for bar in found["predicted"]) == pytest.approx(found["predicted_us"])
    live = [(one["first"], one["last"], one["offset"], one["offset"] + one["size_bytes"]) for one in found["buffers"]]
    assert max(end for *_, end in live) <= found["arena_bytes"]
    text = page.read_text()
    assert f"a call copies {size(sum(one['size_bytes'] for one in weights))} of them" in text
    assert "<svg" in text
    assert all(one["name"].replace("&", "&amp;") in text for one in weights)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_limit(chain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(monkeypatch, capsys, chain)
    assert "no order of bytes in the arena takes less than" in text
    assert "waiting for copies" not in text
    assert "What lives at the peak" in text
