"""`prefuse pack`: places in one range of memory for blocks with known lifetimes, in the form of the minimalloc benchmark."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ...passes.plan.packing import EFFORTS, Block, Packing, pack
from ...passes.plan.packing.check import packing_faults
from ...passes.plan.packing.instance import MOST_BYTES
from ...runtime.errors import InputError, OptionError
from ...runtime.files.whole_file import whole_file
from .common import JSON, show, size_text
from .output import check_output

_MOST_ALIGNMENT = 1 << 30  # by which offsets of many blocks stay far from the end of 64-bit integers
_COLUMNS = ("lower", "upper", "size")
_FIX = "give a file with the columns id, lower, upper, size"


@click.command("pack")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--capacity", type=click.IntRange(0, MOST_BYTES), help="Bytes within which any packing will do; else the least is looked for."
)
@click.option(
    "--alignment",
    default=1,
    show_default=True,
    type=click.IntRange(1, _MOST_ALIGNMENT),
    help="Offsets are multiples of so many bytes.",
)
@click.option(
    "--effort",
    default="max",
    show_default=True,
    type=click.Choice(list(EFFORTS)),
    help="No exact search, one of about a second, or of a minute.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the blocks with their offsets to this CSV file.")
@JSON
def command(file: Path, capacity: int | None, alignment: int, effort: str, output: Path | None, as_json: bool) -> None:
    """Pack the blocks of FILE, a CSV file with the columns lower, upper (their lifetime, half open) and size (bytes).

    Blocks with a number in a column "offset" stay there. Equal files are packed equally on every machine. The status is 1 where
    the capacity is exceeded.
    """
    if output is not None:
        check_output(output)
    columns, rows = _rows(file)
    blocks = [_block(file, number, row) for number, row in rows]
    begin = time.perf_counter()
    try:
        packing = pack(blocks, alignment, capacity=capacity, effort=next(one for one in EFFORTS if one == effort))
    except ValueError as error:
        raise InputError(str(file), str(error), "correct the sizes or offsets of these blocks") from None
    seconds = time.perf_counter() - begin
    assert not (faults := packing_faults(blocks, packing, alignment)), faults
    if output is not None:
        _write(output, columns, [row for _, row in rows], packing)
    data = {
        "blocks": len(blocks),
        "total_bytes": packing.total_bytes,
        "bound_bytes": packing.bound_bytes,
        "capacity_bytes": capacity,
        "nodes": packing.nodes,
        "seconds": seconds,
    }
    show(
        as_json, data, _sentence(packing, len(blocks), capacity), f"{packing.nodes:,} nodes of the exact search, {seconds:.2f} s"
    )
    if capacity is not None and packing.total_bytes > capacity:
        raise click.exceptions.Exit(1)


def _sentence(packing: Packing, count: int, capacity: int | None) -> str:
    text = (
        f"{packing.total_bytes:,} bytes ({size_text(packing.total_bytes)}) for {count} blocks; at least {packing.bound_bytes:,} "
    )
    text += (
        "are needed at one time, so it is the least" if packing.total_bytes == packing.bound_bytes else "are needed at one time"
    )
    if capacity is None:
        return text
    if packing.total_bytes <= capacity:
        return f"{text}; within the capacity of {capacity:,}"
    why = "nothing fits" if packing.bound_bytes > capacity else "nothing that fits was found"
    return f"{text}; the capacity is {capacity:,}: {why}"


def _rows(file: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a file, and its rows by these, each with the number of the line on which it ends.

    Raises:
        InputError: it is no text, has not the columns, one of them twice, or a row of more cells.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:  # spreadsheets write a byte order mark
            reader = csv.reader(text, strict=True)
            lines = [(reader.line_num, line) for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(file), f"is no CSV file ({error})", _FIX) from None
    names = [name.strip() for name in (lines[0][1] if lines else ())]
    if missing := [name for name in _COLUMNS if name not in names]:
        raise InputError(str(file), f"has no column {', '.join(missing)}", _FIX)
    if twice := [name for name in (*_COLUMNS, "offset") if names.count(name) > 1]:
        raise InputError(str(file), f"has the column {twice[0]} {names.count(twice[0])} times", _FIX)
    for number, line in lines[1:]:
        if len(line) > len(names):
            raise InputError(f"{file}, line {number}", f"{len(line)} cells for {len(names)} columns", _FIX)
    padded = ((number, (*line, *[""] * (len(names) - len(line)))) for number, line in lines[1:])
    return names, [(number, dict(zip(names, line, strict=True))) for number, line in padded]


def _block(file: Path, line: int, row: Mapping[str, str]) -> Block:
    """The block of a row.

    Raises:
        InputError: it has no whole numbers, or they are none of a block.
    """
    cells = [row[name] for name in _COLUMNS] + ([row["offset"]] if row.get("offset", "").strip() else [])
    try:
        lower, upper, size, *offset = (int(cell) for cell in cells)
    except ValueError:
        fix = "give times, bytes and offsets as whole numbers"
        raise InputError(f"{file}, line {line}", f"{', '.join(cells)} are no whole numbers", fix) from None
    if lower >= upper or size < 0 or min(offset, default=0) < 0:
        fix = "lower must be less than upper, size and offset at least 0"
        raise InputError(f"{file}, line {line}", f"{', '.join(cells)} is no block", fix)
    if max(abs(lower), abs(upper), size, *offset) > MOST_BYTES:
        raise InputError(f"{file}, line {line}", f"{', '.join(cells)} has a number above 2^60", "use smaller units")
    return Block(lower, upper, size, *offset)


def _write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]], packing: Packing) -> None:
    try:
        with whole_file(path) as place, place.open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, [*(name for name in columns if name != "offset"), "offset"])
            writer.writeheader()
            writer.writerows({**row, "offset": offset} for row, offset in zip(rows, packing.offsets, strict=True))
    except OSError as error:
        raise OptionError("--output", f"{path} cannot be written ({error.strerror})", "give another path") from None
