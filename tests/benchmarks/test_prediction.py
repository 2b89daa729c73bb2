"""benchmarks/prediction.py: what is counted of predictions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from prefuse.benchmarks.prediction.errors import Found, GroupError, family_of, measured_share, summary, tables
from prefuse.compiler.predictor.prediction import Prediction
from prefuse.kernels.registry import TEMPLATES

GROUPS = (
    GroupError("a", "matmul_tiles", "product", 110.0, 100.0, 105.0),
    GroupError("b", "matmul", "product", 60.0, 100.0),
    GroupError("c", "winograd_channels_last", "convolution", 1.0, 2.0),
)
PROGRAMS = [
    Found("net", "bfloat16", 1, 200.0, 180.0, 210.0, 64, 64, GROUPS),
    Found("other", "bfloat16", 1, 100.0, 120.0, 0.0, 64, 64, ()),
    Found("net", "float32", 1, 100.0, 100.0, 0.0, 64, 64, GROUPS[2:]),
]


def test_errors_are_counted_by_precision_and_family() -> None:
    rows = {(precision, what): row for precision, what, *row in summary(PROGRAMS)}
    assert rows["bfloat16", "product"] == [2, pytest.approx(0.25), pytest.approx(0.4), 0.15]
    assert rows["bfloat16", "convolution"][:2] == [1, pytest.approx(0.5)]
    assert rows["bfloat16", "program"] == [2, pytest.approx(0.15), pytest.approx(0.2), 0.10]
    assert rows["bfloat16", "program, from runs"] == [1, pytest.approx(0.05), pytest.approx(0.05), 0.05]
    assert rows["float32", "program"][1] == 0
    assert ("float32", "program, from runs") not in rows


def test_every_template_has_the_family_of_its_operator() -> None:
    families = {template.name: family_of(template.name) for template in TEMPLATES}
    assert families["strassen_matmul"] == families["product_rows"] == "product"
    assert families["strassen_convolution"] == families["winograd_channels_last"] == "convolution"
    assert families["recurrent"] == "recurrence"
    assert families["attention"] == "attention"
    assert families["pooling_channels_last"] == families["rows"] == "rest"


def test_what_was_compiled_from_another_plan_says_nothing_of_predictions() -> None:
    """But its launches do, that have the same kernel; and a run on whose way the clock changed says nothing at all."""
    other, restless = replace(PROGRAMS[0], is_same_plan=False), replace(PROGRAMS[0], change=0.2)
    rows = {what: row for _, what, *row in summary([other, PROGRAMS[1], restless])}
    assert rows["product"][0] == 2
    assert rows["program"][:2] == [1, pytest.approx(0.2)]
    assert "program, from runs" not in rows
    programs, _ = tables([other])
    assert list(programs.columns[3].cells) == ["other plan"]


def test_a_prediction_is_from_runs_where_most_of_its_time_is() -> None:
    steps = [SimpleNamespace(time_us=9.0, source="measured"), SimpleNamespace(time_us=1.0, source="scaled")]
    assert measured_share(cast("Prediction", SimpleNamespace(steps=steps))) == pytest.approx(0.9)
    assert measured_share(cast("Prediction", SimpleNamespace(steps=[]))) == 0
