"""How architectures went, and the file of results that a long run can be resumed from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from prefuse.runtime.precision import Precision

Outcome = Literal["agrees", "compiles", "wrong", "not exported by torch", "refused", "error", "crash", "hang"]


@dataclass(frozen=True)
class Result:
    """How one architecture went in one precision. `error` is what the precision is judged by (`judge.compare`).

    `peer_error` is that of `peer` in the same type, if it can run the model. `compile_seconds` are from a module to a program;
    torch's export is among those of the precision that was the first. `means` names what computed the result beside our kernels:
    "tvm-default" (slow), "stages", "host". For a GPU, which nobody has to run it, a program "compiles", or is refused with a
    reason; `grids` are what one call launches.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    error: float | None = None
    compile_seconds: float | None = None
    means: tuple[str, ...] = ()
    precision: Precision = "float32"
    target: str = "cpu"
    peer: str = ""
    peer_error: float | None = None
    grids: int | None = None

    @property
    def ratio(self) -> float | None:
        """The error beside the peer's; None without one."""
        return None if self.error is None or not self.peer_error else self.error / self.peer_error

    @property
    def is_good(self) -> bool:
        """Whether nothing is to be mended here."""
        return self.outcome in ("agrees", "compiles", "not exported by torch")


def read_results(path: Path) -> list[Result]:
    """The results of a file, which need not exist."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**{**row, "means": tuple(row["means"])}) for row in map(json.loads, lines)]


def append_results(path: Path, results: Iterable[Result]) -> None:
    """Add results to a file, one a line."""
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(result)) + "\n" for result in results)
