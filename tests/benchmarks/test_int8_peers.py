"""benchmarks/int8_peers.py: who is compared with whom, and who is missing."""

from __future__ import annotations

import pytest
from prefuse.benchmarks.harness import Measurement, Result
from prefuse.benchmarks.int8_peers import verdict


def row(engine: str, *round_ms: float, error: float = 1e-2, failure: str = "") -> Result:
    return Result("net", engine, round_ms=round_ms, error=error, failure=failure)


def test_the_best_peer_is_chosen_by_what_is_reported() -> None:
    """By rounds: the medians of all calls of a peer that was lucky for a while would choose it."""
    ours, rough = row("prefuse-int8", 1.0, 2.0, 4.0), row("prefuse-int8-rows", 0.5, 1.0, 2.0, error=2e-2)
    steady, lucky = row("openvino-int8", 1.5, 3.0, 6.0), row("onnxruntime-int8", 1.9, 2.0, 9.0)
    found = verdict("net", Measurement([ours, rough, steady, lucky, row("prefuse-bf16", 2.0, 4.0, 8.0)]))
    assert found is not None
    assert (found.ours, found.peer, found.failed) == ("prefuse-int8", "openvino-int8", ())
    assert found.speed.median == pytest.approx(1.5)
    assert found.speed_over_bf16 is not None
    assert found.speed_over_bf16.median == pytest.approx(2.0)


def test_peers_that_failed_are_named() -> None:
    """One of them might have been the best."""
    found = verdict(
        "net",
        Measurement([row("prefuse-int8", 1.0), row("openvino-int8", 2.0), row("onnxruntime-int8-dynamic", failure="shapes")]),
    )
    assert found is not None
    assert found.failed == ("onnxruntime-int8-dynamic",)
    assert found.speed_over_bf16 is None
