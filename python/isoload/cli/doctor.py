"""``isoload doctor``: what this machine offers, what is off, and why; the engines found here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from isoload.cli.options import CostFile, Force, JsonTarget
from isoload.cli.tables import write_out

if TYPE_CHECKING:
    from isoload.cli.checks import Item


def print_doctor(items: Sequence[Item], console: Console) -> None:
    width = max(len(item.name) for item in items)
    for item in items:
        on, colour = ("on", "green") if item.on else ("off", "yellow")
        line = Text(f"{item.name:<{width}}  ").append(f"{on:<3}", colour).append(f"  {item.detail}")
        console.print(line, soft_wrap=True)


def doctor(cost: CostFile = None, json: JsonTarget = None, force: Force = False) -> None:
    """What this machine offers, what is off, and why; which engines isoload attaches to, with this environment.

    Exit code 1 if a variable asks for an engine (ISOLOAD_SGLANG=1, ISOLOAD_VLLM=1) that isoload would stay out of.
    """
    from isoload.cli.checks import report
    from isoload.cli.cost import given_cost
    from isoload.cli.targets import check_targets

    check_targets([cost], force, json)
    items = report(given_cost(cost))
    write_out(json, [asdict(item) for item in items], lambda console: print_doctor(items, console))
    if any(item.asked and not item.on for item in items):
        raise typer.Exit(1)
