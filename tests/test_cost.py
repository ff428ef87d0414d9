"""The cost model: Eq. 3 and 4 recounted in plain loops, bytes that travel, break-even, and its file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import isoload
from isoload import Topology
from isoload.times.cost import (
    CostModel,
    break_even,
    exchange_seconds,
    import_seconds,
    lent,
    rank_bytes,
    rank_seconds,
    read_cost,
    slots_in_time,
)

MODEL = CostModel(
    hidden=10, intermediate=4, weight_bytes=2, overhead_us=7, token_us=((1, 8.0), (4, 4.0), (16, 1.0))
)
SLOTS = torch.tensor([0, 1, -1, 2, 3, 0, 4, 5, -1, 6, 7, 5], dtype=torch.int32)  # 4 ranks, 1 spare slot
HOME = torch.tensor([0, 1, 3, 4, 6, 7, 9, 10])
QUOTA = torch.tensor([5, 0, 0, 1, 2, 100, 8, 0, 0, 0, 0, 4], dtype=torch.int32)


def per_token(copies: int) -> float:
    """Linear in log(copies) between the points of MODEL."""
    for (low, slow), (high, fast) in zip(MODEL.token_us, MODEL.token_us[1:], strict=False):
        if low <= copies <= high:
            part = math.log(copies / low) / math.log(high / low)
            return slow + (fast - slow) * part
    return MODEL.token_us[-1][1]


def test_compute_time_is_equation_3() -> None:
    expected = [sum(7 + n * per_token(n) for n in row if n) * 1e-6 for row in QUOTA.view(4, 3).tolist()]
    assert rank_seconds(QUOTA, 4, MODEL).tolist() == pytest.approx(expected)
    layers = rank_seconds(torch.stack([QUOTA, QUOTA * 0]), 4, MODEL)
    assert layers.tolist() == [pytest.approx(expected), [0.0] * 4]


def test_few_large_gemms_beat_many_small_ones() -> None:
    one, many = torch.tensor([64, 0, 0, 0]), torch.tensor([16, 16, 16, 16])
    assert rank_seconds(one, 1, CostModel()) < rank_seconds(many, 1, CostModel())


def test_memory_is_equation_4() -> None:
    expected = []
    for copies, held in zip(QUOTA.view(4, 3).tolist(), SLOTS.view(4, 3).tolist(), strict=True):
        weights = sum(3 * 10 * 4 * 2 for e in held if e >= 0)
        expected.append(sum(n * 10 * 2 + n * 4 * 2 for n in copies) + weights)
    assert rank_bytes(QUOTA, SLOTS, 4, MODEL).tolist() == expected


def test_borrowed_weights_take_the_time_of_the_busier_end() -> None:
    """Rank 1 borrows expert 0 of rank 0, rank 3 expert 5 of rank 2; then rank 0 lends to both, one of them far."""
    topology = Topology(4, 2, bandwidths=(2.0, 0.5))
    lending = lent(SLOTS, HOME, 1, topology)
    assert lending.nonzero().tolist() == [[0, 1], [2, 3]] and int(lending.sum()) == 2
    assert lent(torch.stack([SLOTS] * 2), torch.stack([HOME] * 2), 1, topology)[1].equal(lending)
    near, far = 240 / 2e9, 240 / 5e8
    assert import_seconds(lending, topology, MODEL).tolist() == pytest.approx([near] * 4)
    twice = SLOTS.clone()
    twice[11] = 0
    both = import_seconds(lent(twice, HOME, 1, topology), topology, MODEL)
    assert both.tolist() == pytest.approx([near + far, near, 0, far])
    slow = import_seconds(lending, Topology(4, 1), MODEL)
    assert slow.tolist() == pytest.approx([240 / 5e10] * 4), "the documented default"
    given = import_seconds(lending, Topology(4, 1), CostModel(10, 4, weight_bytes=2, bandwidths=(9, 2)))
    assert given.tolist() == pytest.approx([240 / 2e9] * 4)


def test_all_to_all_counts_the_busier_direction_both_ways() -> None:
    rows = torch.tensor([[9, 3, 0, 1], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    seconds = exchange_seconds(rows, Topology(4, 2, bandwidths=(2.0, 0.5)), MODEL)
    row = 10 * 2  # bytes
    sent = 3 * row / 2e9 + 1 * row / 5e8
    assert seconds.tolist() == pytest.approx([2 * sent, 2 * 3 * row / 2e9, 0, 2 * row / 5e8])


@pytest.mark.parametrize(
    ("expert_bytes", "bandwidth", "token_us", "tokens"),
    [
        (2 * 44_040_192, 400, 0.1468, 1500),
        (2 * 44_040_192, 50, 0.1468, 12_000),
        (1000, 1, 1, 1),
        (1, 1e3, 1, 1),
    ],
)
def test_break_even(expert_bytes: float, bandwidth: float, token_us: float, tokens: int) -> None:
    assert break_even(expert_bytes, bandwidth, token_us) == pytest.approx(tokens, rel=0.01)


def test_break_even_of_a_model_is_of_its_large_gemms() -> None:
    assert isoload.times.cost.break_even is break_even
    assert CostModel().break_even == (749, 5992)
    assert MODEL.large_token_us == 1.0 and MODEL.break_even == (1, 1)
    slow = CostModel(hidden=10, intermediate=4, token_us=((1, 9.0), (8, 0.01)), bandwidths=(0.5, 0.1))
    assert slow.break_even == (24, 120)


@pytest.mark.parametrize("name", ["expert_bytes", "bandwidth", "token_us"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_break_even_refuses(name: str, value: float) -> None:
    arguments = {"expert_bytes": 1.0, "bandwidth": 1.0, "token_us": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got {value}"):
        break_even(**arguments)


def test_a_model_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({"hidden": 64, "token_us": [[1, 2.0], [100, 0.5]]}))
    model = read_cost(file)
    assert model == CostModel(hidden=64, token_us=((1, 2.0), (100, 0.5)), source="cost.json")
    assert model.expert_bytes == 3 * 64 * 2048
    file.write_text(json.dumps(dataclasses.asdict(MODEL)))
    assert read_cost(file) == MODEL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "cost file must be a JSON object, got list"),
        ("{", "cost file must be a JSON object, got "),
        ('{"speed": 1}', "cost file must have fields of hidden, .*, got 'speed'"),
        ('{"hidden": 0}', "hidden must be a positive number below 2\\^53, got 0"),
        ('{"overhead_us": -1}', "overhead_us must be 0 or a positive number below 2\\^53, got -1"),
        ('{"hidden": "x"}', "hidden must be a positive number below 2\\^53, got 'x'"),
        ('{"weight_bytes": true}', "weight_bytes must be a positive number below 2\\^53, got True"),
        ('{"token_bytes": Infinity}', "Infinity is no number of JSON"),
        ('{"source": 3}', "source must be text, got 3"),
        ('{"bandwidths": 400}', "bandwidths must be two positive numbers, got 400"),
        ('{"bandwidths": [400]}', "bandwidths must be two positive numbers, got \\[400\\]"),
        ('{"bandwidths": [400, 0]}', "bandwidths must be two positive numbers, got \\[400, 0\\]"),
        ('{"token_us": 1}', "token_us must be pairs of ascending sizes and positive times, got 1"),
        ('{"token_us": [[1, 2, 3]]}', "token_us must be pairs of ascending sizes and positive times"),
        ('{"token_us": [[1.5, 2]]}', "token_us must be pairs of ascending sizes and positive times"),
        ('{"token_us": [[1, NaN]]}', "NaN is no number of JSON"),
        ('{"token_us": []}', r"token_us must be pairs of ascending sizes and positive times, got \[\]"),
        ('{"token_us": [[4, 1], [4, 1]]}', "token_us must be pairs of ascending sizes"),
        ('{"token_us": [[1, 0]]}', "token_us must be pairs of ascending sizes and positive times"),
    ],
)
def test_refuses_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_cost(file)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cost file must be a JSON object, got .*none.json"):
        read_cost(tmp_path / "none.json")


def test_slots_in_time_by_hand() -> None:
    """10 copies over 3 experts take 3 launches and 22 us: 25 us, in which 25 kB come at 1 GB/s; an expert has 120 B."""
    model = CostModel(hidden=10, intermediate=4, overhead_us=1, token_us=((1, 2.2),), bandwidths=(1.0, 0.1))
    near, far = Topology(4), Topology(4, 2)
    assert slots_in_time(10, 3, near, model) == 25_000 // 120
    assert slots_in_time(10, 3, far, model) == 2_500 // 120
    assert slots_in_time(10, 20, near, model) == 32_000 // 120, "launches of the experts that have copies"
    assert slots_in_time(1, 1, Topology(4, bandwidths=(0.001, 0.001)), model) == 0
    for arguments, name in (((0, 3), "copies"), ((3, 0), "experts"), ((1.5, 3), "copies")):
        with pytest.raises(ValueError, match=f"{name} must be a number of at least 1, got"):
            slots_in_time(*arguments, near, model)
