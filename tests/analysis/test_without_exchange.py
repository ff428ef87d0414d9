"""Ways to run without an exchange: plain loops over the experts, the published ratios, what is left out, the output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isoload.analysis.advice import Question, advise
from isoload.analysis.details import without_exchange
from isoload.analysis.judge import Judged
from isoload.analysis.models import MODELS, layer_time
from isoload.analysis.server import ServerAdvice, with_alone
from isoload.times.exchanges import PEER_BANDWIDTHS
from isoload.topology import Topology
from support.documents import printed

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
TRACE = str(ROOT / "examples/traces/gptoss20b_decode.npz")
MODEL = MODELS["gpt-oss-20b"]


def asked(tokens=512, ranks=4, model=MODEL, gpu="h100", **options):
    topology = Topology(ranks, options.pop("ranks_per_node", 0))
    layer, _ = layer_time(gpu, "sglang", "prefill", model, topology)
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.ones(model.experts), size=(3, 1))
    loads = draw.multinomial(tokens * model.top_k, shares, size=(2, 3, ranks)).astype(np.int32)
    judged = Judged(loads.sum((0, 2)).astype(np.int64), torch.from_numpy(loads), False)
    return Question(model, layer, topology, tokens, **options), judged


def test_a_step_is_the_slowest_rank_of_plain_loops():
    question, judged = asked(64)
    now = advise(question, judged).now
    (whole, prefetched), left_out = without_exchange(question, judged, now)
    lacking = MODEL.experts - MODEL.experts // 4
    transfer = lacking * MODEL.expert_bytes / (PEER_BANDWIDTHS["h100"] * 1e9)
    steps = {"all": [], "dwdp": []}
    for batch in judged.loads.numpy():
        by_rank = {"all": [], "dwdp": []}
        for rank in range(4):
            own = [float(question.layer.experts.seconds(layer[rank], 64)) for layer in batch]
            by_rank["all"].append(np.mean(own))
            by_rank["dwdp"].append(np.mean([max(second, transfer) for second in own]))
        for name, ranks in by_rank.items():
            steps[name].append(1e3 * MODEL.layers * max(ranks))
    assert whole.ms == pytest.approx(2 * [np.mean(steps["all"])])
    assert prefetched.ms == pytest.approx(2 * [np.mean(steps["dwdp"])])
    assert whole.saved_ms[0] == pytest.approx(now.ms[0] - whole.ms[0])
    assert whole.slots_bytes == lacking * MODEL.layers * MODEL.expert_bytes
    assert prefetched.slots_bytes == 2 * lacking * MODEL.expert_bytes
    assert prefetched.ms > whole.ms  # so few tokens do not hide the transfer
    assert whole.imbalance == 1 and left_out == []


@pytest.mark.parametrize(("length", "theirs"), [(4096, 1.16), (8192, 1.37), (16384, 1.18)])
def test_published_ratios_of_prefetching_are_within_15_percent(length, theirs):
    """SGLang's pull request 29778, gpt-oss-120b on 4 B200. Attention, projections and NCCL are milliseconds of
    aiconfigurator-core 0.12.0, as bench/bench_published.py reads them."""
    attention = {4096: (0.8647 + 0.2333) / 2, 8192: (1.4797 + 0.2319) / 2, 16384: (2.8562 + 0.2302) / 2}[
        length
    ]
    rest = 1e-3 * (attention + 0.4335 * 2880 / 4096 + 0.3037 * 2880 / 3072)
    exchange = 1e-3 * (0.3673 + 0.3805) * 4 * 16384 * 2880 / 2**27
    for dtype in ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"):
        model = replace(MODELS["gpt-oss-120b"], dtype=dtype)
        layer, _ = layer_time("b200", "sglang", "prefill", model, Topology(4, 4))
        transfer = 96 * model.expert_bytes / (PEER_BANDWIDTHS["b200"] * 1e9)
        own = float(layer.without_exchange(np.full(128, 512), 16384, transfer))
        gathered = exchange + float(layer.experts.seconds(np.full(32, 2048), 4 * 16384))
        assert (rest + gathered) / (rest + own) == pytest.approx(theirs, rel=0.15)


def test_published_rows_on_the_page_are_within_15_percent():
    rows = map(json.loads, (ROOT / "bench/results/bench_published.jsonl").read_text().splitlines())
    errors = [row["error"] for row in rows if row["what"].startswith("DWDP")]
    assert len(errors) == 3 and max(map(abs, errors)) < 0.15


@pytest.mark.parametrize(
    ("options", "left", "reason"),
    [
        ({"memory": 1e6}, [], "the other ranks' experts exceed --memory-per-rank"),
        ({"memory": 1e6}, [], "two buffers for the experts of peers exceed --memory-per-rank"),
        ({"ranks_per_node": 2}, ["all"], "no bandwidth for the weights of other nodes was measured"),
        (
            {"model": MODELS["deepseek-v3"], "gpu": "h200"},
            ["dwdp"],
            "all experts together exceed the memory of one h200",
        ),
    ],
)
def test_ways_that_cannot_run_are_left_out_with_the_reason(options, left, reason):
    question, judged = asked(**options)
    answers, left_out = without_exchange(question, judged, advise(question, judged).now)
    assert [answer.candidate.placer for answer in answers] == left
    assert any(reason in line for line in left_out)


def test_times_of_an_unknown_gpu_need_its_memory_and_its_links():
    question, judged = asked()
    experts = replace(question.layer.experts, gpu="mine")
    question = replace(question, layer=replace(question.layer, experts=experts))
    now = advise(question, judged).now
    answers, left_out = without_exchange(question, judged, now)
    assert answers == [] and len(left_out) == 2
    assert "the memory of mine is not known: pass --memory-per-rank" in left_out[0]
    assert "the bandwidth between ranks of mine is not known: isoload measure times it" in left_out[1]
    slow, fast = (without_exchange(question, judged, now, move_us)[0][0] for move_us in (1e5, 1.0))
    assert slow.ms[0] == pytest.approx(1e-3 * 24 * 24 * 1e5)  # 24 layers of 24 experts that a rank lacks
    assert fast.ms[0] < slow.ms[0]


def test_one_rank_has_nothing_to_leave_out():
    question, judged = asked(ranks=1)
    assert without_exchange(question, judged, advise(question, judged).now) == ([], [])


def test_a_server_has_the_mean_of_both_phases():
    questions = {"prefill": asked(512), "decode": asked(16)}
    both = {name: advise(question, judged) for name, (question, judged) in questions.items()}
    server = ServerAdvice(both["prefill"], both, {"prefill": 0.25, "decode": 0.75})
    server, _ = with_alone(server, questions, None)
    first, second = (server.phases[name].alone for name in ("prefill", "decode"))
    for mean, one, other in zip(server.whole.alone, first, second, strict=True):
        assert mean.ms == pytest.approx(np.multiply(one.ms, 0.25) + np.multiply(other.ms, 0.75))


def test_a_way_that_takes_less_time_is_named_and_the_choice_of_balancing_stays(tmp_path):
    command = [
        "advise",
        TRACE,
        "--gpu",
        "h100",
        "--model",
        "gpt-oss-20b",
        "--ranks",
        "8",
        "--tokens-per-rank",
    ]
    fast = " ".join(printed([*command, "2048", "--json", str(tmp_path / "fast.json")]).split())
    assert "Without an exchange nothing is to be balanced: no expert parallelism saves another" in fast
    assert "isoload: worth it" in fast
    slow = printed([*command, "64", "--phase", "decode"])
    assert "DWDP, prefetched" in slow and "nothing is to be balanced" not in " ".join(slow.split())
    figures = json.loads((tmp_path / "fast.json").read_text())
    assert [row["candidate"]["placer"] for row in figures["without_exchange"]] == ["all", "dwdp"]
    assert all(row["candidate"]["placer"] in ("eplb", "trivial") for row in figures["answers"])
