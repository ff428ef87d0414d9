"""SGLang's own /metrics, scraped over HTTP from a server over two CPU processes while it serves, moves experts and is
switched off: every metric that the dashboards name is there, of both ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoint import PROMPTS, make_qwen3_moe
from run_engine import COMMON
from served import Samples, check_all_there, one, sglang_server

OPTIONS = {
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True,
    "eplb_rebalance_num_iterations": 20, "expert_distribution_recorder_buffer_size": 20,
    "expert_distribution_recorder_mode": "stat", "eplb_algorithm": "isoload", "enable_metrics": True,
}  # fmt: skip
VARIABLES = {
    "ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_REPORT_SECONDS": "0.2", "ISOLOAD_CHECK_WEIGHTS": "1",
    "ISOLOAD_STALLED_SECONDS": "1", "ENGINE_RECORD": "",
}  # fmt: skip
LAYERS = 3


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Samples, Samples]]:
    """While isoload chose replicas, and switched off."""
    folder = tmp_path_factory.mktemp("metrics")
    make_qwen3_moe(folder / "model")
    variables = VARIABLES | {"ISOLOAD_SWITCH": str(folder / "said")}
    body = {"input_ids": PROMPTS, "sampling_params": {"max_new_tokens": 24, "ignore_eos": True}}
    with sglang_server(folder, variables, body, **COMMON, **OPTIONS) as server:
        yield server.on_and_off(folder / "said")


def test_every_metric_is_there(scraped: tuple[Samples, Samples]) -> None:
    check_all_there(scraped[0])


def test_values_are_those_of_what_ran(scraped: tuple[Samples, Samples]) -> None:
    on, _ = scraped
    for rank in "01":
        assert one(on, "attached", rank) == 1 and one(on, "fallbacks_total", rank) == 0
        batches = one(on, "batches_total", rank)
        assert batches >= 40 * LAYERS and batches % LAYERS == 0
        assert one(on, "plan_seconds_count", rank) >= batches
        assert one(on, "errors_total", rank) == one(on, "wrong_slots", rank) == 0
        assert one(on, "rebalance_thread_dead", rank) == one(on, "rebalance_stalled_seconds", rank) == 0
        moved = one(on, "experts_moved_total", rank)
        assert one(on, "rebalance_seconds_count", rank) == one(on, "rebalances_total", rank) >= 2
        assert moved > 0 and one(on, "bytes_moved_total", rank) % moved == 0
    assert one(on, "batches_not_certified_total") == 0
    (info,) = on["isoload_info", "0"]
    assert {"policy": "exact", "placer": "eplb", "version": "0.1.0"}.items() <= dict(info).items()
    worst = {
        dict(of)["plan"]: value
        for of, value in on["isoload_imbalance", "0"].items()
        if dict(of)["quantile"] == "1.0"
    }
    assert 1 <= worst["isoload"] <= worst["even"]


def test_switched_off_batches_fall_back(scraped: tuple[Samples, Samples]) -> None:
    for rank in "01":
        assert one(scraped[1], "attached", rank) == 0 and one(scraped[1], "fallbacks_total", rank) > 0
