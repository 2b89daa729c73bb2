"""Save a program, load it without a compiler, and call it from several threads that share its weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import prefuse
import torch
from torch import nn


def main() -> None:
    """Two threads, each with a context: its own arena, the same weights."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))
    with TemporaryDirectory() as folder:
        path = Path(folder, "net.prefuse")
        prefuse.compile(module, args=torch.zeros(1, 3, 16, 16)).save(path)  # args: compiled at once, for this shape
        net = prefuse.load(path)  # needs neither torch nor TVM's compiler; it holds native code, so load only what you trust

        batches = np.random.default_rng(0).standard_normal((2, 20, 1, 3, 16, 16), dtype=np.float32)

        def serve(images: np.ndarray) -> list[np.ndarray]:
            context = net.context()  # one caller's arena, kept from call to call
            return [np.asarray(context(image)) for image in images]

        with ThreadPoolExecutor(max_workers=2) as pool:
            answers = [answer for part in pool.map(serve, batches) for answer in part]
        expected = [np.asarray(net(image)) for part in batches for image in part]
        assert np.array_equal(np.stack(answers), np.stack(expected))
        print(f"{len(answers)} answers from two threads, bitwise those of one; {path.stat().st_size / 1024:.0f} KiB on disk")


if __name__ == "__main__":
    main()
