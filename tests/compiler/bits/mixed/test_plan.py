"""Plans of bits: written, edited, read again, applied to units, and refused where they do not fit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from prefuse.compiler.bits.mixed.formats import FLOATS, REST, candidates, placed, uniform
from prefuse.compiler.bits.mixed.plan import BitsPlan, plan_of
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.quantization.quantizer import Calibrated, calibrate
from prefuse.runtime.errors import OptionError
from prefuse.runtime.target import Target

from ...quantization.models import batches, feed_forward, residual_network


@cache
def calibrated() -> Calibrated:
    model = import_model(feed_forward())
    return calibrate(model, batches(model, 4), Target.parse("cpu"))


def formats(plan: BitsPlan, found: Calibrated | None = None) -> dict[str, str]:
    known = found or calibrated()
    return plan.formats(known.units, candidates(known))


def test_written_and_read(tmp_path: Path) -> None:
    plan = BitsPlan({"a": "int8", REST: "bfloat16"}, {"*b*": "float32-fast"}, {"error": 1e-3})
    plan.save(tmp_path / "plan.json")
    assert plan_of(tmp_path / "plan.json") == plan
    assert plan_of(str(tmp_path / "plan.json")) == plan
    assert plan_of(json.loads(plan.as_text())) == plan
    assert plan_of(plan) is plan
    assert plan_of(None) == BitsPlan({})


def test_patterns_alone_are_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"*attention*": "bfloat16"}')
    assert plan_of(tmp_path / "plan.json") == plan_of({"*attention*": "bfloat16"}) == BitsPlan({}, {"*attention*": "bfloat16"})


def test_later_patterns_come_after_earlier_ones_and_after_units() -> None:
    first, second = (unit.name for unit in calibrated().units)
    plan = BitsPlan({first: "bfloat16"}, {"*": "float32-fast", second: "int8-rows"})
    assert formats(plan) == {first: "float32-fast", second: "int8-rows", REST: "float32-fast"}
    assert formats(BitsPlan({first: "int8"})) == {first: "int8"}


def test_float32_is_what_a_search_may_end_with(tmp_path: Path) -> None:
    """It is written, read, and compiled, though never searched for."""
    wanted = dict.fromkeys(candidates(calibrated()), "float32")
    BitsPlan(wanted).save(tmp_path / "plan.json")
    assert formats(plan_of(tmp_path / "plan.json")) == formats(BitsPlan({}, {"*": "float32"})) == wanted
    model = placed(calibrated(), wanted, "bfloat16")
    assert {node.metadata_props.get("prefuse.precision") for node in model.graph} == {"float32"}


def test_patterns_set_those_units_that_can_have_the_format() -> None:
    """The stem of three channels has no integer kernel, and images have no rows."""
    model = import_model(residual_network())
    found = calibrate(model, batches(model, 4), Target.parse("cpu"))
    legal = candidates(found)
    named = formats(BitsPlan({}, {"*": "int8"}), found)
    assert named
    assert set(named) == {name for name, forms in legal.items() if "int8" in forms}
    assert len(named) < len(found.units)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (BitsPlan({"nowhere": "int8"}), "no such unit"),
        (BitsPlan({}, {"*attention*": "int8"}), "no unit matches"),
        (BitsPlan({REST: "int8"}), "cannot be int8 on this target; it can be float32-fast, bfloat16"),
    ],
)
def test_what_does_not_fit_the_model(plan: BitsPlan, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        formats(plan)


def test_what_no_plan_is(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(OptionError, match="cannot be read"):
        plan_of(path)
    path.write_text("{")
    with pytest.raises(OptionError, match="no JSON"):
        plan_of(path)
    path.write_text("[]")
    with pytest.raises(OptionError, match="holds no plan"):
        plan_of(path)
    with pytest.raises(OptionError, match="version 9"):
        plan_of({"prefuse_bits": 9})
    with pytest.raises(OptionError, match="did you mean 'int8'"):
        plan_of({"*": "int9"})
    with pytest.raises(OptionError, match="no formats by names"):
        plan_of({"units": ["a"]})
    with pytest.raises(OptionError, match="int given"):
        plan_of(3)
    with pytest.raises(OptionError, match="cannot be written"):
        BitsPlan({}).save(tmp_path / "nowhere" / "plan.json")


def test_one_format_for_all_that_can_have_it() -> None:
    choices = {"a": (*FLOATS, "int8"), "b": (*FLOATS, "int8", "int8-rows"), "c": FLOATS, REST: FLOATS}
    assert uniform(choices, "int8-rows", "bfloat16") == {"a": "int8", "b": "int8-rows", "c": "bfloat16", REST: "bfloat16"}
    assert uniform(choices, "float32-fast", "bfloat16") == dict.fromkeys(choices, "float32-fast")
    assert uniform({**choices, "a": ("int8",)}, "bfloat16", "bfloat16")["a"] == "int8", "what a plan has fixed stays"


def test_formats_are_in_the_graph() -> None:
    """Of the float units as metadata where they are not the program's, of the others as QuantizeLinear and DequantizeLinear."""
    first, second = (unit.name for unit in calibrated().units)
    model = placed(calibrated(), {first: "int8", second: "float32-fast", REST: "bfloat16"}, "bfloat16")
    precisions = {node.name: node.metadata_props.get("prefuse.precision") for node in model.graph}
    assert {name: one for name, one in precisions.items() if one} == {second: "float32-fast"}
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 1
    exact = placed(calibrated(), {first: "float32-fast", second: "bfloat16", REST: "float32-fast"}, "bfloat16")
    assert {node.metadata_props.get("prefuse.precision") for node in exact.graph if node.name != second} == {"float32-fast"}
    assert not any(node.op_type == "QuantizeLinear" for node in exact.graph)
