"""What further lengths of BERT-base cost as a module: processor seconds of each by stage, and resident memory of one and of all.

    python -m benchmarks.lengths [--layers 12] [--lengths 128,145,162,200] [--cache FOLDER]

The first length is exported for itself, the second exports the module for any length, and from the third on the graph and the
constants are there. Processor time is that of all threads, which other processes on the machine disturb little. Programs are not
run; what is resident is what the process has of memory once they are loaded, which includes the module's own parameters.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from prefuse import compile as compile_model
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models import bert

from .worker import resident_bytes

_STAGES = {  # what the stages that a compilation reports are called here; all else is of a pass
    "export": "export by torch",
    "prepare": "clone",
    "inferring shapes": "bind",
    "choosing kernels": "choose kernels and plan",
    "generating code": "native code",
    "writing the program": "constants and file",
    "done": "load",
}


@dataclass
class Stages:
    """Adds the processor time between two reports to the stage that the first of them names."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last: str = "find"
    _since: float = field(default_factory=time.process_time)

    def __call__(self, stage: str, fraction: float) -> None:
        now = time.process_time()
        self.seconds[self._last] += now - self._since
        self._last, self._since = _STAGES.get(stage, "passes"), now

    def take(self) -> Mapping[str, float]:
        """The seconds since it was asked last."""
        self("find", 0.0)
        self._last, found = "find", dict(self.seconds)
        self.seconds.clear()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=bert.BERT_BASE.layers)
    parser.add_argument("--lengths", default="128,145,162,200", help="tokens, separated by commas")
    parser.add_argument("--cache", type=Path, help="a folder to keep programs in; none is kept without")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = replace(bert.BERT_BASE, layers=arguments.layers)
    module = bert.bert(config, 8)[0].eval()
    stages = Stages()
    net = compile_model(module, cache=arguments.cache or False, progress=stages)
    assert isinstance(net, SpecializedModel)
    own = resident_bytes("VmRSS")
    first = 0
    for length in map(int, arguments.lengths.split(",")):
        inputs = bert.bert(replace(config, layers=0), length)[1]
        stages.take()
        net.specialize(*inputs)
        found = stages.take()
        resident = resident_bytes("VmRSS")
        first = first or resident
        listed = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found.items())
        memory = f"{resident / 2**20:.0f} MiB resident ({resident / first:.2f} of one length; {own / 2**20:.0f} before all)"
        print(f"length {length}: {sum(found.values()):.2f} s: {listed}; {memory}", flush=True)


if __name__ == "__main__":
    main()
