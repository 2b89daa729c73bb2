"""Kernels of one template and tile each, at sizes as of full models, against torch on the GPU: what a check is, without TVM."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import torch

PROGRAM, _CHECK = "program.prefuse", "check.json"
_PERIOD = 251  # a prime: of weights that are compressed well, although no tile is like another
# Of the largest error, relative to the root mean square of the results: one wrong tile shows, however large the others' number.
_PROMISES = {"bfloat16": 0.05, "float16": 0.02, "float32": 1e-3, "uint8": 0.0}


@dataclass(frozen=True, slots=True)
class Check:
    """One operation by one template, and a tile or as the template chooses.

    `shape` is (batch, m, n, k) of a product, whose batch of 0 is no dimension, and (batch, heads, queries, keys, depth) of an
    attention. Operands of a product are `transposed` or not; the second one is a constant or the caller's. Bytes are uint8 by
    int8.
    """

    name: str
    kind: Literal["product", "attention"]
    shape: tuple[int, ...]
    dtype: str
    template: str
    tile: str = ""
    transposed: tuple[bool, bool] = (False, False)
    is_constant: bool = False

    @property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all, a constant too."""
        if self.kind == "attention":
            batch, heads, queries, keys, depth = self.shape
            return tuple((batch, heads, rows, depth) for rows in (queries, keys, keys))
        batch, m, n, k = self.shape
        pairs = ((k, m) if self.transposed[0] else (m, k), (n, k) if self.transposed[1] else (k, n))
        return tuple((*([batch] if batch else []), *pair) for pair in pairs)

    def constant(self) -> np.ndarray:
        """The second operand: the same numbers wherever they are made."""
        *batch, rows, columns = self.operands[1]
        places = np.arange(rows)[:, None] * 7 + np.arange(columns) * 13
        places = places + np.arange(int(np.prod(batch)))[:, None, None] * 29
        values = (np.arange(_PERIOD) * 97 % _PERIOD - _PERIOD // 2).astype(np.int64)
        found = values[places % _PERIOD].reshape(self.operands[1])
        return np.asarray(found.astype(np.int8) if self.dtype == "uint8" else (found / 64).astype(np.dtype(self.dtype)))

    def write(self, program: Path, path: Path) -> None:
        """This check and its program."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_CHECK, json.dumps(asdict(self)))
            archive.write(program, PROGRAM)


def unpacked(path: Path, folder: Path) -> Check:
    """What `write` wrote, its program as PROGRAM in a folder."""
    with zipfile.ZipFile(path) as archive:
        archive.extract(PROGRAM, folder)
        given: dict[str, Any] = json.loads(archive.read(_CHECK))
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Check(**given)


def inputs_of(check: Check, device: str) -> list[torch.Tensor]:
    """Numbers for the operands that are no constants."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = check.operands[:1] if check.is_constant else check.operands
    if check.dtype == "uint8":
        return [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=device) for shape in shapes]
    return [torch.randn(shape, generator=generator, device=device).to(getattr(torch, check.dtype)) for shape in shapes]


def compared(check: Check, inputs: Sequence[torch.Tensor], got: torch.Tensor) -> dict[str, Any]:
    """The largest error relative to the root mean square of what torch computes in float64 where the inputs lie."""
    operands = [x.double() for x in inputs]
    if check.is_constant:
        operands.append(torch.from_numpy(check.constant().astype(np.float64)).to(inputs[0].device))
    if check.kind == "attention":
        query, key, value = operands
        wanted = torch.softmax(query @ key.mT / check.shape[-1] ** 0.5, -1) @ value
    else:
        a, b = (x.mT if is_turned else x for x, is_turned in zip(operands, check.transposed, strict=True))
        wanted = a @ b
    rms = wanted.square().mean().sqrt()
    error = float(((got.to(wanted.device).double() - wanted).abs().max() / rms).item())
    is_finite = bool(torch.isfinite(got).all()) if got.is_floating_point() else True
    return {"error": error, "is_finite": is_finite, "right": is_finite and error <= _PROMISES[check.dtype]}
