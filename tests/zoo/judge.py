"""How prefuse fares on architectures, beside torch, and in narrow types beside what others make of these."""

from __future__ import annotations

import io
import logging
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, stdev
from unittest import mock

import numpy as np
import onnx_ir as ir
import prefuse
import torch
from prefuse.compiler.frontend import torch_export
from prefuse.compiler.frontend.pytree import Structure, flatten
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.runtime.errors import CompileError
from prefuse.runtime.precision import PRECISIONS, TOLERANCES, Precision
from prefuse.runtime.target import Target
from torch import Tensor, nn

from ..conformance.means import account_of, grids_of
from ..translation_table import keep_translation_table
from ..worker_pool import Lost, run_apart
from .architecture import Call, Inputs
from .architectures import ZOO
from .peers import in_float64, peer_of, peer_outputs
from .result import Result

BOUND = 1e-4  # float32: the largest difference of an output, in relation to its largest element
FAST_BOUND = 2e-5  # float32-fast: the norm of the difference, in relation to that of the output
PEER_RATIO = 1.2  # the error beside that of the peer
DRAWS = 5  # of weights and inputs, of which the median error is judged where the first is beyond the bound
MORE_DRAWS = 9  # in all, where that is, too: then the mean ratio to the peer's error is, by no less than its standard error
# float32-fast beside float32, where a model makes so much of any rounding that float32 itself misses FAST_BOUND: products of two
# bfloat16 terms are right to 2**-17, sums of hundreds of products in float32 to about 2**-21.
FAST_RATIO = 16
# Narrow types for products of any size: these models' are smaller than what is worth rounding for, and would all stay float32.
_NARROW_PIPELINE = DEFAULT_PIPELINE.replace("assign-formats", "assign-formats{min-operations=0}")
# An error that is none beside any peer: half a unit in the last place, which rounding the result would cost.
_FLOOR = {"bfloat16": 2.0**-9, "float16": 2.0**-12}


@dataclass(frozen=True)
class Difference:
    """How far two results are apart, at the worst of their outputs.

    `largest` is the largest difference in relation to the largest element, `norm` the norm of the difference in relation to that
    of the output. `form` says what is different in structure, types or shapes; nothing else is known then.
    """

    form: str = ""
    largest: float = math.nan
    norm: float = math.nan


def judge_apart(
    names: Sequence[str],
    processes: int,
    timeout_s: float,
    precisions: Sequence[Precision] = PRECISIONS,
    target: str = "cpu",
) -> Iterator[tuple[Result, ...]]:
    """For each architecture a result a precision, as they come. A crash or a hang costs one row of the table."""
    import transformers

    transformers.logging.set_verbosity_error()
    keep_translation_table()
    with _exporter_silent():
        torch.onnx.export(nn.Identity(), (torch.zeros(1),), dynamo=True)  # what it imports and makes is there for all processes
    work = partial(_judge_on_one_core, precisions=precisions, target=target)
    for done in run_apart(names, work, processes=processes, timeout_s=timeout_s):
        if isinstance(done.result, Lost):
            lost = Result(done.task, done.result.how, done.result.detail, target=target)
            yield _in_all(precisions, lost)
        else:
            yield done.result


def _judge_on_one_core(name: str, precisions: Sequence[Precision], target: str) -> tuple[Result, ...]:
    torch.set_num_threads(1)  # processes are dealt to the cores, not threads
    return judge(name, precisions, target)


def judge(name: str, precisions: Sequence[Precision] = ("float32",), target: str = "cpu") -> tuple[Result, ...]:
    """Compile an architecture in each precision, as a user would, and compare the result of one call with torch's.

    For a GPU itself compile it only: what the machine has no compiler for is refused. In a narrow type, products of any size are:
    `_NARROW_PIPELINE`; and of an error beyond the bound the median of several draws of weights decides.
    """
    found = _judge_draw(name, precisions, target, 0)
    return tuple(_median(name, one) if one.outcome == "wrong" and one.ratio and one.precision in _FLOOR else one for one in found)


def _median(name: str, first: Result) -> Result:
    """The result with the median error beside the peer's of several draws, `first` among them.

    Of these small models it is a walk of few roundings: 0.4 to 1.5 times the peer's from one draw of MobileBERT to the next, 0.3
    to 2.0 of ResNet on AMX, for kernels that are as exact. So it is wrong only if that of more draws is, and if their geometric
    mean is beyond the bound by its standard error.
    """
    draws = [first]
    for count in (DRAWS, MORE_DRAWS):
        draws += [_judge_draw(name, (first.precision,), first.target, draw)[0] for draw in range(len(draws), count)]
        middle = sorted(draws, key=_ratio)[count // 2]
        if middle.outcome != "wrong":
            return middle
    return replace(middle, outcome="agrees", detail="") if _is_chance(draws) else middle


def _is_chance(draws: Sequence[Result]) -> bool:
    """Whether the mean of the logarithms of the ratios is within that of the bound and its own standard error."""
    if not all(math.isfinite(_ratio(one)) for one in draws):
        return False
    logs = [math.log(_ratio(one)) for one in draws]
    return mean(logs) - stdev(logs) / math.sqrt(len(logs)) <= math.log(PEER_RATIO)


def _ratio(result: Result) -> float:
    """The error beside the peer's; infinite where it is no number."""
    return result.ratio if result.ratio and math.isfinite(result.ratio) else math.inf


def _judge_draw(name: str, precisions: Sequence[Precision], target: str, draw: int) -> tuple[Result, ...]:
    with warnings.catch_warnings(), torch.no_grad(), _exported_once() as exports:
        warnings.simplefilter("ignore")
        call = ZOO[name].build(draw)
        module, positional, named = call
        expected = module(*positional, **named)
        results: list[Result] = []
        for precision in precisions:
            results.append(_judge_in(precision, target, Result(name, "agrees"), call, expected, exports))
            if not exports:
                return _in_all(precisions, results[0])
        return tuple(results)


def is_compiled_only(target: str) -> bool:
    """Whether programs for a target are made and not run: those of GPUs themselves, of which the simulators need none."""
    parsed = Target.parse(target)
    return parsed.is_gpu and not parsed.is_simulated


def _in_all(precisions: Sequence[Precision], result: Result) -> tuple[Result, ...]:
    return tuple(replace(result, precision=precision) for precision in precisions)


def _judge_in(
    precision: Precision, target: str, result: Result, call: Call, expected: object, exports: Sequence[ir.Model]
) -> Result:
    module, positional, named = call
    result = replace(result, precision=precision, target=target)
    pipeline = _NARROW_PIPELINE if precision in _FLOOR else None
    begin = time.perf_counter()
    try:
        compiled = prefuse.compile(module, positional, named, cache=False, precision=precision, target=target, pipeline=pipeline)
        seconds = round(time.perf_counter() - begin, 1)
        if is_compiled_only(target):
            means = _means_beside_kernels(compiled)
            return replace(result, outcome="compiles", compile_seconds=seconds, means=means, grids=grids_of(compiled))
        got = compiled(*positional, **named)
    except CompileError as refusal:
        reason = "" if exports else _why_torch_cannot_export(module, positional, named)
        return replace(result, outcome="not exported by torch" if reason else "refused", detail=str(reason or refusal))
    except Exception as bug:
        return replace(result, outcome="error", detail=f"{type(bug).__name__}: {bug}")
    right, found = expected, compare(got, expected)
    if precision == "float32-fast" and found.norm > FAST_BOUND:  # torch's own rounding is a part of that
        right = in_float64(call, expected)
        found = compare(got, right)
    result = replace(result, compile_seconds=seconds, means=_means_beside_kernels(compiled))
    if found.form:
        return replace(result, outcome="wrong", detail=found.form)
    peer = peer_of(precision)
    peer_error = _peer_error(peer_outputs(peer, call, exports[0], precision), right)
    return _judge_error(replace(result, peer=peer, peer_error=peer_error), found)


def _judge_error(result: Result, found: Difference) -> Result:
    """The result with its error; wrong where that is beyond what the precision promises."""
    error = found.largest if result.precision == "float32" else found.norm
    bound = error_bound(result.precision, result.peer_error)
    result = replace(result, error=error)
    if error <= bound:  # not so of NaN
        return result
    return replace(result, outcome="wrong", detail=f"the error is {error:.1e}, allowed are {bound:.1e}")


def error_bound(precision: Precision, peer_error: float | None) -> float:
    """The largest error that a precision may have. A narrow one without a peer may have that of equally exact results.

    float32-fast may miss its bound where torch's float32 does, beside float64.
    """
    if precision == "float32":
        return BOUND
    if precision == "float32-fast":
        return FAST_BOUND if peer_error is None or peer_error <= FAST_BOUND else FAST_RATIO * peer_error
    return TOLERANCES[precision].error if peer_error is None else max(PEER_RATIO * peer_error, _FLOOR[precision])


def _peer_error(outputs: Sequence[np.ndarray], expected: object) -> float | None:
    """The error of a peer; None if it has no outputs, or some that are no numbers."""
    wanted = [leaf for leaf in flatten(expected)[1] if isinstance(leaf, Tensor)]
    if not outputs:
        return None
    worst = max(_norm_error(a, b.double().numpy()) for a, b in zip(outputs, wanted, strict=True))
    return worst if math.isfinite(worst) else None


def _means_beside_kernels(compiled: object) -> tuple[str, ...]:
    account = account_of(compiled)
    return tuple(way for way in (*account.ways, account.means) if way in ("tvm-default", "stages", "host"))


def compare(got: object, expected: object) -> Difference:
    """How far a result is from what was expected; NaN where it has NaN."""
    structure, actual = flatten(got)
    expected_structure, wanted = flatten(expected)
    if structure != expected_structure:
        return Difference("the result has another structure")
    largest, norm = [0.0], [0.0]
    for number, (a, b) in enumerate(zip(actual, wanted, strict=True)):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference(f"output {number} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}")
        largest.append(_largest_error(a.double().numpy(), b.double().numpy()))
        norm.append(_norm_error(a.double().numpy(), b.double().numpy()))
    return Difference("", float(np.max(largest)), float(np.max(norm)))  # NaN if one is


def _largest_error(got: np.ndarray, expected: np.ndarray) -> float:
    scale = max(np.abs(expected).max(initial=0.0), np.finfo(np.float32).tiny)
    return float(np.abs(got - expected).max(initial=0.0) / scale)


def _norm_error(got: np.ndarray, expected: np.ndarray) -> float:
    scale = max(np.linalg.norm(expected), np.finfo(np.float32).tiny)
    return float(np.linalg.norm(got - expected) / scale)


@contextmanager
def _exported_once() -> Iterator[list[ir.Model]]:
    """A module that is compiled several times is exported by the first compilation; yields the list that holds the graph then."""
    export, results, graphs = torch_export.export_module, list[Structure](), list[ir.Model]()

    def copied(module: nn.Module, arguments: Structure, leaves: Sequence[Tensor]) -> torch_export.ExportedModule:
        if not graphs:
            found = export(module, arguments, leaves)
            graphs.append(found.model)
            results.append(found.result)
        return torch_export.ExportedModule(graphs[0].clone(), results[0])

    with mock.patch.object(torch_export, "export_module", copied):
        yield graphs


def _why_torch_cannot_export(module: nn.Module, positional: tuple[Tensor, ...], named: Inputs) -> str:
    """The error of torch's own exporter; empty if it has none."""
    try:
        with _exporter_silent():
            torch.onnx.export(module, positional, kwargs=named, dynamo=True, optimize=False, verbose=False)
    except Exception as error:  # whatever it raises
        cause = error.__cause__ or error
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return f"{type(cause).__name__}: {lines[0].strip() if lines else ''}"
    return ""


@contextmanager
def _exporter_silent() -> Iterator[None]:
    """Nothing of what torch's exporter prints, logs and warns of."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
