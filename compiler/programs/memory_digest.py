"""Digests of large arrays in memory, which are hashed once as long as they stay where they are and what they are.

Whether they are what they were, a weighted sum of their words tells, at ten times the speed of SHA-256. It is of what its owner
may do to an array in place, such as a module to its parameters; it protects from nobody who wants to deceive.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LEAST_BYTES = 1 << 16  # below, hashing is as fast as looking
_CHUNK_BYTES = 1 << 24  # one piece of work for one thread; a digest of digests costs nothing beside it
_BLOCK_WORDS = 1 << 13  # of 8 bytes: what stays in the nearest cache while it is summed
_MOST_KNOWN = 1 << 14  # arrays
_MIXED_BITS = 29
_WEIGHTS = np.random.default_rng(0).integers(0, 1 << 64, _BLOCK_WORDS, np.uint64)

_known: dict[tuple[int, int], tuple[bytes, str]] = {}  # by address and size: the sums, and the digest
_lock = threading.Lock()


def known_digest(data: np.ndarray) -> str:
    """The digest of contiguous bytes."""
    if data.size < _LEAST_BYTES:
        return hashlib.sha256(data.data).hexdigest()
    place, sums = (data.ctypes.data, data.size), weighted_sums(data)
    found = _known.get(place)
    if found is None or found[0] != sums:
        found = sums, _digest(data)
        with _lock:
            while len(_known) >= _MOST_KNOWN:
                _known.pop(next(iter(_known)))
            _known[place] = found
    return found[1]


def weighted_sums(data: np.ndarray) -> bytes:
    """A digest of the sums, modulo 2^64, of the words of each block, each multiplied by a number of its place in the block.

    High bits of a word are first mixed into its low ones: a difference in them alone would be lost with even factors.
    """
    count = data.size // 8
    words = data[: 8 * count].view(np.uint64)
    sums = np.empty(-(-count // _BLOCK_WORDS), np.uint64)
    mixed = np.empty(_BLOCK_WORDS, np.uint64)
    for number, begin in enumerate(range(0, count, _BLOCK_WORDS)):
        block = words[begin : begin + _BLOCK_WORDS]
        part = mixed[: block.size]
        np.right_shift(block, _MIXED_BITS, out=part)
        np.bitwise_xor(part, block, out=part)
        np.multiply(part, _WEIGHTS[: block.size], out=part)
        sums[number] = part.sum()
    digest = hashlib.sha256(sums.data)
    digest.update(data[8 * count :].data)
    return digest.digest()


def _digest(data: np.ndarray) -> str:
    """The hash of pieces, hashed on all cores."""
    pieces = [data[start : start + _CHUNK_BYTES] for start in range(0, data.size, _CHUNK_BYTES)]
    if len(pieces) == 1:
        return hashlib.sha256(data.data).hexdigest()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = pool.map(lambda piece: hashlib.sha256(piece.data).digest(), pieces)
        return hashlib.sha256(b"".join(parts)).hexdigest()
