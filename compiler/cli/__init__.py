"""The command line. Each verb is a module of this folder, imported when it is used."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import click

from ...runtime.errors import CompileError, OptionError
from ..programs.options import suggest

_VERBS = {
    "compile": "compile an ONNX model into a .prefuse program",
    "run": "run a model on random or given inputs, and compare it with ONNX Runtime",
    "opt": "run passes on a model and print the graph",
    "quantize": "make products of an ONNX model 8 bits, by calibration data and within an error",
    "bits": "find the format of each product that makes a model fastest, or smallest, within an error",
    "explain": "tell what each pass made of a node, and which kernel computes it",
    "why-not": "say why two nodes are not in one group",
    "profile": "say where the time of a model goes, and compare two pipelines",
    "predict": "say how long a model will take and what memory, without compiling it",
    "memory": "show what of a model lies where in memory and when, and what is copied beside its kernels",
    "pack": "find places in memory for blocks with known lifetimes, in a CSV file",
    "tune": "measure how the kernels of a model are computed fastest here, for later compilations",
    "bisect": "find the pass after which a model's numbers are wrong",
    "inspect": "list a model's operators, parameters, arithmetic, and what cannot be compiled",
    "doctor": "say what this machine can run, and what to install",
}


class _Verbs(click.Group):
    """A group that imports a verb only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            ctx.fail(f"no verb {cmd_name!r}; {suggest(cmd_name, _VERBS)}")
        command = importlib.import_module(f".{cmd_name.replace('-', '_')}", __name__).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="prefuse")
def cli() -> None:
    """Compile neural networks to fast native programs, and look into how."""


def main() -> None:
    """Run the command line: status 0, 1 for a fault of the model, options or files, 2 for wrong usage, 130 for Ctrl-C."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        if sys.__stdout__ is None:  # it was closed before
            sys.stdout = nowhere
        try:
            status = cli(standalone_mode=False, prog_name="prefuse")
            sys.stdout.flush()
            sys.exit(status if isinstance(status, int) else 0)
        except CompileError as error:
            fail(error)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except OSError as error:
            if error.filename is not None:  # of a file; writing to what is open names none
                fix = "check the path, its rights and its space"
                fail(OptionError(str(error.filename), error.strerror or str(error), fix))
            if not isinstance(error, BrokenPipeError):  # who reads no further, as `head`, knows
                click.echo(f"error: standard output: cannot be written: {error.strerror or error}", err=True)
            sys.exit(1)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(130)


def fail(error: CompileError) -> None:
    """Print a fault, as JSON on stdout where --json was asked for, and exit with status 1. An option that was given is named as
    it was."""
    option = f"--{error.where.replace('_', '-')}"
    where = option if any(argument.partition("=")[0] == option for argument in sys.argv) else error.where
    if "--json" in sys.argv:
        parts = {"kind": type(error).__name__, "where": where, "what": error.what, "fix": error.fix}
        click.echo(json.dumps({"error": parts}, indent=2))
    else:
        click.echo(f"error: {str(error).replace(error.where, where, 1)}", err=True)
    sys.exit(1)
