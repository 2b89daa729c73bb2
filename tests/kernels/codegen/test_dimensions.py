"""Sizes in kernels: what is simplified of offsets in tensors whose extents a call decides."""

from __future__ import annotations

from prefuse.kernels.codegen.builder import row_major, unravel
from prefuse.kernels.codegen.dimensions import dimensions
from prefuse.runtime.symbolic.sizes import Dim, Domain
from tvm import tirx


def test_what_was_divided_by_an_extent_is_not_divided() -> None:
    """A flat position becomes an index, and a flat offset again."""
    domain = Domain([Dim("H", 4, 40), Dim("W", 4, 40)], {"H": 8, "W": 8})
    height, width, position = domain.size("H"), domain.size("W"), tirx.Var("position", "int32")
    with dimensions(domain):
        assert row_major(unravel(position, (height, width)), (height, width)).same_as(position)
        assert row_major(unravel(position, (3, height, width)), (3, height, width)).same_as(position)
        assert "truncmod" in str(row_major(unravel(position, (height, width)), (height, width + 1)))  # of a wider image
        assert "truncmod" in str(row_major(unravel(position, (height, width))[::-1], (height, width)))


def test_numbers_come_last() -> None:
    """Neighbours share all but a number."""
    domain = Domain([Dim("W", 4, 40)], {"W": 8})
    width, row, column = domain.size("W"), tirx.Var("row", "int32"), tirx.Var("column", "int32")
    with dimensions(domain):
        first, second = (row_major((row, column + i, 2), (7, width, 5)) for i in (0, 3))
        assert str(second).removesuffix(" + 17") == str(first).removesuffix(" + 2")
        assert str(second).endswith(" + 17")
        assert str(row_major((row + 1, column), (7, width))) == "W * (row + 1) + column"
