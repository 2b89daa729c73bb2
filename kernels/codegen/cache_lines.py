"""Where cache lines begin on the stack, of which LLVM knows only that it is aligned to 16 bytes."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES

_FUNCTION = "prefuse_bytes_to_line"

LLVM_FUNCTIONS = f"""
define linkonce_odr i32 @{_FUNCTION}(ptr %p) alwaysinline {{
  %address = ptrtoint ptr %p to i32
  %negative = sub i32 0, %address
  %r = and i32 %negative, {LINE_BYTES - 1}
  ret i32 %r
}}
"""


def bytes_to_line(element: Any) -> Any:
    """How many bytes behind an element of a buffer the next cache line begins; 0 where one begins with it."""
    return tirx.call_pure_extern("int32", _FUNCTION, tirx.address_of(element))
