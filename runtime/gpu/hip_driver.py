"""AMD's driver through HIP. There are no contexts to push: a thread says which device it means."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .driver import DriverError, Handle, KernelLaunch, Transfer
from .entry_points import OF_HIP
from .library_driver import LibraryDriver
from .tensor_maps import TensorMap

_LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_FROM_HOST, _ON_DEVICE = 1, 3  # hipMemcpyHostToDevice, hipMemcpyDeviceToDevice
_PROPERTIES_BYTES = 16 << 10  # more than hipDeviceProp_t takes in any version
_ARCHITECTURE = re.compile(rb"gfx[0-9a-f]{3,4}(?=[:\0])")


class _KernelParameters(ctypes.Structure):
    """hipKernelNodeParams; a function of a module may stand for one of the host."""

    _fields_ = (
        ("block", ctypes.c_uint * 3),
        ("extra", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("arguments", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint),
    )


class HipDriver(LibraryDriver):
    """The first AMD GPU of this machine.

    Raises:
        DriverError: there is no driver or no GPU, or the driver is too old.
    """

    name, api, least = "AMD", "hip", "ROCm 6.0"
    graphs_cooperate = False  # HIP keeps the attribute of a node and launches it as any other

    def __init__(self, libraries: tuple[str, ...] = _LIBRARIES) -> None:
        super().__init__(_first(libraries), OF_HIP)
        count = ctypes.c_int()
        self._call("count", ctypes.byref(count))
        if not count.value:
            raise DriverError("this machine has no AMD GPU")

    @contextmanager
    def active(self) -> Iterator[None]:
        before = ctypes.c_int()
        self._call("get_device", ctypes.byref(before))
        self._call("set_device", 0)
        try:
            yield
        finally:
            self._call("set_device", before.value)

    def architecture(self) -> str:
        """The one name of that form in the device's properties, whose layout differs from version to version."""
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self._call("properties", properties, 0)
        found = _ARCHITECTURE.findall(properties.raw)
        if not found:
            raise DriverError("the driver does not say what its GPU is")
        return str(found[-1].decode())

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("version", ctypes.byref(number))
        return f"ROCm {number.value // 10**7}.{number.value // 10**5 % 100}"

    def _allow_shared(self, function: Handle, shared_bytes: int) -> None:
        """All that a compute unit has may be asked for."""

    def _encode_map(self, one: TensorMap, address: int, to: int) -> None:
        """Kernels for AMD have none."""
        raise DriverError("AMD's GPUs copy no tensors by maps")

    def _forget_error(self) -> None:
        """HIP keeps the last failure of a thread, which torch would take for one of its next kernel."""
        self._functions["last_error"]()

    def _error_name(self, code: int) -> str:
        function = self._functions["error_name"]
        function.restype = ctypes.c_char_p
        return (function(code) or b"error").decode()

    def _kernel_parameters(self, kernel: KernelLaunch) -> ctypes.Structure:
        arguments = ctypes.addressof(kernel.places)
        return _KernelParameters(
            (kernel.threads, 1, 1), None, kernel.function, (kernel.blocks, 1, 1), arguments, kernel.shared_bytes
        )

    def _copy_arguments(self, copy: Transfer) -> tuple[object, ...]:
        kind = _FROM_HOST if copy.is_from_host else _ON_DEVICE
        return copy.places[0], copy.places[1], copy.size_bytes, kind


def _mapped(libraries: tuple[str, ...]) -> list[str]:
    """Paths of those that this process has, such as torch's own: addresses and streams of one are nothing to another."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line[line.index("/") :] for line in lines if "/" in line)
    return [path for path in paths if path.rpartition("/")[2].startswith(libraries)]


def _first(libraries: tuple[str, ...]) -> ctypes.CDLL:
    problems = []
    for name in (*_mapped(libraries), *libraries):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise DriverError(f"this machine has no AMD driver ({problems[0]})")
