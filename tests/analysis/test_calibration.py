"""Calibration: no batch is replayed on a placement that has seen it, unless that was asked for."""

import pytest

from isoload.analysis.batches import CALIBRATIONS, Fold, calibration_folds, strictest


def test_first_half():
    assert calibration_folds(5, "first-half") == [Fold((0, 1), (2, 3, 4))]
    assert calibration_folds(2, "first-half") == [Fold((0,), (1,))]


def test_interleaved():
    assert calibration_folds(5, "interleaved") == [Fold((0, 2, 4), (1, 3))]


def test_all_sees_what_it_replays():
    assert calibration_folds(1, "all") == [Fold((0,), (0,))]


def test_leave_one_out():
    assert calibration_folds(3, "leave-one-out") == [
        Fold((1, 2), (0,)),
        Fold((0, 2), (1,)),
        Fold((0, 1), (2,)),
    ]


def test_leave_cluster_out():
    folds = calibration_folds(5, "leave-cluster-out", ("b", "a", "b", "c", "a"))
    assert folds == [Fold((1, 3, 4), (0, 2)), Fold((0, 2, 3), (1, 4)), Fold((0, 1, 2, 4), (3,))]


@pytest.mark.parametrize("calibrate", CALIBRATIONS)
def test_every_mode_but_all_keeps_them_apart(calibrate):
    folds = calibration_folds(7, calibrate, tuple("aabbbcc"))
    replayed = [b for fold in folds for b in fold.replay]
    assert len(set(replayed)) == len(replayed)
    expected = {"first-half": [3, 4, 5, 6], "interleaved": [1, 3, 5]}
    assert sorted(replayed) == expected.get(calibrate, list(range(7)))
    assert all(fold.calibrate and fold.replay for fold in folds)
    if calibrate != "all":
        assert all(not set(fold.calibrate) & set(fold.replay) for fold in folds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (4, "second-half"),
            "calibrate must be one of first-half, interleaved, all, leave-one-out, leave-cluster-out, got 'sec",
        ),
        ((1, "first-half"), "calibrate=first-half needs at least 2 batches, got 1: use calibrate=all"),
        ((1, "leave-one-out"), "calibrate=leave-one-out needs at least 2 batches, got 1"),
        ((2, "leave-cluster-out"), "leave-cluster-out needs batches of at least 2 clusters, got no labels"),
        ((2, "leave-cluster-out", ("x", "x")), "needs batches of at least 2 clusters, got only 'x'"),
    ],
)
def test_messages(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibration_folds(*arguments)


def test_the_strictest_that_the_batches_allow():
    assert strictest(4, ("a", "b", "b", "b")) == "leave-cluster-out"
    assert strictest(4, ("a",) * 4) == strictest(2, None) == "first-half"
    phases = (
        "prefill",
        "decode",
        "decode",
        "decode",
    )  # else decode were judged on a placement made of prefill alone
    assert strictest(4, phases) == "first-half"
    assert strictest(1, None) == "all"
