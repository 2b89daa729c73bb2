"""Structures: apart and together again, hashable, and through JSON."""

import json
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefuse.compiler.frontend.pytree import flatten, from_json, leaf_paths, to_json, unflatten
from prefuse.runtime.errors import InputError

Point = namedtuple("Point", "x y")


@dataclass
class Pair:
    first: object
    second: object


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.builds(np.ones, st.integers(0, 3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=10,
)


@given(TREES)
def test_round_trip(tree: object) -> None:
    structure, leaves = flatten(tree)
    again = unflatten(from_json(json.loads(json.dumps(to_json(structure)))), leaves)
    assert repr(again) == repr(tree)
    assert flatten(again)[0] == structure
    assert hash(flatten(again)[0]) == hash(structure)
    assert len(list(leaf_paths(structure))) == len(leaves)


@pytest.mark.parametrize(("one", "other"), [(1, True), (0.0, -0.0), (1, 1.0), ("1", 1), ((), []), (None, 0)])
def test_different_values_have_different_structures(one: object, other: object) -> None:
    assert flatten(one)[0] != flatten(other)[0]


def test_mappings_keep_their_class_and_order() -> None:
    tree = OrderedDict(b=np.ones(1), a=np.zeros(2))
    structure, leaves = flatten(tree)
    again = unflatten(structure, leaves)
    assert type(again) is OrderedDict
    assert list(again) == ["b", "a"]


@pytest.mark.parametrize("factory", [None, list])
def test_defaults_of_mappings_stay(factory: type | None) -> None:
    structure, leaves = flatten(defaultdict(factory, a=np.ones(1), b=[np.zeros(2)]))
    again = unflatten(structure, leaves)
    assert type(again) is defaultdict
    assert again.default_factory is factory
    assert list(again) == ["a", "b"]
    assert list(leaf_paths(structure)) == ["a", "b_0"]
    assert flatten(again)[0] == structure


class Named(dict):  # type: ignore[type-arg]
    """A mapping made as dict is."""


class Prefixed(dict):  # type: ignore[type-arg]
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix


def test_mappings_that_are_made_otherwise_are_refused() -> None:
    """A Counter of pairs would count them."""
    structure, leaves = flatten(Named(a=np.ones(1)))
    assert type(unflatten(structure, leaves)) is Named
    for value in (Counter("ab"), Prefixed("x"), type("Defaults", (defaultdict,), {})(list)):
        with pytest.raises(InputError, match="may not be made of its items again"):
            flatten(value)


class Cache:
    """A plain object, as decoders of other libraries keep their keys and values in."""

    def __init__(self, keys: object) -> None:
        self.keys = keys
        self.length = 3

    def __repr__(self) -> str:
        return f"Cache({self.keys!r}, {self.length})"


def test_plain_objects_are_their_attributes() -> None:
    structure, leaves = flatten({"cache": Cache([np.zeros(2), None])})
    again = unflatten(from_json(json.loads(json.dumps(to_json(structure)))), leaves)
    assert repr(again) == "{'cache': Cache([array([0., 0.]), None], 3)}"
    assert flatten(again)[0] == structure
    assert list(leaf_paths(structure)) == ["cache_keys_0"]


@pytest.mark.parametrize(
    "value", [len, json, threading.Lock(), Path("x"), {1.5: 1}, ValueError("no"), type("Slots", (), {"__slots__": ("a",)})()]
)
def test_objects_that_are_more_than_their_attributes_are_refused(value: object) -> None:
    with pytest.raises(InputError, match="input"):
        flatten(value)


def test_an_object_that_contains_itself_is_refused() -> None:
    cache = Cache(None)
    cache.keys = [cache]
    with pytest.raises(InputError, match="input: Cache contains itself"):
        flatten(cache)


@pytest.mark.parametrize("value", [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)])
def test_types_and_devices_of_torch_have_a_json_form(value: object) -> None:
    structure, _ = flatten({"kind": value})
    again = from_json(json.loads(json.dumps(to_json(structure))))
    assert again == structure
    assert unflatten(again, ()) == {"kind": value}


def test_names_of_leaves() -> None:
    structure, _ = flatten({"a": [np.ones(1), np.ones(1)], "b": Pair(np.ones(1), 3)})
    assert list(leaf_paths(structure, "in")) == ["in_a_0", "in_a_1", "in_b_first"]


def test_an_unknown_object_is_named_with_its_place() -> None:
    with pytest.raises(InputError, match=r"input\[1\]\['k'\]: builtins.object is neither"):
        flatten((1, {"k": object()}))


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        [],
        {},
        {"torch": "dtype", "value": "nn"},
        {"torch": "device", "value": "x"},
        {"module": "no.such", "class": "X", "keys": None, "children": []},
    ],
)
def test_what_is_no_structure(data: object) -> None:
    with pytest.raises((TypeError, KeyError, ValueError)):
        from_json(data)
