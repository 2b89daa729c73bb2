"""Ctrl-C while a model is compiled is a KeyboardInterrupt, wherever it comes, and leaves nothing behind."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.interrupts import surfacing_interrupts
from prefuse.kernels.expressions import ldexp
from tvm.target import Target

_MODEL = '<ir_version: 10, opset_import: ["": 21]> main (float[64] x) => (float[64] y) { y = Tanh(x) }'


def test_inside_a_function_that_tvm_calls(sigint_handler: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def current(**options: bool) -> object:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return Target.current(**options)

    monkeypatch.setattr(ldexp, "Target", SimpleNamespace(current=current))
    model = ir.from_onnx_text(_MODEL)
    with pytest.raises(KeyboardInterrupt):
        prefuse.compile(model, cache=tmp_path)
    assert calls == [1]
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is sigint_handler
    prefuse.compile(model, cache=tmp_path)
    assert len(list(tmp_path.glob("*.prefuse"))) == 1


@pytest.mark.parametrize("error", [RuntimeError("C++ trace"), None])
def test_whoever_caught_it(sigint_handler: object, error: Exception | None) -> None:
    @surfacing_interrupts()
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if error is not None:
                raise error from None

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is sigint_handler


def test_other_errors_and_handlers_stay_as_they_are() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with surfacing_interrupts():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyError, match="ours"), surfacing_interrupts():
            _interrupted_lookup()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] * 2


def _interrupted_lookup() -> None:
    signal.raise_signal(signal.SIGINT)
    raise KeyError("ours")


def test_another_thread_has_no_signals(sigint_handler: object) -> None:
    results: list[object] = []

    def work() -> None:
        with surfacing_interrupts():
            results.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [sigint_handler]
