"""route_shared_sampled: worked examples of the three published draws, equality with the reference, frequencies."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import reference
from isoload import ops
from isoload.ops import SharedRule

RULES = get_args(SharedRule)
MANY_RANKS = (1, 3, 12, 48, 72, 96, 1024)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(rows: list[list[int]], load: Tensor, tokens: Tensor | None, *args: Any) -> list[int]:
    """Ranks of tokens given as slots [T, K]."""
    return ops.route_shared_sampled(torch.tensor(rows), load, tokens, *args).flatten().tolist()


# Examples worked out on paper from the published text. SGLang's hash of token i on rank 0 is
# 1013904223 + 1664525 i (mod 2^32; no wrap before token 1971), so modulo a total it is an arithmetic sequence.


def test_static_on_rank_0() -> None:
    """Loads 40, 24 and K=1: T = ceil((64+64)/2) = 64, weights 24 and floor(40*10/11) = 36, total 60.

    The draw is 43 + 5 i mod 60: 43 48 53 58 3 8 13 18 23 28 33 38, and again. Below 24 is rank 0.
    """
    ranks = drawn([[0]] * 40 + [[1]] * 24, ints(40, 24), None, 1, 0, "static")
    assert ranks == ([1] * 4 + [0] * 5 + [1] * 3) * 5 + [1] * 4


def test_static_rounds_the_target_up_and_the_rest_down() -> None:
    """Loads 40, 25 and K=2: T = ceil((65+32)/2) = 49, weights 9 and floor(240/11) = 21, total 30; draw 13 + 5 i."""
    ranks = drawn([[0, 1]] * 64, ints(40, 25), None, 1, 0, "static")
    assert ranks == ([1] * 4 + [0] * 2) * 10 + [1] * 4


def test_static_hash_of_another_source() -> None:
    """Rank 1 of loads 24, 40: weights 36, 24. (i ^ 0x9E3779B9)*1664525 + 1013904223 for i = 0..3 is 1120982980,
    1119318455, 1124312030, 1122647505, modulo 60: 40 35 50 45."""
    ranks = drawn([[0]] * 24 + [[1]] * 40, ints(24, 40), None, 1, 1, "static")
    assert ranks[:4] == [1, 0, 1, 1]


@pytest.mark.parametrize(("load", "kept"), [((4, 3), False), ((11, 10), True)])
def test_static_without_weights_needs_a_clearly_lighter_rank(load: tuple[int, int], kept: bool) -> None:
    """K=24 makes sum // K = 0. 4, 3: T=4, weights 0 and floor(10/11) = 0; 33 < 40 moves. 11, 10: 110 < 110 does
    not."""
    rows = [[0] + [-1] * 23] * 64
    assert drawn(rows, ints(*load), None, 1, 0, "static") == [0 if kept else 1] * 64


def test_dynamic_among_visited_ranks() -> None:
    """Routed 200, 100, 84 and 64 tokens each: loads 264, 164, 148; target ceil((576 + 384//2)/3) = 256 < 264.

    So candidates are visited or own; weights 0, floor(920/11) = 83, floor(1080/11) = 98. With both others
    visited the draw is 1013904223 + 1664525 i mod 181: 143 11 60 109 158 26; below 83 is rank 1.
    """
    rows = [[1, 2]] * 6 + [[0, 1]] * 29 + [[0, -1]] * 28 + [[2, 2]]
    ranks = drawn(rows, ints(200, 100, 84), ints(64, 64, 64), 1, 0, "dynamic")
    assert ranks == [2, 1, 1, 2, 2, 1] + [1] * 29 + [0] * 28 + [2]


def test_dynamic_among_all_ranks() -> None:
    """Routed 130, 130, 124: loads 194, 194, 188, none above the target 256, so unvisited ranks are drawn too.

    Weights 62, floor(620/11) = 56, floor(680/11) = 61, total 179; the draw is 72 + 4 i mod 179.
    """
    ranks = drawn([[0, 0]] * 64, ints(130, 130, 124), ints(64, 64, 64), 1, 0, "dynamic")
    assert ranks == [1] * 12 + [2] * 15 + [0] * 16 + [1] * 14 + [2] * 7


def test_dynamic_opens_all_ranks_where_the_largest_load_is_the_target() -> None:
    """Routed 100, 8 and tokens 80, 64: loads 180, 72; target (252 + 108)/2 = 180. All slack is on rank 1."""
    assert drawn([[0]] * 64, ints(100, 8), ints(80, 64), 1, 0, "dynamic") == [1] * 64


@pytest.mark.parametrize(("own_tokens", "moved"), [(10, False), (12, True)])
def test_dynamic_fallback_counts_tokens_as_load(own_tokens: int, moved: bool) -> None:
    """Routed 100, 100, 0, 0, 0 and t tokens on rank 0 only: target ceil((200 + t + 200)/5) is 82 or 83.

    Loads 100 + t and 100 are above it, so ranks 0 and 1 have no weight. 100*11 < 110*10 fails, < 112*10 holds.
    """
    load, tokens = ints(100, 100, 0, 0, 0), ints(own_tokens, 0, 0, 0, 0)
    assert drawn([[1], [0]] * 32, load, tokens, 1, 0, "dynamic") == [int(moved), 0] * 32


def test_dynamic_fallback_compares_in_the_order_of_the_slots() -> None:
    """Loads 100, 90, 82 and target 51: ranks 0 to 2 have no weight. From rank 0 either rank is clearly lighter, but
    neither is clearly lighter than the other, so the first slot of a token decides."""
    load, tokens = ints(100, 90, 82, 0, 0, 0, 0, 0), ints(*[0] * 8)
    assert drawn([[1, 2], [2, 1]] * 32, load, tokens, 1, 0, "dynamic") == [1, 2] * 32


def test_blog_weighs_own_slack_11_and_other_slack_10() -> None:
    """L = 200, 100, 84 and N = 192: H = ceil(576/3) = 192, slack 0, 92, 108.

    The first words of SplitMix64's stream 0 are published: 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4,
    0x06C45D188009454F, 0xF88BB8A8724C81EC. From rank 0 the weights are 920, 1080 and the words modulo 2000 are
    1535 1700 1679 444; from rank 1 they are 1012, 1080 and modulo 2092 the words are 1667 16 111 1136.
    """
    load, tokens = ints(200, 100, 84), ints(64, 64, 64)
    assert drawn([[1, 2]] * 4, load, tokens, 1, 0, "blog") == [2, 2, 2, 1]
    assert drawn([[0, 2]] * 4, load, tokens, 1, 1, "blog") == [2, 1, 1, 2]


def test_blog_all_draws_from_every_rank() -> None:
    """Many tokens that visit rank 0 alone: rank 2, which has all the room, takes them; under blog nobody else can."""
    load, tokens = ints(90, 90, 0), ints(60, 0, 0)
    rows = [[0]] * 60
    assert drawn(rows, load, tokens, 1, 0, "blog") == [0] * 60
    assert drawn(rows, load, tokens, 1, 0, "blog_all", 7) == [2] * 60


def test_blog_fallback_takes_the_next_clearly_lighter_candidate() -> None:
    """L = 100, 90, 82, 0 and no tokens: H = 68, only rank 3 has slack. From rank 0: 90*11 < 100*10 moves to rank 1;
    82*11 < 90*10 does not hold, so rank 2, though lightest, is not taken. Alone it is: 902 < 1000."""
    load, tokens = ints(100, 90, 82, 0), ints(0, 0, 0, 0)
    rows = [[1, 2], [2, -1], [0, 0], [3, 1]]
    assert drawn(rows, load, tokens, 1, 0, "blog") == [1, 2, 0, 3]


def draw_problem(seed: int, ranks: int, tokens: int, top_k: int, dtype: torch.dtype) -> dict[str, Any]:
    """Slots, loads and tokens of one rank; some copies and whole tokens absent, ties and zero loads among them."""
    rng = np.random.default_rng([seed, ranks, tokens, top_k])
    slots_per_rank = int(rng.integers(1, 5))
    slots = rng.integers(0, ranks * slots_per_rank, (tokens, top_k))
    slots[rng.random(slots.shape) < 0.1] = -1
    slots[rng.random(tokens) < 0.1] = -1
    load = rng.integers(0, rng.choice([1, 2, 50, 2**20]), ranks)
    if rng.random() < 0.3:
        load[:] = load[0]
    if rng.random() < 0.3:
        load[int(rng.integers(ranks))] = 2**31 - 1
    arriving = rng.integers(0, rng.choice([1, 2, 100, 2**20]), ranks)
    return {
        "slots": torch.from_numpy(slots).to(dtype),
        "load": torch.from_numpy(load).to(rng.choice([torch.int32, torch.int64])),
        "tokens": torch.from_numpy(arriving).int(),
        "slots_per_rank": slots_per_rank,
        "rank": int(rng.integers(ranks)),
        "seed": int(rng.integers(2**63)),
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", MANY_RANKS)
def test_equals_reference(ranks: int, rule: SharedRule) -> None:
    sizes = [(tokens, 1 + i % 8) for i, tokens in enumerate((0, 1, 63, 64, 65, 66, 130, 200, 1000))]
    for tokens, top_k in [*sizes, (70, 0)]:
        for seed, dtype in enumerate((torch.int32, torch.int64)):
            problem = draw_problem(seed, ranks, tokens, top_k, dtype)
            mine = ops.route_shared_sampled(**problem, rule=rule)
            theirs = reference.route_shared_sampled(**problem, rule=rule)
            assert mine.dtype == theirs.dtype == torch.int32 and mine.shape == (tokens, 1)
            assert torch.equal(mine, theirs), f"T={tokens} K={top_k} seed {seed}"


@pytest.mark.parametrize("rule", RULES)
def test_absent_tokens_have_no_rank_and_change_no_other(rule: SharedRule) -> None:
    problem = draw_problem(7, 12, 200, 4, torch.int64)
    slots = problem["slots"]
    ranks = ops.route_shared_sampled(**problem, rule=rule).flatten()
    absent = (slots < 0).all(1)
    assert absent.any() and bool((ranks[absent] == -1).all()) and bool((ranks[~absent] >= 0).all())
    slots[:100] = -1
    assert torch.equal(ops.route_shared_sampled(**problem, rule=rule)[100:, 0], ranks[100:])
    slots[:] = -1
    assert bool((ops.route_shared_sampled(**problem, rule=rule) == -1).all())


@pytest.mark.parametrize("rule", ["static", "dynamic"])
def test_fewer_than_64_rows_stay_at_home(rule: SharedRule) -> None:
    """Padded rows count: SGLang compares the number of rows."""
    load, tokens = ints(900, 0, 0, 0), ints(0, 0, 0, 0)
    for padded in (0, 60):
        for size in (63, 64):
            rows = [[0, 1]] * (size - padded) + [[-1, -1]] * padded
            ranks = drawn(rows, load, tokens, 1, 0, rule)
            assert (set(ranks[: size - padded]) == {0}) == (size == 63)


@pytest.mark.parametrize("ranks", [3, 16, 72])
def test_blog_leaves_the_token_where_it_goes_anyway(ranks: int) -> None:
    for seed in range(5):
        problem = draw_problem(seed, ranks, 300, 3, torch.int64)
        chosen = ops.route_shared_sampled(**problem, rule="blog")
        visited = (problem["slots"].div(problem["slots_per_rank"], rounding_mode="floor") == chosen).any(1)
        assert bool((visited | (chosen[:, 0] == problem["rank"]) | (chosen[:, 0] < 0)).all())


@pytest.mark.parametrize("rule", RULES)
def test_int64_loads_and_strided_inputs_draw_the_same(rule: SharedRule) -> None:
    problem = draw_problem(11, 12, 150, 4, torch.int64)
    problem["load"] = problem["load"].clamp(max=1000)
    plain = ops.route_shared_sampled(**problem, rule=rule)
    problem["slots"] = problem["slots"].t().contiguous().t()
    for name in ("load", "tokens"):
        problem[name] = torch.stack([problem[name], problem[name] + 9], 1)[:, 0]
    problem["load"] = problem["load"].long()
    assert torch.equal(ops.route_shared_sampled(**problem, rule=rule), plain)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_blog_frequencies_follow_the_slack(seed: int) -> None:
    """Pearson's chi-square of 20,000 draws stays below its 99.9 % point; a rank without slack gets nothing."""
    load, tokens = ints(9000, 100, 7000, 4000, 0, 6500), ints(*[4000] * 6)
    level = -((int(load.sum()) + 24_000) // -6)
    weights = np.maximum(level - load.numpy(), 0) * np.array([10, 10, 10, 11, 10, 10])
    rows = torch.arange(6).expand(20_000, 6)
    ranks = ops.route_shared_sampled(rows, load, tokens, 1, 3, "blog", seed)
    counts, kept = np.bincount(ranks.numpy().ravel(), minlength=6), weights > 0
    assert not kept.all() and counts[~kept].sum() == 0
    expected = 20_000 * weights[kept] / weights.sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < chi2.ppf(0.999, df=kept.sum() - 1)


def test_seeds_give_different_streams_and_prefixes_agree() -> None:
    rows, load, tokens = torch.arange(4).expand(500, 4), ints(1, 2, 3, 4), ints(9, 9, 9, 9)
    first, second = (
        ops.route_shared_sampled(rows, load, tokens, 1, 0, "blog", seed) for seed in (1, 2**64 - 1)
    )
    assert 0.6 < (first != second).double().mean() < 0.9
    assert torch.equal(ops.route_shared_sampled(rows[:100], load, tokens, 1, 0, "blog", 1), first[:100])


def test_a_step_on_the_device_equals_the_reference_and_draws_anew() -> None:
    problem = {**draw_problem(3, 12, 200, 4, torch.int64), "seed": 2**64 - 3}
    drawn = []
    for step in (0, 1, -5):
        for rule in ("blog", "blog_all"):
            mine = ops.route_shared_sampled(**problem, rule=rule, step=torch.tensor(step))
            theirs = reference.route_shared_sampled(**problem, rule=rule, step=torch.tensor(step))
            assert torch.equal(mine, theirs)
            drawn.append(tuple(mine.flatten().tolist()))
    assert len(set(drawn)) == 6


def test_static_frequencies_follow_the_slack() -> None:
    """The hash is an arithmetic sequence, no random one: mostly far evener than a draw, at times aliased.

    So the median batch is held to the weights, closely, and every batch to the ranks that have any.
    """
    errors = []
    for seed in range(40):
        rng = np.random.default_rng([5, seed])
        load = rng.multinomial(32_000, rng.dirichlet(np.full(16, 20.0)))
        rows = torch.from_numpy(rng.integers(0, 16, (4000, 8)))
        own = int(rng.integers(16))
        ranks = ops.route_shared_sampled(rows, torch.from_numpy(load), None, 1, own, "static")
        slack = np.maximum(36_000 // 16 - load, 0)
        weights = np.where(np.arange(16) == own, slack, slack * 10 // 11)
        counts = np.bincount(ranks.numpy().ravel(), minlength=16)
        assert counts[weights == 0].sum() == 0, f"seed {seed}"
        errors.append(np.abs(counts / 4000 - weights / weights.sum()).max())
    assert np.median(errors) < 0.01


def test_drawn_ranks_append() -> None:
    """What it draws is what append_shared_expert takes."""
    problem = draw_problem(13, 12, 100, 4, torch.int64)
    ranks = ops.route_shared_sampled(**problem, rule="blog")
    S = problem["slots_per_rank"]
    slots, _ = ops.append_shared_expert(problem["slots"], torch.ones(100, 4), ranks, S)
    assert torch.equal(slots[:, -1:].div(S + 1, rounding_mode="floor"), ranks.long())
