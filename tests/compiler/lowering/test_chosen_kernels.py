"""One answer to which kernel: what passes were told of is what lowering wrote, in every example model.

Each model is compiled for one target in one precision, other ones each day: `PREFUSE_TEST_SAMPLE` from 0 to 8 runs all of them.
"""

from __future__ import annotations

from itertools import product

import pytest
from prefuse.compiler.driver import lower_groups
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import fused_names
from prefuse.compiler.lowering.planning import LoweredGroup
from prefuse.compiler.pipeline import Context, Prediction, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES, named_pipeline
from prefuse.examples.models import MODELS
from prefuse.kernels.registry import candidates
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target
from prefuse.tests.models.exports import Exports
from prefuse.tests.sample import VARIABLE, sample_number

_PRECISIONS: tuple[Precision, ...] = ("float32", "float32-fast", "bfloat16")
_COMBINATIONS = tuple(product(("avx2", "avx512bf16", "amx"), _PRECISIONS))


def combination_of_the_day(name: str) -> tuple[str, Precision]:
    """Level and precision in which a model is compiled: the next ones each day, and others than the model before it."""
    return _COMBINATIONS[(sample_number() + list(MODELS).index(name)) % len(_COMBINATIONS)]


def lowered_with(path: str, target: Target, precision: Precision) -> tuple[list[LoweredGroup], list[Prediction]]:
    """The kernels of a model, and what its passes were told of them."""
    model, context = import_model(path), Context(target, precision=precision)
    infer_facts(model)
    run_pipeline(model, parse_pipeline(named_pipeline(None), PASSES), context)
    lowered, _ = lower_groups(model, target, precision)
    return lowered, context.predictions


def lies_channels_last(item: LoweredGroup) -> bool:
    return any(op.op_type == "Transpose" for op in item.group.ops)


def checkable(told: Prediction, item: LoweredGroup) -> bool:
    """Whether a pass asked of the kernel that is written, and not of one that the graph was not to have.

    assign-formats asks of convolutions as choose-layout is to leave them, channels-last. Where that finds this dearer and leaves
    one channels-first, nothing is said of its kernel.
    """
    return told.pass_name != "assign-formats" or any(op.op_type == "Transpose" for op in item.group.ops)


@pytest.mark.daily
@pytest.mark.parametrize("name", MODELS)
def test_passes_were_told_what_is_written(name: str, exports: Exports) -> None:
    level, precision = combination_of_the_day(name)
    target = Target("cpu", level, 2)
    lowered, predictions = lowered_with(str(exports(name).path), target, precision)
    written = {member: item for item in lowered for member in fused_names(item.node) or (str(item.node.name),)}
    convolutions = [item for item in lowered if any(op.op_type.startswith("Conv") for op in item.group.ops)]
    assert sum(told.pass_name == "choose-layout" for told in predictions) == len(convolutions)
    for told in predictions:
        item = written[told.names[0]]
        if checkable(told, item):
            where = f"{level} {precision} {told.pass_name} {told.names[0]}"
            assert (where, told.choice.template) == (where, item.kernel.template)
    for item in {item.symbol: item for item in lowered}.values():
        ranked, _ = candidates(item.group, target)
        assert not ranked or ranked[0][0] == item.kernel.template


def test_days_in_a_row_hold_all_combinations_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    held = set()
    for number in range(len(_COMBINATIONS)):
        monkeypatch.setenv(VARIABLE, str(number))
        held |= {(name, combination_of_the_day(name)) for name in MODELS}
    assert held == set(product(MODELS, _COMBINATIONS))
