"""How much memory a user allows: what is no such amount is one error, and other amounts are other programs."""

from __future__ import annotations

import pytest
from prefuse.compiler.programs.memory_limit import parse_memory_limit
from prefuse.runtime.errors import OptionError


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "MiB", "9" * 306 + "TiB"])
def test_a_number_beyond_all_is_more_than_there_is(text: str) -> None:
    with pytest.raises(OptionError, match="is more than this machine has"):
        parse_memory_limit(text)


@pytest.mark.parametrize(
    ("text", "name"), [("50%", "50%"), ("33.333333%", "33.333333%"), ("33.33333%", "33.33333%"), ("1KiB", "1024B")]
)
def test_other_limits_have_other_names(text: str, name: str) -> None:
    """By which the cache knows their programs."""
    assert str(parse_memory_limit(text)) == name
