"""Seconds of a rank's experts: closed forms, shapes, what is refused, and what the shipped constants were fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isoload.times import ExpertTime, available, local_bytes

SHIPPED = [row for row in available() if row["table"] == "experts"]
ASKED: dict[str, Any] = {
    "kernel": "sglang_deepep_decode",
    "hidden": 7168,
    "intermediate": 2048,
    "dtype": "fp8_block",
}


def made(p: float = 1.0, tile: int = 1, rho_us: float = 0.0) -> ExpertTime:
    """5 us a call, 10 us a slot, 0.5 us a copy."""
    return ExpertTime(
        "mine", "k", "bf16", 8, 8, 5.0, 10.0, 0.5, rho_us, p, tile, copies_from=4, copies_to=100
    )


def load(row: dict[str, Any]) -> ExpertTime:
    names = ("gpu", "kernel", "dtype", "hidden", "intermediate", "experts")
    return ExpertTime.load(**{name: row[name] for name in names})


def microseconds(time: ExpertTime, copies: Any, rows: Any = None) -> Any:
    return pytest.approx(1e6 * time.seconds(copies, rows))


def test_reading_and_multiplying_add_up_at_1_and_the_longer_counts_at_the_other_end() -> None:
    assert microseconds(made(1.0), [4, 0, 8]) == 5 + 2 * 10 + 12 * 0.5
    assert microseconds(made(2.0), [4, 0, 8]) == 5 + np.hypot(20, 6)
    assert microseconds(made(200.0), [4, 0, 8]) == 5 + 20
    assert microseconds(made(200.0), [400, 0, 8]) == 5 + 204


def test_a_rank_without_copies_takes_a_call() -> None:
    for p in (1.0, 3.0, 11.0):
        assert microseconds(made(p), [0, 0]) == 5


def test_copies_of_a_slot_are_rounded_up_to_the_tile() -> None:
    assert microseconds(made(tile=64), [1, 64, 65, 0]) == 5 + 3 * 10 + 0.5 * (64 + 64 + 128)


def test_rows_are_copies_unless_they_are_given() -> None:
    assert microseconds(made(rho_us=2.0), [4, 8]) == 5 + 20 + 6 + 2 * 12
    assert microseconds(made(rho_us=2.0), [4, 8], 9) == 5 + 20 + 6 + 2 * 9


def test_ranks_and_batches_lead_and_tensors_are_taken() -> None:
    copies = np.random.default_rng(0).integers(0, 90, (3, 4, 5))
    rows = copies.max(-1)
    found = made(1.7, 16, 0.3).seconds(copies, rows)
    assert found.shape == (3, 4) and found.dtype == np.float64
    assert found[2, 1] == made(1.7, 16, 0.3).seconds(copies[2, 1], rows[2, 1])
    assert (made(1.7, 16, 0.3).seconds(torch.from_numpy(copies), torch.from_numpy(rows)) == found).all()


def test_huge_loads_stay_finite() -> None:
    assert microseconds(made(11.0), [1e12, 1e12]) == 1e12


def test_what_was_not_measured_is_marked() -> None:
    assert made().extrapolated([[1, 2], [2, 2], [50, 50], [50, 51]]).tolist() == [True, False, False, True]
    assert np.isfinite(made().seconds([50, 51]))


@pytest.mark.parametrize(
    "row", SHIPPED, ids=lambda row: f"{row['gpu']}-{row['kernel']}-{row['dtype']}-{row['model']}"
)
def test_shipped_constants_load_and_more_copies_never_take_less(row: dict[str, Any]) -> None:
    slots, copies, *_ = row["example"]
    time = load(row)
    assert not time.extrapolated(np.full(slots, copies))
    assert (row["copies_from"], row["copies_to"]) == (time.copies_from, time.copies_to)
    steps = np.unique(np.geomspace(1, 1e5, 60).astype(int))
    seconds = time.seconds(np.stack([steps, np.ones_like(steps)], -1))
    assert (np.diff(seconds) >= 0).all() and (seconds[0] > 0) and np.isfinite(seconds).all()


def test_shipped_constants_give_the_rows_they_were_fitted_to() -> None:
    """The largest one of each over several ranks, which fits weigh as any other; a stray one may be among them."""
    off = []
    for row in SHIPPED:
        slots, copies, rows, us = row["example"]
        off.append(abs(1e6 * load(row).seconds(np.full(slots, copies), rows) / us - 1))
    assert np.median(off) < 0.03 and np.quantile(off, 0.95) < 0.2 and np.sort(off)[-3] < 0.3


def test_reading_a_deepseek_expert_takes_as_long_as_its_bytes() -> None:
    """44 MB: 11.0 us on an H200 (4.8 TB/s), 15.6 on an H100 (3.35 TB/s), 7 on a GB200 (8 TB/s)."""
    of = {gpu: ExpertTime.load(gpu, **ASKED).b_us for gpu in ("h100", "h200", "gb200")}
    assert of == {
        "h100": pytest.approx(15.6, abs=1),
        "h200": pytest.approx(11.0, abs=1),
        "gb200": pytest.approx(7, abs=1),
    }


def test_the_best_fit_is_taken_where_several_models_share_a_shape() -> None:
    of = {"gpu": "h200", "kernel": "trtllm_moe_torch_flow_cutlass", "hidden": 7168, "intermediate": 2048}
    rows = [row for row in SHIPPED if of.items() <= row.items() and row["dtype"] == "fp8_block"]
    assert len(rows) == 2
    best = min(rows, key=lambda row: row["fit_error"])
    assert ExpertTime.load(**of, dtype="fp8_block") == load(best)
    assert {load(row).fit_error for row in rows} == {row["fit_error"] for row in rows}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"gpu": "h20"},
            r"gpu must be one of b200, b300, gb200, gb300, h100, h200, got 'h20'; did you mean h200\?",
        ),
        ({"kernel": "deepep"}, r"kernel must be one of .*sglang_deepep_decode, .*, got 'deepep'"),
        ({"dtype": "bf16"}, r"dtype must be one of fp8_block, got 'bf16'"),
        ({"hidden": 4096}, r"hidden must be one of 7168, got 4096"),
        ({"intermediate": 1}, r"intermediate must be one of 2048, got 1"),
        ({"experts": 8}, r"experts must be one of 256, got 8"),
    ],
)
def test_unknown_ones_are_refused_with_the_choices(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        ExpertTime.load(**({"gpu": "h200", **ASKED} | wrong))


@pytest.mark.parametrize("copies", [[1, -1], [1, float("nan")], [float("inf")]])
def test_copies_are_finite_numbers(copies: list[float]) -> None:
    with pytest.raises(ValueError, match="^copies must be finite numbers from 0 on, got (-1|nan|inf)$"):
        made().seconds(copies)
    with pytest.raises(ValueError, match="^copies must be finite"):
        made().extrapolated(copies)


def test_rows_are_finite_numbers() -> None:
    with pytest.raises(ValueError, match="^rows must be finite numbers from 0 on, got -2$"):
        made().seconds([1], -2)


@pytest.mark.parametrize(("name", "value", "least"), [("b_us", -1.0, 0), ("p", 0.5, 1), ("tile", 0, 1)])
def test_constants_of_ones_own_are_checked(name: str, value: float, least: int) -> None:
    given = {"a_us": 1.0, "b_us": 1.0, "c_us": 1.0, "rho_us": 0.0, "p": 1.0, "tile": 1} | {name: value}
    with pytest.raises(ValueError, match=f"^{name} must be finite numbers from {least} on, got {value:g}$"):
        ExpertTime("mine", "k", "bf16", 8, 8, **given)


def test_equation_4_is_the_sum_over_experts_with_copies():
    """LLEP, Equation 4: B_i D + D H + B_i H numbers for each expert with copies."""
    rng = np.random.default_rng(0)
    copies = rng.integers(0, 90, (3, 4, 6)) * (rng.random((3, 4, 6)) < 0.6)
    for hidden, intermediate, item in ((2880, 2880, 2.0), (7, 3, 1.0)):
        wanted = [
            [
                sum(b * hidden + hidden * intermediate + b * intermediate for b in row if b) * item
                for row in layer
            ]
            for layer in copies.tolist()
        ]
        assert local_bytes(copies, hidden, intermediate, item).tolist() == wanted
    with pytest.raises(ValueError, match="copies must be"):
        local_bytes([-1, 2], 4, 4)
