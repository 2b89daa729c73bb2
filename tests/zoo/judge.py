"""How prefuse fares on architectures, beside torch."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Literal

import prefuse
import torch
from prefuse.compiler.frontend.pytree import flatten
from prefuse.runtime.errors import CompileError
from torch import Tensor, nn

from ..conformance.means import account_of
from ..worker_pool import Lost, run_apart
from .architecture import Inputs
from .architectures import ZOO

Outcome = Literal["agrees", "wrong", "not exported by torch", "refused", "error", "crash", "hang"]
BOUND = 1e-4  # largest difference of an output, in relation to its largest element


@dataclass(frozen=True)
class Result:
    """How one architecture went. `error` is the largest difference in relation to the largest element, over all outputs.

    `means` names what computed the result beside our kernels: "tvm-default" (slow), "stages", "host".
    """

    name: str
    outcome: Outcome
    detail: str = ""
    error: float | None = None
    compile_seconds: float | None = None
    means: tuple[str, ...] = ()


def judge_apart(names: Sequence[str], processes: int, timeout_s: float) -> Iterator[Result]:
    """The results of all architectures, as they come. A crash or a hang costs one row of the table."""
    import transformers

    transformers.logging.set_verbosity_error()
    for done in run_apart(names, _judge_on_one_core, processes=processes, timeout_s=timeout_s):
        yield Result(done.task, done.result.how, done.result.detail) if isinstance(done.result, Lost) else done.result


def _judge_on_one_core(name: str) -> Result:
    torch.set_num_threads(1)  # processes are dealt to the cores, not threads
    return judge(name)


def judge(name: str) -> Result:
    """Compile an architecture as a user would, and compare the result of one call with torch's."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module, positional, named = ZOO[name].build()
        expected = module(*positional, **named)
        begin = time.perf_counter()
        try:
            compiled = prefuse.compile(module, positional, named, cache=False)
            seconds = round(time.perf_counter() - begin, 1)
            got = compiled(*positional, **named)
        except CompileError as refusal:
            reason = _why_torch_cannot_export(module, positional, named)
            return Result(name, "not exported by torch" if reason else "refused", str(reason or refusal))
        except Exception as bug:
            return Result(name, "error", f"{type(bug).__name__}: {bug}")
    difference, error = compare(got, expected)
    return Result(name, "wrong" if difference else "agrees", difference, error, seconds, _means_beside_kernels(compiled))


def _means_beside_kernels(compiled: object) -> tuple[str, ...]:
    account = account_of(compiled)
    return tuple(way for way in (*account.ways, account.means) if way in ("tvm-default", "stages", "host"))


def compare(got: object, expected: object) -> tuple[str, float]:
    """What is different (nothing if empty) and the largest relative difference; structures are compared too."""
    structure, actual = flatten(got)
    expected_structure, wanted = flatten(expected)
    if structure != expected_structure:
        return "the result has another structure", float("nan")
    worst = 0.0
    for number, (a, b) in enumerate(zip(actual, wanted, strict=True)):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {number} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}", float("nan")
        if b.numel():
            scale = max(b.double().abs().max().item(), torch.finfo(torch.float32).tiny)
            difference = (a.double() - b.double()).abs().max().item() / scale
            worst = max(worst, difference) if difference == difference else float("nan")
            if not difference <= BOUND:
                return f"output {number} differs by {difference:.1e}", difference
    return "", worst


def _why_torch_cannot_export(module: nn.Module, positional: tuple[Tensor, ...], named: Inputs) -> str:
    """The error of torch's own exporter; empty if it has none."""
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            torch.onnx.export(module, positional, kwargs=named, dynamo=True, optimize=False, verbose=False)
    except Exception as error:  # whatever it raises
        cause = error.__cause__ or error
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return f"{type(cause).__name__}: {lines[0].strip() if lines else ''}"
    finally:
        logging.disable(logging.NOTSET)
    return ""
