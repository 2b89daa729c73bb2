"""The published configurations of HAWQ-V3, and that the benchmark notices what is not as stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefuse.benchmarks.bits_oracle import main

ORACLE = Path(__file__).parents[4] / "shared" / "data" / "hawq" / "resnet18_oracle.json"


def small() -> dict[str, Any]:
    """A file of the form with three layers, of which two are tied, and one budget; all by hand."""
    return {
        "models": {
            "net": {
                "Hutchinson_trace": [1.0, 2.0, 4.0],
                "delta_weights_4bit_square": [1.0, 1.0, 1.0],
                "delta_weights_8bit_square": [0.0, 0.0, 0.0],
                "parameters": [1.0, 1.0, 1.0],
                "bops": [1.0, 1.0, 1.0],
                "latency_int4": [1.0, 1.0, 1.0],
                "latency_int8": [2.0, 2.0, 2.0],
                "ties": [[0, 2]],
                "cases": [
                    {"constraint": "size", "fraction": 0.7, "optimum_bits": [8, 4, 8], "optimum_omega": 2.0},
                    {"constraint": "bops", "fraction": 0.5, "optimum_bits": [4, 8, 4], "optimum_omega": 5.0},
                    {"constraint": "lat", "fraction": 1.0, "optimum_bits": [8, 8, 8], "optimum_omega": 0.0},
                ],
            }
        }
    }


def run(data: object, folder: Path) -> tuple[int, str]:
    path = folder / "oracle.json"
    path.write_text(json.dumps(data))
    done = CliRunner().invoke(main, [str(path)])
    return done.exit_code, done.output


def test_published_cases() -> None:
    if not ORACLE.is_file():
        pytest.skip(f"HAWQ's published cases are not in ../shared/data: there is no {ORACLE}")
    done = CliRunner().invoke(main, [str(ORACLE)])
    assert (done.exit_code, "9 of 9 cases at the stated optimum" in done.output) == (0, True), done.output


def test_a_file_of_the_form(tmp_path: Path) -> None:
    code, text = run(small(), tmp_path)
    assert (code, "3 of 3" in text) == (0, True), text


@pytest.mark.parametrize(
    ("key", "wrong", "message"), [("optimum_omega", 1.99, "omega differs"), ("optimum_bits", [4, 8, 4], "these are no")]
)
def test_wrong_statements_are_noticed(key: str, wrong: object, message: str, tmp_path: Path) -> None:
    data = small()
    data["models"]["net"]["cases"][0][key] = wrong
    code, text = run(data, tmp_path)
    assert (code, "2 of 3" in text, message in text) == (1, True, True), text


def test_ties_of_the_optimum_count(tmp_path: Path) -> None:
    """Two layers of equal trace, of which one may be narrow: either is right."""
    data = small()
    net = data["models"]["net"]
    net["Hutchinson_trace"], net["ties"] = [2.0, 2.0, 4.0], []
    for bits in ([8, 4, 8], [4, 8, 8]):
        net["cases"] = [{"constraint": "size", "fraction": 0.7, "optimum_bits": bits, "optimum_omega": 2.0}]
        assert run(data, tmp_path)[0] == 0


@pytest.mark.parametrize("data", [{}, [], {"models": {"net": {"cases": [{"constraint": "size"}]}}}])
def test_other_files_are_refused(data: object, tmp_path: Path) -> None:
    code, text = run(data, tmp_path)
    assert (code, "is no oracle of bits" in text) == (1, True)
