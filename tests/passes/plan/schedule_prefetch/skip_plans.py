"""Plans whose activations wait for readers far behind them, as a UNet's do."""

from __future__ import annotations

from dataclasses import replace

from prefuse.runtime.plan import Buffer, Kernel, Launch, Plan, Port, Region, Role, Space, TensorType

SIZE_BYTES = 1 << 14  # of each


def skips(depth: int, wide_bytes: int = 0) -> Plan:
    """y0, y1, ... one after the other, then ..., z1, z0, each from the one before and the y of its depth. The first step has a
    workspace of `wide_bytes`."""
    ups, downs = [f"y{number}" for number in range(depth)], [f"z{number}" for number in reversed(range(depth))]
    names = ["x", *ups, *downs]
    regions = {name: Region(name, 0, SIZE_BYTES) for name in names}
    reads: list[tuple[str, ...]] = [(name,) for name in names[:depth]]
    reads += [tuple(dict.fromkeys(both)) for both in zip(names[depth:-1], reversed(ups), strict=True)]
    steps = [
        Launch(f"k{1 + len(read)}", tuple(regions[name] for name in read), (regions[write],), label=write)
        for read, write in zip(reads, names[1:], strict=True)
    ]
    roles = {"x": Role.INPUT, "z0": Role.OUTPUT}
    buffers = [
        Buffer(name, roles.get(name, Role.ACTIVATION), SIZE_BYTES, "caller" if name in roles else "arena") for name in names
    ]
    if wide_bytes:
        buffers.append(Buffer("wide", Role.WORKSPACE, wide_bytes, "arena"))
        steps[0] = replace(steps[0], kernel="k3", scratch=(Region("wide", 0, wide_bytes),))
    kind = TensorType((SIZE_BYTES // 4,), "float32")
    ports = ((Port("x", kind, "x"),), (Port("z0", kind, "z0"),))
    kernels = (Kernel("k2", "elementwise", 2), Kernel("k3", "elementwise", 3))
    return Plan("cpu:avx2,threads=1", *ports, (Space("caller"), Space("arena")), tuple(buffers), kernels, tuple(steps))
