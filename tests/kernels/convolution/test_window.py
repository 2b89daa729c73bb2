"""The taps of windows that lie on the input."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from prefuse.kernels.convolution.window import Window, share_of_padding


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first draw imports, beside other work
@given(st.tuples(*(st.integers(1, 9) for _ in range(4))), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(1, 5))
def test_share_of_padding_is_counted(extents: tuple[int, ...], pads: tuple[int, int], run: int) -> None:
    length, taps, stride, dilation = extents
    outputs = (length + sum(pads) - (taps - 1) * dilation - 1) // stride + 1
    assume(outputs >= run)
    window = Window((taps,), (stride,), (dilation,), (pads[0],), (length,), (outputs,))
    skipped = 0
    starts = [min(start, outputs - run) for start in range(0, outputs, run)]
    for start in starts:
        places = [place * stride - pads[0] for place in range(start, start + run)]
        before = sum(places[-1] + tap * dilation < 0 for tap in range(taps))
        behind = sum(places[0] + tap * dilation >= length for tap in range(taps))
        skipped += min(before + behind, taps)
    assert abs(share_of_padding(window, 0, run) - skipped / (len(starts) * taps)) < 1e-9
