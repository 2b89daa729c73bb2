"""Example models on simulated GPUs, some of the ways a day; `python -m tests.gpu.example_models` runs all of them."""

from __future__ import annotations

import pytest
from prefuse.runtime.precision import Precision

from ..sample import every
from .example_models import CASES, PRECISIONS, error_of
from .simulator import need_compiler

_OF_A_DAY = 4


@pytest.mark.daily
@pytest.mark.parametrize(("name", "precision", "target"), every(len(CASES) // _OF_A_DAY, CASES))
def test_it_keeps_its_promise(name: str, precision: Precision, target: str) -> None:
    need_compiler()
    assert error_of(name, precision, target) < PRECISIONS[precision]
