"""Which programs read a prompt: the cheapest pieces that cover its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def first_piece(counts: Sequence[int], length: int, room: int, fixed: float) -> int:
    """How many tokens the first of the pieces takes that read `length` tokens, from 1 on, in the least time.

    A piece takes one of `counts`, which rise from 1 on, and the time of so many tokens and `fixed` ones: what is not a token's
    own, such as reading weights. The last piece may take more than there are, but fills up no place beyond `room`. Where room
    is less than `length`, as another text is longer, this piece alone is kept inside of it.
    """
    counts = tuple(counts)
    slack = min(max(room - length, 0), counts[-1])
    found = _choices(counts, slack, fixed, 1 << length.bit_length())[length]
    return found if found <= max(room, 1) else max(count for count in counts if count <= max(room, 1))


@lru_cache(16)
def _choices(counts: tuple[int, ...], slack: int, fixed: float, end: int) -> tuple[int, ...]:
    """The first piece for each length below `end`, of which none takes more than `slack` tokens that are none; 0 for no tokens.

    A dynamic program over lengths; of equally cheap pieces the longest comes first.
    """
    least, chosen = [0.0], [0]
    for length in range(1, end):
        allowed = (count for count in counts if count - length <= slack)
        time, negative = min((count + fixed + least[max(length - count, 0)], -count) for count in allowed)
        least.append(time)
        chosen.append(-negative)
    return tuple(chosen)
