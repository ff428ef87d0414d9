"""What a user can mend ends in one red line, in the words of the command line."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from isoload.cli.options import check_ranges
from isoload.files.writing import printable

# typer has its own copy of click or imports click, depending on its version.
CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a stream without a file name
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended: 128 + SIGINT
OTHER_NAMES = {"num_ranks": "ranks", "num_shared": "shared_experts"}


class RankError(RuntimeError):
    """A rank failed, ended or stalled."""


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors in what the user gave end in one red line and exit code 2, a lost process in exit code 1,
    all others in a traceback."""
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
    """Print one red line to stderr."""
    line = Text(f"error: {printable(text)}", style="red")
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


class Command(TyperCommand):
    """Command whose help shows square brackets as written: rich takes ``[report]`` for a style."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        texts: list[Any] = [self, *self.params]
        for text in texts:
            text.help = escape(text.help or "")


class Group(TyperGroup):
    """Group of commands that ends in one red line for a wrong option, a full disk and Ctrl-C."""

    def main(self, *args: Any, **given: Any) -> Any:
        if not given.get("standalone_mode", True):
            return super().main(*args, **given)
        try:
            code = super().main(*args, **given | {"standalone_mode": False}) or 0
            sys.stdout.flush()
        except CLICK_ERROR as error:
            print_error(error.format_message())
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
    """Drop what stdout still buffers: the interpreter would fail on it again at its end, with a traceback."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def in_options(message: str, parameters: Collection[str]) -> str:
    """A message that begins with the name of an argument, with options for the names of the commands' parameters.

    A name of one word is an option's already. What is said of a file begins with the file, and names its keys.
    """
    rule, got, value = message.partition(", got ")

    def option(name: str) -> str:
        known = OTHER_NAMES.get(name, name)
        return f"--{known.replace('_', '-')}" if "_" in name and known in parameters else name

    first = re.split(r"\W", rule, maxsplit=1)[0]
    if option(first) == first:
        return message
    return re.sub(r"\w+", lambda word: option(word[0]), rule) + got + value
