"""The next token of each sequence: that of the largest logit, or one drawn by temperature, top-k, top-p and min-p.

A token is drawn as the largest of logits / temperature + Gumbel noise, -log(-log u): a draw from their softmax (Gumbel, 1954).
The noise is a function of the seed, the token's place in its text, the sequence and the token (Philox4x32-10), so that equal
seeds draw equal tokens with any number of threads, in one call or in several. Top-k and top-p need no sorting: each is a
threshold, found by a search that halves its range three times a pass over the logits. Tokens whose logits equal the threshold
all stay. A token whose logit is NaN is never chosen; where no logit is more than -inf, that is token 0. Of infinite logits each
is as likely, and no other is drawn.

Before all of these a bias is added to the logits, and those of tokens that the text has are divided by the repetition penalty
where they are above 0, else multiplied by it (Keskar et al., CTRL, 2019).
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
KEY_WORDS = 3  # of a sequence: the seed's low and high half, and a number that tells sequences of one seed apart
# Of a sequence: temperature, 0 for the largest; top-k, 0 for all; top-p, 1 for all; the logarithm of min-p, -inf for all; the
# repetition penalty, 1 for none; whether there is a bias, and whether the token's log-probability is wanted, else 0.
SETTINGS = 7
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _PENALTY, _HAS_BIAS, _WANTS_LOGPROB = range(SETTINGS)
PARAMETERS = ("logits", "settings", "key", "ends", "state", "scratch", "token", "alive", "bias", "seen", "logprobs")

_LANES = 16  # of all vectors here, on every target, so that numbers do not depend on it
_BLOCK = 4 * _LANES  # tokens whose noise is the four words of _LANES counters
_WAYS, _ROUNDS = 8, 11  # of a search: 88 * 8**-11 is less than float32 tells apart
_NOISE_WORK = 8  # of a token, in passes over the logits
_MOST_LOGPROBS = 2**31 - 1  # of a call: whatever the caller gives room for
_DEPTH = 88.0  # a logit so far below the largest has a probability of 0
_LEAST = -3.0e38  # less than any logit that is finite
_HOPELESS = -20.0  # noise is from -2.82 to 16.64: what is further below the largest is never the highest with noise


def scratch_elements(batch: int, vocabulary: int, threads: int) -> int:
    """Numbers of float32 that the kernel wants as scratch: of each sequence two rows, the largest of each block of the first, the
    highest of each part with its token, a threshold and a token."""
    pitch = _pitch(vocabulary)
    return batch * (2 * pitch + pitch // _BLOCK + 2 * _parts(batch, threads) + 2)


def _parts(batch: int, threads: int) -> int:
    """Into how many parts of the vocabulary the threads share a draw, where there are more of them than sequences."""
    return threads if threads > batch else 1


def token_sampler(batch: int, vocabulary: int, target: Target) -> Any:
    """The kernel, whose parameters are pointers to `PARAMETERS`, in this order:

    logits float32 [batch, vocabulary], settings float32 [batch, SETTINGS], key uint32 [batch, KEY_WORDS], ends int64 [STOPS + 1]:
    stop tokens, then what a sequence gets that has ended; state int64 [1 + 3 batch]: the step's number and 1 for each sequence
    that runs, else 0, both of which it renews, then the place in its text of the token of step 0, and how many steps it runs at
    most; scratch; token int64 [batch] and alive int64 [1], how many sequences run, which it writes.

    Read only where settings say so: bias float32 [batch, vocabulary], added to the logits; seen int8 [batch, vocabulary], 1 for
    tokens that the text has, to which it adds the new one. It writes logprobs float32 [steps, batch], where wanted: of the
    step's token by the softmax of the logits as they are.
    """
    builder = new_builder(target)
    kernel = _Sampler(builder, batch, vocabulary, _parts(batch, target.threads))
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
    parts: int

    @property
    def pitch(self) -> int:
        """Numbers of a row of scratch: whole blocks, the last filled up with what no token is."""
        return _pitch(self.vocabulary)

    def _base(self, row: Expr) -> Expr:
        """Where a row of scratch begins."""
        return self.builder.bind(row * self.pitch)

    @property
    def blocks(self) -> int:
        return self.pitch // _BLOCK

    def _maxima(self, row: Expr) -> Expr:
        """Where in scratch the largest of each block of a row are."""
        return self.builder.bind(2 * self.batch * self.pitch + row * self.blocks)

    def _result(self, row: Expr, number: Expr) -> Expr:
        """A place in scratch for a number of a row: the highest of each part, the token of each, the threshold, the token."""
        first = self.batch * (2 * self.pitch + self.blocks)
        return self.builder.bind(first + row * (2 * self.parts + 2) + number)

    def parameter(self, name: str) -> Buffer:
        rows = self.batch
        elements, dtype = {
            "logits": (rows * self.vocabulary, "float32"),
            "settings": (rows * SETTINGS, "float32"),
            "key": (rows * KEY_WORDS, "uint32"),
            "ends": (STOPS + 1, "int64"),
            "state": (1 + 3 * rows, "int64"),
            "scratch": (self.batch * (2 * self.pitch + self.blocks + 2 * self.parts + 2), "float32"),
            "token": (rows, "int64"),
            "alive": (1, "int64"),
            "bias": (rows * self.vocabulary, "float32"),
            "seen": (rows * self.vocabulary, "int8"),
            "logprobs": (_MOST_LOGPROBS, "float32"),
        }[name]
        return self.builder.parameter(name, elements, dtype)

    def build(self) -> None:
        builder, zero = self.builder, tirx.const(0, "int32")
        for name in PARAMETERS:
            self.parameter(name)
        state, alive = self.parameter("state"), self.parameter("alive")
        with builder.chunks(self.batch, self.batch * self.vocabulary) as row:
            self._row(row)
        if self.parts > 1:
            with builder.chunks(self.batch * self.parts, self.batch * self.vocabulary * _NOISE_WORK) as item:
                row = builder.bind(tirx.floordiv(item, self.parts))
                self._highest(row, builder.bind(tirx.floormod(item, self.parts)))
            with builder.loop(self.batch, name="row") as row:
                self._finish(row)
        builder.store(state, zero, state[zero] + tirx.const(1, "int64"))
        builder.store(alive, zero, tirx.const(0, "int64"))
        with builder.loop(self.batch, name="row") as row:
            builder.store(alive, zero, alive[zero] + state[row + 1])

    def _row(self, row: Expr) -> None:
        """The likeliest token of a sequence, or what is needed to draw one; all that there is to do, if that is not shared."""
        builder, scratch = self.builder, self.parameter("scratch")
        with builder.when(self.parameter("state")[row + 1] > tirx.const(0, "int64")):
            base = self._base(row)
            self._widen(row, base)
            self._change(row, base)
            temperature = self._setting(row, _TEMPERATURE)
            largest = builder.bind(self._largest(base))
            with builder.when(temperature <= math.f32(0.0)):
                token = tirx.Cast("float32", self._place_of(row, largest))
                builder.store(scratch, self._result(row, 2 * self.parts + 1), token)
            with builder.when(temperature > math.f32(0.0)):
                self._narrow(row, largest, temperature)
        if self.parts == 1:
            self._highest(row, 0)
            self._finish(row)

    def _draws(self, row: Expr) -> Expr:
        """Whether a token is drawn."""
        runs = self.parameter("state")[row + 1] > tirx.const(0, "int64")
        return self.builder.bind(tirx.And(runs, self._setting(row, _TEMPERATURE) > math.f32(0.0)))

    def _finish(self, row: Expr) -> None:
        """Take the token that was drawn, and tell of it."""
        builder, scratch, zero = self.builder, self.parameter("scratch"), tirx.const(0, "int32")
        best, chosen = builder.local(1, "float32", "best"), builder.local(1, "int32", "chosen")
        builder.store(chosen, zero, zero)
        with builder.when(self.parameter("state")[row + 1] > tirx.const(0, "int64")):
            builder.store(chosen, zero, tirx.Cast("int32", scratch[self._result(row, 2 * self.parts + 1)]))
            with builder.when(self._setting(row, _TEMPERATURE) > math.f32(0.0)):
                for part in range(self.parts):
                    score, place = scratch[self._result(row, part)], scratch[self._result(row, self.parts + part)]
                    is_best = builder.name(score > best[zero]) if part else tirx.const(True, "bool")
                    builder.store(chosen, zero, tirx.Select(is_best, tirx.Cast("int32", place), chosen[zero]))
                    builder.store(best, zero, tirx.Select(is_best, score, best[zero]) if part else score)
            with builder.when(self._setting(row, _WANTS_LOGPROB) > math.f32(0.0)):
                self._tell(row, chosen[zero])
            with builder.when(tirx.NE(self._setting(row, _PENALTY), math.f32(1.0))):
                builder.store(self.parameter("seen"), row * self.vocabulary + chosen[zero], tirx.const(1, "int8"))
        self._end(row, chosen[zero])

    def _setting(self, row: Expr, number: int) -> Expr:
        return self.builder.bind(self.parameter("settings")[row * SETTINGS + number])

    def _end(self, row: Expr, chosen: Expr) -> None:
        """Store the token, and whether the sequence runs on."""
        builder, state, ends = self.builder, self.parameter("state"), self.parameter("ends")
        one, none = tirx.const(1, "int64"), tirx.const(0, "int64")
        found = builder.local(1, "int64", "found")
        runs = builder.bind(state[row + 1])
        is_last = builder.bind(state[tirx.const(0, "int32")] + one >= state[1 + 2 * self.batch + row])
        token = builder.bind(tirx.Select(runs > none, tirx.Cast("int64", chosen), ends[STOPS]))
        builder.store(found, tirx.const(0, "int32"), runs)
        with builder.loop(STOPS, name="stop") as number:
            builder.store(found, tirx.const(0, "int32"), tirx.Select(tirx.EQ(ends[number], token), none, found[0]))
        builder.store(self.parameter("token"), row, token)
        builder.store(state, row + 1, tirx.Select(tirx.And(found[0] > none, tirx.Not(is_last)), one, none))

    def _widen(self, row: Expr, base: Expr) -> None:
        """Copy a row of logits to a place in scratch, filled up to whole blocks."""
        builder, scratch = self.builder, self.parameter("scratch")
        logits = self.parameter("logits")
        builder.vector_loop(
            self.vocabulary, _LANES, lambda i: builder.store(scratch, base + i, logits[row * self.vocabulary + i])
        )
        with builder.loop(self.pitch - self.vocabulary, name="fill") as i:
            builder.store(scratch, base + self.vocabulary + i, math.f32(-inf))

    def _change(self, row: Expr, base: Expr) -> None:
        """Add the bias to the logits in scratch, and apply the repetition penalty."""
        builder, scratch, first = self.builder, self.parameter("scratch"), self.builder.bind(row * self.vocabulary)
        bias, seen, penalty = self.parameter("bias"), self.parameter("seen"), self._setting(row, _PENALTY)

        def add(i: Expr) -> None:
            builder.store(scratch, base + i, scratch[base + i] + bias[first + i])

        def punish(i: Expr) -> None:
            value = builder.name(scratch[base + i])
            lower = tirx.Select(value > math.f32(0.0), value / penalty, value * penalty)
            builder.store(scratch, base + i, tirx.Select(seen[first + i] > tirx.const(0, "int8"), lower, value))

        with builder.when(self._setting(row, _HAS_BIAS) > math.f32(0.0)):
            builder.vector_loop(self.vocabulary, _LANES, add)
        with builder.when(tirx.NE(penalty, math.f32(1.0))):
            builder.vector_loop(self.vocabulary, _LANES, punish)

    def _tell(self, row: Expr, chosen: Expr) -> None:
        """Store the log-probability of the token by the logits as they are."""
        builder, scratch, base = self.builder, self.parameter("scratch"), self._base(self.batch + row)
        self._widen(row, base)
        largest = builder.bind(tirx.min(self._largest(base), math.f32(-_LEAST)))

        def below(value: Expr) -> Expr:
            difference = builder.name(value - largest)
            return builder.name(tirx.Select(difference > math.f32(0.0), math.f32(0.0), difference))

        total = self._sums(base, lambda i: math.exp_nonpositive(builder.name, below(scratch[base + i])), [math.f32(-inf)])[0]
        found = below(scratch[base + chosen]) - math.log(builder.name, total)
        step = tirx.Cast("int32", self.parameter("state")[tirx.const(0, "int32")])
        builder.store(self.parameter("logprobs"), step * self.batch + row, found)

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

    def _largest(self, base: Expr) -> Expr:
        """The largest number of a row of scratch; NaN never is."""
        scratch, best = self.parameter("scratch"), self._lanes("float32", math.f32(_LEAST))

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

    def _narrow(self, row: Expr, largest: Expr, temperature: Expr) -> None:
        """Make the logits of a row what they are below the largest, and find the threshold below which no token is drawn."""
        builder, scratch = self.builder, self.parameter("scratch")
        base, weights, maxima = self._base(row), self._base(self.batch + row), self._maxima(row)
        zero = tirx.const(0, "int32")
        top_k, top_p = self._setting(row, _TOP_K), self._setting(row, _TOP_P)
        largest = builder.bind(tirx.min(largest, math.f32(-_LEAST)))
        with builder.loop(self.blocks, name="block") as block:
            first = builder.bind(base + block * _BLOCK)
            seen = self._lanes("float32", math.f32(_LEAST), "seen")
            for part in range(4):
                with builder.loop(_LANES, "vectorized", "lane") as lane:
                    place = first + part * _LANES + lane
                    below = builder.name((scratch[place] - largest) / temperature)
                    below = builder.name(tirx.Select(below > math.f32(0.0), math.f32(0.0), below))  # inf becomes 0, NaN stays
                    builder.store(scratch, place, below)
                    builder.store(seen, lane, tirx.Select(below > seen[lane], below, seen[lane]))
            builder.store(scratch, maxima + block, self._folded(seen, tirx.max))
        threshold = builder.local(1, "float32", "threshold")
        builder.store(threshold, zero, math.f32(-_DEPTH))
        with builder.when(top_k > math.f32(0.0)):
            self._search(base, maxima, lambda _: math.f32(1.0), top_k, threshold)
        with builder.when(top_p < math.f32(1.0)):
            kept = builder.bind(threshold[zero])

            def weigh(i: Expr) -> None:
                below = builder.name(scratch[base + i])
                weight = math.exp_nonpositive(builder.name, below)
                builder.store(scratch, weights + i, tirx.Select(below >= kept, weight, math.f32(0.0)))

            self._vectors(weigh)
            total = self._sums(base, lambda i: scratch[weights + i], [math.f32(-_DEPTH)], maxima)[0]
            self._search(base, maxima, lambda i: scratch[weights + i], builder.bind(total) * top_p, threshold)
        least = tirx.max(self._setting(row, _MIN_P), math.f32(_HOPELESS))
        builder.store(scratch, self._result(row, 2 * self.parts), tirx.max(threshold[zero], least))

    def _search(self, base: Expr, maxima: Expr, weight: Callable[[Expr], Expr], goal: Expr, threshold: Buffer) -> None:
        """Raise the threshold to the largest such that the weights of all that is not below it sum to the goal, if one is so."""
        builder, zero = self.builder, tirx.const(0, "int32")
        goal = builder.bind(goal)
        least, width = builder.local(1, "float32", "least"), builder.local(1, "float32", "width")
        builder.store(least, zero, math.f32(-_DEPTH))
        builder.store(width, zero, math.f32(_DEPTH))
        with builder.loop(_ROUNDS, name="round"):
            builder.store(width, zero, width[zero] * math.f32(1 / _WAYS))
            bounds = [builder.bind(least[zero] + width[zero] * math.f32(way)) for way in range(1, _WAYS)]
            sums = self._sums(base, weight, bounds, maxima)
            for bound, total in zip(bounds, sums, strict=True):
                builder.store(least, zero, tirx.Select(total >= goal, bound, least[zero]))
        builder.store(threshold, zero, tirx.max(threshold[zero], least[zero]))

    def _sums(self, base: Expr, weight: Callable[[Expr], Expr], bounds: list[Expr], maxima: Expr | None = None) -> list[Expr]:
        """The sums of the weights of all tokens that are not below each bound, which ascend; blocks whose largest are below all
        of these add nothing."""
        builder, scratch = self.builder, self.parameter("scratch")
        sums = [self._lanes("float32", math.f32(0.0)) for _ in bounds]

        def add(i: Expr) -> None:
            below, own, lane = builder.name(scratch[base + i]), builder.name(weight(i)), tirx.floormod(i, _LANES)
            for total, bound in zip(sums, bounds, strict=True):
                builder.store(total, lane, total[lane] + tirx.Select(below >= bound, own, math.f32(0.0)))

        if maxima is None:
            self._vectors(add)
        else:
            with (
                builder.loop(self.blocks, name="block") as block,
                builder.when(scratch[maxima + block] >= bounds[0]),
                builder.loop(_BLOCK // _LANES, name="part") as part,
                builder.loop(_LANES, "vectorized", "lane") as lane,
            ):
                add(block * _BLOCK + part * _LANES + lane)
        return [builder.bind(self._folded(total, lambda a, b: a + b)) for total in sums]

    def _highest(self, row: Expr, part: Expr) -> None:
        """The token that is the largest with noise, of those of a part that are not below the threshold, if one is drawn."""
        builder, scratch = self.builder, self.parameter("scratch")
        with builder.when(self._draws(row)):
            threshold, draw = builder.bind(scratch[self._result(row, 2 * self.parts)]), self._draw_of(row)
            base, maxima = self._base(row), self._maxima(row)
            best, places = self._lanes("float32", math.f32(_LEAST)), self._lanes("int32", tirx.const(0, "int32"), "places")
            begin = builder.bind(tirx.floordiv(part * self.blocks, self.parts)) if self.parts > 1 else 0
            end = builder.bind(tirx.floordiv((part + 1) * self.blocks, self.parts)) if self.parts > 1 else self.blocks
            with builder.loop(end - begin, name="block") as number:
                block = builder.bind(begin + number)
                with builder.when(scratch[maxima + block] >= threshold), builder.loop(_LANES, "vectorized", "lane") as lane:
                    for quarter, noise in enumerate(self._noise(draw, block * _LANES + lane)):
                        place = block * _BLOCK + quarter * _LANES + lane
                        below = builder.name(scratch[base + place])
                        score = builder.name(tirx.Select(below >= threshold, below + noise, math.f32(_LEAST)))
                        is_best = builder.name(score > best[lane])
                        builder.store(best, lane, tirx.Select(is_best, score, best[lane]))
                        builder.store(places, lane, tirx.Select(is_best, tirx.Cast("int32", place), places[lane]))
            highest, place = self._first_best(best, places)
            builder.store(scratch, self._result(row, part), highest)
            builder.store(scratch, self._result(row, self.parts + part), tirx.Cast("float32", place))

    def _first_best(self, best: Buffer, places: Buffer) -> tuple[Expr, Expr]:
        """The highest of all lanes, and the first token that has it."""
        builder = self.builder
        held = self._lanes("float32", math.f32(_LEAST), "held")
        with builder.loop(_LANES, "vectorized", "lane") as lane:
            builder.store(held, lane, best[lane])
        highest = builder.bind(self._folded(held, tirx.max))
        with builder.loop(_LANES, "vectorized", "lane") as lane:
            is_highest = tirx.EQ(best[lane], highest)
            builder.store(places, lane, tirx.Select(is_highest, places[lane], tirx.const(self.vocabulary - 1, "int32")))
        return highest, self._folded(places, tirx.min)

    def _draw_of(self, row: Expr) -> tuple[Key, tuple[Expr, ...]]:
        """What tells the draw of this token from all others: the seed, and words of the counter above that of the token."""
        builder, state, key = self.builder, self.parameter("state"), self.parameter("key")
        low, high, stream = (builder.bind(key[row * KEY_WORDS + word]) for word in range(KEY_WORDS))
        place = builder.bind(state[1 + self.batch + row] + state[tirx.const(0, "int32")])
        words = (tirx.Cast("uint32", place), tirx.Cast("uint32", place >> tirx.const(32, "int64")))
        return Key(low, high), (stream, *map(builder.bind, words))

    def _noise(self, draw: tuple[Key, tuple[Expr, ...]], counter: Expr) -> list[Expr]:
        """Gumbel noise of the four tokens of a counter: u is the middle of one of 2**23 parts of (0, 1)."""
        builder, (key, others) = self.builder, draw
        words = philox(counter, key, builder.name, others)
        found = []
        for word in words:
            middle = tirx.Cast("float32", word >> tirx.const(9, "uint32")) + math.f32(0.5)
            exponential = -math.log(builder.name, builder.name(middle * math.f32(2.0**-23)))
            found.append(builder.name(-math.log(builder.name, builder.name(exponential))))
        return found
