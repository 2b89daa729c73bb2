"""Each model of the zoo, full size, becomes the groups that its golden file lists; `python -m tests.golden` writes it again."""

from __future__ import annotations

import pytest
from prefuse.examples.models import MODELS
from prefuse.tests.golden.group_counts import FOLDER, Grouped, golden_file, grouped
from prefuse.tests.sample import every, sample_number


@pytest.fixture(scope="module", params=every(2, tuple(MODELS)))
def model(request: pytest.FixtureRequest) -> tuple[str, Grouped]:
    """One model after the other, fused once for all tests; the others tomorrow."""
    return request.param, grouped(request.param)


def test_groups_are_those_of_the_golden_file(model: tuple[str, Grouped]) -> None:
    name, groups = model
    assert groups.text() == golden_file(name).read_text()


def test_every_group_of_one_node_says_why(model: tuple[str, Grouped]) -> None:
    """A pass says it of each pointwise neighbour; where there is none, nothing can be joined."""
    _, groups = model
    assert not groups.unexplained()


def test_every_golden_file_has_a_model() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(MODELS)
    assert {path.stem for path in FOLDER.glob("gpu/*.txt")} == set(MODELS)


@pytest.mark.parametrize("name", every(6, tuple(MODELS)))
def test_groups_of_gpus_are_those_of_the_golden_file(name: str) -> None:
    """Of one maker's GPUs today, of the other's the next time that a model's turn comes."""
    kind = ("cuda", "rocm")[sample_number() // 6 % 2]
    assert grouped(name, kind).text() == golden_file(name, kind).read_text()


def test_launches_of_gpus() -> None:
    """A group is a launch, or two where k is split: few enough, and none that only copies."""
    for name, most in (("bert-base", 95), ("gpt2", 95), ("vit-b16", 95), ("resnet50", 60), ("bigru-linear", 2)):
        lines = golden_file(name, "cuda").read_text().splitlines()
        assert int(lines[0].split()[0]) <= most
        assert not {"Transpose", "Concat", "Slice", "Expand"} & {line.split()[1] for line in lines[1 : lines.index("")]}
