"""Trace files are zip archives from anywhere: what lies inside, and how much memory it may take."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isoload.files.reading import MAX_ARRAYS, open_regular
from isoload.wording import shown

MAX_BYTES_NAME = "ISOLOAD_MAX_TRACE_BYTES"  # of the environment: another limit


def max_bytes(given: int | None) -> int:
    """The limit: given, or the environment's, or MAX_ARRAYS."""
    name, value = (
        ("max_bytes", given) if given is not None else (MAX_BYTES_NAME, os.environ.get(MAX_BYTES_NAME))
    )
    if value is None:
        return MAX_ARRAYS
    limit = int(value) if isinstance(value, int) or (value.isdecimal() and len(value) < 19) else 0
    if limit < 1:
        raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
    return limit


def check_bytes(what: str | Path, size: int, limit: int) -> None:
    """Refuses what is larger than the limit, before memory is taken for it."""
    if size > limit:
        raise ValueError(
            f"{what}: unfolds to {size / 2**20:.0f} MiB, above the limit of {limit / 2**20:g} MiB: "
            f"{MAX_BYTES_NAME} or read_trace(max_bytes=...) sets another"
        )


def read_members(path: Path) -> list[zipfile.ZipInfo]:
    """What a zip archive holds, nothing of it unfolded."""
    with open_regular(path) as file:
        magic = file.read(2)
        if magic != b"PK":
            raise ValueError(f"{path}: " + ("is neither an npz nor a torch file" if magic else "is empty"))
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
            # damage may read as a version yet to come, or as a place before the file's start
            raise ValueError(f"{path}: is truncated or damaged") from None


def is_npz(path: Path, members: Sequence[zipfile.ZipInfo]) -> bool:
    """npz and torch files are both zip archives; their members distinguish them."""
    names = [member.filename for member in members]
    if any(name.endswith("data.pkl") for name in names):
        return False
    if all(name.endswith(".npy") for name in names):
        return True
    raise ValueError(f"{path}: is neither an npz nor a torch file")


def read_arrays(
    path: Path, names: Collection[str], limit: int
) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """Return the named arrays of an npz that are in it, and the names of its other arrays, which are not unfolded.

    Args:
        path: of the npz.
        names: of arrays, as np.savez takes them.
        limit: most bytes that the named arrays may take in memory.

    Raises:
        ValueError: another file, a damaged one or one above the limit; naming the file.
        OSError: a file that cannot be opened.
    """
    members = read_members(path)
    if not is_npz(path, members):
        raise ValueError(f"{path}: is a torch file, not an npz")
    wanted = {f"{name}.npy" for name in names}
    check_bytes(path, sum(member.file_size for member in members if member.filename in wanted), limit)
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files if key in names}
            others = [key for key in archive.files if key not in arrays]
    except Exception as error:
        # damaged bytes surface from zipfile, zlib, tokenize or NumPy, as a dozen types
        raise ValueError(f"{path}: cannot be read as an npz of plain arrays ({str(error)[:200]})") from None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy hands over the bytes of a member without a header
            raise ValueError(
                f"{path}: {key}.npy must be an array in NumPy's format, got {len(array)} other bytes"
            )
    return arrays, others
