"""advise: every copy has a slot under every split, rows are as routed, times are the closed form, verdicts follow."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.advice import (
    GATHER_US,
    NOW,
    PLAN_US,
    Candidate,
    Question,
    advise,
    grid,
    over_even,
    placed,
    run,
    sent,
    step_ms,
    targets,
)
from isoload.analysis.details import flags, placeholders
from isoload.analysis.judge import Judged, guessed_trace, judge_by
from isoload.analysis.models import MODELS, WEIGHT_BYTES, Model, find_model, layer_time
from isoload.analysis.timeline import rows_between
from isoload.balancing.planning import plan_layers, share_of_node
from isoload.cli.advise_output import verdict_lines
from isoload.times import AllToAllTime, ExpertTime, LayerTime
from isoload.times.exchanges import Curve
from isoload.traces import Trace

SMALL = Model("small", 64, 32, 16, 2, 3, "bfloat16", 1024)
TOPOLOGY = isoload.Topology(4, 2)
EXPERTS = ExpertTime("gpu", "kernel", "bfloat16", 64, 32, a_us=10, b_us=2, c_us=1, rho_us=0.1, p=3)


def skewed(batches: int = 6, seed: int = 0) -> Trace:
    shares = np.random.default_rng(seed).dirichlet(np.full(16, 0.5), size=(1, 3))
    return Trace("skewed", 16, 2, np.rint(1e5 * np.repeat(shares, batches, 0)).astype(np.int64))


def question(**changes: object) -> Question:
    return replace(Question(SMALL, LayerTime(None, EXPERTS, None), TOPOLOGY, tokens=64), **changes)


@pytest.mark.parametrize("candidate", grid(16, nodes=2), ids=lambda candidate: candidate.label)
def test_every_copy_goes_to_a_slot_of_its_expert(candidate: Candidate) -> None:
    judged = judge_by(skewed(), SMALL, 4, 64)
    placement = placed(candidate, judged, TOPOLOGY)
    renewed = targets(candidate.split, torch.from_numpy(judged.calibration), placement)
    for loads in judged.loads:
        moved = sent(candidate, loads, placement, renewed, seed=1).long()
        at = placement.slot_to_expert.long().unsqueeze(1).expand_as(moved)
        assert (moved[at < 0] == 0).all()
        got = torch.zeros_like(loads, dtype=torch.int64).scatter_add_(2, at.clamp(min=0), moved)
        assert got.equal(loads.long())
        if candidate.split == "exact":
            peak = moved.sum(1).view(3, 4, -1).sum(-1).amax(1)
            assert peak.equal(plan_layers(loads, placement).bound.long())


def test_the_grid_names_every_split_and_nothing_twice() -> None:
    assert {candidate.split for candidate in grid(16, nodes=2)} == set(PLAN_US)
    assert len(set(grid(16))) == len(grid(16))
    assert grid(0) == grid(16)[:2]
    assert {candidate.split for candidate in grid(16)} == set(PLAN_US) - {"node"}
    assert {candidate.split for candidate in grid(16, False, 2)} == set(PLAN_US) - {"exact", "node"}


def test_rows_are_those_of_routed_tokens() -> None:
    """K distinct experts of a token: independent slots count a few rows too few, never a tenth of them."""
    draw, tokens, experts, top_k = np.random.default_rng(0), 512, 32, 4
    weights = draw.dirichlet(np.full(experts, 1.0))
    ids = np.stack([draw.choice(experts, top_k, replace=False, p=weights) for _ in range(tokens)])
    slots = draw.permutation(experts)[ids]
    moved = np.bincount(slots.ravel(), minlength=experts).reshape(1, 1, -1)
    for groups in (2, 8):
        rows = rows_between(moved, tokens, groups)[0, 0]
        exact = [len(np.unique(np.nonzero(slots // (experts // groups) == g)[0])) for g in range(groups)]
        assert np.abs(rows / exact - 1).max() < 0.1
        assert (rows <= tokens + 1e-9).all()


def test_rows_of_whole_copies_are_those_of_the_same_copies_as_fractions() -> None:
    """Whole copies take their logarithms from a table, fractions do not; a source may have more copies than tokens."""
    moved = np.random.default_rng(0).integers(0, 20, (3, 8, 32))
    assert (rows_between(moved, 16, 4) == rows_between(moved.astype(np.float64), 16, 4)).all()


@pytest.mark.parametrize(("kernel", "even"), [("normal", 0.75), ("low_latency", 1.0)])
def test_rows_to_other_nodes_are_those_of_even_routing_where_routing_is_even(
    kernel: str, even: float
) -> None:
    """top-2 on 2 nodes: 3 of 4 tokens have an expert on the other node, and one copy of each goes there."""
    curve = Curve(30.0, 0.5, 1.0)
    steps = [AllToAllTime("gpu", kernel, name, 4, 2, curve, curve) for name in ("dispatch", "combine")]
    asked = question(layer=LayerTime(steps[0], EXPERTS, steps[1]))
    found = run(NOW, Judged(np.ones((3, 16)), torch.full((1, 3, 4, 16), 8, dtype=torch.int32), False), asked)
    assert over_even(found.crossing, asked) == pytest.approx(np.ones((1, 3)))
    assert found.crossing[..., 1] == pytest.approx(np.ones((1, 3))), (
        "of two copies one goes to the other node"
    )
    half = found._replace(crossing=found.crossing / 2)
    saved = 3e-3 * 2 * 0.5 * 64 / 2
    assert step_ms(found, asked)[0] - step_ms(half, asked)[0] == pytest.approx(saved)
    one_node = replace(asked, topology=isoload.Topology(4))
    assert over_even(found.crossing, one_node) == 1.0


@pytest.mark.parametrize("seed", range(8))
def test_a_node_shares_as_the_op_does_for_all_ranks(seed: int) -> None:
    """Experts twice on a rank and empty slots included."""
    draw = np.random.default_rng(seed)
    nodes, size, slots, layers = (int(draw.integers(1, most)) for most in (5, 5, 5, 4))
    all_slots, num_ranks = nodes * size * slots, nodes * size
    experts = int(draw.integers(1, all_slots + 1))
    rows = [np.arange(experts), draw.integers(-1, experts, all_slots - experts)]
    table = torch.tensor(
        np.stack([draw.permutation(np.concatenate(rows)) for _ in range(layers)]), dtype=torch.int32
    )
    tables = isoload.ops.replica_tables(table, num_ranks, experts)
    loads = torch.tensor(
        draw.poisson(draw.choice([0.3, 30]), (layers, num_ranks, experts)), dtype=torch.int32
    )
    for node in range(nodes):
        ranks = slice(node * size, (node + 1) * size)
        inside = torch.zeros_like(loads)
        inside[:, ranks] = loads[:, ranks]
        offset = torch.tensor(draw.integers(0, 2**18, (layers, num_ranks)), dtype=torch.int32)
        quota = isoload.ops.plan_own(inside.sum(1, dtype=torch.int32), tables, offset, node)
        mine = share_of_node(loads[:, ranks], quota, table, slice(ranks.start * slots, ranks.stop * slots))
        assert mine.equal(isoload.ops.share(inside, quota, tables, size)[:, ranks])


def test_rows_of_one_slot_are_its_copies_and_none_are_none() -> None:
    moved = np.array([[[7, 0, 0, 0]]])
    assert rows_between(moved, 7, 4)[0, 0] == pytest.approx([7, 0, 0, 0], abs=1e-6)


def test_even_loads_take_the_closed_form() -> None:
    """16 experts, each with 32 copies, in order on 4 ranks: 3 layers of a + ((4 b)^3 + (128 c)^3)^(1/3) + rho rows."""
    loads = torch.full((1, 3, 4, 16), 8, dtype=torch.int32)
    found = advise(question(), Judged(np.full((3, 16), 100), loads, drawn=False)).now
    rows = 4 * 64 * (1 - (1 - 8 / 64) ** 4)
    wanted = 3e-3 * (10 + ((4 * 2) ** 3 + 128**3) ** (1 / 3) + 0.1 * rows)
    assert found.ms == pytest.approx((wanted, wanted), rel=1e-6)
    assert (found.imbalance, found.saved_ms) == (1.0, (0.0, 0.0))


def test_answers_are_ranked_and_compared_with_what_runs_now() -> None:
    found = advise(question(), judge_by(skewed(), SMALL, 4, 64))
    assert [sum(answer.ms) for answer in found.answers] == sorted(sum(answer.ms) for answer in found.answers)
    assert found.now.candidate == Candidate("trivial", 0, "none") and found.now in found.answers
    assert found.ours is not None and found.ours.candidate.ours and not found.theirs.candidate.ours
    for answer in found.answers:
        saved = sorted(now - then for now, then in zip(found.now.ms, answer.ms, strict=True))
        assert answer.saved_ms == pytest.approx(saved)
        assert answer.slots_bytes == answer.candidate.more * SMALL.expert_bytes * SMALL.layers
    exact = [answer for answer in found.answers if answer.candidate == Candidate("eplb", 4, "exact")]
    assert exact[0].imbalance < found.now.imbalance


def test_a_rebalance_and_memory_are_counted() -> None:
    judged = judge_by(skewed(), SMALL, 4, 64)
    plain, slow = (advise(question(**how), judged) for how in ({}, {"rebalance_s": 2.0, "every": 1000}))
    by_label = {answer.candidate: answer for answer in plain.answers}
    for answer in slow.answers:
        moves = 2.0 if answer.candidate.placer == "eplb" else 0.0
        assert answer.ms[0] == pytest.approx(by_label[answer.candidate].ms[0] + moves)
    room = 2.5 * SMALL.expert_bytes * SMALL.layers
    assert max(answer.candidate.more for answer in advise(question(memory=room), judged).answers) == 2
    without = advise(question(memory=1.0), judged)
    assert without.ours is None and without.verdict == "not worth it" and without.gain_ms == (0.0, 0.0)


def test_the_verdict_follows_from_what_isoload_adds() -> None:
    slow = replace(EXPERTS, c_us=1000.0)  # planning is nothing beside such experts
    judged = judge_by(skewed(), SMALL, 4, 64)
    found = advise(question(layer=LayerTime(None, slow, None)), judged)
    low, high = found.gain_ms
    assert found.verdict == "worth it" and found.share((low, high))[0] >= 0.03
    measured = advise(question(layer=LayerTime(None, slow, None), step_ms=100 * high), judged)
    assert measured.verdict == "no difference" and measured.share((high, high)) == pytest.approx((0.01, 0.01))
    assert (
        advise(question(), judge_by(skewed(), SMALL, 4, 8)).verdict == "not worth it"
    )  # planning takes longer


@pytest.mark.parametrize("moves", [{}, {"rebalance_s": 2.0, "every": 1000}])
def test_a_whole_step_is_its_layers_and_the_dense_part(moves: dict[str, float]) -> None:
    """Every rank visits every other here, so that by the timeline, too, nothing overlaps and all wait for the slowest.
    The trace has 3 of the model's 6 layers."""
    asked = question(model=replace(SMALL, layers=6), **moves)
    judged = judge_by(skewed(), SMALL, 4, 64)
    plain, found = advise(asked, judged), advise(replace(asked, dense_ms=7.0), judged)
    assert plain.steps is None and found.steps is not None and found.answers == plain.answers
    for answer, step in zip((found.now, found.answers[0]), found.steps, strict=True):
        assert step.ms == pytest.approx([ms + 7.0 for ms in answer.ms], rel=1e-9)
        for end in (0, 1):
            assert sum(of[end] for of in step.stages.values()) == pytest.approx(step.ms[end], rel=1e-9)
        assert step.stages["dense"] == pytest.approx((7.0, 7.0))
        assert step.halved_ms[0] > step.ms[0] - step.stages["waiting"][0], "there is no exchange to hide"
        moving = 2.0 if moves and answer.candidate.placer != "trivial" else 0.0
        assert step.stages["rebalance"] == (moving, moving)
    low, high = found.share((1.0, 1.0))
    assert (high, low) == pytest.approx([1.0 / ms for ms in found.steps[0].ms])


def test_halves_hide_exchanges() -> None:
    """Even loads: four times 30 us of each layer, as much as both halves compute meanwhile."""
    curve = Curve(30.0, 0.0, 1.0)
    steps = [AllToAllTime("gpu", "k", name, 4, 1, curve, curve) for name in ("dispatch", "combine")]
    asked = question(layer=LayerTime(steps[0], EXPERTS, steps[1]), dense_ms=0.18)
    loads = torch.full((1, 3, 4, 16), 8, dtype=torch.int32)
    found = advise(asked, Judged(np.full((3, 16), 100), loads, drawn=False))
    assert found.steps is not None
    (whole, _), (halved, _) = found.steps[0].ms, found.steps[0].halved_ms
    rows = 4 * 64 * (1 - (1 - 8 / 64) ** 4) / 2
    half = 10 + ((4 * 2) ** 3 + 64**3) ** (1 / 3) + 0.1 * rows  # of a layer's experts
    exchanges_alone = 3e-3 * 4 * 30
    assert halved >= max(exchanges_alone, 3e-3 * (60 + 2 * half)) and whole > 0.18 + 3e-3 * (60 + half)
    assert halved < 0.18 + 3e-3 * (2 * half + 4 * 30)


def test_a_gather_is_a_stage_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [NOW, Candidate("eplb", 4, "exact")]
    monkeypatch.setattr("isoload.analysis.advice.grid", lambda most, gathers, nodes: two)
    asked = question(layer=LayerTime(None, replace(EXPERTS, c_us=1000.0), None), dense_ms=1.0)
    found = advise(asked, judge_by(skewed(), SMALL, 4, 64))
    assert found.steps is not None and found.answers[0].candidate.split == "exact"
    stages = found.steps[1].stages
    assert stages["gather"] == pytest.approx((3 * 10e-3, 3 * 25e-3))
    least, most = np.array(PLAN_US["exact"]) - GATHER_US
    assert stages["plan"] == pytest.approx((3e-3 * least, 3e-3 * most))


def test_tokens_of_a_trace_are_judged_as_recorded() -> None:
    ids = np.random.default_rng(0).integers(0, 16, (4 * 4 * 8, 1, 1)).astype(np.int32)
    judged = judge_by(Trace("tokens", 16, topk_ids=ids), replace(SMALL, top_k=1), 4, 8)
    assert not judged.drawn and judged.loads.shape == (2, 1, 4, 16)
    assert judged.calibration.sum() == judged.loads.sum() == 64
    assert judged.loads[0, 0, 1].tolist() == np.bincount(ids[72:80].ravel(), minlength=16).tolist()
    assert len(judge_by(skewed(), SMALL, 4, 8).loads) == 8
    assert judge_by(Trace("counts", 16, 0, np.ones((3, 1, 16), dtype=np.int64)), SMALL, 4, 8).drawn


@pytest.mark.parametrize(("unseen", "times"), [(1, [8]), (2, [4, 4]), (3, [3, 3, 2]), (8, [1] * 8)])
def test_each_unseen_batch_is_drawn_from_as_often(unseen: int, times: list[int]) -> None:
    counts = 100 * np.eye(2 * unseen, 16, dtype=np.int64)[:, None]  # batch i: all copies on expert i
    found = judge_by(Trace("counts", 16, 0, counts), SMALL, 4, 8).loads.sum((1, 2)).argmax(-1)
    assert np.bincount(found, minlength=2 * unseen)[unseen:].tolist() == times


def test_a_guess_has_the_shares_that_are_asked_for() -> None:
    model = replace(SMALL, experts=64)
    even, steep = guessed_trace("zipf:0", 0.0, model), guessed_trace("zipf:2", 0.0, model)
    assert even.counts is not None and np.unique(even.counts).tolist() == [15625]
    assert steep.counts is not None and steep.counts.max() == 500_000  # a token has two experts
    assert (steep.counts == steep.counts[:1]).all()
    moved = guessed_trace("zipf:2", 0.5, model).counts
    assert moved is not None and (moved != moved[:1]).any()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_flags_name_the_slots_and_switch_isoload_on_for_its_own_splits_alone(engine: str) -> None:
    for candidate in grid(16):
        said = " ".join(flags(engine, candidate, isoload.Topology(8), 2, None))
        assert (f"ISOLOAD_{engine.upper()}=1" in said) == candidate.ours
        assert (str(8 * candidate.more) in said) or not candidate.more
        assert ("--enable-eplb" in said) == (candidate.placer == "eplb")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_flags_name_the_ranks_and_the_all_to_all_that_were_modelled(phase: str) -> None:
    """Without these ISOLOAD_LOADS=own would have no effect: all ranks would hold the same tokens."""
    backend = {"prefill": "deepep_high_throughput", "decode": "deepep_low_latency"}[phase]
    wanted = {
        "sglang": ("--tp 8 --ep-size 8", "--moe-a2a-backend deepep"),
        "vllm": ("--data-parallel-size 8", f"--all2all-backend {backend}"),
    }
    for engine, options in wanted.items():
        for candidate in grid(4)[1:]:
            said = " ".join(flags(engine, candidate, isoload.Topology(8), 3, None, phase))
            assert all(option in said for option in options) and "--nnodes" not in said
            assert "--nnodes 2" in " ".join(flags(engine, candidate, isoload.Topology(8, 4), 3, None, phase))


def test_sglang_starts_from_a_file_that_place_makes() -> None:
    candidate = grid(4)[3]
    first, start = flags("sglang", candidate, isoload.Topology(8, 4), 3, "'my trace.npz'")
    assert first == (
        "isoload place 'my trace.npz' -o placement.json --format sglang --ranks 8 --ranks-per-node 4 "
        f"--slots-per-rank 3 --placer {candidate.placer}"
    )
    assert start.endswith(" --init-expert-location placement.json")
    assert not any(
        "placement.json" in line for line in flags("vllm", candidate, isoload.Topology(8), 3, "t.npz")
    )


def test_a_start_is_one_line_whose_placeholders_are_explained() -> None:
    candidate, topology = Candidate("eplb", 2, "own"), isoload.Topology(16, 8)
    place, start = flags("sglang", candidate, topology, 3, "TRACE")
    assert start.startswith(
        "ISOLOAD_SGLANG=1 ISOLOAD_LOADS=own python -m sglang.launch_server --model-path MODEL --tp 16 --ep-size 16 "
        "--nnodes 2 --node-rank NODE_RANK --dist-init-addr HEAD_NODE_IP:PORT --moe-a2a-backend deepep "
    )
    assert placeholders([place, start]) == (
        "Replace the words in capitals: TRACE is the files of the trace, MODEL is the model's folder or its name on "
        "Hugging Face, NODE_RANK is 0 on the first node, 1 on the second, HEAD_NODE_IP is the address of the first "
        "node, PORT is a free port of the first node. Run the last command on every node."
    )
    (alone,) = flags("vllm", Candidate("eplb", 0, "none"), isoload.Topology(8), 2, "t.npz")
    assert alone.startswith("vllm serve MODEL --data-parallel-size 8 ")
    assert placeholders([alone]) == (
        "Replace the words in capitals: MODEL is the model's folder or its name on Hugging Face."
    )
    assert placeholders(flags("vllm", candidate, topology, 3, None)).endswith(
        "Run the last command on every node, with --headless on every node but the first."
    )


def test_like_for_like_compares_with_as_many_slots() -> None:
    found = advise(question(), judge_by(skewed(), SMALL, 4, 64))
    ms = {"own": (4.0, 4.5), "dynamic": (5.0, 5.5), "static": (7.0, 8.0)}
    more = {"own": 4, "dynamic": 1, "static": 4}
    made = [replace(found.now, candidate=Candidate("eplb", more[split], split), ms=ms[split]) for split in ms]
    free, equal = (
        replace(found, question=question(like_for_like=same), answers=(*made, found.now))
        for same in (False, True)
    )
    assert (free.theirs, equal.theirs) == (made[1], made[2]) == (equal.rival(False), free.rival(True))
    assert (free.gain_ms, equal.gain_ms) == ((1.0, 1.0), (3.0, 3.5)) and free.gain_over(made[2]) == (3.0, 3.5)
    assert verdict_lines(free, {"prefill": free})[2].startswith(
        "Both sides choose their number of slots. With +4 slots on both sides isoload saves 3.0 to 3.5 ms a step"
    )
    assert verdict_lines(equal, {"prefill": equal})[2].startswith(
        "Both sides have +4 slots. Where both choose their number of slots isoload saves 1.0 ms a step"
    )
    same = replace(free, answers=(made[0], made[2], found.now))
    assert verdict_lines(same, {"prefill": same})[2] == (
        "Both sides choose their number of slots, and both choose +4."
    )
    assert advise(question(memory=1.0, like_for_like=True), judge_by(skewed(), SMALL, 4, 64)).gain_ms == (
        0,
        0,
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_constants_or_says_what_there_are(name: str) -> None:
    for engine in ("sglang", "vllm"):
        for phase in ("prefill", "decode"):
            try:
                time, notes = layer_time("h200", engine, phase, MODELS[name], isoload.Topology(8))
            except ValueError as error:
                assert "model must have experts that" in str(error)
                continue
            assert time.experts.hidden == MODELS[name].hidden and time.dispatch is not None
            measured = (MODELS[name].hidden, MODELS[name].top_k) in ((7168, 8), (4096, 8), (2048, 8))
            assert bool(notes) != measured or engine == "vllm"
    assert layer_time("h200", "sglang", "decode", MODELS["deepseek-v3"], isoload.Topology(8))[
        0
    ].experts.kernel == ("sglang_deepep_decode")


def test_a_refusal_lists_what_would_be_accepted() -> None:
    """For this engine, phase and dtype: the list had shapes that another engine was measured with."""
    found = set()
    for gpu, engine, phase in product(("h100", "h200", "b200"), ("sglang", "vllm"), ("prefill", "decode")):
        for dtype in WEIGHT_BYTES:
            model = replace(MODELS["qwen3-30b"], hidden=6144, intermediate=2560, dtype=dtype)
            try:
                layer_time(gpu, engine, phase, model, isoload.Topology(8))
                continue
            except ValueError as error:
                said = re.fullmatch(
                    r"model must have experts that \w+ was measured with on \w+ for \w+ in \w+ \((.*)\), got "
                    rf"qwen3-30b, 6144 x 2560 {dtype}(?:; 6144 x 2560 was measured in (.*): --dtype \w+)?"
                    r"\. isoload measure times the kernels of your GPUs, and --times takes its file in place of --gpu",
                    str(error),
                )
            assert said is not None
            shapes = re.findall(r"(\d+) x (\d+)", said[1])
            assert shapes or said[1] == "none"
            others = [replace(model, hidden=int(hidden), intermediate=int(inner)) for hidden, inner in shapes]
            others += [replace(model, dtype=other) for other in (said[2] or "").split(", ") if other]
            assert model not in others
            for other in others:
                layer_time(gpu, engine, phase, other, isoload.Topology(8))
            found |= {(engine, bool(shapes), said[2] is not None)}
    assert ("sglang", True, True) in found and len(found) > 2


def test_a_model_is_found_as_people_write_it() -> None:
    for given in ("deepseek-v3", "DeepSeek-V3", "deepseek-ai/DeepSeek-V3"):
        assert find_model(given) == MODELS["deepseek-v3"]


def test_a_model_is_read_from_its_configuration(tmp_path) -> None:
    config = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    config |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    path = tmp_path / "qwen3-30b.json"
    path.write_text(json.dumps(config))
    assert find_model(str(path)) == MODELS["qwen3-30b"]
    latent = {**config, "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    latent |= {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    latent |= {"quantization_config": {"quant_method": "fp8"}, "model_type": "deepseek_v3"}
    path.write_text(json.dumps(latent))
    assert find_model(str(path)) == replace(MODELS["deepseek-v3"], name="qwen3-30b")
    assert find_model("gpt-oss-20b", "bfloat16").expert_bytes == 3 * 2880 * 2880 * 2
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert find_model(str(path), "int4_wo").dtype == "int4_wo"
    with pytest.raises(ValueError, match="dtype must be given for .*, whose quant_method is 'gptq'"):
        find_model(str(path))
    path.write_text(json.dumps({**config, "num_experts_per_tok": "8"}))
    with pytest.raises(ValueError, match=r"json: num_experts_per_tok must be a whole number, got '8'"):
        find_model(str(path))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: find_model("gpt-5"), "model must be one of deepseek-v3, .* or a config.json, got 'gpt-5'"),
        (lambda: find_model("kimi-k2", "int3"), "dtype must be one of float32, .* got 'int3'"),
        (lambda: question(step_ms=0.0), "step_ms must be above 0, got 0"),
        (lambda: question(dense_ms=0.0), "dense_ms must be above 0, and in place of step_ms, got 0 and None"),
        (
            lambda: question(dense_ms=9.0, step_ms=40.0),
            "dense_ms must be above 0, and in place of step_ms, got 9 and 40",
        ),
        (lambda: question(tokens=0), "tokens_per_rank must be at least 1, got 0"),
        (
            lambda: question(rebalance_s=1.0),
            "rebalance_seconds must be at least 0 and come with every, got 1 and 0",
        ),
        (
            lambda: judge_by(skewed(), replace(SMALL, layers=2), 4, 64),
            "model must have the trace's 3 layers, small has 2",
        ),
        (lambda: judge_by(skewed(1), SMALL, 4, 64), "trace must have at least 2 batches, .* skewed has 1"),
        (
            lambda: judge_by(skewed(), replace(SMALL, top_k=3), 4, 64),
            "model must have the trace's 16 experts and top-2, small has 16 and top-3",
        ),
        (
            lambda: guessed_trace("pareto:1", 0, SMALL),
            "skew must be zipf:POWER, a power of 0..10, got 'pareto:1'",
        ),
        (lambda: guessed_trace("zipf:x", 0, SMALL), "skew must be zipf:POWER"),
        (lambda: guessed_trace("zipf:1", 2, SMALL), "drift must be in 0..1, got 2"),
        (
            lambda: judge_by(skewed(), MODELS["qwen3-30b"], 4, 64),
            "model must have the trace's 16 experts and top-2, qwen3-30b has 128 and top-8",
        ),
        (lambda: layer_time("v100", "vllm", "decode", SMALL, TOPOLOGY), "gpu must be one of .* got 'v100'"),
        (
            lambda: layer_time("h200", "tgi", "decode", SMALL, TOPOLOGY),
            "engine must be one of sglang, vllm, got 'tgi'",
        ),
        (
            lambda: layer_time("h200", "vllm", "train", SMALL, TOPOLOGY),
            "phase must be one of prefill, decode, got",
        ),
        (
            lambda: layer_time("h200", "vllm", "decode", SMALL, TOPOLOGY),
            "model must have experts that vllm",
        ),
        (
            lambda: layer_time("h200", "vllm", "decode", MODELS["qwen3-30b"], TOPOLOGY, "magic"),
            "kernel must be one of vllm_.* got 'magic'",
        ),
    ],
)
def test_refuses(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
