"""Write the golden files again: `python -m tests.golden [MODEL ...]`, at the repository's root."""

from __future__ import annotations

import argparse

from prefuse.examples.models import MODELS

from .group_counts import TARGETS, golden_file, grouped


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", choices=[[], *MODELS], help=f"of {', '.join(MODELS)}; all by default"
    )
    for name in parser.parse_args().models or MODELS:
        for kind in TARGETS:
            text = grouped(name, kind).text()
            golden_file(name, kind).write_text(text)
            print(f"{name}, {kind}: {text.splitlines()[0]}")


if __name__ == "__main__":
    main()
