"""What a user can mend ends in one red line, in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

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
        Console(stderr=True, highlight=False).print(Text(f"error: {text}", style="red"), soft_wrap=True)
        raise typer.Exit(code)

    return run


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
