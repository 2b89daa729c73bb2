"""Strings between programs: arrays of `str` objects, each as long as it is."""

from __future__ import annotations

import numpy as np


def with_str_objects(array: np.ndarray) -> np.ndarray:
    """An array of strings of any kind as one of `str` objects, bytes read as UTF-8; another array as it is.

    NumPy's own strings are as long as the longest of their array, and what is written among them is cut.

    Raises:
        UnicodeDecodeError: bytes are no UTF-8.
    """
    if array.dtype.kind not in "OUST":
        return array
    whole = array.astype(object, copy=False)
    if not any(isinstance(item, bytes) for item in whole.flat):
        return whole
    texts = [item.decode() if isinstance(item, bytes) else item for item in whole.flat]
    return np.array(texts, object).reshape(whole.shape)
