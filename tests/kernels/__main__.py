"""All tests of kernels, each case at each level, at the repository's root: `python -m tests.kernels [OPTIONS OF PYTEST]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from prefuse.tests.sample import WHOLE


def main() -> int:
    os.environ[WHOLE] = "1"
    return pytest.main([str(Path(__file__).parent), *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
