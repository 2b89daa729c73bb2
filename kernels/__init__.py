"""The templates of kernels, and what they share (docs/architecture.md)."""

from .tvm_import import import_tvm_without_torch

import_tvm_without_torch()
