"""route_shared_sampled: the rank of every token's shared expert, by one of the published draws."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from reference.route import random_word, stream_of

MIN_TOKENS = 64  # SGLang: fewer rows on a rank keep their shared copies at home
Rule = Literal["static", "dynamic", "blog", "blog_all"]


def route_shared_sampled(
    slots: Tensor,
    load: Tensor,
    tokens: Tensor | None,
    slots_per_rank: int,
    rank: int,
    rule: Rule,
    seed: int = 0,
    step: Tensor | None = None,
) -> Tensor:
    """[T, 1] ranks; -1 for a token without a routed copy."""
    num_ranks, num_tokens, seed = len(load), len(slots), stream_of(seed, step, rank)
    arriving = [0] * num_ranks if tokens is None else tokens.tolist()
    loads, target = _level(load.tolist(), arriving, slots.shape[1], rule)
    weights = [_weight(max(target - x, 0), r == rank, rule) for r, x in enumerate(loads)]
    any_rank = rule in ("static", "blog_all") or (rule == "dynamic" and max(loads) <= target)
    chosen = []
    for i, token in enumerate(slots.tolist()):
        visited = {p // slots_per_rank for p in token if p != -1}
        if not visited:
            chosen.append(-1)
        elif not rule.startswith("blog") and num_tokens < MIN_TOKENS:
            chosen.append(rank)
        else:
            candidates = list(range(num_ranks)) if any_rank else sorted(visited | {rank})
            word = random_word(seed, i) if rule.startswith("blog") else _hash(i, rank)
            order = candidates
            if rule == "dynamic" and not any_rank:
                order = [p // slots_per_rank for p in token if p != -1]
            chosen.append(_draw(word, candidates, weights, loads, rank, order))
            assert chosen[-1] in candidates, "a candidate is drawn"
    return torch.tensor(chosen, dtype=torch.int32).view(-1, 1)


def _level(load: list[int], tokens: list[int], top_k: int, rule: Rule) -> tuple[list[int], int]:
    """What the rule takes as each rank's load, and the mean after the shared copies, rounded up."""
    loads = [x + own for x, own in zip(load, tokens, strict=True)] if rule == "dynamic" else load
    shared = sum(tokens) if rule.startswith("blog") else sum(load) // max(top_k, 1)
    return loads, -((sum(loads) + shared) // -len(loads))


def _weight(slack: int, own: bool, rule: Rule) -> int:
    if rule.startswith("blog"):
        return slack * (11 if own else 10)
    return slack if own else slack * 10 // 11


def _hash(token: int, rank: int) -> int:
    return ((token ^ rank * 0x9E3779B9 % 2**32) * 1664525 + 1013904223) % 2**32


def _draw(
    word: int, candidates: list[int], weights: list[int], loads: list[int], own: int, order: list[int]
) -> int:
    """The candidate at ``word % total`` of the cumulative weights; if none weighs, own or a clearly lighter one, by
    comparisons in ``order``."""
    total = sum(weights[r] for r in candidates)
    if total == 0:
        best = own
        for r in order:
            best = r if loads[r] * 11 < loads[best] * 10 else best
        return best
    left = word % total
    for r in candidates:
        if left < weights[r]:
            return r
        left -= weights[r]
    raise AssertionError("the total is the sum of the weights")
