"""What the system answers when it is asked for tile registers, in words."""

from __future__ import annotations

import ctypes
import errno
from types import SimpleNamespace

import pytest
from prefuse.runtime.hardware import tile_state


@pytest.mark.parametrize(
    ("answer", "number", "refusal"),
    [(0, 0, ""), (-1, errno.EPERM, "Operation not permitted"), (-1, errno.ENOSPC, "alternate signal stack is too small")],
)
def test_answers(monkeypatch: pytest.MonkeyPatch, answer: int, number: int, refusal: str) -> None:
    def system_call(*words: ctypes.c_long) -> int:
        assert [word.value for word in words] == [158, 0x1023, 18]
        return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=system_call))
    monkeypatch.setattr(ctypes, "get_errno", lambda: number)
    got = tile_state.refusal.__wrapped__()
    assert bool(got) == bool(refusal)
    assert refusal in got
