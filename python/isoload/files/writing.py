"""JSON files that appear whole or not at all; devices, pipes and links are written through."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import unicodedata
from pathlib import Path
from typing import Any


def check_target(target: str | None, name: str = "json") -> None:
    """Refuses a file in a folder that does not exist, before any work is done for it."""
    if target in (None, "-"):
        return
    found = _found(target)
    folder = found is None and not Path(os.path.realpath(target)).parent.is_dir()
    if folder or (found is not None and stat.S_ISDIR(found.st_mode)):
        raise ValueError(f"{name} must be a file in an existing folder or -, got {target!r}")


def printable(text: str) -> str:
    """Return text with control characters and lone surrogates as backslash escapes.

    A name in a file may contain ESC sequences, which a terminal executes, or an undecodable byte, which no stream
    can encode.
    """
    if text.isprintable():
        return text
    unsafe = ("Cc", "Cf", "Cs", "Zl", "Zp")
    parts = (c.encode("unicode_escape").decode() if unicodedata.category(c) in unsafe else c for c in text)
    return "".join(parts)


def to_json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, on one line or indented. ValueError: a value that JSON does not have."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False) + "\n"
    except RecursionError:
        raise ValueError("JSON must not be nested so deep") from None


def write_json(value: Any, target: str) -> None:
    """Writes indented JSON as :func:`write_text` writes."""
    write_text(to_json_text(value, indent=2), target)


def write_text(text: str, target: str) -> None:
    """Writes text to stdout ("-") or to a file.

    A regular file appears whole or not at all, with the mode it had; links are followed, and stay. Whatever else the
    target is (a device, a pipe, /dev/stdout, /dev/fd/3) is opened and written, never replaced.
    """
    if target == "-":
        print(text, end="")
        return
    try:
        number, found = descriptor_of(target), _found(target)
        if number is not None or (found is not None and not stat.S_ISREG(found.st_mode)):
            sys.stdout.flush()  # what was printed before comes before
            opened = target if number is None else number
            with open(opened, "w", encoding="utf-8", closefd=number is None) as file:
                file.write(text)
            return
        path = Path(os.path.realpath(target))
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            if found is not None:
                shutil.copymode(path, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:  # one of write() names no file
        raise OSError(error.errno, error.strerror, target) from None


def _found(target: str) -> os.stat_result | None:
    """What the target is, at the end of its links; None: nothing yet."""
    try:
        return os.stat(target)
    except FileNotFoundError:
        return None


def descriptor_of(target: str) -> int | None:
    """The number behind "-", /dev/stdout, /dev/fd/3 and the like, which may stand for a regular file: that one is open
    already, and replacing it would leave its writer with a file that has no name."""
    if target == "-":
        return 1
    path, own = Path(target), os.path.realpath("/proc/self/fd")
    for _ in range(40):  # as many links as Linux follows
        if os.path.realpath(path.parent) == own and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None
