"""A progress bar for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class ConsoleProgress:
    """Shows the stage of a compilation on stderr while it runs, and leaves nothing behind; silent where that is no terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __call__(self, stage: str, fraction: float) -> None:
        if self._bar is None:
            console = Console(stderr=True)
            if fraction >= 1.0 or not console.is_terminal:  # to a file the bar would write an empty line
                return
            columns = (TextColumn("{task.description:<16}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.add_task(stage, total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=stage, completed=fraction)
        if fraction >= 1.0:
            self._bar.stop()
            self._bar = None
