"""The functions of libcuda and libamdhip64 that are called, by one name.

HIP's follow CUDA's, argument for argument; where they do not, each driver has its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from .driver import DriverError

_P, _I, _U, _Z, _Q = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function by its symbol in each library, and the types of its arguments: addresses and handles are pointers."""

    cuda: str
    hip: str
    arguments: tuple[Any, ...]


ENTRY_POINTS = {
    "init": EntryPoint("cuInit", "hipInit", (_U,)),
    "version": EntryPoint("cuDriverGetVersion", "hipDriverGetVersion", (_P,)),
    "memory_info": EntryPoint("cuMemGetInfo_v2", "hipMemGetInfo", (_P, _P)),
    "allocate": EntryPoint("cuMemAlloc_v2", "hipMalloc", (_P, _Z)),
    "free": EntryPoint("cuMemFree_v2", "hipFree", (_P,)),
    "allocate_host": EntryPoint("cuMemHostAlloc", "hipHostMalloc", (_P, _Z, _U)),
    "free_host": EntryPoint("cuMemFreeHost", "hipHostFree", (_P,)),
    "pointer_attribute": EntryPoint("cuPointerGetAttribute", "hipPointerGetAttribute", (_P, _I, _P)),
    "load": EntryPoint("cuModuleLoadData", "hipModuleLoadData", (_P, _P)),
    "unload": EntryPoint("cuModuleUnload", "hipModuleUnload", (_P,)),
    "function": EntryPoint("cuModuleGetFunction", "hipModuleGetFunction", (_P, _P, _P)),
    "new_stream": EntryPoint("cuStreamCreate", "hipStreamCreateWithFlags", (_P, _U)),
    "free_stream": EntryPoint("cuStreamDestroy_v2", "hipStreamDestroy", (_P,)),
    "synchronize": EntryPoint("cuStreamSynchronize", "hipStreamSynchronize", (_P,)),
    "new_event": EntryPoint("cuEventCreate", "hipEventCreateWithFlags", (_P, _U)),
    "free_event": EntryPoint("cuEventDestroy_v2", "hipEventDestroy", (_P,)),
    "record": EntryPoint("cuEventRecord", "hipEventRecord", (_P, _P)),
    "wait": EntryPoint("cuStreamWaitEvent", "hipStreamWaitEvent", (_P, _P, _U)),
    "wait_here": EntryPoint("cuEventSynchronize", "hipEventSynchronize", (_P,)),
    "elapsed": EntryPoint("cuEventElapsedTime", "hipEventElapsedTime", (_P, _P, _P)),
    "copy_in": EntryPoint("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", (_P, _P, _Z, _P)),
    "copy_out": EntryPoint("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", (_P, _P, _Z, _P)),
    "copy": EntryPoint("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", (_P, _P, _Z, _P)),
    "launch": EntryPoint("cuLaunchKernel", "hipModuleLaunchKernel", (_P, *[_U] * 7, _P, _P, _P)),
    "launch_cooperative": EntryPoint("cuLaunchCooperativeKernel", "hipModuleLaunchCooperativeKernel", (_P, *[_U] * 7, _P, _P)),
    "new_graph": EntryPoint("cuGraphCreate", "hipGraphCreate", (_P, _U)),
    "add_kernel": EntryPoint("cuGraphAddKernelNode_v2", "hipGraphAddKernelNode", (_P, _P, _P, _Z, _P)),
    "set_attribute": EntryPoint("cuGraphKernelNodeSetAttribute", "hipGraphKernelNodeSetAttribute", (_P, _I, _P)),
    "instantiate": EntryPoint("cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags", (_P, _P, _Q)),
    "update_kernel": EntryPoint("cuGraphExecKernelNodeSetParams_v2", "hipGraphExecKernelNodeSetParams", (_P, _P, _P)),
    "launch_graph": EntryPoint("cuGraphLaunch", "hipGraphLaunch", (_P, _P)),
    "free_graph": EntryPoint("cuGraphDestroy", "hipGraphDestroy", (_P,)),
    "free_instance": EntryPoint("cuGraphExecDestroy", "hipGraphExecDestroy", (_P,)),
}
OF_CUDA = {
    "device": ("cuDeviceGet", (_P, _I)),
    "attribute": ("cuDeviceGetAttribute", (_P, _I, _I)),
    "function_attribute": ("cuFuncSetAttribute", (_P, _I, _I)),
    "retain": ("cuDevicePrimaryCtxRetain", (_P, _I)),
    "push": ("cuCtxPushCurrent_v2", (_P,)),
    "pop": ("cuCtxPopCurrent_v2", (_P,)),
    "encode_map": ("cuTensorMapEncodeTiled", (_P, _I, _U, _P, _P, _P, _P, _P, *[_I] * 4)),
    "error_name": ("cuGetErrorName", (_I, _P)),
    "add_copy": ("cuGraphAddMemcpyNode", (_P, _P, _P, _Z, _P, _P)),
    "update_copy": ("cuGraphExecMemcpyNodeSetParams", (_P, _P, _P, _P)),
}
OF_HIP = {
    "count": ("hipGetDeviceCount", (_P,)),
    "get_device": ("hipGetDevice", (_P,)),
    "set_device": ("hipSetDevice", (_I,)),
    "last_error": ("hipGetLastError", ()),
    "properties": ("hipGetDevicePropertiesR0600", (_P, _I)),
    "error_name": ("hipGetErrorName", (_I,)),
    "add_copy": ("hipGraphAddMemcpyNode1D", (_P, _P, _P, _Z, _P, _P, _Z, _I)),
    "update_copy": ("hipGraphExecMemcpyNodeSetParams1D", (_P, _P, _P, _P, _Z, _I)),
}


def bound(library: Any, symbols: dict[str, tuple[str, tuple[Any, ...]]], least: str) -> dict[str, Any]:
    """The functions of a loaded library by our names.

    Raises:
        DriverError: it lacks one, which every version from `least` on has.
    """
    functions = {}
    for name, (symbol, arguments) in symbols.items():
        try:
            function = getattr(library, symbol)
        except AttributeError as error:
            raise DriverError(f"the driver of this machine has no {symbol}, which {least} and newer have") from error
        function.argtypes = list(arguments)
        functions[name] = function
    return functions
