"""The arrows between our folders, read from the imports of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("compiler", "kernels", "passes", "runtime")

# What a folder may import of ours, longest prefix first. The frame is the compiler without its driver and its command line.
ALLOWED: dict[str, tuple[str, ...]] = {
    "runtime": ("runtime",),
    "kernels": ("kernels", "runtime"),
    "passes": (
        "passes",
        "compiler.ir",
        "compiler.pipeline",
        "kernels.costs",
        "kernels.strassen_costs",
        "kernels.tile_costs",
        "runtime",
    ),
    "compiler": ("compiler", "runtime"),
    "compiler.ir": ("compiler.ir", "compiler.pipeline", "runtime"),
    "compiler.lowering": ("compiler", "kernels", "runtime"),
    "compiler.driver": ("compiler", "kernels", "runtime"),
    "compiler.tuning": ("compiler", "kernels", "runtime"),
    "compiler.cli": ("", "compiler", "kernels", "runtime"),
    "": ("compiler", "runtime"),
}
SOURCES = sorted([ROOT / "__init__.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])


def module_of(path: Path) -> str:
    """Dotted name of a file inside the package: "compiler.ir.facts", "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name (inside the package) of each import of ours; bare or "prefuse." imports keep their text."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                yield node.lineno, ".".join([*base, *(node.module or alias.name).split(".")])
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            yield node.lineno, node.module or ""


def is_ours(name: str) -> bool:
    return name.split(".")[0] in (*FOLDERS, "prefuse")


def is_relative(path: Path, line: int) -> bool:
    statement = path.read_text().splitlines()[line - 1].strip()
    return statement.startswith("from .")


def allowed_for(module: str) -> tuple[str, ...]:
    prefix = next(one for one in sorted(ALLOWED, key=len, reverse=True) if is_inside(module, one))
    return ALLOWED[prefix]


def is_inside(module: str, package: str) -> bool:
    return not package or module == package or module.startswith(package + ".")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    module = module_of(path)
    for line, name in imports_of(path):
        assert is_relative(path, line), f"{path.name}:{line}: import {name} relatively; this way it becomes a second module"
        legal = any(name == one or name.startswith(one + ".") for one in allowed_for(module))
        assert legal, f"{path.name}:{line}: {module or 'the package'} may not import {name}"


def test_the_rules_are_noticed() -> None:
    """Each folder that the rules know exists, and a forbidden arrow is one."""
    assert "compiler.ir" in allowed_for("passes.fuse_epilogue")
    assert not any(is_inside("passes.fuse_epilogue", one) for one in allowed_for("compiler.ir.facts"))
    assert not any(is_inside("compiler.ir", one) for one in allowed_for("kernels.cpu.matmul"))
    assert all((ROOT / name.replace(".", "/")).exists() or (ROOT / f"{name.replace('.', '/')}.py").exists() for name in ALLOWED)


def test_the_rooms_of_passes_form_no_cycle() -> None:
    """A room is a folder of passes/; the passes that lie beside the rooms are one room more, which reads all others."""
    rooms = nx.DiGraph()
    for path in (ROOT / "passes").rglob("*.py"):
        for _, name in imports_of(path):
            ends = [_room(part) for part in (module_of(path), name)]
            if None not in ends and ends[0] != ends[1]:
                rooms.add_edge(*ends)
    assert list(nx.simple_cycles(rooms)) == []
    assert rooms.has_edge("passes", "passes.canonicalization")  # else nothing was looked at


def _room(module: str) -> str | None:
    """The folder of passes/ that a module is in; None for one that is elsewhere."""
    parts = module.split(".")[:2]
    if parts[0] != "passes":
        return None
    return ".".join(parts) if (ROOT.joinpath(*parts)).is_dir() else "passes"


def test_the_frame_imports_neither_tvm_nor_torch() -> None:
    """Both are slow; a command that only reads graphs must not wait for them."""
    program = (
        "import sys; import prefuse.compiler.oracle; "
        "print([name for name in ('torch', 'tvm', 'onnxruntime', 'onnxscript') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_every_package_is_installed() -> None:
    """pyproject lists packages by hand, as the root is one of them: a new folder must be there too."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(("prefuse", *path.parent.relative_to(ROOT).parts)) for path in SOURCES}
    assert set(listed) == found
