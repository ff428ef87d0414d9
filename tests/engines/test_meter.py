"""Meter: sums over batches, against the same figures by hand; and the line that reports them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import isoload
from isoload.online.metrics import Meter, line
from support.told_metrics import Told

# Expert 0 has a replica on each of two ranks, 1 and 2 have one.
TABLE = torch.tensor([[0, 1, 0, 2]])
TOPOLOGY = isoload.Topology(2)


def measured(
    meter: Meter, *loads: list[int], policy: str = "exact", topology: isoload.Topology = TOPOLOGY
) -> None:
    placement = isoload.Placement(TABLE, topology, 3)
    for row in loads:
        counts = torch.tensor([row, [0, 0, 0]], dtype=torch.int32)
        meter.add(5, counts, isoload.plan(counts, placement, 0, policy), 1e-3)


def test_sums_by_hand() -> None:
    meter = Meter("engine", 60)
    measured(meter, [6, 4, 0], [0, 8, 0], [0, 0, 0])
    (report,) = meter.read()
    # evenly spread: (3 + 4, 3) and (8, 0); planned: (5, 5) and (8, 0); the empty batch is none
    assert (report.layer, report.batches, report.certified) == (5, 2, 2)
    assert report.before == pytest.approx((7 / 5 + 2) / 2) and report.after == pytest.approx((1 + 2) / 2)
    assert meter.read() == [], "a reading begins anew"


def test_with_speeds_loads_are_costs() -> None:
    """Ten copies of expert 0: 5 and 5 end after 5 and 10 copies' time, 7 and 3 after 7 and 6; together after 20 / 3."""
    meter = Meter("engine", 60)
    measured(meter, [10, 0, 0], topology=isoload.Topology(2, speeds=(1.0, 0.5)))
    (report,) = meter.read()
    assert report.before == pytest.approx(30 / 20) and report.after == pytest.approx(21 / 20)


def test_a_sampled_policy_has_no_peak() -> None:
    meter = Meter("engine", 60)
    measured(meter, [6, 4, 0], policy="dynamic")
    (report,) = meter.read()
    assert report.after is None and report.certified == 0 and report.before == pytest.approx(7 / 5)


def test_the_line(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter("engine", 0)
    measured(meter, [6, 4, 0], [0, 8, 0])
    with caplog.at_level(logging.INFO, "isoload"):
        meter.report_if_due()
        meter.report_if_due()  # nothing since
    (record,) = caplog.records
    assert record.getMessage() == (
        "isoload engine: 2 plans of 1 layers; imbalance 1.700 evenly spread, 1.500 planned, 1.500 in the worst layer; "
        "peak == bound in all batches of 1 of 1 layers; 1000 us per plan on the host"
    )


def test_a_graphs_replays_have_no_time() -> None:
    """The host runs none of the calls, while the sums on the device go on."""
    meter = Meter("engine", 0)
    measured(meter, [6, 4, 0])
    layers = meter.read()
    assert line("engine", layers, None).endswith("all replayed from graphs")


def test_no_report_before_its_time(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter("engine", 3600)
    measured(meter, [6, 4, 0])
    with caplog.at_level(logging.INFO, "isoload"):
        meter.report_if_due()
    assert not caplog.records and len(meter.read()) == 1


def test_sums_stay_where_they_are() -> None:
    """A captured graph goes on adding to them."""
    meter = Meter("engine", 60)
    measured(meter, [6, 4, 0])
    address = meter._sums[5].data_ptr()
    meter.read()
    measured(meter, [6, 4, 0])
    assert meter._sums[5].data_ptr() == address


def test_exchanges_are_measured_by_the_batches_before_them(caplog: pytest.LogCaptureFixture) -> None:
    """A layer in which no rank had a copy, then, is left out of that one."""
    meter, nan = Meter("engine", 0), float("nan")
    for imbalance in ([1.5, 1.0, nan], [1.0, nan, nan]):
        meter.add_exchange(torch.tensor(imbalance, dtype=torch.float64))
    with caplog.at_level(logging.INFO, "isoload"):
        meter.report_if_due()
        meter.report_if_due()  # nothing since
    (record,) = caplog.records
    assert record.getMessage() == (
        "isoload engine: 2 exchanges of 2 layers; imbalance 1.125 of all copies of the batch before each, "
        "1.250 in the worst layer"
    )


def test_metrics_are_those_of_the_line() -> None:
    meter = Meter("engine", 0)
    meter.metrics = told = Told()
    measured(meter, [6, 4, 0], [0, 8, 0], policy="even")  # 3 + 4 and 3 copies; 8 and 0
    meter.report_if_due()
    found = {key[1:3]: v for key, v in told.values.items() if key[0] == "imbalance" and key[3] == "1.0"}
    assert found == {("mixed", "even"): pytest.approx(1.7), ("mixed", "isoload"): pytest.approx(1.7)}
    assert told.values["balancedness", "mixed", "isoload", "0.5"] == pytest.approx(1 / 1.7)
    assert told.values["batches_not_certified_total"] == 1


def test_a_plan_within_its_policys_tolerance_is_certified(caplog: pytest.LogCaptureFixture) -> None:
    """A peak of 1001 over a bound of 1000 is at a thousandth; 1002 is above it."""
    counts = torch.tensor([[1000, 1000, 0], [0, 0, 0]], dtype=torch.int32)
    placement = isoload.Placement(TABLE, TOPOLOGY, 3)
    for tolerance, certified in ((0.0, [True, False, False]), (0.001, [True, True, False])):
        best = isoload.plan(counts, placement, 0, "exact", tolerance=tolerance)
        assert best.bound is not None and int(best.bound) == 1000
        meter = Meter("engine", 0)
        for peak in (1000, 1001, 1002):
            meter.add(5, counts, replace(best, peak=torch.full_like(best.bound, peak)), 1e-3)
            assert meter.read()[0].certified == certified[peak - 1000]
        meter.add(5, counts, best, 1e-3)
        with caplog.at_level(logging.INFO, "isoload"):
            meter.report_if_due()
        proof = "peak <= 1.001 bound" if tolerance else "peak == bound"
        assert f"{proof} in all batches of 1 of 1 layers" in caplog.records[-1].getMessage()


def test_of_exchanges_and_samples_nothing_is_certified_nor_not() -> None:
    meter = Meter("engine", 0)
    meter.metrics = told = Told()
    meter.add_exchange(torch.tensor([1.5], dtype=torch.float64))
    measured(meter, [6, 4, 0], policy="dynamic")
    meter.report_if_due()
    assert "batches_not_certified_total" not in told.values
    assert told.values["imbalance", "mixed", "isoload", "1.0"] == 1.5


def test_exchanges_and_plans_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter("engine", 0)
    measured(meter, [6, 4, 0])
    meter.add_exchange(torch.ones(2, dtype=torch.float64))
    with caplog.at_level(logging.INFO, "isoload"):
        meter.report_if_due()
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "isoload engine: 1 plans of 1 layers", "isoload engine: 1 exchanges of 2 layers",
    ]  # fmt: skip
