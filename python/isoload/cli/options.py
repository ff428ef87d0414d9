"""Types and names of options that several commands take, their errors, and ``--plugin FILE.py``.

A command's file imports torch only inside its functions, so that its help appears at once. The names listed here repeat
the registries; tests/cli/test_help.py compares them.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from isoload.files import open_regular, printable

MAX_COUNT = 2**31 - 1  # counts of tokens, slots and batches are int32


class Range(NamedTuple):
    """Bounds of a numeric option, both included. typer's own min and max accept nan."""

    least: float
    largest: float = MAX_COUNT


@cache
def ranges(command: Callable[..., None]) -> dict[str, Range]:
    """Return the ranges of a command's numeric options, by parameter."""
    hints = get_type_hints(command, include_extras=True)
    parts = [(name, part) for name, hint in hints.items() for part in get_args(hint)]
    return {name: part for name, part in parts if isinstance(part, Range)}


def check_ranges(command: Callable[..., None], values: Mapping[str, Any]) -> None:
    """Raise ValueError for a number outside its option's range; nan and infinities are outside every range."""
    for name, (least, limit) in ranges(command).items():
        value = values[name]
        if value is None or least <= value <= limit:
            continue
        rule = f"at least {least}" if value < least and limit == MAX_COUNT else f"in {least}..{limit}"
        raise ValueError(f"--{name.replace('_', '-')} must be {rule}, got {value!s:.40}")


POLICIES = (
    "none, static, even, dynamic, exact, exact_active, lp, lp_sampled, shared_local, waterfill, "
    "waterfill_sampled, joint, llep, llep_published, spill_cost, libra, libra_published, hedge, grace"
)
BASELINE = "in order, no replicas"  # experts in order, E/R slots per rank: what tables compare with
DEFAULT_POLICIES = "in-order,static,even,dynamic,exact"
SHARED_POLICIES = "in-order,shared_local,waterfill_sampled,exact,waterfill,joint"
PLACERS = "trivial, eplb, craft, scenario, grace"
FORMATS = "isoload, tensorrt-llm, sglang, vllm, vllm-list, vllm-ascend"
CALIBRATIONS = "first-half, interleaved, all, leave-one-out, leave-cluster-out"
ASSIGNMENTS = "contiguous, round-robin"
PREDICTIONS = "perfect, last, linear, popularity, none"
LOADS = "gathered, node, own"
CALIBRATE_DEFAULT = (
    "Default: leave-cluster-out if batches have clusters, else first-half; all for a single batch."
)

TracePaths = Annotated[
    list[Path],
    Argument(
        metavar="TRACE...",
        help="An npz trace, or a record of SGLang, TensorRT-LLM, vLLM or vllm-ascend: a file, a folder, or the files "
        "of all ranks. Files of several recordings are batches.",
    ),
]
Stages = Annotated[
    bool,
    Option(
        "--stages",
        help="The files are stages of one pipeline, in this order, each with layers numbered from 0.",
    ),
]
SameLayers = Annotated[
    bool,
    Option(
        "--same-layers",
        help="The files, each with layers numbered from 0, are recordings of the same layers.",
    ),
]
AllowMissingRanks = Annotated[
    bool, Option("--allow-missing-ranks", help="Read a recording that lacks the files of some ranks.")
]
FirstMoeLayer = Annotated[
    int | None,
    Range(0),
    Option(
        metavar="N",
        help="Number of the model's first MoE layer, that is the number of dense layers before it (DeepSeek-V3: 3).",
    ),
]
ModelLayers = Annotated[
    str | None,
    Option(
        "--model",
        metavar="NAME|FILE",
        help="The model's name or its config.json, which states the MoE layers.",
    ),
]
ExtraLayers = Annotated[
    str | None,
    Option(
        metavar="LIST",
        help="Layers to add that were not recorded, by the model's numbers (61,62), such as draft (MTP) layers: "
        "experts in order, with the same number of slots.",
    ),
]
Experts = Annotated[
    int | None, Range(1, 2**20), Option(help="Routed experts per layer, if the config.json lacks them.")
]
ExpertsPerToken = Annotated[
    int | None, Range(1, 2**10), Option("--top-k", help="Experts per token, if the config.json lacks them.")
]
MoeLayers = Annotated[
    int | None, Range(1, 2**12), Option(help="Number of MoE layers, if the config.json lacks it.")
]
Ranks = Annotated[int, Range(1), Option(help="Number of ranks of the expert-parallel group.")]
RanksPerNode = Annotated[int, Range(0), Option(help="Ranks per node. 0: all ranks are on one node.")]
SlotsPerRank = Annotated[
    int,
    Range(0),
    Option(help="S, slots per rank. 0: E/R, an eighth more (at least 1), and the shared and spare slots."),
]
PlacerName = Annotated[str, Option(help=f"One of {PLACERS}, with options as name:option=value.")]
FormatName = Annotated[str, Option("--format", help=f"One of {FORMATS}.")]
Plugins = Annotated[
    list[Path] | None,
    Option(
        "--plugin",
        metavar="FILE.py",
        help="A Python file that registers policies or placers of your own; may be given several times.",
    ),
]
TopK = Annotated[
    str | None,
    Option(
        metavar="K|MODEL",
        help="K, experts per token, or the model's name; needed if the record does not state K.",
    ),
]
LayersText = Annotated[str | None, Option(metavar="LIST", help="Only these layers, by position: 0-3,7.")]
Wide = Annotated[bool, Option("--wide", help="Show all figures; without it the table fits 80 columns.")]
JsonTarget = Annotated[
    str | None,
    Option(
        metavar="FILE|-",
        help="Write the figures as JSON to this file, or to stdout (-); with - no table is printed.",
    ),
]
HtmlTarget = Annotated[
    str | None, Option(metavar="FILE", help="Write a page with charts to this file; needs isoload[report].")
]
Force = Annotated[
    bool,
    Option(
        "--force",
        help="Replace an existing placement (-o), or an existing file of any kind (--json, --html).",
    ),
]


def load_plugins(paths: Sequence[Path] | None) -> None:
    """Run the files, which call register_policy or register_placer; errors name the file, the error and its line."""
    for path in paths or ():
        open_regular(path).close()
        name = f"isoload_plugin_{path.stem}"
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"plugin must be a Python file, whose name ends in .py, got {str(path)!r}")
        module = module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up the types of their fields here
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(
                f"{path}: {type(error).__name__}: {error}{_line_of(error, spec.origin)}"
            ) from error


def _line_of(error: Exception, file: str | None) -> str:
    """Return the line of the file at which it failed, if Python has it."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"


# typer has its own copy of click or imports click, depending on its version.
CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a stream without a file name
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended: 128 + SIGINT
REMOVED = {  # options by command, and their replacements
    ("replay", "--cost"): "use --times FILE, which isoload measure writes",
    ("doctor", "--cost"): "isoload measure prints from how many copies a borrow pays",
}
OTHER_NAMES = {"num_ranks": "ranks", "num_shared": "shared_experts"}


class RankError(RuntimeError):
    """A rank failed, ended or stalled."""


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with one red line for a user's error (exit code 2) or a lost process (1)."""
    parameters = signature(command).parameters

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        code = 2
        try:
            check_ranges(command, options)
            return command(*args, **options)
        except OSError as error:
            if error.filename is None:
                raise
            text = f"{error.filename}: {error.strerror}"
        except ValueError as error:
            text = in_options(str(error), parameters)
        except ImportError as error:
            if "isoload[" not in str(error):  # an extra that is not installed
                raise
            text = str(error)
        except RankError as error:
            text, code = str(error), 1
        print_error(text)
        raise typer.Exit(code)

    return run


def print_error(text: str) -> None:
    line = Text(f"error: {printable(text)}", style="red")
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


class Command(TyperCommand):
    """Command whose help shows square brackets as written: rich would read ``[report]`` as a style."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        texts: list[Any] = [self, *self.params]
        for text in texts:
            text.help = escape(text.help or "")


class Group(TyperGroup):
    """Group of commands that prints one red line for a wrong option, a full disk and Ctrl-C."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("standalone_mode", True):
            return super().main(*args, **kwargs)
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False}) or 0
            sys.stdout.flush()
        except CLICK_ERROR as error:
            command, option = getattr(error.ctx, "info_name", ""), getattr(error, "option_name", "")
            use = REMOVED.get((str(command), str(option)))
            print_error(f"{option} was removed: {use}" if use else error.format_message())
            code = error.exit_code
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # the reader has ended, for example head
            code = 1
            discard_stdout()
        except OSError as error:
            if error.filename is not None or error.errno not in NOT_WRITTEN:
                raise
            code = 1
            discard_stdout()
            print_error(f"stdout: {error.strerror}")
        if code == INTERRUPTED:
            print_error("interrupted")
        sys.exit(code)


def discard_stdout() -> None:
    """Drop the buffered output of stdout: otherwise the interpreter would fail on it at exit, with a traceback."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def in_options(message: str, parameters: Collection[str]) -> str:
    """Return a message with options in place of the command's parameter names, if it begins with such an argument.

    A name of one word is already the option's. A message about a file begins with the file, and names its keys.
    """
    rule, got, value = message.partition(", got ")

    def option(name: str) -> str:
        known = OTHER_NAMES.get(name, name)
        return f"--{known.replace('_', '-')}" if "_" in name and known in parameters else name

    first = re.split(r"\W", rule, maxsplit=1)[0]
    if option(first) == first:
        return message
    return re.sub(r"\w+", lambda match: option(match[0]), rule) + got + value
