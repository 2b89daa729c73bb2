"""Every configuration that a template offers computes the same; what is not legal is ignored, and said to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels import registry
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.problem import problem_of
from prefuse.kernels.registry import build_kernel, candidates, measurable_templates
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import Target

from .attention.attention_cases import attend
from .convolution import test_convolution as first
from .convolution.channels_last_cases import convolution, transposed
from .convolution.test_winograd import fast
from .harness import Case, check, operator, target_of
from .linalg.test_paired_product import product
from .linalg.test_product_rows import projected
from .linalg.test_strassen_matmul import multiplied

rng = np.random.default_rng(11)


def matmul(rows: int, depth: int, columns: int) -> Case:
    """A product by constant weights, of extents that divide no tile."""
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, rows, depth), (3, depth, columns))]
    exact = arrays[0].astype(np.float64) @ arrays[1]
    case = operator("MatMul", *arrays, expected=[exact.astype(np.float32)], rtol=1e-4, atol=1e-4)
    return replace(case, group=replace(case.group, constants=frozenset(["x1"])))


CASES = {
    "matmul": (matmul(13, 19, 37), "avx2"),
    "product of pairs": (product((13, 18), (18, 37)), "avx2"),
    "product_rows": (projected((70, 19), 37), "avx2"),
    "convolution_channels_last": (convolution((2, 10, 9, 11), 37, 3, 1, 1), "avx2"),
    "convolution": (first.convolution((2, 5, 9, 11), 13, 3, 1, 1), "avx2"),
    "transposed convolution": (transposed((2, 9, 6, 5), 21, 3, 2, 1), "avx2"),
    "attention": (attend((1, 2, 17, 33, 20, 12)), "avx2"),
    "narrow convolution": (convolution((1, 10, 9, 11), 37, 3, 2, 1, narrow="xw"), "avx512"),
    "strassen_matmul": (multiplied((37, 45), 83), "avx2"),
    "winograd_channels_last": (fast((2, 10, 9, 11), 37, 3, 1, 1, template=""), "avx2"),
}


def configured(case: Case, **configuration: str) -> Case:
    group = replace(case.group, configuration=configuration)
    return replace(case, group=group, label=f"{case.label} {configuration}", template="")


def built(case: Case, target: Target) -> BuiltKernel:
    kernel = build_kernel(case.group, target)
    assert isinstance(kernel, BuiltKernel)
    return kernel


def variants(case: Case, target: Target) -> Iterator[Case]:
    """Each template with its own choices, and with the second and the last option of each choice."""
    for template in measurable_templates(case.group, target):
        own = configured(case, template=template)
        yield own
        for choice in built(own, target).choices:
            for option in {choice.options[1], choice.options[-1]}:
                yield configured(case, **{TEMPLATE: template, choice.name: option})


@pytest.mark.parametrize("name", CASES)
def test_all_choices_compute_the_same(name: str) -> None:
    case, level = CASES[name]
    target = target_of(level, 3)
    cases = list(variants(case, target))
    assert len(cases) > 2
    for one in cases:
        kernel = built(one, target)
        assert kernel.ignored == ()
        wanted = one.group.configuration
        assert {**{choice.name: choice.taken for choice in kernel.choices}, TEMPLATE: kernel.template}.items() >= wanted.items()
    check(cases, target)
    if name not in ("strassen_matmul", "winograd_channels_last", "product of pairs"):  # tiles and loops change no bit
        assert len({one.got[0].tobytes() for one in cases}) == 1


def test_the_first_option_is_the_models_own() -> None:
    for case, level in CASES.values():
        kernel = built(configured(case), target_of(level))
        assert kernel.choices
        assert all(choice.taken == choice.options[0] for choice in kernel.choices)
        assert all(len(set(choice.options)) == len(choice.options) > 1 for choice in kernel.choices)


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ({"tile": "99x9"}, "tile=99x9 ignored: not one of "),
        ({"tile": ""}, "tile= ignored: not one of "),
        ({"colour": "red"}, "colour=red ignored: there is no such choice here"),
        ({TEMPLATE: "topk"}, "template=topk ignored: is no template for it"),
        ({TEMPLATE: "attention"}, "template=attention ignored: is not two products"),
        ({TEMPLATE: "product_rows"}, "template=product_rows ignored: has 1 products before 0 other operators"),
    ],
)
def test_what_is_not_legal_is_ignored(configuration: dict[str, str], reason: str) -> None:
    case, level = CASES["matmul"]
    own, odd = (built(configured(case, **one), target_of(level)) for one in ({}, configuration))
    assert [text[: len(reason)] for text in odd.ignored] == [reason]
    assert [choice.taken for choice in odd.choices] == [choice.taken for choice in own.choices]


def test_a_template_that_the_model_thinks_slow_can_be_asked_for() -> None:
    case = fast((1, 4, 4, 4), 4, 3, 1, 1, template="")
    target = target_of("avx2")
    assert measurable_templates(case.group, target) == ("convolution_channels_last", "winograd_channels_last")
    assert built(configured(case), target).template == "convolution_channels_last"
    assert built(configured(case, template="winograd_channels_last"), target).template == "winograd_channels_last"


@pytest.mark.parametrize("case", [matmul(29, 19, 37), fast((1, 4, 4, 4), 4, 3, 1, 1, template="")])
def test_the_tile_unit_can_be_asked_for(case: Case) -> None:
    target = target_of("amx-emulated")
    vectors, tiles, *_ = measurable_templates(case.group, target)
    assert tiles in ("matmul_tiles", "convolution_tiles")
    assert built(configured(case), target).template == vectors
    check([replace(configured(case, template=tiles), atol=1e-3)], target)  # two terms have an error of 1e-5


def test_winograd_is_no_rival_where_the_precision_forbids_it() -> None:
    case = convolution((2, 10, 9, 11), 37, 3, 1, 1)
    assert measurable_templates(case.group, target_of("avx2")) == ("convolution_channels_last",)


def test_what_is_predicted_to_take_many_times_the_least_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case, target = fast((1, 64, 5, 1), 64, 3, 1, 1, template=""), Target.parse("cpu:avx2,machine=zen3,threads=1")
    ranked, _ = candidates(case.group, target)
    (winograd, least), (direct, more) = ((name, one.estimate.wall_cycles(target.machine)) for name, one in ranked)
    assert measurable_templates(case.group, target) == (winograd, direct)
    monkeypatch.setattr(registry, "_MOST_TIMES", 0.99 * more / least)
    assert measurable_templates(case.group, target) == (winograd,)


def test_problems_are_told_apart() -> None:
    plain = matmul(13, 19, 37).group
    assert problem_of(plain) == "MatMul(float32[3,13,19],const float32[3,19,37])->float32[3,13,37]"
    renamed = replace(matmul(13, 19, 37).group, precision="bfloat16", configuration={"tile": "1x1"})
    assert problem_of(renamed) == problem_of(plain)
    assert problem_of(replace(plain, constants=frozenset())) != problem_of(plain)
    assert problem_of(matmul(14, 19, 37).group) != problem_of(plain)
    assert problem_of(product((13, 18), (18, 37), narrow="ab").group) != problem_of(product((13, 18), (18, 37), narrow="b").group)
