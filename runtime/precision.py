"""How exactly a program computes float32, which its user chooses."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

# bfloat16, float16: what products read is stored in that type, all sums and all else is float32.
# float32: the error against float64 is at most twice that of ONNX Runtime in float32. float32-fast: at most 2e-5 relative.
Precision: TypeAlias = Literal["float32", "float32-fast", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
