"""Models that draw random numbers are taken only where the user says so."""

from __future__ import annotations

import numpy as np
import prefuse
import pytest
from onnx import parser
from prefuse.runtime.errors import OptionError, UnsupportedModelError

_HEADER = '<ir_version: 8, opset_import: ["": 18]>\n'
_NOISE = "main (float[1000] x) => (float[1000] y) { n = RandomUniformLike(x) y = Add(x, n) }"
_DROPOUT = "main (float[1000] x, float ratio, bool trains) => (float[1000] y) { y = Dropout(x, ratio, trains) }"
_ONES = np.ones(1000, np.float32)


def test_random_numbers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"RandomUniformLike .* random=True"):
        prefuse.compile(parser.parse_model(_HEADER + _NOISE), cache=False)


def test_random_numbers_are_drawn_where_that_is_meant() -> None:
    net = prefuse.compile(parser.parse_model(_HEADER + _NOISE), cache=False, random=True)
    first, second = net(_ONES), net(_ONES)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert ((first >= 1) & (first < 2)).all()
    assert not np.array_equal(first, second)


def test_a_dropout_is_judged_by_what_its_inputs_say() -> None:
    net = prefuse.compile(parser.parse_model(_HEADER + _DROPOUT), cache=False)
    for ratio, trains in ((0.5, False), (0.0, True)):
        np.testing.assert_array_equal(net(_ONES, np.array(ratio, np.float32), np.array(trains)), _ONES)
    with pytest.raises(UnsupportedModelError, match=r"Dropout .* model\.eval\(\)"):
        net(_ONES, np.array(0.5, np.float32), np.array(True))
    trained = prefuse.compile(parser.parse_model(_HEADER + _DROPOUT), cache=False, random=True)
    result = trained(_ONES, np.array(0.5, np.float32), np.array(True))
    assert isinstance(result, np.ndarray)
    assert set(np.unique(result)) == {0.0, 2.0}


def test_the_option_is_a_truth_value() -> None:
    with pytest.raises(OptionError, match="neither True nor False"):
        prefuse.compile(parser.parse_model(_HEADER + _NOISE), cache=False, random="yes")
