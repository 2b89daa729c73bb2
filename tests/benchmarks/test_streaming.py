"""benchmarks/streaming.py: what the ratios are of, on calls whose work is counted."""

from __future__ import annotations

from collections import Counter

import pytest
from prefuse.benchmarks.streaming import blocks_of, spreads


def test_the_ceiling_does_the_work_of_one_call_once() -> None:
    """One call and one pass of its copies, whichever takes longer; beside a call that warms up."""
    made = Counter[str]()
    calls = [lambda name=name: made.update([name]) for name in ("compute", "transfer", "streamed", "on demand")]
    blocks = blocks_of(*calls)
    assert len(blocks["together"]()) == 1
    assert made == {"compute": 2, "transfer": 1}
    assert len(blocks["streamed"]()) == 1
    assert made["streamed"] == 2


def test_a_program_slower_than_one_after_the_other_says_so() -> None:
    """GPT-2 of 1,024 tokens once took 2,294 ms, its kernels 2,073 and its copies 188: no ceiling can be far above their sum."""
    times = {"compute": [2.073], "transfer": [0.188], "together": [2.2], "streamed": [2.294], "on demand": [2.4]}
    found = spreads(times)
    assert found["over_serial"].median == pytest.approx(2.294 / 2.261)
    assert found["over_ceiling"].median == pytest.approx(2.294 / 2.2)
    assert found["over_alone"].median == pytest.approx(2.294 / 2.073)
