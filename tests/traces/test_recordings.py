"""Which files are one recording: every reader, as folder, list and pattern, in every state of its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoload.traces import Identity, read_recordings, read_trace
from support.recording_files import (
    RANKS,
    READERS,
    drawn,
    wanted,
    write_npz,
    write_sglang,
    write_shadow,
    write_tensorrt,
    write_vllm,
)


def groupings(folder: Path, paths: list[Path]) -> dict[str, Any]:
    """The ways to name all files of a folder."""
    pattern = f"{folder}/*{paths[0].suffix}"
    return {"folder": folder, "list": paths, "reversed": paths[::-1], "glob": pattern}


@pytest.mark.parametrize("name", READERS)
def test_a_complete_recording_is_the_same_in_every_grouping(name: str, tmp_path: Path) -> None:
    counts = drawn(0)
    paths = READERS[name].write(tmp_path, counts)
    for how, given in groupings(tmp_path, paths).items():
        trace = read_trace(given)
        np.testing.assert_array_equal(trace.batch_counts(), wanted(name, counts), how)
        assert trace.layer_ids == ((2, 3, 4) if READERS[name].numbered else (0, 1, 2))
        assert trace.identity.numbering == ("model" if READERS[name].numbered else "moe")
        assert len(read_recordings(given)) == 1
    if READERS[name].by_rank and name != "tensorrt-llm":
        assert trace.provenance["read as"] == "3 rank files of one recording"


@pytest.mark.parametrize("name", [name for name in READERS if READERS[name].by_rank])
def test_a_missing_rank_is_refused_by_its_number(name: str, tmp_path: Path) -> None:
    counts = drawn(0)
    paths = READERS[name].write(tmp_path, counts)
    fewer = [paths[0], paths[2]]
    with pytest.raises(
        ValueError, match=r"lacks the files of rank 1 of 3: add them, or --allow-missing-ranks"
    ):
        read_trace(fewer)
    with pytest.warns(
        UserWarning, match="lacks the files of rank 1 of 3; its loads are those of the remaining ranks"
    ):
        trace = read_trace(fewer, allow_missing_ranks=True)
    np.testing.assert_array_equal(trace.batch_counts(), counts[[0, 2]].sum(0))
    paths[1].unlink()
    with pytest.raises(ValueError, match="lacks the files of rank 1 of 3"):
        read_trace(tmp_path)


def test_a_last_rank_that_is_missing_shows_in_slots_that_nobody_counted(tmp_path: Path) -> None:
    """Ranks that count their own slots (DeepEP) leave a hole; ranks that count their own tokens leave none."""
    counts = drawn(0)
    for rank in range(RANKS):
        counts[rank, :, :, : 2 * rank] = counts[rank, :, :, 2 * rank + 2 :] = 0
    paths = write_sglang(tmp_path, counts)
    np.testing.assert_array_equal(read_trace(paths).batch_counts(), counts.sum(0))
    for some, lacking in (
        (paths[:2], "rank 2 of 3"),
        (paths[:1], "ranks 1, 2 of 3"),
        (paths[1:], "rank 0 of 3"),
    ):
        with pytest.raises(ValueError, match=f"lacks the files of {lacking}"):
            read_trace(some)


@pytest.mark.parametrize("name", READERS)
def test_a_file_given_twice_is_refused(name: str, tmp_path: Path) -> None:
    paths = READERS[name].write(tmp_path, drawn(0))
    with pytest.raises(ValueError, match="twice|same bytes"):
        read_trace([*paths, paths[0]])
    if name != "tensorrt-llm":
        copy = tmp_path / f"copy{paths[0].suffix}"
        copy.write_bytes(paths[0].read_bytes())
        for given in ([*paths, copy], tmp_path):
            with pytest.raises(ValueError, match=r"holds the same bytes as .*, give each file once"):
                read_trace(given)


@pytest.mark.parametrize("name", READERS)
def test_two_recordings_are_batches(name: str, tmp_path: Path) -> None:
    """In folders of their own, or in one where passes tell them apart; files from layer 0 need the option."""
    first, second = drawn(0), drawn(1)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    paths = READERS[name].write(folders[0], first) + READERS[name].write(folders[1], second, 1000)
    want = np.concatenate([wanted(name, first), wanted(name, second)])
    options: dict[str, Any] = {} if READERS[name].numbered else {"same_layers": True}
    if options:
        with pytest.raises(
            ValueError, match=r"number their MoE layers from 0, .*pass --same-layers or --stages"
        ):
            read_trace(folders)
    by_bytes = sorted(batch.tobytes() for batch in want)
    for given in (folders, paths, paths[::-1]):
        trace = read_trace(given, **options)
        assert sorted(batch.tobytes() for batch in trace.batch_counts()) == by_bytes
        assert trace.provenance["read as"] == "2 recordings" and len(read_recordings(given, **options)) == 2


def test_two_recordings_of_the_same_passes_need_folders_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write_sglang(folder, drawn(seed))
    whole = read_trace(folders)
    np.testing.assert_array_equal(whole.batch_counts(), np.concatenate([drawn(0).sum(0), drawn(1).sum(0)]))
    for path in folders[1].iterdir():
        path.rename(folders[0] / f"again_{path.name}")
    with pytest.raises(ValueError, match="both hold forward pass 0 of rank 0: they are of two recordings"):
        read_trace(folders[0])


@pytest.mark.parametrize("name", READERS)
def test_pipeline_stages(name: str, tmp_path: Path) -> None:
    """Layers with the model's numbers unite; files from layer 0 are stages by the option alone, in the order given."""
    first, second = drawn(0), drawn(1)[:, :, :2]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    reader = READERS[name]
    if name == "tensorrt-llm":
        late = write_tensorrt(folders[1], second, layers=(0, 1))
        reader.write(folders[0], first)
        for rank, path in enumerate(late):
            path.rename(folders[0] / f"rank{RANKS + rank}.safetensors")
        given: Any = folders[0]
    else:
        reader.write(folders[0], first)
        reader.write(folders[1], second, layers=(0, 1), first_pass=0 if reader.numbered else 9)
        given = folders
    ours, theirs = wanted(name, first), wanted(name, second)
    if reader.numbered:
        trace = read_trace(given)
        assert trace.layer_ids == (0, 1, 2, 3, 4)
        np.testing.assert_array_equal(trace.batch_counts(), np.concatenate([theirs, ours], axis=1))
        return
    with pytest.raises(ValueError, match="pass --same-layers or --stages"):
        read_trace(given)
    trace = read_trace(given, stages=True)
    assert trace.layer_ids == (0, 1, 2, 3, 4) and trace.identity.numbering == "moe"
    assert trace.provenance["read as"] == "2 pipeline stages of one recording"
    np.testing.assert_array_equal(trace.batch_counts(), np.concatenate([ours, theirs], axis=1))
    with pytest.raises(ValueError, match="and no layer 2, which trace loads?_0 has"):
        read_trace(given, same_layers=True)


@pytest.mark.parametrize("name", READERS)
def test_a_torn_end(name: str, tmp_path: Path) -> None:
    """The last line of a killed process is dropped with a warning; a damaged archive is refused by its name."""
    counts = drawn(0)
    paths = READERS[name].write(tmp_path, counts)
    paths[-1].write_bytes(paths[-1].read_bytes()[:-40])
    if name == "vllm":
        with pytest.warns(UserWarning, match=r"line 5 is incomplete, .*; the 3 steps before it are read"):
            trace = read_trace(paths)
        np.testing.assert_array_equal(trace.batch_counts(), counts.sum(0)[:-1])
        assert trace.provenance["torn_lines_dropped"] == 1
        return
    for given in groupings(tmp_path, paths).values():
        with pytest.raises(ValueError, match=re.escape(str(paths[-1]))):
            read_trace(given)


def test_a_line_torn_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (path,) = write_vllm(tmp_path, drawn(0))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:-40] + "\n", *lines[3:]]))
    with pytest.raises(ValueError, match="line 3: is not JSON"):
        read_trace(path)


def test_a_restarted_engine_appends_another_run(tmp_path: Path) -> None:
    (path,) = write_vllm(tmp_path, drawn(0))
    again = write_vllm(tmp_path, drawn(1), 1)[0].read_text()
    whole = path.read_text() + again
    path.write_text(whole)
    trace = read_trace(path)
    np.testing.assert_array_equal(trace.batch_counts(), np.concatenate([drawn(0).sum(0), drawn(1).sum(0)]))
    assert trace.provenance["runs"] == 2
    path.write_text(whole + again.replace('"num_redundant_experts": 0', '"num_redundant_experts": 1'))
    with pytest.raises(ValueError, match="line 11: eplb_load_meta must agree with the run before"):
        read_trace(path)
    path.write_text(whole.replace('{"record_type": "eplb_load_meta"', '{"record_type": "eplb_load_m', 1))
    with pytest.raises(ValueError, match="line 1: is not JSON"):
        read_trace(path)


def test_shadow_files_of_vllm_s_stages_are_not_taken_for_recordings_of_the_same_layers(
    tmp_path: Path,
) -> None:
    """vLLM numbers the layers of each stage from 0, so that the stages' files look like those of two runs."""
    folders, counts = [tmp_path / "a", tmp_path / "b"], [drawn(0), drawn(1)]
    counts[0][:, :, 1] = 0  # a layer without copies keeps its position
    for folder, own in zip(folders, counts, strict=True):
        folder.mkdir()
        write_shadow(folder, own, layers=(0, 1, 2), identity=Identity("moe"))
    with pytest.raises(ValueError, match="pass --same-layers or --stages"):
        read_trace(folders)
    whole = read_trace(folders, stages=True).batch_counts()
    np.testing.assert_array_equal(whole, np.concatenate([own.sum(0) for own in counts], axis=1))
    assert read_trace(folders, same_layers=True).num_batches == 8


def test_options_that_name_nothing_are_refused(tmp_path: Path) -> None:
    paths = write_npz(tmp_path, drawn(0))
    for option in ("stages", "same_layers"):
        with pytest.raises(
            ValueError, match=f"^{option} needs several recordings whose layers are numbered from 0"
        ):
            read_trace(paths, **{option: True})
    with pytest.raises(ValueError, match="exclude each other"):
        read_trace(paths, stages=True, same_layers=True)
    with pytest.raises(ValueError, match="no file matches this pattern"):
        read_trace(f"{tmp_path}/*.pt")


def test_intervals_of_shadow_mode_are_one_recording(tmp_path: Path) -> None:
    """Regression: an engine writes a file of every rank per report; each interval was a recording of its own."""
    counts = drawn(0)
    write_shadow(tmp_path, counts)
    write_shadow(tmp_path, counts, first_pass=50)
    (trace,) = read_recordings(tmp_path)
    assert trace.num_batches == 2 * counts.shape[1]
    np.testing.assert_array_equal(trace.batch_counts(), np.tile(wanted("shadow", counts), (2, 1, 1)))
    assert trace.provenance["read as"] == "6 rank files of one recording"
