"""Which batches of a trace a placement is made from, and which are then replayed on it."""

from __future__ import annotations

from dataclasses import dataclass

from isoload.wording import not_one_of

PHASES = {"prefill", "decode"}  # labels of batches that shadow mode records
CALIBRATIONS = ("first-half", "interleaved", "all", "leave-one-out", "leave-cluster-out")


@dataclass(frozen=True)
class Fold:
    """Batches that a placement is made from, and batches that are replayed on it."""

    calibrate: tuple[int, ...]
    replay: tuple[int, ...]


def strictest(num_batches: int, clusters: tuple[str, ...] | None) -> str:
    """The calibration that asks most of a placement, of those that the batches allow.

    Phases of an engine are no clusters: decode would be judged on a placement made of prefill alone.
    """
    if clusters is not None and len(set(clusters)) > 1 and not set(clusters) <= PHASES:
        return "leave-cluster-out"
    return "first-half" if num_batches > 1 else "all"


def calibration_folds(
    num_batches: int, calibrate: str, clusters: tuple[str, ...] | None = None
) -> list[Fold]:
    """The folds of a replay.

    Args:
        num_batches: batches are 0..num_batches-1.
        calibrate:
            first-half: the first ``num_batches // 2`` calibrate, the rest is replayed.
            interleaved: every second batch calibrates, from the first on, the others are replayed.
            all: all calibrate and all are replayed: the test data are the calibration data.
            leave-one-out: each batch on the placement of all others.
            leave-cluster-out: each cluster's batches on the placement of all other clusters.
        clusters: [num_batches] labels; leave-cluster-out needs them.
    """
    every = tuple(range(num_batches))
    if calibrate not in CALIBRATIONS:
        raise ValueError(not_one_of("calibrate", CALIBRATIONS, calibrate))
    if calibrate == "all":
        return [Fold(every, every)]
    if calibrate == "leave-cluster-out":
        if clusters is None or len(set(clusters)) < 2:
            got = "no labels" if clusters is None else f"only {clusters[0]!r}"
            raise ValueError(f"calibrate=leave-cluster-out needs batches of at least 2 clusters, got {got}")
        own = [tuple(b for b in every if clusters[b] == label) for label in dict.fromkeys(clusters)]
        return [Fold(tuple(b for b in every if b not in held), held) for held in own]
    if num_batches < 2:
        raise ValueError(
            f"calibrate={calibrate} needs at least 2 batches, got {num_batches}: use calibrate=all"
        )
    if calibrate == "first-half":
        return [Fold(every[: num_batches // 2], every[num_batches // 2 :])]
    if calibrate == "interleaved":
        return [Fold(every[::2], every[1::2])]
    return [Fold(every[:b] + every[b + 1 :], (b,)) for b in every]
