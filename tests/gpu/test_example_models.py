"""One of the example models in one precision a day on a simulated GPU; `python -m tests.gpu.example_models` runs all of them."""

from __future__ import annotations

import pytest

from ..sample import every
from .example_models import CASES, PRECISIONS, TARGETS, error_of
from .simulator import need_compiler


@pytest.mark.parametrize(("name", "precision"), every(len(CASES), CASES))
def test_it_keeps_its_promise(name: str, precision: str) -> None:
    need_compiler()
    for target in TARGETS:
        promise = next(error for known, error in PRECISIONS.items() if known == precision)
        assert error_of(name, next(known for known in PRECISIONS if known == precision), target) < promise
