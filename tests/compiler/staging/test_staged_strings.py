"""Strings between programs are objects of `str`, each as long as it is; NumPy's own kinds cut what is longer than the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.runtime.errors import InputError


def _compiled(text: str) -> Any:
    return prefuse.compile(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}'), cache=False)


def _check(found: Any, wanted: Any) -> None:
    assert found.dtype == object
    assert found.tolist() == wanted


_WHERE = "main (bool[2] c, string[2] a, string[2] b) => (string[2] y) { y = Where(c, a, b) }"
_KINDS: dict[str, Any] = {"U": "U", "S": "S", "T": np.dtypes.StringDType(), "object": object}


@pytest.mark.parametrize("kind", _KINDS)
def test_any_strings_of_numpy_are_taken_whole(kind: str) -> None:
    first, second = (np.array(words, _KINDS[kind]) for words in (["no", "no"], ["maybe", "never"]))
    _check(_compiled(_WHERE)(np.array([True, False]), first, second), ["no", "never"])


def test_bytes_are_utf_8() -> None:
    net = _compiled(_WHERE)
    given = np.array([True, False]), np.array(["é".encode(), b"c"]), np.array([b"d", b"\xff"], object)
    with pytest.raises(InputError, match=r"input 'b': .*utf-8"):
        net(*given)
    given[2][1] = "ü".encode()
    _check(net(*given), ["é", "ü"])


def test_numbers_made_strings_do_not_cut_others() -> None:
    text = """main (bool[2] c, uint8[2] x) => (string[2] y) {
        s = Cast<to=8>(x)
        k = Constant<value_strings=["unknown"]>()
        y = Where(c, s, k)
    }"""
    _check(_compiled(text)(np.array([True, False]), np.array([7, 8], np.uint8)), ["7", "unknown"])


def test_strings_in_a_sequence() -> None:
    text = "main (seq(string[N]) s) => (string[M] y) { y = ConcatFromSequence<axis=0>(s) }"
    _check(_compiled(text)([np.array(["a"]), np.array([b"bcd"])]), ["a", "bcd"])


def test_one_string_by_its_index_is_an_array() -> None:
    """A classifier's label."""
    text = """main (float[3] x) => (string y, string[1] z) {
        names = Constant<value_strings=["a", "b", "c"]>()
        i = ArgMax<axis=0, keepdims=0>(x)
        y = Gather(names, i)
        axis = Constant<value_ints=[0]>()
        z = Unsqueeze(y, axis)
    }"""
    y, z = _compiled(text)(np.array([1, 5, 2], np.float32))
    _check(y, "b")
    _check(z, ["b"])
