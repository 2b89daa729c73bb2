"""What 8 and 4 bits cost trained models, and what they gain: a sentence encoder, a net for digits, a reader of text lines.

Each is compared with itself in float32 on data that calibration has not seen; times are of interleaved calls in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import prefuse
from prefuse.compiler.frontend.dimensions import bind_dimensions
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.constants import constant_tensor
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.compiler.quantization.quantizer import calibrate
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target
from rich.console import Console
from rich.table import Table

from .record import record
from .trained_nets import Batch, digits_lenet, minilm
from .turns import LEAST_ROUNDS, Rounds, Spread, block_of, compared, in_milliseconds, take_turns

_SENTENCES, _LINES, _CALIBRATION_LINES = 200, 100, 16
_CALIBRATION_BATCHES = 8  # of 8 sentences
_COSINE_LOST = 8e-4  # by mixed formats, on two of these batches: a fifth less than unseen sentences may lose
_CALLS, _WARM_SECONDS = 15, 0.02  # of a turn
_LINE_HEIGHT, _LINE_WIDTH = 48, 320
_INT4_GROUP = 128
Programs = Mapping[str, CompiledModel]


@dataclass(frozen=True, slots=True)
class Row:
    """One program of a model: how good it is, by `measure`, its constants, and its time, also in units of bfloat16's, round by
    round. `batch` inputs are of one call."""

    model: str
    program: str
    measure: str
    value: float
    constant_bytes: int
    weight_bytes: int  # of the model in float32
    batch: int
    time_ms: float
    time_over_bf16: Spread
    rounds_ms: list[list[float]]


def sentence_rows(threads: int, rounds: int) -> Iterator[Row]:
    """MiniLM: the mean cosine between vectors in float32 and of each program, over 200 sentences."""
    net = minilm(_CALIBRATION_BATCHES + _SENTENCES // 8)
    every = [*net.calibration, *net.held_out]
    calibration, held_out = every[:_CALIBRATION_BATCHES], every[_CALIBRATION_BATCHES:]
    programs = _programs(net.model, calibration, threads)
    programs["mixed"] = _mixed(net.model, calibration, threads, metric="cosine", max_error=_COSINE_LOST)
    times = _times(programs, held_out[0], rounds)
    exact = _outputs(programs["float32"], held_out)
    for name, program in programs.items():
        cosines = [np.sum(a * b, 1) for a, b in zip(_outputs(program, held_out), exact, strict=True)]
        yield _row("MiniLM", name, "mean cosine", float(np.mean(cosines)), program, times, net.model)


def digit_rows(threads: int, rounds: int) -> Iterator[Row]:
    """LeNet on scikit-learn's digits: the share that is recognised of 512 images; linear layers of 4 bits, too."""
    from sklearn.datasets import load_digits

    net = digits_lenet()
    programs = _programs(net.model, net.calibration, threads)
    programs["int8, int4"] = small_lenet(net.model, net.calibration, threads)
    times = _times(programs, net.held_out[0], rounds)
    digits = load_digits()
    known = {
        image.astype(np.float32).tobytes(): int(label) for image, label in zip(digits.images / 16, digits.target, strict=True)
    }
    for name, program in programs.items():
        found = [
            int(row.argmax()) == known[image.tobytes()]
            for batch, (logits, *_) in zip(net.held_out, ([one] for one in _outputs(program, net.held_out)), strict=True)
            for image, row in zip(batch["image"][:, 0], logits, strict=True)
        ]
        yield _row("digits LeNet", name, "accuracy", float(np.mean(found)), program, times, net.model)


def small_lenet(model: ir.Model, calibration: Sequence[Batch], threads: int) -> CompiledModel:
    """Convolutions of int8, linear layers of int4 with a scale for each 128 numbers along k."""
    calibrated = calibrate(model, list(calibration), Target.parse("cpu", threads))
    images = {unit.name for unit in calibrated.units if unit.is_convolution}
    placed = calibrated.place({name: form for name, form in calibrated.uniform().items() if name in images})
    small = f"quantize-weights{{weights=int4,block-size={_INT4_GROUP},min-elements=512}}"
    pipeline = DEFAULT_PIPELINE.replace("quantize-weights", small)
    program = prefuse.compile(placed, cache=False, threads=threads, pipeline=pipeline)
    assert isinstance(program, CompiledModel)
    return program


def line_rows(threads: int, rounds: int) -> Iterator[Row]:
    """The recogniser of PP-OCRv4 in rapidocr-onnxruntime: the share of 100 rendered lines with the text that float32 reads."""
    package = find_spec("rapidocr_onnxruntime")  # imported, it would want OpenCV
    if package is None or package.origin is None:
        raise click.UsageError("rapidocr-onnxruntime is not installed: pip install --no-deps rapidocr-onnxruntime")
    model = import_model(Path(package.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx")
    (x,) = model.graph.inputs
    shape = (1, 3, _LINE_HEIGHT, _LINE_WIDTH)
    model = bind_dimensions(model, {str(x.name): shape})
    batches = [{str(x.name): image} for image in _lines(_CALIBRATION_LINES + _LINES)]
    calibration, held_out = batches[:_CALIBRATION_LINES], batches[_CALIBRATION_LINES:]
    programs = _programs(model, calibration, threads, rows_with_data=True)
    times = _times(programs, held_out[0], rounds)
    exact = [_text(scores) for scores in _outputs(programs["float32"], held_out)]
    for name, program in programs.items():
        same = [_text(scores) == text for scores, text in zip(_outputs(program, held_out), exact, strict=True)]
        yield _row("PP-OCRv4 recogniser", name, "same text", float(np.mean(same)), program, times, model)


def _lines(count: int) -> Iterator[np.ndarray]:
    """Rendered lines of words and numbers, as the recogniser wants them: [1, 3, height, width] from -1 to 1, padded with 0."""
    from PIL import Image, ImageDraw, ImageFont

    random = np.random.default_rng(0)
    words = "the quick brown fox jumps over a lazy dog invoice total amount due date paid Street Berlin London 2024 net".split()  # noqa: SIM905
    for _ in range(count):
        text = " ".join(random.choice(words) for _ in range(random.integers(2, 4))) + f" {random.integers(10, 9999)}"
        font = ImageFont.load_default(size=int(random.integers(22, 36)))
        left, top, right, bottom = ImageDraw.Draw(Image.new("RGB", (1, 1))).textbbox((0, 0), text, font=font)
        light, dark = int(random.integers(180, 256)), int(random.integers(0, 90))
        image = Image.new("RGB", (int(right - left) + 16, int(bottom - top) + 12), (light,) * 3)
        ImageDraw.Draw(image).text((8 - left, 6 - top), text, (dark,) * 3, font=font)
        width = min(_LINE_WIDTH, max(1, round(image.width * _LINE_HEIGHT / image.height)))
        pixels = np.asarray(image.resize((width, _LINE_HEIGHT), Image.Resampling.BILINEAR), np.float32)
        noisy = pixels + random.normal(0, 4, pixels.shape)
        line = np.zeros((1, 3, _LINE_HEIGHT, _LINE_WIDTH), np.float32)
        line[0, :, :, :width] = (noisy / 127.5 - 1).transpose(2, 0, 1)
        yield line


def _text(scores: np.ndarray) -> tuple[int, ...]:
    """The characters of scores [1, steps, characters], by number: the best of each step, without repetitions and blanks (CTC)."""
    best = scores[0].argmax(1)
    return tuple(int(one) for one, before in zip(best, [-1, *best[:-1]], strict=True) if one not in (0, before))


def _programs(
    model: ir.Model, calibration: Sequence[Batch], threads: int, *, rows_with_data: bool = False
) -> dict[str, CompiledModel]:
    """A model in float32, bfloat16, and 8 bits by tensors and by rows."""
    data = list(calibration)
    options: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {},
        "int8": {"calibration": data},
        "int8-rows": {"calibration": data} if rows_with_data else {},
    }
    found = {}
    for precision, more in options.items():
        program = prefuse.compile(model, precision=precision, cache=False, threads=threads, **more)
        assert isinstance(program, CompiledModel)
        found[precision] = program
    return found


def _mixed(model: ir.Model, calibration: Sequence[Batch], threads: int, *, metric: str, max_error: float) -> CompiledModel:
    """A model in mixed formats within an error."""
    wanted: dict[str, Any] = {"metric": metric, "max_error": max_error, "calibration": list(calibration)}
    program = prefuse.compile(model, precision="mixed", cache=False, threads=threads, **wanted)
    assert isinstance(program, CompiledModel)
    return program


def _outputs(program: CompiledModel, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The first output for each batch."""
    found = [program(**batch) for batch in batches]
    return [np.asarray(one[0] if isinstance(one, tuple) else one) for one in found]


def _times(programs: Programs, batch: Batch, rounds: int) -> Rounds:
    """Seconds of calls by each program, in turns."""
    calls = {name: partial(program, **batch) for name, program in programs.items()}
    return take_turns({name: block_of(call, _CALLS, warm_seconds=_WARM_SECONDS) for name, call in calls.items()}, rounds)


def _row(model: str, name: str, measure: str, value: float, program: CompiledModel, times: Rounds, graph: ir.Model) -> Row:
    made = [value for node in graph.graph if node.op_type == "Constant" for value in node.outputs]
    tensors = [constant_tensor(value) for value in (*graph.graph.initializers.values(), *made)]
    weights = sum(one.nbytes for one in tensors if one is not None)
    batch = int(program.plan.inputs[0].type.shape[0])
    time_ms, over = 1e3 * median(map(median, times[name])), compared(times[name], times["bfloat16"])
    sizes = program.plan.weights_bytes, weights
    return Row(model, name, measure, value, *sizes, batch, time_ms, over, in_milliseconds(times[name]))


MODELS: dict[str, Callable[[int, int], Iterator[Row]]] = {"minilm": sentence_rows, "lenet": digit_rows, "ocr": line_rows}


@click.command()
@click.argument("models", nargs=-1, type=click.Choice(tuple(MODELS)))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads of each program.")
@click.option(
    "--rounds", default=3 * LEAST_ROUNDS, show_default=True, type=click.IntRange(min=1), help="Of calls of all programs."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(models: tuple[str, ...], threads: int, rounds: int, json_path: Path | None) -> None:
    """What 8 bits cost trained MODELs, and what they gain; all three if none is named."""
    kept = record(json_path, threads, {"rounds": rounds}, ("onnxruntime", "scikit-learn"), key=("model", "program"))
    console = Console(width=120)
    for model in models or tuple(MODELS):
        rows = list(MODELS[model](threads, rounds))
        table = Table(title=rows[0].model, title_justify="left")
        times = f"ms, batch of {rows[0].batch}", "of the time of bfloat16"
        for heading in ("program", rows[0].measure, "KiB of constants", "times smaller", *times):
            table.add_column(heading, justify="left" if heading == "program" else "right")
        for row in rows:
            smaller = f"{row.weight_bytes / row.constant_bytes:.2f}"
            found = f"{row.value:.5f}", f"{row.constant_bytes / 1024:.0f}", smaller, f"{row.time_ms:.3f}", str(row.time_over_bf16)
            table.add_row(row.program, *found)
        console.print(table)
        kept.add(*rows)


if __name__ == "__main__":
    main()
