"""What a program needs of a GPU's driver. Addresses and handles are integers.

What is given to one stream runs there in order, beside what is given to others; an event lets one stream wait for what another
has been given before. A graph is launched into a stream as a whole; its nodes run side by side but where edges say otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from .tensor_maps import Encode, EncodedMaps, TensorMap

Handle = int
Cells = ctypes.Array[ctypes.c_uint64]  # arguments of kernels and addresses of copies, eight bytes each

OUT_OF_MEMORY = 2  # of CUresult and hipError_t, which agree in the numbers that are named here
WRONG_BINARY = (200, 209, 218, 222)  # not loadable: image, architecture, PTX, its version
TOO_MANY_BLOCKS = 720  # of a cooperative launch: more than the GPU runs at once
LOST = frozenset([700, 702, 709, 710, *range(714, TOO_MANY_BLOCKS), 999])  # after these every call of the process fails


class DriverError(Exception):
    """The driver is absent or a call failed; `code` is its result, 0 where there is none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A grid of `blocks` blocks of `threads` threads. A cell is an argument: a pointer, or an int32 in the lower half.

    `places` are the addresses of the cells and behind them of tensor maps, as launches take their arguments: made once, as a
    launch costs a microsecond. Drivers encode the maps when they read the cells.
    """

    function: Handle
    blocks: int
    threads: int
    shared_bytes: int  # of each block, beside its arrays of fixed size
    cells: Cells
    places: ctypes.Array[ctypes.c_void_p]
    label: str  # for people
    maps: EncodedMaps
    is_cooperative: bool = False  # all blocks run at once, and wait for each other

    @classmethod
    def of(
        cls,
        function: Handle,
        size: tuple[int, int, int],
        cells: Cells,
        label: str,
        maps: tuple[TensorMap, ...] = (),
        is_cooperative: bool = False,
    ) -> KernelLaunch:
        """With blocks, threads and bytes of shared memory, and the addresses of its cells."""
        step = ctypes.sizeof(ctypes.c_uint64)
        encoded = EncodedMaps(maps)
        addresses = [*(ctypes.addressof(cells) + step * at for at in range(len(cells))), *encoded.addresses]
        places = (ctypes.c_void_p * len(addresses))(*addresses)
        return cls(function, *size, cells, places, label, encoded, is_cooperative)

    def encode_maps(self, encode: Encode) -> None:
        """Encode the maps of operands that have moved."""
        self.maps.encode(self.cells, encode)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of bytes. `places` has two cells: where to and where from; the source is on the host (pinned), or on the GPU too."""

    places: Cells
    size_bytes: int
    is_from_host: bool
    label: str  # for people


Work = KernelLaunch | Transfer


class Driver(Protocol):
    """One GPU. All calls but `version` raise DriverError, and all but the first three are made inside of `active()`."""

    name: str  # of its maker, for people
    graphs_cooperate: bool  # whether blocks of a grid in a graph may wait for each other

    def active(self) -> AbstractContextManager[None]:
        """A context manager inside of which the calling thread may use the GPU."""

    def version(self) -> str: ...
    def architecture(self) -> str: ...
    def free_bytes(self) -> tuple[int, int]:
        """Device memory: free, and all there is."""

    def allocate(self, size_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def allocate_host(self, size_bytes: int) -> int: ...
    def free_host(self, address: int) -> None: ...
    def is_device_address(self, address: int) -> bool: ...
    def load(self, binary: bytes) -> Handle: ...
    def unload(self, module: Handle) -> None: ...
    def function(self, module: Handle, name: str, shared_bytes: int) -> Handle:
        """Which may be launched with so many bytes of shared memory for each block."""

    def new_stream(self) -> Handle: ...
    def free_stream(self, stream: Handle) -> None: ...
    def new_event(self, has_time: bool = False) -> Handle: ...
    def free_event(self, event: Handle) -> None: ...
    def record(self, event: Handle, stream: Handle) -> None: ...
    def wait(self, stream: Handle, event: Handle) -> None: ...
    def wait_here(self, event: Handle) -> None:
        """Let the calling thread wait for it."""

    def milliseconds(self, begin: Handle, end: Handle) -> float: ...
    def copy_in(self, device: int, host: int, size_bytes: int, stream: Handle) -> None: ...
    def copy_out(self, host: int, device: int, size_bytes: int, stream: Handle) -> None: ...
    def copy(self, destination: int, source: int, size_bytes: int, stream: Handle) -> None: ...
    def launch(self, kernel: KernelLaunch, stream: Handle) -> None: ...
    def synchronize(self, stream: Handle) -> None: ...
    def new_graph(self) -> Handle: ...
    def add(self, graph: Handle, work: Work, after: Sequence[Handle]) -> Handle:
        """A node that runs when those of `after` have; its cells are read now."""

    def instantiate(self, graph: Handle) -> Handle:
        """The graph in a form that can be launched."""

    def update(self, instance: Handle, node: Handle, work: Work) -> None:
        """Read the cells of a node again, for launches of the instance from now on."""

    def launch_graph(self, instance: Handle, stream: Handle) -> None: ...
    def free_graph(self, graph: Handle) -> None: ...
    def free_instance(self, instance: Handle) -> None: ...


def issue(driver: Driver, work: Work, stream: Handle) -> None:
    """Give a kernel or a copy to a stream."""
    if isinstance(work, KernelLaunch):
        driver.launch(work, stream)
    elif work.is_from_host:
        driver.copy_in(work.places[0], work.places[1], work.size_bytes, stream)
    else:
        driver.copy(work.places[0], work.places[1], work.size_bytes, stream)


def handles(values: Iterable[Handle]) -> ctypes.Array[ctypes.c_void_p]:
    """As an array for C."""
    listed = list(values)
    return (ctypes.c_void_p * len(listed))(*listed)
