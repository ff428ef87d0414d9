"""vLLM's own /metrics, scraped over HTTP from a server whose two workers are processes of their own: every metric that
the dashboards name is there, of both, while it serves, moves experts and is switched off."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from checkpoint import PROMPTS, make_qwen3_moe, make_tokenizer
from run_vllm import COMMON
from served import Samples, check_all_there, one, vllm_server

EPLB = {
    "num_redundant_experts": 4,
    "window_size": 4,
    "step_interval": 16,
    "use_async": False,
    "communicator": "torch_gloo",
}
OPTIONS = {key: value for key, value in COMMON.items() if key != "skip_tokenizer_init"} | {
    "enable_eplb": True, "eplb_config": json.dumps(EPLB),
}  # fmt: skip
VARIABLES = {
    "ISOLOAD_VLLM": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_REPORT_SECONDS": "0.2", "ISOLOAD_CHECK_WEIGHTS": "1",
    "ISOLOAD_STALLED_SECONDS": "1", "ENGINE_RECORD": "",
}  # fmt: skip
LAYERS = 3
for module in ("uvicorn", "model_hosting_container_standards"):
    pytest.importorskip(
        module, reason="vLLM's server: pip install -r tests/real_engines/requirements-vllm.txt"
    )


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Samples, Samples]]:
    """While isoload chose replicas, and switched off."""
    folder = tmp_path_factory.mktemp("metrics")
    make_qwen3_moe(folder / "model", head_dim=32)
    make_tokenizer(folder / "model")
    variables = VARIABLES | {"ISOLOAD_SWITCH": str(folder / "said")}
    body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 24, "ignore_eos": True}
    with vllm_server(folder, variables, body, **OPTIONS) as server:
        yield server.on_and_off(folder / "said")


def test_every_metric_is_there_of_every_worker(scraped: tuple[Samples, Samples]) -> None:
    check_all_there(scraped[0])


def test_values_are_those_of_what_ran(scraped: tuple[Samples, Samples]) -> None:
    on, off = scraped
    for rank in "01":
        assert one(on, "attached", rank) == 1 and one(on, "fallbacks_total", rank) == 0
        assert one(on, "batches_total", rank) >= 20 * LAYERS and one(on, "batches_total", rank) % LAYERS == 0
        assert one(on, "rebalances_total", rank) == one(on, "rebalance_seconds_count", rank) >= 2
        assert one(on, "errors_total", rank) == one(on, "wrong_slots", rank) == 0
        assert one(off, "attached", rank) == 0
    moved, size = (
        sum(one(on, f"{name}_moved_total", rank) for rank in "01") for name in ("experts", "bytes")
    )
    assert moved > 0 and size % moved == 0
    (info,) = on["isoload_info", "0"]
    assert {"policy": "exact", "placer": "eplb"}.items() <= dict(info).items()
