"""Fuzzed groupings of the files of recordings: the right counts, or a refusal that names what to do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from isoload.traces import read_trace
from support.fuzz_cases import FuzzCase
from support.recording_files import READERS, drawn, wanted

TOLD = (
    "--allow-missing-ranks",
    "same bytes",
    "twice",
    "--same-layers",
    "folder of its own",
    "must lie in one folder",
)


def check_records(case: FuzzCase) -> None:
    """One or two recordings, of which a file may be missing, doubled or in another order."""
    rng = np.random.default_rng(case.seed)
    name = list(READERS)[int(rng.integers(len(READERS)))]
    reader, number = READERS[name], int(rng.integers(1, 3))
    counts = [drawn(int(seed)) for seed in rng.integers(2**31, size=number)]
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(i)) for i in range(number)]
        whole: list[list[Path]] = []
        for i, own in enumerate(folders):
            own.mkdir()
            apart = (
                1000 * i if rng.random() < 0.5 or not reader.by_rank else 0
            )  # shadow files go by their start
            whole.append(reader.write(own, counts[i], apart))
        paths = [path for files in whole for path in files]
        change = ["none", "drop", "double", "torn"][int(rng.integers(4))]
        if change == "drop" and reader.by_rank:
            paths.remove(whole[0][int(rng.integers(len(whole[0]) - 1))])
        elif change == "double":
            paths.append(paths[int(rng.integers(len(paths)))])
        elif change == "torn":
            victim = paths[int(rng.integers(len(paths)))]
            victim.write_bytes(victim.read_bytes()[: int(rng.integers(10, 200))])
        broken = change in ("double", "torn") or (change == "drop" and reader.by_rank)
        paths = [paths[i] for i in rng.permutation(len(paths))]
        options: dict[str, Any] = {} if reader.numbered or number == 1 else {"same_layers": True}
        try:
            found = sorted(batch.tobytes() for batch in read_trace(paths, **options).batch_counts())
        except ValueError as error:
            assert broken, f"{name}: {error}"
            assert change == "torn" or any(word in str(error) for word in TOLD), f"{name}: {error}"
            return
        assert not broken, f"{name} reads {change} files"
        want = [batch.tobytes() for own in counts for batch in wanted(name, own)]
        assert found == sorted(want), f"{name} reads other counts"
