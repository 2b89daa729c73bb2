"""What a program takes of the machine's memory, measured in a process that has nothing else: `python -m` is not for it.

Arguments: a control group to join or "", a small program, the program, its calls (.npz files), and how many of its reads of its
file come late. It prints, as JSON: the bytes that were resident before it was loaded, the most that were later, by two counts of
the system, and a digest of the results of each call.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS, now, or VmHWM, the most so far."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def main() -> None:
    group, small, large, late, *calls = sys.argv[1:]
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    import prefuse
    from prefuse.runtime.executor import CompiledModel

    first = prefuse.load(small)
    assert isinstance(first, CompiledModel)
    first(*(np.ones(port.type.shape, port.type.dtype) for port in first.plan.inputs))  # threads, and what a first call imports
    inputs = [dict(np.load(path)) for path in calls]
    gc.collect()
    before = resident("VmRSS")
    net = prefuse.load(large)
    digests = []
    real, random = os.preadv, np.random.default_rng(0)

    def slowly(*arguments: object) -> int:
        time.sleep(random.exponential(0.0005))
        return real(*arguments)  # type: ignore[arg-type]

    for number, feeds in enumerate(inputs):
        os.preadv = slowly if number < int(late) else real
        digests.append(digest(net(**feeds)))  # results are let go before the next call, as they are no part of the limit
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"before": before, "hwm": resident("VmHWM"), "maxrss": most, "digests": digests}))


def digest(results: object) -> str:
    """Of the bits of one result, or of several."""
    arrays = results if isinstance(results, tuple) else (results,)
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # no copy of what lies in one piece
    return found.hexdigest()


if __name__ == "__main__":
    main()
