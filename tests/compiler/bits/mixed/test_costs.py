"""Steps of programs dealt to units, and casts between units."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from prefuse.compiler.bits.mixed.costs import StepOwners, casts, unit_times
from prefuse.compiler.bits.mixed.formats import FLOATS, FORMATS, REST
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.quantization.quantizer import prepare
from prefuse.compiler.quantization.units import Unit, find_units
from prefuse.runtime.profile import GroupDescription, StepProfile
from prefuse.runtime.target import Target

from ...quantization.models import feed_forward, residual_network

CPU = Target.parse("cpu")


def step(time_us: float, nodes: str = "", computing: str = "") -> StepProfile:
    """A step of some nodes, names apart by spaces."""
    description = GroupDescription(tuple(nodes.split()), computing=tuple(computing.split()))
    return StepProfile("", "", 0, 0, time_us, 0.0, description)


def prepared(model: object) -> tuple[ir.Model, tuple[Unit, ...]]:
    found = prepare(import_model(model), CPU)
    return found, find_units(found)


OWNERS = StepOwners(
    {"p": "first", "q": "second", "q2": "second"},
    {"norm": ("first",), "split": ("first", "second")},
    {"first": 1.0, "second": 3.0},
)


def test_steps_are_dealt_to_what_they_compute() -> None:
    steps = [step(10, "p add", "p"), step(8, "p q", "p q"), step(5, "q2", "q2"), step(2, "norm", "norm"), step(1, "p relu")]
    assert OWNERS.times_us(steps) == {"first": 10 + 2 + 1, "second": 6 + 5, REST: 2}
    assert OWNERS.times_us([step(3)]) == {REST: 3}


def test_what_integers_take_more_beside_is_paid_by_those_who_read_it() -> None:
    """The normalization takes 2 in programs of floats and 3.5 where it rounds rows; the split is shared by its readers."""
    choices = {"first": FORMATS, "second": FLOATS, REST: FLOATS}
    programs = {
        "float32-fast": [step(20, "p", "p"), step(30, "q", "q"), step(2, "norm", "norm"), step(1, "split")],
        "bfloat16": [step(10, "p", "p"), step(15, "q", "q"), step(2, "norm", "norm"), step(1, "split")],
        "int8": [step(5, "p", "p"), step(15, "q", "q"), step(2.5, "norm", "norm"), step(2, "split")],
        "int8-rows": [step(5, "p", "p"), step(15, "q", "q"), step(3.5, "norm", "norm"), step(1, "split")],
    }
    found = unit_times(OWNERS, choices, programs, "bfloat16")
    assert found == {
        ("first", "float32-fast"): 20,
        ("first", "bfloat16"): 10,
        ("first", "int8"): 5 + 0.5 + 0.5,
        ("first", "int8-rows"): 5 + 1.5,
        ("second", "float32-fast"): 30,
        ("second", "bfloat16"): 15,
        (REST, "float32-fast"): 3,
        (REST, "bfloat16"): 3,
    }


def test_owners_of_a_graph() -> None:
    """A normalization is read by the first product; what follows products in their groups is of no unit by itself."""
    model, (first, second) = prepared(feed_forward())
    owners = StepOwners.of(model, (first, second))
    (norm,) = [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert owners.units == {first.name: first.name, second.name: second.name}
    assert owners.readers[str(norm.name)] == (first.name,)
    assert owners.work == {first.name: 32 * 96, second.name: 96 * 32}
    assert owners.readers_of(step(1, f"{norm.name} other")) == (first.name,)


def test_casts_reach_through_what_is_pointwise_and_pools() -> None:
    """From each convolution to those that read it, with the bytes of values that are stored in another form."""
    _, units = prepared(residual_network())
    choices = {unit.name: FORMATS[:3] for unit in units}
    found = casts(units, choices, CPU)
    pairs = {(cast.maker, reader) for cast in found for reader in cast.readers}
    stem, one, two, three, *_ = (unit.name for unit in units)
    assert {(stem, one), (one, two), (two, three)} <= pairs
    assert all(maker != reader for maker, reader in pairs)
    for cast in found:
        table = cast.costs["time"]
        assert [table[place][place] for place in range(3)] == [0, 0, 0], "what is stored anyway costs nothing"
        assert table[2][0] > 0, "float32 beside 8 bits"
        ratio = 4 / 2 if len(cast.readers) > 1 else (4 - 1) / (2 - 1)  # several readers: one may want what is made
        assert table[2][0] == pytest.approx(ratio * table[2][1])
