"""The next token of each sequence: that of the largest logit, or one drawn by temperature, top-k and top-p.

A token is drawn as the largest of logits / temperature + Gumbel noise, -log(-log u): a draw from their softmax (Gumbel, 1954).
The noise is a function of seed, step, sequence and token (Philox4x32-10), so that equal seeds draw equal tokens with any number
of threads. Top-k and top-p need no sorting: each is a threshold, found by a search that halves its range three times a pass over
the logits. Tokens whose logits equal the threshold all stay. A token whose logit is NaN is never chosen; where no logit is more
than -inf, that is token 0. Of infinite logits each is as likely, and no other is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..expressions import math
from ..expressions.philox import Key, philox
from ..template.kernel import new_builder

STOPS = 16  # stop tokens, at most; the others are -1
SETTINGS = 3  # of a sequence: temperature, 0 for the largest; top-k, 0 for all; top-p, 1 for all
PARAMETERS = ("logits", "settings", "key", "ends", "state", "scratch", "token", "alive")

_LANES = 16  # of all vectors here, on every target, so that numbers do not depend on it
_BLOCK = 4 * _LANES  # tokens whose noise is the four words of _LANES counters
_WAYS, _ROUNDS = 8, 11  # of a search: 88 * 8**-11 is less than float32 tells apart
_DEPTH = 88.0  # a logit so far below the largest has a probability of 0
_LEAST = -3.0e38  # less than any logit that is finite


def scratch_elements(batch: int, vocabulary: int) -> int:
    """Numbers of float32 that the kernel wants as scratch."""
    return 2 * batch * _pitch(vocabulary)


def token_sampler(batch: int, vocabulary: int, target: Target) -> Any:
    """The kernel, whose parameters are pointers to `PARAMETERS`, in this order:

    logits float32 [batch, vocabulary], settings float32 [batch, SETTINGS], key uint32 [2], ends int64 [STOPS + 1]: stop tokens,
    then what a sequence gets that has ended; state int64 [1 + batch], which it renews: the step's number, and 1 for each
    sequence that runs, else 0; scratch; token int64 [batch] and alive int64 [1], how many sequences run, which it writes.
    """
    builder = new_builder(target)
    kernel = _Sampler(builder, batch, vocabulary)
    kernel.build()
    builder.order_parameters(PARAMETERS)
    return builder.function()


def _pitch(vocabulary: int) -> int:
    return -(-vocabulary // _BLOCK) * _BLOCK


@dataclass(frozen=True)
class _Sampler:
    builder: KernelBuilder
    batch: int
    vocabulary: int

    @property
    def pitch(self) -> int:
        """Numbers of a row of scratch: whole blocks, the last filled up with what no token is."""
        return _pitch(self.vocabulary)

    def _base(self, row: Expr) -> Expr:
        """Where a row of scratch begins."""
        return self.builder.bind(row * self.pitch)

    def parameter(self, name: str) -> Buffer:
        rows = self.batch
        elements, dtype = {
            "logits": (rows * self.vocabulary, "float32"),
            "settings": (rows * SETTINGS, "float32"),
            "key": (2, "uint32"),
            "ends": (STOPS + 1, "int64"),
            "state": (1 + rows, "int64"),
            "scratch": (scratch_elements(rows, self.vocabulary), "float32"),
            "token": (rows, "int64"),
            "alive": (1, "int64"),
        }[name]
        return self.builder.parameter(name, elements, dtype)

    def build(self) -> None:
        builder, zero = self.builder, tirx.const(0, "int32")
        for name in PARAMETERS:
            self.parameter(name)
        state, alive = self.parameter("state"), self.parameter("alive")
        with builder.chunks(self.batch, self.batch * self.vocabulary) as row:
            self._row(row)
        builder.store(state, zero, state[zero] + tirx.const(1, "int64"))
        builder.store(alive, zero, tirx.const(0, "int64"))
        with builder.loop(self.batch, name="row") as row:
            builder.store(alive, zero, alive[zero] + state[row + 1])

    def _row(self, row: Expr) -> None:
        """The token of one sequence."""
        builder, zero = self.builder, tirx.const(0, "int32")
        chosen = builder.local(1, "int32", "chosen")
        builder.store(chosen, zero, zero)
        self._widen(row)
        temperature = builder.bind(self.parameter("settings")[row * SETTINGS])
        with builder.when(self.parameter("state")[row + 1] > tirx.const(0, "int64")):
            largest = builder.bind(self._largest(row))
            with builder.when(temperature <= math.f32(0.0)):
                builder.store(chosen, zero, self._place_of(row, largest))
            with builder.when(temperature > math.f32(0.0)):
                self._draw(row, largest, temperature, chosen)
        self._end(row, chosen[zero])

    def _end(self, row: Expr, chosen: Expr) -> None:
        """Store the token, and whether the sequence runs on."""
        builder, state, ends = self.builder, self.parameter("state"), self.parameter("ends")
        one, none = tirx.const(1, "int64"), tirx.const(0, "int64")
        found = builder.local(1, "int64", "found")
        runs = builder.bind(state[row + 1])
        token = builder.bind(tirx.Select(runs > none, tirx.Cast("int64", chosen), ends[STOPS]))
        builder.store(found, tirx.const(0, "int32"), runs)
        with builder.loop(STOPS, name="stop") as number:
            builder.store(found, tirx.const(0, "int32"), tirx.Select(tirx.EQ(ends[number], token), none, found[0]))
        builder.store(self.parameter("token"), row, token)
        builder.store(state, row + 1, tirx.Select(found[0] > none, one, none))

    def _widen(self, row: Expr) -> None:
        """Copy a row of logits to scratch, filled up to whole blocks."""
        builder, scratch, base = self.builder, self.parameter("scratch"), self._base(row)
        logits = self.parameter("logits")
        builder.vector_loop(
            self.vocabulary, _LANES, lambda i: builder.store(scratch, base + i, logits[row * self.vocabulary + i])
        )
        with builder.loop(self.pitch - self.vocabulary, name="fill") as i:
            builder.store(scratch, base + self.vocabulary + i, math.f32(-inf))

    def _vectors(self, body: Callable[[Expr], None]) -> None:
        """`body` for each place in a row of scratch, vector by vector."""
        with self.builder.loop(self.pitch // _LANES, name="v") as v, self.builder.loop(_LANES, "vectorized", "lane") as lane:
            body(v * _LANES + lane)

    def _lanes(self, dtype: str, value: Expr, name: str = "acc") -> Buffer:
        found = self.builder.local(_LANES, dtype, name)
        with self.builder.loop(_LANES, "vectorized", "lane") as lane:
            self.builder.store(found, lane, value)
        return found

    def _folded(self, lanes: Buffer, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        """One number of all lanes, which are overwritten."""
        half = _LANES // 2
        while half:
            with self.builder.loop(half, "vectorized" if half > 1 else "serial", "lane") as lane:
                self.builder.store(lanes, lane, combine(lanes[lane], lanes[half + lane]))
            half //= 2
        return lanes[tirx.const(0, "int32")]

    def _largest(self, row: Expr) -> Expr:
        """The largest logit; NaN never is."""
        scratch, base, best = self.parameter("scratch"), self._base(row), self._lanes("float32", math.f32(_LEAST))

        def look(i: Expr) -> None:
            value, lane = self.builder.name(scratch[base + i]), tirx.floormod(i, _LANES)
            self.builder.store(best, lane, tirx.Select(value > best[lane], value, best[lane]))

        self._vectors(look)
        return self._folded(best, tirx.max)

    def _place_of(self, row: Expr, value: Expr) -> Expr:
        """The first token of this logit; 0 if none has it."""
        scratch, base = self.parameter("scratch"), self._base(row)
        first = self._lanes("int32", tirx.const(self.pitch, "int32"))

        def look(i: Expr) -> None:
            lane = tirx.floormod(i, _LANES)
            place = tirx.Select(tirx.EQ(scratch[base + i], value), tirx.Cast("int32", i), tirx.const(self.pitch, "int32"))
            self.builder.store(first, lane, tirx.min(first[lane], place))

        self._vectors(look)
        found = self.builder.bind(self._folded(first, tirx.min))
        return tirx.Select(found < self.vocabulary, found, tirx.const(0, "int32"))

    def _draw(self, row: Expr, largest: Expr, temperature: Expr, chosen: Buffer) -> None:
        """Draw a token: `chosen` is set."""
        builder, scratch, settings = self.builder, self.parameter("scratch"), self.parameter("settings")
        base, weights = self._base(row), self._base(self.batch + row)
        zero = tirx.const(0, "int32")
        top_k, top_p = (builder.bind(settings[row * SETTINGS + number]) for number in (1, 2))
        largest = builder.bind(tirx.min(largest, math.f32(-_LEAST)))

        def scale(i: Expr) -> None:
            below = builder.name((scratch[base + i] - largest) / temperature)
            builder.store(scratch, base + i, tirx.Select(below > math.f32(0.0), math.f32(0.0), below))  # inf becomes 0, NaN stays

        self._vectors(scale)
        threshold = builder.local(1, "float32", "threshold")
        builder.store(threshold, zero, math.f32(-_DEPTH))
        with builder.when(top_k > math.f32(0.0)):
            self._search(base, lambda _: math.f32(1.0), top_k, threshold)
        with builder.when(top_p < math.f32(1.0)):
            kept = builder.bind(threshold[zero])

            def weigh(i: Expr) -> None:
                below = builder.name(scratch[base + i])
                weight = math.exp_nonpositive(builder.name, below)
                builder.store(scratch, weights + i, tirx.Select(below >= kept, weight, math.f32(0.0)))

            self._vectors(weigh)
            total = self._sums(base, lambda i: scratch[weights + i], [math.f32(-_DEPTH)])[0]
            self._search(base, lambda i: scratch[weights + i], builder.bind(total) * top_p, threshold)
        self._highest(row, base, threshold[zero], chosen)

    def _search(self, base: Expr, weight: Callable[[Expr], Expr], goal: Expr, threshold: Buffer) -> None:
        """Raise the threshold to the largest such that the weights of all that is not below it sum to the goal, if one is so."""
        builder, zero = self.builder, tirx.const(0, "int32")
        goal = builder.bind(goal)
        least, width = builder.local(1, "float32", "least"), builder.local(1, "float32", "width")
        builder.store(least, zero, math.f32(-_DEPTH))
        builder.store(width, zero, math.f32(_DEPTH))
        with builder.loop(_ROUNDS, name="round"):
            builder.store(width, zero, width[zero] * math.f32(1 / _WAYS))
            bounds = [builder.bind(least[zero] + width[zero] * math.f32(way)) for way in range(1, _WAYS)]
            sums = self._sums(base, weight, bounds)
            for bound, total in zip(bounds, sums, strict=True):
                builder.store(least, zero, tirx.Select(total >= goal, bound, least[zero]))
        builder.store(threshold, zero, tirx.max(threshold[zero], least[zero]))

    def _sums(self, base: Expr, weight: Callable[[Expr], Expr], bounds: list[Expr]) -> list[Expr]:
        """The sums of the weights of all tokens that are not below each bound."""
        builder, scratch = self.builder, self.parameter("scratch")
        sums = [self._lanes("float32", math.f32(0.0)) for _ in bounds]

        def add(i: Expr) -> None:
            below, own, lane = builder.name(scratch[base + i]), builder.name(weight(i)), tirx.floormod(i, _LANES)
            for total, bound in zip(sums, bounds, strict=True):
                builder.store(total, lane, total[lane] + tirx.Select(below >= bound, own, math.f32(0.0)))

        self._vectors(add)
        return [builder.bind(self._folded(total, lambda a, b: a + b)) for total in sums]

    def _highest(self, row: Expr, base: Expr, threshold: Expr, chosen: Buffer) -> None:
        """The token that is the largest with noise, of those that are not below the threshold."""
        builder, scratch = self.builder, self.parameter("scratch")
        threshold = builder.bind(threshold)
        best, places = self._lanes("float32", math.f32(_LEAST)), self._lanes("int32", tirx.const(0, "int32"), "places")
        with builder.loop(self.pitch // _BLOCK, name="block") as block:
            first = builder.bind(base + block * _BLOCK)
            seen = self._lanes("float32", math.f32(_LEAST), "seen")
            for part in range(4):
                with builder.loop(_LANES, "vectorized", "lane") as lane:
                    below = builder.name(scratch[first + part * _LANES + lane])
                    builder.store(seen, lane, tirx.Select(below > seen[lane], below, seen[lane]))
            with builder.when(self._folded(seen, tirx.max) >= threshold), builder.loop(_LANES, "vectorized", "lane") as lane:
                for part, noise in enumerate(self._noise(row, block * _LANES + lane)):
                    below = builder.name(scratch[first + part * _LANES + lane])
                    score = builder.name(tirx.Select(below >= threshold, below + noise, math.f32(_LEAST)))
                    place = block * _BLOCK + part * _LANES + lane
                    is_best = builder.name(score > best[lane])
                    builder.store(best, lane, tirx.Select(is_best, score, best[lane]))
                    builder.store(places, lane, tirx.Select(is_best, tirx.Cast("int32", place), places[lane]))
        self._first_best(best, places, chosen)

    def _first_best(self, best: Buffer, places: Buffer, chosen: Buffer) -> None:
        builder, zero = self.builder, tirx.const(0, "int32")
        held = self._lanes("float32", math.f32(_LEAST), "held")
        with builder.loop(_LANES, "vectorized", "lane") as lane:
            builder.store(held, lane, best[lane])
        highest = builder.bind(self._folded(held, tirx.max))
        with builder.loop(_LANES, "vectorized", "lane") as lane:
            is_highest = tirx.EQ(best[lane], highest)
            builder.store(places, lane, tirx.Select(is_highest, places[lane], tirx.const(self.vocabulary - 1, "int32")))
        builder.store(chosen, zero, self._folded(places, tirx.min))

    def _noise(self, row: Expr, counter: Expr) -> list[Expr]:
        """Gumbel noise of the four tokens of a counter: u is the middle of one of 2**23 parts of (0, 1)."""
        builder, key, step = self.builder, self.parameter("key"), self.parameter("state")[tirx.const(0, "int32")]
        high = tirx.Cast("uint32", step >> tirx.const(32, "int64"))
        words = philox(counter, Key(key[0], key[1]), builder.name, (tirx.Cast("uint32", row), tirx.Cast("uint32", step), high))
        found = []
        for word in words:
            middle = tirx.Cast("float32", word >> tirx.const(9, "uint32")) + math.f32(0.5)
            exponential = -math.log(builder.name, builder.name(middle * math.f32(2.0**-23)))
            found.append(builder.name(-math.log(builder.name, builder.name(exponential))))
        return found
