"""Messages of the library in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Collection

OTHER_NAMES = {"num_ranks": "ranks", "num_shared": "shared_experts"}


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
