"""Whether a packing is right. It trusts nothing that made it."""

from __future__ import annotations

from collections.abc import Sequence

from .instance import Block, Packing


def packing_faults(blocks: Sequence[Block], packing: Packing, alignment: int = 1) -> tuple[str, ...]:
    """What is wrong with a packing, block pairs by index; empty for a right one."""
    if len(packing.offsets) != len(blocks):
        return (f"{len(packing.offsets)} offsets for {len(blocks)} blocks",)
    faults = []
    placed = sorted(zip(packing.offsets, blocks, range(len(blocks)), strict=True), key=lambda item: (item[0], item[2]))
    for rank, (offset, block, index) in enumerate(placed):
        if offset < 0 or offset % alignment:
            faults.append(f"block {index} is at {offset}")
        if offset + block.size_bytes > packing.total_bytes:
            faults.append(f"block {index} ends at {offset + block.size_bytes}, after {packing.total_bytes}")
        for other_offset, other, other_index in placed[rank + 1 :]:
            if other_offset >= offset + block.size_bytes:
                break
            if block.lower < other.upper and other.lower < block.upper and other.size_bytes:
                faults.append(f"blocks {index} and {other_index} share bytes while both live")
    return tuple(faults)
