"""What the executor asks of a device. `cpu_device` is the first; accelerators follow the same protocol."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .program_file import Program


class Arena(Protocol):
    """Device memory of one context, or of the states of a session; freed when the last reference goes."""

    @property
    def address(self) -> int: ...

    def read(self, offset: int, size_bytes: int) -> np.ndarray:
        """A copy of bytes, uint8. No call that writes them may be under way."""

    def write(self, offset: int, content: np.ndarray) -> None:
        """Set bytes, as contiguous uint8. No call that reads or writes them may be under way."""


class Invocation(Protocol):
    """A program bound to one arena. Calls run to completion; one caller at a time."""

    def __call__(self, *addresses: int) -> None:
        """Run with the addresses of the Plan's parameters, in their order: inputs, outputs, counts."""


class Executable(Protocol):
    """Native code loaded on a device; holds the program's constants."""

    def bind(self, arena: Arena, states: Arena | None = None) -> Invocation:
        """For a caller with these activations, and these states if the program has any."""

    def bind_profile(self, arena: Arena, states: Arena | None = None) -> Invocation:
        """As `bind`; calls take one address more, where the clock is stored before the first step and after each one.

        Raises:
            OptionError: the program has no counters.
        """


class Device(Protocol):
    """A place that runs programs. `torch_devices` names, as torch does, where tensors may lie that are given to them;
    `gives_zeros`: whether memory is zero at first.
    """

    @property
    def torch_devices(self) -> frozenset[str]: ...

    @property
    def gives_zeros(self) -> bool: ...

    def load(self, program: Program) -> Executable:
        """Make a program's native code callable.

        Raises:
            ProgramFileError: the code cannot be loaded here.
        """

    def allocate(self, size_bytes: int, part_bytes: int = 0) -> Arena:
        """Memory for one context, or for states, aligned to `plan.ALIGNMENT`. Of `part_bytes` each it has parts that are filled
        over many calls, each from its beginning on; 0: it is used as a whole.

        Raises:
            ArenaMemoryError: there is not so much memory.
        """
