"""The garbage collector is as it was after a pause."""

import gc
from collections.abc import Iterator

import pytest
from prefuse.compiler.collection import paused_collection


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_pause_ends(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    with pytest.raises(KeyError):
        _interrupted()
    assert gc.isenabled() == was_enabled


def _interrupted() -> None:
    with paused_collection(), paused_collection():
        assert not gc.isenabled()
        raise KeyError
