"""The command ``isoload``. Outside of the package, which imports torch: that takes a second, and no help needs it."""

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer


def main() -> None:
    """Entry point."""
    if sys.argv[1:] in ([], ["--help"]):
        print_help()
    from isoload.cli import main

    main()


def print_help() -> None:
    """What ``isoload.cli.app`` would print, with its commands and nothing behind them."""
    app = typer.Typer(
        help="Equal load for the ranks of expert-parallel Mixture-of-Experts layers.",
        no_args_is_help=True,
        add_completion=False,
    )

    @app.callback()
    def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
        pass

    for name, text in commands():
        app.command(name, help=text)(lambda: None)
    app(prog_name="isoload")


def commands() -> Iterator[tuple[str, str]]:
    """Name and description of every command, from the text of isoload/cli/app.py."""
    spec = find_spec("isoload")
    assert spec is not None and spec.submodule_search_locations
    for node in ast.parse(Path(spec.submodule_search_locations[0], "cli", "app.py").read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "app.command":
                yield (
                    ast.literal_eval(call.args[0]) if call.args else node.name,
                    ast.get_docstring(node) or "",
                )
