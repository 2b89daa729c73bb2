"""What templates say before they write: estimates obey the machine's numbers, and the cheapest candidate is taken."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from prefuse.kernels.codegen.builder import KernelBuilder
from prefuse.kernels.cost.convolution import Convolution, channels_last_cycles, channels_last_tile, in_words
from prefuse.kernels.cost.estimate import Estimate, floors
from prefuse.kernels.cost.pointwise import LoopBody
from prefuse.kernels.cost.product import attention_cycles, product_estimate
from prefuse.kernels.cost.register_tile import Step, ranked_tiles
from prefuse.kernels.cost.strassen import strassen_choices
from prefuse.kernels.formats.format import U8_DOT, U8_MADD, Format
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.registry import build_kernel, candidates
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.machine import Machine, names, row
from prefuse.runtime.target import Target

from ..convolution.channels_last_cases import convolution
from ..harness import operator
from ..linalg.test_matmul import product

ZEN3, ZEN5 = row("zen3", 8), row("zen5", 16)


@pytest.mark.parametrize("machine", [row(name, 8) for name in names()], ids=lambda machine: machine.name)
@pytest.mark.parametrize("size", [(1, 768, 768), (24, 512, 1024), (128, 3072, 768), (1000, 17, 5)])
def test_no_product_is_faster_than_its_floors(machine: Machine, size: tuple[int, int, int]) -> None:
    one, (m, n, k) = product_estimate(*size, machine), size
    operations = m * n * k / (machine.multiply_adds * machine.lanes)
    assert one.wall_cycles(machine) >= max(operations, 4 * n * k / machine.memory_bytes)
    assert one.wall_cycles(machine, 2) >= max(operations / 2, 4 * n * k / machine.shared_memory_bytes)
    assert one.wall_cycles(machine, 1, 1 << 20) <= one.wall_cycles(machine)  # weights that a cache holds


def test_time_is_that_of_the_level_that_holds_the_bytes() -> None:
    near, far = Estimate(0.0, 0, streamed_bytes=1 << 14), Estimate(0.0, 0, streamed_bytes=1 << 28)
    assert near.wall_cycles(ZEN3) - ZEN3.launch_cycles == (1 << 14) / ZEN3.l1.bytes_per_cycle
    assert far.wall_cycles(ZEN3) - ZEN3.launch_cycles == (1 << 28) / ZEN3.memory_bytes
    weights = Estimate(0.0, 0, constant_bytes=1 << 14)
    assert weights.wall_cycles(ZEN3, 1, inf) == ZEN3.launch_cycles + (1 << 14) / ZEN3.memory_bytes


def test_pointwise_operators_cost_their_operations() -> None:
    x = np.ones((64, 1000), np.float32)
    relu, exp = (operator(name, x).group for name in ("Relu", "Exp"))
    assert 8 * floors(relu, ZEN3).cycles < floors(exp, ZEN3).cycles
    assert floors(relu, ZEN3).streamed_bytes == 2 * 4 * 64_000


def test_choices_change_as_the_numbers_of_the_machine_say() -> None:
    """Of the same problems on two cores, and on one whose numbers are changed one by one."""
    tiles = [ranked_tiles(128, 768, 768, one, shifted_loads=False, b_padded=True, streams_b=True)[0] for one in (ZEN3, ZEN5)]
    assert tiles[0].rows * tiles[0].vectors + tiles[0].vectors < ZEN3.registers < tiles[1].rows * tiles[1].vectors
    # Rows of 4 KiB share a set: 14 of them where L1 has 12 ways and panels come from afar, half as many where it has 8.
    assert channels_last_tile(28, 1024, 9216, 1024, ZEN5)[0] == 14
    assert channels_last_tile(28, 1024, 9216, 1024, replace(ZEN5, l1=replace(ZEN5.l1, ways=8, size_bytes=32 << 10)))[0] <= 7
    # Strassen's weights have up to three times the bytes: worth it where memory keeps up with what is multiplied.
    size, slow = (128, 3072, 768), replace(ZEN5, memory_bytes=0.3)
    for machine, is_worth in ((ZEN5, True), (slow, False)):
        strassen, plain = strassen_choices(*size, machine)[0].estimate, product_estimate(*size, machine)
        assert (strassen.wall_cycles(machine) < plain.wall_cycles(machine)) == is_worth


@pytest.mark.parametrize("machine", ["zen3", "haswell", "generic"])
def test_the_cheapest_candidate_is_written(machine: str) -> None:
    """And the others say by how much they are dearer."""
    target = Target.parse(f"cpu:avx2,machine={machine},threads=1")
    for case in (product((128, 768), (768, 3072)), convolution((1, 256, 14, 14), 256, 3, 1, 1), convolution((1, 3, 8, 8), 4, 3)):
        group = replace(case.group, precision="float32-fast")
        ranked, refused = candidates(group, target)
        times = [one.estimate.wall_cycles(target.machine) for _, one in ranked if not one.estimate.is_floor]
        assert times == sorted(times)
        built = build_kernel(group, target)
        assert isinstance(built, BuiltKernel)
        assert built.template == ranked[0][0]
        assert built.estimate == ranked[0][1].estimate
        reasons = dict(built.refused)
        assert set(reasons) == {*refused, *(name for name, _ in ranked[1:])}
        assert all("cycles, and what was taken" in reasons[name] for name, _ in ranked[1:])


def test_pairs_are_multiplied_at_once_by_dot_products_alone() -> None:
    size = (128, 768, 768)
    plain, pairs, dots = (
        product_estimate(*size, ZEN5, k_pack=k_pack, unit=unit) for k_pack, unit in ((1, "fma"), (2, "fma"), (2, "dot"))
    )
    assert dots.cycles < 0.6 * plain.cycles < 0.9 * pairs.cycles
    assert (plain.unit, pairs.unit, dots.unit) == ("fma", "fma", "dot")


def test_words_of_several_neighbours_are_loaded_once() -> None:
    """A word is one load, of which two numbers are made."""
    core = replace(ZEN3, sum_latency=1)
    plain, pairs = Step().cycles(core, 1, 4), Step(products=2).cycles(core, 1, 4)
    assert 2 * plain < pairs < 2.5 * plain
    assert 2.2 * Step().cycles(ZEN3, 6, 2) < Step(products=2).cycles(ZEN3, 6, 2) < 2.6 * Step().cycles(ZEN3, 6, 2)


def test_weights_that_one_tile_reads_are_counted_where_they_lie() -> None:
    one, two = (product_estimate(rows, 1536, 512, ZEN3) for rows in (1, 24))
    assert one.constants_seen < two.constants_seen
    assert one.cycles < 4 * 1536 * 512 / ZEN3.l2.bytes_per_cycle  # no panel comes from L2 again
    assert one.wall_cycles(ZEN3) >= 4 * 1536 * 512 / ZEN3.memory_bytes


def test_attention_is_counted_by_the_format_of_its_products() -> None:
    size, zen4 = (128, 128, 64, 64), row("zen4", 16)
    plain = attention_cycles(12, size, zen4, LoopBody(2))
    pairs = attention_cycles(12, size, zen4, LoopBody(2), k_pack=2, unit="dot", is_rough=True)
    assert 0.45 * plain < pairs < 0.65 * plain
    assert 0.5 * plain < attention_cycles(12, size, zen4, LoopBody(2), seen=0.5) < 0.6 * plain  # what is packed is packed whole
    assert attention_cycles(12, size, zen4, LoopBody(2), is_packed=False) < plain


def test_rows_of_a_table_in_memory_come_one_by_one() -> None:
    core = replace(ZEN3, place_cycles=1600.0)
    estimate = Estimate(0.0, 0, constant_bytes=1 << 10, places=10)
    assert estimate.wall_cycles(core, 1, inf) - estimate.wall_cycles(ZEN3, 1, inf) == 16_000
    assert estimate.wall_cycles(core, 1, 1 << 20) == estimate.wall_cycles(ZEN3, 1, 1 << 20)


def test_operations_beside_multiply_adds_shorten_loops() -> None:
    zen4 = row("zen4", 16)
    assert LoopBody(20).cycles(zen4) == 20 / zen4.operations < LoopBody(20).cycles(replace(zen4, operations=0.0)) == 20


@pytest.mark.parametrize("machine", [row(name, 8) for name in names()], ids=lambda machine: machine.name)
@pytest.mark.parametrize("form", [U8_DOT, U8_MADD], ids=lambda form: form.name)
def test_products_of_bytes_take_as_long_in_a_convolution(form: Format, machine: Machine) -> None:
    """Whatever dot products of bfloat16 the core has: a 1x1 window is a product."""
    one = Convolution.of_dimensions((1, 1, 256, 128), (28, 28), (28, 28), (1, 1), (1, 1), (1, 1), has_pads=False, element_bytes=1)
    core = form.machine(machine)
    convolution = channels_last_cycles(in_words(one, form.k_pack), core)
    plain = product_estimate(784, 128, 256, core, k_pack=form.k_pack, unit=form.unit).cycles
    assert plain >= 784 * 128 * 64 * (2 if form is U8_MADD else 1) / (machine.multiply_adds * machine.lanes)
    assert 0.9 * plain < convolution < 1.1 * plain


def test_what_cannot_be_written_is_no_candidate() -> None:
    """Templates without a model of their own say so before their floors are ranked."""
    ranked, refused = candidates(product((8, 16), (16, 32)).group, Target.parse("cpu:avx2"))
    assert "gathered_matmul" not in dict(ranked)
    assert refused["gathered_matmul"] == "is not a product by gathered matrices"


def test_products_of_a_panel_take_their_share_of_l2() -> None:
    """Strassen's products of a panel are of fewer rows at once where L2 is 512 KiB (Zen 3) than where it is 1 MiB (Zen 4)."""
    group = replace(product((1024, 768), (768, 768)).group, precision="float32-fast", configuration={TEMPLATE: "strassen_matmul"})
    scratch = {}
    for machine in ("zen3", "zen4"):
        built = build_kernel(group, Target.parse(f"cpu:avx2,machine={machine},threads=1"))
        assert isinstance(built, BuiltKernel)
        assert (built.template, built.ignored) == ("strassen_matmul", ())
        scratch[machine] = built.workspace_bytes
    assert scratch["zen3"] < scratch["zen4"]


def test_a_tile_whose_loads_exceed_its_multiply_adds_is_worth_less() -> None:
    """14x1 makes 15 loads for 14 multiply-adds, 5x2 seven for ten: the second wins where neither wastes edges."""
    (best, *_) = ranked_tiles(70, 256, 2304, ZEN3, shifted_loads=False, b_padded=True)
    assert best.vectors == 2


def test_threads_wait_for_work_that_takes_longer_than_waking_them() -> None:
    slow = replace(ZEN3, wake_cycles=4 * ZEN3.wake_cycles)
    assert [KernelBuilder(machine, 2).threads_for(20_000) for machine in (ZEN3, slow)] == [2, 1]
    assert KernelBuilder(slow, 2).threads_for(80_000) == 2


def test_floors_of_products_count_each_multiply_add() -> None:
    """A batch takes as long as its products one after the other."""
    a, b = np.ones((6, 48, 40), np.float32), np.ones((6, 40, 56), np.float32)
    one, batch = (floors(operator("MatMul", *pair).group, ZEN3).cycles for pair in ((a[0], b[0]), (a, b)))
    assert batch == pytest.approx(6 * one)
    assert one == pytest.approx(48 * 40 * 56 / (ZEN3.multiply_adds * ZEN3.lanes))
    turned = operator("Gemm", np.ascontiguousarray(a[0].T), b[0], transA=1).group
    assert floors(turned, ZEN3).cycles == pytest.approx(one)
