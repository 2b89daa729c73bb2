"""Results of a model, whatever they are, as arrays with names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Arrays = dict[str, np.ndarray]


def arrays_by_name(values: Iterable[tuple[str, object]]) -> Arrays:
    """The arrays of results: items of a sequence by their places, none for an empty optional, strings as NumPy has them."""
    arrays: Arrays = {}
    for name, value in values:
        if isinstance(value, list):
            arrays |= arrays_by_name((f"{name}[{place}]", item) for place, item in enumerate(value))
        elif value is not None:
            array = np.asarray(value)
            arrays[name] = array.astype(np.str_) if array.dtype == object else array
    return arrays
