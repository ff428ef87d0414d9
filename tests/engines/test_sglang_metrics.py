"""SGLang's own /metrics, scraped over HTTP from a server over two CPU processes while it serves, moves experts and is
switched off: every metric that the dashboards name is there, of both ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from checkpoint import PROMPTS, make_qwen3_moe
from prometheus_client.parser import text_string_to_metric_families
from served import ask, sglang_server

from isoload.integrations.metrics import METRICS

OPTIONS = {
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True,
    "eplb_rebalance_num_iterations": 20, "expert_distribution_recorder_buffer_size": 20,
    "expert_distribution_recorder_mode": "stat", "eplb_algorithm": "isoload", "enable_metrics": True,
    "served_model_name": "tiny",
}  # fmt: skip
VARIABLES = {
    "ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_REPORT_SECONDS": "0.2", "ISOLOAD_CHECK_WEIGHTS": "1",
    "ISOLOAD_STALLED_SECONDS": "1", "ENGINE_RECORD": "",
}  # fmt: skip
LAYERS = 3
Samples = dict[tuple[str, str], dict[frozenset[tuple[str, str]], float]]


@dataclass(frozen=True)
class Scraped:
    """Samples by name and rank, with their other labels: while isoload chose replicas, and switched off."""

    on: Samples
    off: Samples


def scrape(address: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(ask(f"{address}/metrics")):
        for sample in family.samples:
            if sample.name.startswith("isoload_"):
                labels = dict(sample.labels)
                assert labels.pop("model") == "tiny" and labels.pop("engine") == "SGLang"
                found.setdefault((sample.name, labels.pop("rank")), {})[frozenset(labels.items())] = (
                    sample.value
                )
    return found


def one(samples: Samples, name: str, rank: str = "0") -> float:
    (value,) = samples[f"isoload_{name}", rank].values()
    return value


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("metrics")
    make_qwen3_moe(folder / "model")
    said = folder / "said"
    variables = VARIABLES | {"ISOLOAD_SWITCH": str(said)}
    with sglang_server(folder / "model", folder / "run", variables, **OPTIONS) as (address, log):

        def serve_until(done: Callable[[Samples], bool]) -> Samples:
            end = time.monotonic() + 120
            body = {"input_ids": PROMPTS, "sampling_params": {"max_new_tokens": 24, "ignore_eos": True}}
            while time.monotonic() < end:
                ask(f"{address}/generate", body)
                samples = scrape(address)
                if done(samples):
                    return samples
            raise AssertionError(f"{samples}\n{log.read_text()[-4000:]}")

        on = serve_until(
            lambda found: (
                one(found, "rebalances_total") >= 2 and ("isoload_rebalance_thread_dead", "1") in found
            )
        )
        said.write_text("off")
        off = serve_until(lambda found: one(found, "attached") == 0 and one(found, "attached", "1") == 0)
        later = serve_until(lambda found: one(found, "fallbacks_total") > one(off, "fallbacks_total"))
        yield Scraped(on, later)


def test_every_metric_is_there(scraped: Scraped) -> None:
    """Of both ranks, but what the first says for all of them."""
    of_all = {"imbalance", "balancedness"}
    for name, metric in METRICS.items():
        scraped_as = f"isoload_{name}" + "_count" * (metric.kind == "histogram")
        for rank in "0" if name in of_all else "01":
            labels = {frozenset(key for key, _ in of) for of in scraped.on[scraped_as, rank]}
            assert labels == {frozenset(metric.labels)}, name


def test_values_are_those_of_what_ran(scraped: Scraped) -> None:
    on = scraped.on
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


def test_switched_off_batches_fall_back(scraped: Scraped) -> None:
    for rank in "01":
        assert one(scraped.off, "attached", rank) == 0 and one(scraped.off, "fallbacks_total", rank) > 0
