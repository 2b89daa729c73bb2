"""NVIDIA's driver. It comes with the GPU's kernel module, so that nothing of CUDA need be installed.

All calls work in the primary context of the first GPU, which torch uses too: its tensors can be given to a program as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from .driver import DriverError, Handle, KernelLaunch, Transfer
from .entry_points import OF_CUDA
from .library_driver import LibraryDriver
from .tensor_maps import TensorMap

_LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_*
_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_BYTES = 48 << 10  # that every launch may ask for
_MAP_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}  # CU_TENSOR_MAP_DATA_TYPE_UINT*, by bytes: copies change no numbers
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_*
_INTERLEAVE_NONE, _PROMOTE_TO_256_BYTES, _FILL_ZEROS = 0, 3, 0  # CU_TENSOR_MAP_*


class _KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Side(ctypes.Structure):
    """One of the two sides of a copy. Of one row, it needs no pitch, which is less than 2 GiB."""

    _fields_ = (
        ("x_y_z_level", ctypes.c_size_t * 4),
        ("memory_type", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch_height", ctypes.c_size_t * 2),
    )


class _CopyParameters(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (("source", _Side), ("destination", _Side), ("width_height_depth", ctypes.c_size_t * 3))


class CudaDriver(LibraryDriver):
    """The first NVIDIA GPU of this machine.

    Raises:
        DriverError: there is no driver or no GPU, or the driver is too old.
    """

    name, api, least = "NVIDIA", "cuda", "CUDA 12.0"

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"this machine has no NVIDIA driver ({error})") from error
        super().__init__(loaded, OF_CUDA)
        device = ctypes.c_int()
        self._call("device", ctypes.byref(device), 0)
        self._device = device.value
        self._context = self._made("retain", self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        self._call("push", self._context)
        try:
            yield
        finally:
            self._call("pop", ctypes.byref(ctypes.c_void_p()))

    def architecture(self) -> str:
        return f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("version", ctypes.byref(number))
        return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("attribute", ctypes.byref(value), attribute, self._device)
        return value.value

    def _allow_shared(self, function: Handle, shared_bytes: int) -> None:
        if shared_bytes > _SHARED_BYTES:
            self._call("function_attribute", function, _MAX_SHARED_BYTES, shared_bytes)

    def _encode_map(self, one: TensorMap, address: int, to: int) -> None:
        rank = len(one.extents)
        extents, strides = (ctypes.c_uint64 * rank)(*one.extents), (ctypes.c_uint64 * rank)(*one.strides)
        box, steps = (ctypes.c_uint32 * rank)(*one.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        how = _INTERLEAVE_NONE, _SWIZZLES[one.swizzle_bytes], _PROMOTE_TO_256_BYTES, _FILL_ZEROS
        self._call("encode_map", to, _MAP_TYPES[one.item_bytes], rank, address, extents, strides, box, steps, *how)

    def _forget_error(self) -> None:
        """The driver keeps none."""

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._functions["error_name"](code, ctypes.byref(text))
        return (text.value or b"error").decode()

    def _kernel_parameters(self, kernel: KernelLaunch) -> ctypes.Structure:
        arguments = ctypes.addressof(kernel.places)
        return _KernelParameters(kernel.function, (kernel.blocks, 1, 1), (kernel.threads, 1, 1), kernel.shared_bytes, arguments)

    def _copy_arguments(self, copy: Transfer) -> tuple[object, ...]:
        source = _Side(memory_type=_HOST if copy.is_from_host else _DEVICE)
        if copy.is_from_host:
            source.host = copy.places[1]
        else:
            source.device = copy.places[1]
        destination = _Side(memory_type=_DEVICE, device=copy.places[0])
        return ctypes.byref(_CopyParameters(source, destination, (copy.size_bytes, 1, 1))), self._context
