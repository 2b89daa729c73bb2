"""Each model of the zoo, full size, becomes the groups that its golden file lists; `python -m tests.golden` writes it again."""

from __future__ import annotations

import pytest
from prefuse.examples.models import MODELS
from prefuse.tests.golden.group_counts import FOLDER, golden_file, group_text


@pytest.mark.parametrize("name", MODELS)
def test_groups_are_those_of_the_golden_file(name: str) -> None:
    assert group_text(name) == golden_file(name).read_text()


def test_every_golden_file_has_a_model() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(MODELS)
