"""The command ``isoload``: its commands, each of which is one file."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from isoload.cli.advise import advise
from isoload.cli.demo import demo
from isoload.cli.doctor import doctor
from isoload.cli.inspect import inspect
from isoload.cli.measure import measure
from isoload.cli.options import Command, Group, one_line_errors
from isoload.cli.place import convert, place
from isoload.cli.replay import replay
from isoload.cli.report import report

app = typer.Typer(
    name="isoload",
    help="Equal load for the ranks of expert-parallel Mixture-of-Experts layers.",
    cls=Group,
    rich_markup_mode="rich",  # older versions of typer have another default; Command escapes for this one
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (replay, advise, measure, report, place, convert, inspect, demo, doctor):
    app.command(cls=Command)(one_line_errors(command))


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from isoload import __version__

        print(f"isoload {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")
        raise typer.Exit(2)


def main() -> None:
    app(prog_name="isoload")
