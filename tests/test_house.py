"""The arrows between our folders, read from the imports of every file, and the sizes of files, functions and folders."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
        "compiler.quantization.formats",
        "kernels.cost",
        "runtime",
    ),
    "compiler": ("compiler", "runtime"),
    "compiler.ir": ("compiler.ir", "compiler.pipeline", "runtime"),
    "compiler.lowering": ("compiler", "kernels", "runtime"),
    "compiler.estimates": ("compiler", "kernels", "runtime"),
    "compiler.driver": ("compiler", "kernels", "runtime"),
    "compiler.predictor": ("compiler", "kernels", "runtime"),
    "compiler.tuning": ("compiler", "kernels", "runtime"),
    "compiler.cli": ("", "compiler", "kernels", "passes.plan.packing", "runtime"),
    "": ("compiler", "runtime"),
}
SOURCES = sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])
OTHERS = sorted(path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))

MOST_FILES_OF_FOLDER = 25
MOST_LINES_OF_FUNCTION = 60
MOST_LINES_OF_FILE = 450


def module_of(path: Path) -> str:
    """Dotted name of a file inside the package: "compiler.ir.facts", "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = frozenset(map(module_of, SOURCES))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def statements_of(path: Path) -> tuple[ast.AST, ...]:
    """The statements of a file, nested ones too: imports and functions are nowhere else."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = [ast.parse(text_of(path))]
    while pending:
        node = pending.pop()
        found.append(node)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            pending += getattr(node, part, ())
    return tuple(found)


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and absolute name (inside the package) of each import of ours; bare or "prefuse." imports keep their text."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[int, str]]:
    package = path.parent.relative_to(ROOT).parts
    for node in statements_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                name = ".".join(filter(None, (*base, node.module)))
                inner = f"{name}.{alias.name}" if name else alias.name
                yield node.lineno, inner if inner in MODULES else name
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            yield node.lineno, node.module or ""


def is_ours(name: str) -> bool:
    return name.split(".")[0] in (*FOLDERS, "prefuse")


def is_relative(path: Path, line: int) -> bool:
    statement = text_of(path).splitlines()[line - 1].strip()
    return statement.startswith("from .")


def allowed_for(module: str) -> tuple[str, ...]:
    prefix = next(one for one in sorted(ALLOWED, key=len, reverse=True) if is_inside(module, one))
    return ALLOWED[prefix]


def is_inside(module: str, package: str) -> bool:
    return not package or module == package or module.startswith(package + ".")


@cache
def file_arrows() -> Any:
    """Which of our files imports which, when it is loaded, later or for its types only: a directed graph of their names."""
    arrows = ((module_of(path), name) for path in SOURCES for _, name in imports_of(path))
    return nx.freeze(nx.DiGraph(arrow for arrow in arrows if arrow[0] != arrow[1]))


def package_arrows() -> Any:
    """The same of packages, which are the files of one folder."""
    packages = {module_of(path): module_of(path.parent / "__init__.py") for path in SOURCES}
    arrows = {(packages[importer], packages[imported]) for importer, imported in file_arrows().edges}
    return nx.DiGraph(sorted(arrow for arrow in arrows if arrow[0] != arrow[1]))


def circles(arrows: Any) -> list[list[str]]:
    """Names that can be reached from each other."""
    return [sorted(names) for names in nx.strongly_connected_components(arrows) if len(names) > 1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    module = module_of(path)
    for line, name in imports_of(path):
        assert is_relative(path, line), f"{path.name}:{line}: import {name} relatively; this way it becomes a second module"
        legal = any(name == one or name.startswith(one + ".") for one in allowed_for(module))
        assert legal, f"{path.name}:{line}: {module or 'the package'} may not import {name}"


def test_the_rules_are_noticed() -> None:
    """Each folder that the rules know exists, and a forbidden arrow is one."""
    assert "compiler.ir" in allowed_for("passes.fusion.fuse_epilogue")
    assert not any(is_inside("passes.fusion.fuse_epilogue", one) for one in allowed_for("compiler.ir.facts"))
    assert not any(is_inside("compiler.ir", one) for one in allowed_for("kernels.linalg.matmul"))
    assert all((ROOT / name.replace(".", "/")).exists() or (ROOT / f"{name.replace('.', '/')}.py").exists() for name in ALLOWED)


def test_no_circle_of_files() -> None:
    assert circles(file_arrows()) == []


def test_no_circle_of_packages() -> None:
    assert circles(package_arrows()) == []


def test_circles_are_noticed() -> None:
    """Arrows of imports that are made later, or for types only, count; one arrow back makes a circle."""
    arrows = file_arrows()
    assert arrows.has_edge("compiler.api", "compiler.staging.build")
    assert arrows.has_edge("compiler.programs.builder", "runtime.staged.staged_model")
    closed = nx.DiGraph([*arrows.edges, ("runtime.errors", "compiler.api")])
    assert any({"runtime.errors", "compiler.api"} <= set(names) for names in circles(closed))


def test_folders_can_be_looked_over() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in (*SOURCES, *OTHERS))
    assert [folder for folder, count in counts.items() if count > MOST_FILES_OF_FOLDER] == []


def test_functions_and_files_are_short() -> None:
    """The lines of a function are those of what is nested in it, too."""
    long_functions, long_files = [], []
    for path in (*SOURCES, *OTHERS):
        functions = (node for node in statements_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        long_functions += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
            for node in functions
            if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_FUNCTION
        ]
        if len(text_of(path).splitlines()) > MOST_LINES_OF_FILE:
            long_files.append(str(path.relative_to(ROOT)))
    assert (long_functions, long_files) == ([], [])


def test_the_frame_imports_neither_tvm_nor_torch() -> None:
    """Both are slow; a command that only reads graphs must not wait for them."""
    program = (
        "import sys; import prefuse.compiler.debugging.oracle; "
        "print([name for name in ('torch', 'tvm', 'onnxruntime', 'onnxscript') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_every_package_is_installed() -> None:
    """pyproject lists packages by hand, as the root is one of them: a new folder must be there too."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(("prefuse", *path.parent.relative_to(ROOT).parts)) for path in SOURCES}
    assert set(listed) == found
