"""Launches that wait for the tile unit, and programs that do without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from prefuse.compiler.driver import PlannedModel, plan_model
from prefuse.compiler.estimates.launches import predicted_us
from prefuse.compiler.estimates.tile_unit import AWAKE_US, target_without, uses_tiles, waiting_us
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.options import parse_options
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import AMX_EMULATED, Target

AMX = Target.parse("cpu:amx,threads=1")
WAKE_US = AMX.machine.tile_wake_cycles / AMX.machine.ghz / 1e3
TILES, VECTORS = (BuiltKernel(name, None, (), 0, multiplies=kind) for name, kind in (("a", "tiles1"), ("b", "float32")))


@pytest.mark.parametrize(
    ("launches", "waiting"),
    [
        ([(TILES, 1.0), (TILES, 1.0)], [0]),
        ([(VECTORS, 1.0), (TILES, 1.0), (VECTORS, AWAKE_US - 1), (TILES, 1.0)], [1]),
        ([(TILES, 1.0), (VECTORS, AWAKE_US / 2), (VECTORS, AWAKE_US / 2), (TILES, 1.0)], [0, 3]),
        ([(VECTORS, 100.0)], []),
    ],
)
def test_the_first_launch_of_a_call_waits_and_those_after_a_pause(
    launches: list[tuple[BuiltKernel, float]], waiting: list[int]
) -> None:
    found = list(waiting_us(launches, AMX))
    assert [number for number, wait_us in enumerate(found) if wait_us] == waiting
    assert set(found) <= {0.0, WAKE_US}


def test_a_unit_in_software_is_never_off() -> None:
    assert list(waiting_us([(TILES, 1.0)], Target.parse(f"cpu:{AMX_EMULATED},threads=1"))) == [0.0]


def planned(products: int, rows: int, precision: str, target: str = "cpu:amx") -> PlannedModel:
    """A chain of products by 64 x 64 with a Tanh behind each."""
    nodes = " ".join(f"h{n} = MatMul(y{n}, w{n}) y{n + 1} = Tanh(h{n})" for n in range(products))
    weights = ", ".join(f"float[64,64] w{n} = {{{', '.join(['0.125'] * 4096)}}}" for n in range(products))
    text = f"main (float[{rows},64] y0) => (float[{rows},64] y{products}) <{weights}> {{ {nodes} }}"
    model = import_model(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}'))
    return plan_model(model, parse_options(target, precision, {"threads": 1}))


@pytest.mark.parametrize(
    ("products", "rows", "precision", "has_tiles"),
    [
        (1, 64, "float32-fast", False),  # 4.5 us by vectors; 3.6 by tiles, and 2.5 until they are on
        (1, 512, "float32-fast", True),
        (4, 128, "bfloat16", True),  # all wait once
    ],
)
def test_programs_that_hardly_use_the_unit_do_without_it(products: int, rows: int, precision: str, has_tiles: bool) -> None:
    found = planned(products, rows, precision).lowered
    assert any(uses_tiles(item.kernel) for item in found) == has_tiles
    if not has_tiles:  # where the unit is never off tiles are faster
        assert any(uses_tiles(item.kernel) for item in planned(products, rows, precision, f"cpu:{AMX_EMULATED}").lowered)


def test_what_a_user_has_tuned_stays() -> None:
    lowered = planned(1, 64, "float32-fast", f"cpu:{AMX_EMULATED}").lowered
    assert any(uses_tiles(item.kernel) for item in lowered)
    assert target_without(lowered, AMX) is not None
    tuned = [replace(item, group=replace(item.group, configuration={"template": "matmul_tiles"})) for item in lowered]
    assert target_without(tuned, AMX) is None


def test_waiting_is_part_of_a_prediction() -> None:
    lowered = planned(1, 512, "float32-fast").lowered
    asleep, awake = (replace(AMX, machine=replace(AMX.machine, tile_wake_cycles=cycles)) for cycles in (7500.0, 0.0))
    (late,), (early,) = ([*predicted_us(lowered, target).values()] for target in (asleep, awake))
    assert late - early == pytest.approx(7500 / AMX.machine.ghz / 1e3)


def test_pieces_of_a_weight_have_the_kernel_of_the_whole() -> None:
    """By the unit the whole alone would be slower; its pieces would not."""
    text = "main (float[12,512] x) => (float[12,256] y) { h = MatMul(x, w) y = Tanh(h) }"
    weights = onnx.numpy_helper.from_array(np.full((512, 256), 0.125, np.float32), "w")
    has_tiles = []
    for more in ({}, {"memory_limit": "75%"}):
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}')
        model.graph.initializer.append(weights)
        found = plan_model(import_model(model), parse_options("cpu:amx", "bfloat16", {"threads": 1, **more}))
        has_tiles.append([uses_tiles(item.kernel) for item in found.lowered])
    assert len(has_tiles[1]) > len(has_tiles[0]), "the limit cuts nothing"
    assert not any(has_tiles[0] + has_tiles[1])
