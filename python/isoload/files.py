"""Read files within bounds; write JSON files that appear whole or not at all.

A file may come from anywhere: only regular files are read, and a bound is checked before memory is allocated.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from isoload.wording import shown

if TYPE_CHECKING:
    import numpy as np

MAX_TEXT = 2**28  # bytes: a placement of 100 layers with 65536 slots is smaller
MAX_NOTES = 2**24  # of descriptions: a times file, a trace's provenance, a checkpoint's index
MAX_LINE = 2**26  # of one line of JSON: a step of 100 layers with 65536 slots is smaller
MAX_ARRAYS = 2**30  # of a trace's arrays in memory
MAX_EXPERTS = 2**16  # far above any model's; a larger id is damage, and memory grows with their number
MAX_LAYERS = 2**12  # above any model's; SGLang's files have a row for every layer up to the last
MAX_NUMBER = 2.0**127  # of float32, the dtype of weights, speeds and bandwidths


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; reject anything else: a pipe would block, /dev/zero never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: is no regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, max_bytes: int = MAX_TEXT) -> str:
    with open_regular(path) as file:
        data = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    if data is None or len(data) > max_bytes:  # /proc's files report size 0
        raise ValueError(f"{path}: must be at most {max_bytes >> 20} MiB, has more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not text ({str(error)[:120]})") from None


def parse_json(text: str, infinities: bool = False) -> Any:
    """Return the value of a JSON text; `infinities`: NaN and Infinity, which JSON lacks, are read too."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=float if infinities else _no_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({str(error)[:120]})") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def parse_line(line: bytes) -> Any:
    """Return the value of one line of JSON, of which at most MAX_LINE bytes were read."""
    if len(line) == MAX_LINE:
        raise ValueError(f"must have less than {MAX_LINE >> 20} MiB")
    try:
        return parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text ({str(error)[:120]})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {shown(twice)} must be there once")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def integer_rows(
    key: str, rows: Any, layers: list[Any] | None = None, least: int = -1
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return [L, P] int64 from a list of L lists of P integers, least or more; key and layers are for messages."""
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{key} must be a list of layers, got {shown(rows)}")
    names = layers or list(range(len(rows)))
    for name, row in zip(names, rows, strict=True):
        if not isinstance(row, list) or len(row) != len(rows[0]) or not row:
            got = f"{len(row)} entries" if isinstance(row, list) else shown(row)
            wanted = len(rows[0]) if isinstance(rows[0], list) and rows[0] else "some"
            raise ValueError(f"{key} must have {wanted} entries in every layer, layer {name} has {got}")
        if set(map(type, row)) != {int} or min(row) < least or max(row) >= 2**31:
            wrong = next(value for value in row if type(value) is not int or not least <= value < 2**31)
            raise ValueError(f"{key} must be integers from {least} on, layer {name} has {shown(wrong)}")
    import numpy as np  # imported here, so that commands print their help without NumPy

    return np.array(rows, dtype=np.int64)


def check_keys(content: dict[str, Any], wanted: set[str], what: str = "keys") -> None:
    for key in sorted(wanted - content.keys()):
        raise ValueError(f"{what} must have {key}, got {shown(sorted(content))}")
    for key in sorted(content.keys() - wanted):
        raise ValueError(f"{what} must be {', '.join(sorted(wanted))}, got also {shown(key)}")


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that float32 holds: 10^400 is an integer there."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER


def check_target(target: str | None, name: str = "json") -> None:
    """Reject a file in a folder that does not exist, before any work is done for it."""
    if target in (None, "-"):
        return
    status = _found(target)
    folder = status is None and not Path(os.path.realpath(target)).parent.is_dir()
    if folder or (status is not None and stat.S_ISDIR(status.st_mode)):
        raise ValueError(f"{name} must be a file in an existing folder or -, got {target!r}")


def printable(text: str) -> str:
    """Return text with control characters and lone surrogates as backslash escapes. A name in a file may contain ESC
    sequences, which a terminal executes, or an undecodable byte, which no stream can encode."""
    if text.isprintable():
        return text
    unsafe = ("Cc", "Cf", "Cs", "Zl", "Zp")
    parts = (c.encode("unicode_escape").decode() if unicodedata.category(c) in unsafe else c for c in text)
    return "".join(parts)


def to_json_text(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False) + "\n"
    except RecursionError:
        raise ValueError("JSON must not be nested so deep") from None


def write_json(value: Any, target: str) -> None:
    write_text(to_json_text(value, indent=2), target)


def write_text(text: str, target: str) -> None:
    """Write text to stdout ("-") or to a file. A regular file appears whole or not at all, with its earlier mode; links
    are followed, and stay. Any other target (a device, a pipe, /dev/stdout, /dev/fd/3) is opened and written, never
    replaced."""
    if target == "-":
        print(text, end="")
        return
    try:
        number, status = descriptor_of(target), _found(target)
        if number is not None or (status is not None and not stat.S_ISREG(status.st_mode)):
            sys.stdout.flush()  # earlier output comes first
            opened = target if number is None else number
            with open(opened, "w", encoding="utf-8", closefd=number is None) as file:
                file.write(text)
            return
        path = Path(os.path.realpath(target))
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            if status is not None:
                shutil.copymode(path, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:  # an error of write() names no file
        raise OSError(error.errno, error.strerror, target) from None


def _found(target: str) -> os.stat_result | None:
    try:
        return os.stat(target)
    except FileNotFoundError:
        return None


def descriptor_of(target: str) -> int | None:
    """Return the number of "-", /dev/stdout, /dev/fd/3 etc., which must not be replaced under their writers."""
    if target == "-":
        return 1
    path, descriptors = Path(target), os.path.realpath("/proc/self/fd")
    for _ in range(40):  # the number of links that Linux follows
        if os.path.realpath(path.parent) == descriptors and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None
