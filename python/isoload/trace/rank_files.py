"""Recordings that engines write as one file for each rank: which files belong together, and which ranks are missing."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from isoload.wording import shown

ALLOW = "--allow-missing-ranks (allow_missing_ranks=True) reads the others"


class RankFile(NamedTuple):
    """What a file of one rank, seldom of several, holds.

    path      the file
    passes    {rank: numbers of its forward passes}, at least one
    layers    layers in which its ranks routed a token
    kind      files of different kinds are of different recordings
    one_run   whether kind names a run of the engine, whose files belong together though they share no pass
    shape     sizes of the engine: recordings of one shape have as many ranks
    ranks     ranks of the group where the file states their number, else 0
    """

    path: Path
    passes: dict[int, frozenset[int]]
    layers: frozenset[int]
    kind: Hashable
    shape: tuple[int, ...] = ()
    ranks: int = 0
    one_run: bool = False

    @property
    def first_pass(self) -> int:
        return min(map(min, self.passes.values()))

    @property
    def last_pass(self) -> int:
        return max(map(max, self.passes.values()))


class Recording(NamedTuple):
    """Files of one recording.

    files       one per rank and, where a rank wrote several, in the order of their passes
    stage_of    {path: pipeline stage}: stages have ranks of the same numbers and layers of their own
    """

    files: tuple[RankFile, ...]
    stage_of: dict[Path, int]

    def describe(self) -> str:
        """Return how the files were read, in words."""
        stages = len(set(self.stage_of.values()))
        count = "1 rank file" if len(self.files) == 1 else f"{len(self.files)} rank files"
        return f"{count} of one recording" + (f" with {stages} pipeline stages" if stages > 1 else "")


def recordings_of(files: Sequence[RankFile]) -> list[Recording]:
    """Unite the files of each recording, whatever their order.

    Files of one recording share forward passes, or name their run. A rank that has a pass in two files is of two
    pipeline stages, where these have layers of their own, or of two recordings, which the files' folders then tell
    apart.

    Raises:
        ValueError: two recordings with the same passes in one folder.
    """
    recordings: list[Recording] = []
    for kind in dict.fromkeys(file.kind for file in files):
        same_kind = sorted((f for f in files if f.kind == kind), key=lambda f: (f.first_pass, f.last_pass))
        groups: list[list[RankFile]] = []
        end = -1
        for file in same_kind:
            if not groups or (file.first_pass > end and not file.one_run):
                groups.append([])
            groups[-1].append(file)
            end = max(end, file.last_pass)
        for group in groups:
            recordings += _split(group)
    return recordings


def _split(group: Sequence[RankFile]) -> list[Recording]:
    """One recording, or one for each folder."""
    whole = _with_stages(group)
    if _repeated(whole) is None:
        return [whole]
    folders = list(dict.fromkeys(file.path.parent for file in group))
    recordings = [_with_stages([file for file in group if file.path.parent == folder]) for folder in folders]
    for recording in recordings:
        if (repeated := _repeated(recording)) is not None:
            one, other, rank, number = repeated
            raise ValueError(
                f"{one} and {other} both hold forward pass {number} of rank {rank}: they are of two recordings, "
                "put the files of each recording into a folder of its own"
            )
    return recordings


def _with_stages(group: Sequence[RankFile]) -> Recording:
    stages: list[tuple[set[int], list[RankFile]]] = []
    for file in group:
        layers, members = set(file.layers), [file]
        apart = []
        for known, others in stages:
            if known & layers:
                layers, members = layers | known, others + members
            else:
                apart.append((known, others))
        stages = [*apart, (layers, members)]
    stages.sort(key=lambda stage: min(stage[0], default=0))
    routed = [members for layers, members in stages if layers]
    stage_of = {file.path: 0 for file in group}  # where a rank has no tokens, too
    stage_of |= {file.path: i for i, members in enumerate(routed) for file in members}
    return Recording(tuple(group), stage_of)


def _repeated(recording: Recording) -> tuple[Path, Path, int, int] | None:
    """Two files that hold the same pass of the same rank and stage, that rank and that pass."""
    seen: dict[tuple[int, int, int], Path] = {}
    for file in recording.files:
        for rank, passes in file.passes.items():
            for number in sorted(passes):
                key = recording.stage_of[file.path], rank, number
                if key in seen:
                    return seen[key], file.path, rank, number
                seen[key] = file.path
    return None


def check_ranks(recording: Recording, known: Sequence[Recording], allow_missing: bool) -> None:
    """Refuse a recording that lacks a rank's file, or warn.

    Args:
        recording: to check.
        known: recordings of the same engine, of which some may have more ranks.
        allow_missing: whether to warn in place of raising.

    Raises:
        ValueError: naming the ranks that are missing.
    """
    first, seen = recording.files[0], {rank for file in recording.files for rank in file.passes}
    alike = [f for other in known for f in other.files if (f.kind, f.shape) == (first.kind, first.shape)]
    number = max(max(file.ranks, 1 + max(file.passes)) for file in alike)
    note_missing(recording.files[0].path, sorted(set(range(number)) - seen), number, allow_missing)


def note_missing(path: Path, missing: Sequence[int], number: int, allow_missing: bool, why: str = "") -> None:
    """Refuse missing ranks, or warn; path: of a file or folder of the recording."""
    if not missing:
        return
    ranks = "rank " if len(missing) == 1 else "ranks "
    text = (
        f"{path}: the recording lacks the files of {ranks}{shown(list(missing)).strip('[]')} of {number}{why}"
    )
    if not allow_missing:
        raise ValueError(f"{text}: add them, or {ALLOW}")
    warnings.warn(f"{text}; its loads are those of the other ranks", stacklevel=2)
