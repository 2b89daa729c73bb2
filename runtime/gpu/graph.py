"""A graph of kernels and copies, launched as a whole: one call of the driver where launches one by one cost microseconds each.

What does not depend on each other runs side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from .driver import Driver, DriverError, Handle, Work


class Graph:
    """Instantiated once; the cells of its nodes may change between launches."""

    def __init__(self, driver: Driver, works: Sequence[Work], after: Sequence[Sequence[int]]) -> None:
        """Nodes in an order in which each comes behind those of its `after`.

        Raises:
            DriverError: the driver refuses one, named by its label.
        """
        self._driver = driver
        self._works = works
        self._nodes: list[Handle] = []
        self._instance: Handle = 0
        self._graph = driver.new_graph()
        for work, before in zip(works, after, strict=True):
            try:
                self._nodes.append(driver.add(self._graph, work, [self._nodes[one] for one in before]))
            except DriverError as error:
                raise DriverError(f"{work.label}: {error}", error.code) from error
        self._instance = driver.instantiate(self._graph)

    def update(self, numbers: Iterable[int]) -> None:
        """Take the cells of some nodes as they are now. No launch of the graph is under way."""
        for number in numbers:
            self._driver.update(self._instance, self._nodes[number], self._works[number])

    def launch(self, stream: Handle) -> None:
        self._driver.launch_graph(self._instance, stream)

    def __del__(self) -> None:
        with suppress(DriverError, AttributeError), self._driver.active():  # the driver may be gone before the process
            if self._instance:
                self._driver.free_instance(self._instance)
            self._driver.free_graph(self._graph)
