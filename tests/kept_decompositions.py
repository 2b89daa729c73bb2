"""torch's overrides of composite operators while it exports, made once in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._export.utils import _get_decomp_for_cia
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import exported_program

Kernel = Callable[..., Any]
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def keep_decompositions() -> None:
    """From here on every export takes the same overrides.

    torch makes 21 functions anew for each of 700 operators at every export, and registers them one by one: a third of the time
    that a small module takes.
    """
    exported_program._override_composite_implicit_decomp = _overridden  # type: ignore[assignment]


@contextmanager
def _overridden(decompositions: Mapping[OpOverload, Kernel]) -> Iterator[None]:
    """What the function of torch does: in the context, composite operators are decomposed so."""
    before = {operator: operator.py_kernels.copy() for operator in decompositions}
    for operator, decomposition in decompositions.items():
        own = operator.py_kernels.get(_COMPOSITE)
        kernels, impl = _kernels(operator, own)
        operator.py_kernels.update({**kernels, **operator.py_kernels, _COMPOSITE: decomposition})
        operator._dispatch_cache.clear()
        op_implementations_dict.setdefault(operator, impl)
    try:
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
            op_implementations_dict.pop(operator, None)


@cache
def _kernels(operator: OpOverload, own: object) -> tuple[dict[Any, Kernel], Kernel]:
    """Those for keys that an operator has none for, and its rule for tensors without data; `own` decomposed it before."""
    original = _get_decomp_for_cia(operator)
    refuse = autograd_not_implemented(operator, deferred_error=True)
    kernels = dict.fromkeys(exported_program._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE, refuse)
    kernels |= dict.fromkeys(exported_program._BACKEND_KEYS_TO_OVERRIDE, original)

    def without_data(mode: Any, _: OpOverload, *arguments: Any, **keywords: Any) -> Any:
        with mode:
            return original(*arguments, **keywords)

    return kernels, without_data
