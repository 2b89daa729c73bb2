"""What tests share: the number of the run's sample, torch's table of translations to ONNX, and the exports of our models."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Hashable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prefuse.tests.cpu_seconds import CpuSeconds
from prefuse.tests.one_thread import limit_pools, limit_sessions
from prefuse.tests.same_numbers import begin_again
from prefuse.tests.sample import SHARES, VARIABLE, WHOLE, is_dear, sample_number, today
from prefuse.tests.translation_table import keep_translation_table

if TYPE_CHECKING:
    from prefuse.tests.models.exports import Exports

limit_pools()  # before anything else that pytest loads imports them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=int, metavar="N", help="Show the N tests and files that take the most CPU seconds.")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run have one sample, at midnight too; the first one knows whether it is a run of all tests."""
    os.environ[VARIABLE] = str(sample_number())
    if not hasattr(config, "workerinput"):
        is_named = config.args_source == pytest.Config.ArgsSource.ARGS or config.option.keyword or os.environ.get(WHOLE)
        os.environ[SHARES] = "" if is_named else "1"
    if most := config.getoption("--cpu-seconds"):
        config.pluginmanager.register(CpuSeconds(most))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the dear folders those whose turn it is; tests of one model that a fixture compiles for all of them have one turn."""
    if not os.environ[SHARES]:
        return
    root = Path(__file__).parent
    units = {item: _unit(item) for item in items if is_dear(item.path.relative_to(root).as_posix())}
    units = {item: unit for item, unit in units.items() if item.get_closest_marker("daily") is None}
    chosen = today(list(dict.fromkeys(units.values())))
    dropped = {item: None for item, unit in units.items() if unit not in chosen}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _unit(item: pytest.Item) -> Hashable:
    """What has a turn of its own: a test, one case of its parameters, or all tests for one parameter of a fixture."""
    names = {name for mark in item.iter_markers("parametrize") for name in _names(mark.args[0])}
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    of_fixtures = tuple(f"{name}={value!r}" for name, value in parameters.items() if name not in names)
    return (item.path, of_fixtures) if of_fixtures else item.nodeid


def _names(given: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)


def pytest_collection_finish() -> None:
    """What has been imported lives until the end: the garbage collector need not walk through it again and again.

    Between those before each module there are few of all generations, which Python begins the more often the more is frozen.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What fixtures draw is the same in each run, whichever of their tests is the first."""
    begin_again(for_fixtures=True)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """And what a test draws, whether or not it is the first."""
    begin_again(for_fixtures=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"The sample of the long suites was {VARIABLE}={sample_number()}, which runs it again.")


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """What earlier modules leave in memory lives on, too: tests that ask for a collection need not wait a second for each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Choices are those of the rows of processors and of the shipped table, not of what this user measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFUSE_CACHE", str(tmp_path_factory.getbasetemp() / "user"))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_exports() -> None:
    """What torch does anew at every export, and what takes most of the time of a small module, it does once.

    It makes the table of translations, from the sources of 500 functions, and overrides of 700 composite operators, which it
    looks for in 56 namespaces.
    """
    if "torch" in sys.modules:
        from prefuse.tests.kept_decompositions import keep_decompositions

        keep_translation_table()
        keep_decompositions()
        _look_up_once()


@pytest.fixture(scope="module", autouse=True)
def lone_references() -> None:
    """Where ONNX Runtime is imported, as it is by now in a run of all tests."""
    if "onnxruntime" in sys.modules:
        limit_sessions()


@cache
def _look_up_once() -> None:
    import torch
    from torch._export.utils import _collect_all_valid_cia_ops
    from torch.export import decomp_utils, exported_program

    @cache
    def found(registered: int) -> set[torch._ops.OperatorBase]:
        return _collect_all_valid_cia_ops()

    def looked_up() -> set[torch._ops.OperatorBase]:
        """Again where operators have been registered since then."""
        return found(len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")))

    for module in (decomp_utils, exported_program):
        module._collect_all_valid_cia_ops = looked_up  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Small example models as ONNX files, by name."""
    from prefuse.tests.models.exports import exported  # which imports torch

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "exports"
    folder.mkdir(exist_ok=True)
    return cache(partial(exported, folder=folder))


@pytest.fixture
def sigint_handler() -> Iterator[object]:
    """Python's own handler of SIGINT, which a job in the background of a shell has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)
