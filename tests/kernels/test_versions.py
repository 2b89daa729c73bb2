"""Kernels for a range of sizes with versions by other templates for some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels import registry
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.groups.group import Group
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.kernels.versions import Version, versions_of, with_versions
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.runtime.target import AMX_EMULATED, Target

from .convolution.channels_last_cases import convolution
from .harness import Case, target_of
from .symbolic import Shape, built_for, run_at, sized

_HINT, _WIDTH, _CHANNELS = 16, 9, 33
_HEIGHTS = (4, 15, 16, 17, 40)
_VECTORS, _TILES = "convolution_channels_last", "convolution_tiles"


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(AMX_EMULATED)


def image(height: int) -> Case:
    return convolution((1, 40, height, _WIDTH), _CHANNELS, 3, 1, 1)


def images(*, configuration: Mapping[str, str] | None = None) -> tuple[Group, Domain]:
    """The group for 4 to 40 rows."""
    case, domain = image(_HINT), Domain([Dim("H", 4, 40)], {"H": _HINT})
    shapes: dict[str, Shape] = {
        name: tuple("H" if dim == _HINT else dim for dim in kind.shape)
        for name, kind in case.group.types.items()
        if name not in case.group.constants
    }
    return replace(sized(case, shapes, domain), configuration=configuration or {}), domain


def point(domain: Domain, height: int) -> int:
    return int(np.flatnonzero(domain.points["H"] == height)[0])


def results(kernel: BuiltKernel, domain: Domain, target: Target) -> list[np.ndarray]:
    """Of all heights, each as it must be within the precision."""
    cases = {height: (replace(image(height), rtol=1e-4, atol=1e-4), {"H": height}) for height in _HEIGHTS}
    run_at(kernel, target, domain, cases)
    return [case.got[0] for case, _ in cases.values()]


def test_a_comparison_chooses_among_versions(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors up to 16 rows, tiles beyond: the bits are those of kernels by each alone."""

    def versions(group: Group, domain: Domain, *_: object) -> tuple[Version, ...]:
        most = 16 * _WIDTH * _CHANNELS
        return Version(_VECTORS, point(domain, 8), most), Version(_TILES, point(domain, 40), None)

    monkeypatch.setattr(registry, "versions_of", versions)
    group, domain = images()
    kernel = built_for(group, target)
    found = results(kernel, domain, target)
    alone = {}
    for template in (_VECTORS, _TILES):
        group, domain = images(configuration={TEMPLATE: template})
        alone[template] = results(built_for(group, target), domain, target)
    assert len(kernel.operands) == len(set(kernel.operands))
    assert "elements" in dict(kernel.refused)[_VECTORS if kernel.template == _TILES else _TILES]
    assert any(not np.array_equal(a, b) for a, b in zip(alone[_VECTORS], alone[_TILES], strict=True))
    for height, got, *others in zip(_HEIGHTS, found, alone[_VECTORS], alone[_TILES], strict=True):
        np.testing.assert_array_equal(got, others[height > 16])


def test_templates_change_where_another_saves_enough() -> None:
    group, domain = images()

    def chosen(times: Mapping[int, Mapping[str, float]]) -> list[tuple[str, int, int | None]]:
        """The versions where from a height on templates take other times; the height of each, and the most."""

        def times_at() -> dict[str, float]:
            height = int(domain.points["H"][domain.at])
            found = next(times[least] for least in sorted(times, reverse=True) if least <= height)
            return dict(sorted(found.items(), key=lambda one: one[1]))

        before = domain.at
        found = versions_of(group, domain, "a", times_at)
        assert domain.at == before
        return [(one.template, int(domain.points["H"][one.at]), one.most) for one in found]

    (first, *_), (second, at, most) = chosen({0: {"a": 1e6, "b": 2e6}, 20: {"a": 5e6, "b": 2e6}})
    assert (first, second, most) == ("a", "b", None)
    assert at >= 20
    assert chosen({0: {"a": 1e6, "b": 2e6}}) == [("a", _HINT, None)]
    assert chosen({0: {"a": 1e6, "b": 2e6}, 20: {"a": 2.2e6, "b": 2e6}}) == [("a", _HINT, None)]  # too little
    assert chosen({0: {"a": 100.0, "b": 200.0}, 20: {"a": 900.0, "b": 200.0}}) == [("a", _HINT, None)]  # of hardly any
    shared = replace(group, shares_weights=True)
    assert len(versions_of(shared, domain, "a", lambda: {"b": 1.0, "a": 1e9})) == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_version_that_is_not_for_all_sizes_is_left_out(is_refused: bool, target: Target) -> None:
    group, domain = images()
    built, alive = built_for(group, target), domain.alive.copy()
    versions = Version(built.template, domain.at, 100), Version("other", point(domain, 40), None)

    def write(_: str) -> BuiltKernel | Refusal:
        assert domain.size("H") > 10  # which cuts the domain
        return Refusal("no") if is_refused else built

    assert with_versions(built, group, target, domain, versions, write) is built
    np.testing.assert_array_equal(domain.alive, alive)
    assert not domain.cuts
