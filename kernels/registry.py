"""Which template computes a group: the first of a visible list that takes it, with the reasons of those passed over."""

from __future__ import annotations

from dataclasses import replace

from ..runtime.target import Target
from .cpu import convolution, elementwise, matmul, recurrent
from .group import Group
from .template import BuiltKernel, Refusal, Template

TEMPLATES: tuple[Template, ...] = (
    Template("elementwise", elementwise.build),
    Template("matmul", matmul.build),
    Template("convolution", convolution.build),
    Template("gru", recurrent.build),
)


def build_kernel(group: Group, target: Target) -> BuiltKernel | tuple[tuple[str, str], ...]:
    """The kernel of a group; where no template takes it, each template's name and reason."""
    refused: list[tuple[str, str]] = []
    for template in TEMPLATES:
        built = template.build(group, target)
        if isinstance(built, BuiltKernel):
            return replace(built, refused=tuple(refused))
        refused.append((template.name, built.reason))
    return tuple(refused)


__all__ = ["TEMPLATES", "Refusal", "build_kernel"]
