"""Placer ``grace``: groups of experts that tokens choose together, replicas of the hottest (arXiv 2509.25041)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isoload.checks import check_range
from isoload.placers.base import Floats, LiveRanks, Placed, Placer, Scenarios, Slots

Groups = list[list[int]]
RATIOS = tuple(i / 10 for i in range(11))  # relative differences of group sizes that are tried
CHUNK = 8192  # number of tokens that are counted at a time


@dataclass(frozen=True)
class GracePlacer(Placer):
    """Spectral clusters of the experts' affinity over nodes and over each node's ranks, then replicas.

    The affinity of two experts is the number of tokens that choose both, which requires per-token traces and
    scikit-learn. Groups of nodes have the size of the clusters. Groups of a node's ranks differ by at most `ratio` of
    their mean (Algorithm 3). The hottest experts of the most loaded rank are replicated on the least loaded ranks
    (Equation 2). The placement is ragged. Its weights, by which policies split replicas, are the inverse of the
    predicted rank load (Equation 3). With printed an expert goes to the group with the largest score of all pairs, and
    W_max/(n+1) counts on every replica's rank; otherwise it goes where it adds most affinity, and replicas take their
    own load, W_r/(n+1).
    """

    name = "grace"
    needs_tokens = True
    uses_tokens = True
    ratio: float | None = None  # None: the knee of intra-group affinity over their deviation (Equation 1)
    replicate: bool = True
    replicas: int | None = None  # of each hot expert; 1 is fixed-count replication (section 5.3)
    everywhere: int | None = None  # number of experts with a replica on every rank (Figure 1b)
    collaborative: bool = False  # of these: the experts with the most partners instead of the most copies
    printed: bool = False  # Algorithm 3 and the predicted loads as printed
    equal: bool = False  # groups of one size, filled up to slots_per_rank with replicas

    @property
    def has_budget(self) -> bool:  # type: ignore[override]
        return not self.equal

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        check_range("ratio", self.ratio, 0, 1)
        if self.equal:
            self._check_equal(scenarios.num_experts, live_ranks)
        limit = scenarios.num_experts if self.replicate else 0
        if self.everywhere is not None and not 1 <= self.everywhere <= limit:
            raise ValueError(
                f"everywhere must be in 1..{limit} for these experts, and replicate on, got {self.everywhere}"
            )
        largest = live_ranks.num_ranks - 1 if self.replicate and self.everywhere is None else 0
        if self.replicas is not None and not 1 <= self.replicas <= largest:
            raise ValueError(
                f"replicas must be in 1..{largest} for these ranks, with replicate and without everywhere, "
                f"got {self.replicas}"
            )
        if self.collaborative and self.everywhere is None:
            raise ValueError("collaborative must come with everywhere, the number of these experts")
        if not scenarios.topk_ids:
            raise ValueError(
                "counts must be traces with per-token choices (topk_ids) for placer grace, got counts alone"
            )
        if scenarios.num_experts < live_ranks.num_ranks:
            raise ValueError(
                f"experts must be at least as many as the {live_ranks.num_ranks} ranks for placer grace, "
                f"got {scenarios.num_experts}"
            )
        experts_by_rank, predicted, replicas = [], [], []
        for layer, load in enumerate(scenarios.mean(scenarios.loads)):
            affinity = co_activation(scenarios, layer)
            groups = group_ranks(affinity, live_ranks, self.ratio, self.printed, self.equal)
            if self.equal:
                copies, weight = fill_up(groups, load, live_ranks.slots_per_rank), list[float]()
            elif self.everywhere is None:
                copies, weight = replicate(groups, load, self.replicate, self.printed, self.replicas)
            else:
                wanted = partners(affinity) if self.collaborative else load
                copies, weight = copy_everywhere(groups, load, wanted, self.everywhere)
            experts_by_rank.append([group + more for group, more in zip(groups, copies, strict=True)])
            predicted.append(weight)
            replicas.append(sum(map(len, copies)))
        slots = ragged(experts_by_rank)
        if live_ranks.slots_per_rank is not None and slots.shape[2] > live_ranks.slots_per_rank:
            raise ValueError(
                f"slots_per_rank must leave a rank {slots.shape[2]} routed slots for these groups and replicas, "
                f"got {live_ranks.slots_per_rank}"
            )
        if self.equal:
            return Placed(slots, None, {"replicas_by_layer": replicas})
        parts = np.repeat(np.array(predicted, dtype=np.float32)[:, :, None], slots.shape[2], axis=2)
        return Placed(slots, np.where(slots >= 0, parts, 0), {"replicas_by_layer": replicas})

    def _check_equal(self, num_experts: int, live_ranks: LiveRanks) -> None:
        if self != GracePlacer(equal=True):
            raise ValueError(
                "equal must come without the other options of placer grace, which make unequal groups"
            )
        if num_experts % live_ranks.num_ranks:
            raise ValueError(
                f"equal needs experts that the {live_ranks.num_ranks} ranks can share evenly, got {num_experts}"
            )


def fill_up(groups: Groups, load: Floats, slots_per_rank: int | None) -> Groups:
    """Return [R] the experts that each rank gets a replica of, as many as fill all slots; None: no replicas. Of the
    heaviest rank the hottest expert that is missing goes to the lightest rank with a free slot."""
    on_rank, parts = [list(group) for group in groups], np.ones(len(load))
    size = len(groups[0]) if slots_per_rank is None else slots_per_rank

    while any(len(experts) < size for experts in on_rank):
        loads = np.array([(load / parts)[experts].sum() for experts in on_rank])
        free = [rank for rank, experts in enumerate(on_rank) if len(experts) < size]
        taker = min(free, key=lambda rank: (loads[rank], rank))
        givers = np.argsort(-loads, kind="stable")
        missing = next(m for rank in givers if (m := sorted({*on_rank[rank]} - {*on_rank[taker]})))
        expert = max(missing, key=lambda e: (load[e] / parts[e], -e))
        on_rank[taker].append(expert)
        parts[expert] += 1
    return [experts[len(group) :] for experts, group in zip(on_rank, groups, strict=True)]


def co_activation(scenarios: Scenarios, layer: int) -> Floats:
    """Return [E, E] the tokens that choose both experts, with equal weight for each trace; the diagonal is 0."""
    experts = scenarios.num_experts
    total = np.zeros((experts, experts))
    for ids in scenarios.topk_ids:
        pairs = np.zeros_like(total)
        for first in range(0, len(ids), CHUNK):
            chosen = ids[first : first + CHUNK, layer]
            token, place = np.nonzero(chosen >= 0)
            taken = np.zeros((len(chosen), experts))
            taken[token, chosen[token, place]] = 1
            pairs += taken.T @ taken
        total += pairs / max(len(ids), 1)
    np.fill_diagonal(total, 0)
    return total


def partners(affinity: Floats) -> Floats:
    """Return [E] the number of partners of each expert: e to the entropy of its affinities. The sum of the affinities
    would only measure how often an expert is chosen."""
    part = affinity / np.maximum(affinity.sum(1, keepdims=True), 1e-300)
    entropy: Floats = -(part * np.log(np.maximum(part, 1e-300))).sum(1)
    return np.exp(entropy)


def group_ranks(
    affinity: Floats, live_ranks: LiveRanks, ratio: float | None, printed: bool = False, equal: bool = False
) -> Groups:
    """Return [R] the experts of every rank: clusters over nodes, then over the ranks of each node."""
    nodes = [np.flatnonzero(live_ranks.node == node).tolist() for node in np.unique(live_ranks.node)]
    nodes.sort(key=len, reverse=True)  # stable; the largest cluster goes to the node with the most ranks
    experts = list(range(len(affinity)))
    least = len(nodes[0])
    whole = clusters(affinity, experts, len(nodes))
    over_nodes = bounded(affinity, whole, least, len(experts), printed)
    if equal:
        size = len(experts) // live_ranks.num_ranks
        over_nodes = sized(affinity, whole, [size * len(ranks) for ranks in nodes])
    over_nodes.sort(key=len, reverse=True)
    groups: Groups = [[] for _ in range(live_ranks.num_ranks)]
    for ranks, members in zip(nodes, over_nodes, strict=True):
        if equal:
            of_ranks = sized(affinity, clusters(affinity, members, len(ranks)), [size] * len(ranks))
        else:
            of_ranks = controlled(affinity, members, len(ranks), ratio, printed)
        for rank, group in zip(ranks, of_ranks, strict=True):
            groups[rank] = sorted(group)
    return groups


def sized(affinity: Floats, clustered: Groups, sizes: list[int]) -> Groups:
    """Return groups of these sizes, the largest clusters for the largest sizes; experts move as in :func:`bounded`."""
    order = sorted(clustered, key=len, reverse=True)
    if len(set(sizes)) == 1:
        return bounded(affinity, order, sizes[0], sizes[0])
    # Nodes with fewer live ranks: experts with the least affinity leave larger clusters one by one.
    groups = [list(group) for group in order]
    while over := [g for g, size in zip(groups, sizes, strict=True) if len(g) > size]:
        _, expert, group = min(((affinity[e, g].sum(), e, g) for g in over for e in g), key=lambda w: w[:2])
        group.remove(expert)
        open_ones = [g for g, size in zip(groups, sizes, strict=True) if len(g) < size]
        max(open_ones, key=lambda g: float(affinity[expert, g].sum())).append(expert)
    return groups


def clusters(affinity: Floats, experts: list[int], number: int) -> Groups:
    if number == 1 or number == len(experts):
        return [[e] for e in experts] if number > 1 else [experts]
    try:
        from sklearn.cluster import SpectralClustering
    except ImportError as error:
        raise ImportError("placer grace needs scikit-learn: pip install 'isoload[plan]'") from error

    block = affinity[np.ix_(experts, experts)]
    joined = block + 1e-6 * (block.mean() or 1.0)  # keeps the graph connected
    labels = SpectralClustering(number, affinity="precomputed", random_state=0).fit_predict(joined)
    return [[e for e, label in zip(experts, labels, strict=True) if label == c] for c in range(number)]


def controlled(
    affinity: Floats, experts: list[int], number: int, ratio: float | None, printed: bool = False
) -> Groups:
    """Return a number of groups whose sizes differ from the mean by at most a ratio (Algorithm 3); None: the knee."""
    clustered = clusters(affinity, experts, number)
    mean = len(experts) // number
    tried = []
    for r in RATIOS if ratio is None else (ratio,):
        delta = max(1, round(mean * r))
        tried.append(bounded(affinity, clustered, max(1, mean - delta), mean + delta, printed))
    return tried[knee([deviation(groups) for groups in tried], [utilised(affinity, g) for g in tried])]


def bounded(affinity: Floats, clustered: Groups, least: int, largest: int, printed: bool = False) -> Groups:
    """Move experts until every group has least..largest of them. The experts with the least affinity leave, for the
    group to which they add most affinity. With ``printed`` they go to the group with the largest score of all its pairs
    including them, as in lines 13 and 19 of Algorithm 3."""

    def score(expert: int, group: list[int]) -> float:
        added = float(affinity[expert, group].sum())
        return float(affinity[np.ix_(group, group)].sum()) + 2 * added if printed else added

    groups, waiting = [], []
    for group in clustered:
        ranked = sorted(group, key=lambda e: (-affinity[e, group].sum(), e))
        groups.append(ranked[:largest])
        waiting += ranked[largest:]
    for expert in waiting:
        open_ones = [g for g in groups if len(g) < largest]
        max(open_ones, key=lambda g: score(expert, g)).append(expert)
    for _ in range(sum(max(0, least - len(g)) for g in groups)):
        # A group with `least` experts gives none, so no expert moves twice.
        expert = weakest(affinity, groups, least)
        max((g for g in groups if len(g) < least), key=lambda g: score(expert, g)).append(expert)
    return groups


def weakest(affinity: Floats, groups: Groups, least: int) -> int:
    """Remove and return the expert with the least affinity to its group, from groups with more than `least`."""
    givers = [g for g in groups if len(g) > least]
    _, expert, group = min(((affinity[e, g].sum(), e, g) for g in givers for e in g), key=lambda w: w[:2])
    group.remove(expert)
    return expert


def deviation(groups: Groups) -> float:
    return float(np.std([len(group) for group in groups]))


def utilised(affinity: Floats, groups: Groups) -> float:
    inside = sum(affinity[np.ix_(group, group)].sum() for group in groups)
    return float(inside / (affinity.sum() or 1.0))


def knee(deviations: list[float], utilisations: list[float]) -> int:
    """Return the first point farthest above the line from the least to the greatest deviation."""
    s, u = np.array(deviations), np.array(utilisations)
    first, last = int(s.argmin()), int(s.argmax())
    if s[first] == s[last]:
        return int(u.argmax())
    line = u[first] + (s - s[first]) / (s[last] - s[first]) * (u[last] - u[first])
    return int((u - line).argmax())


def replicate(
    groups: Groups, load: Floats, wanted: bool, printed: bool, replicas: int | None = None
) -> tuple[Groups, list[float]]:
    """Return [R] the experts that each rank gets a replica of, and each rank's weight: mean over predicted load.
    `replicas`: of each hot expert; None: Equation 2's number."""
    work = np.array([load[group].sum() for group in groups])
    copies: Groups = [[] for _ in groups]
    mean = float(work.mean())
    if not mean:
        return copies, [1.0] * len(groups)
    after = work.copy()
    if wanted and len(groups) > 1:
        heaviest = int(work.argmax())
        number = replicas or min(max(1, int(work[heaviest] / mean)), len(groups) - 1)
        ranked = sorted(groups[heaviest], key=lambda e: (-load[e], e))
        enough = np.cumsum(load[ranked]) > work[heaviest] * number / (number + 1)
        hot = ranked[: int(enough.argmax()) + 1]
        moved = float(load[hot].sum())
        part = (work[heaviest] if printed else moved) / (number + 1)
        for rank in [r for r in np.argsort(work, kind="stable") if r != heaviest][:number]:
            copies[rank] = list(hot)
            after[rank] += part
        after[heaviest] += part - moved
    return copies, [mean / max(float(w), mean * 1e-6) for w in after]


def copy_everywhere(groups: Groups, load: Floats, wanted: Floats, number: int) -> tuple[Groups, list[float]]:
    """Return the same as :func:`replicate`, with the `number` most wanted experts on every rank, split evenly."""
    chosen = sorted(range(len(load)), key=lambda e: (-wanted[e], e))[:number]
    copies = [[e for e in chosen if e not in group] for group in groups]
    alone = load.copy()
    alone[chosen] = 0
    work = np.array([alone[group].sum() for group in groups]) + load[chosen].sum() / len(groups)
    mean = float(work.mean())
    return copies, [mean / max(float(w), mean * 1e-6) if mean else 1.0 for w in work]


def ragged(groups: list[Groups]) -> Slots:
    widest = max(len(experts) for layer in groups for experts in layer)
    slots = np.full((len(groups), len(groups[0]), widest), -1, dtype=np.int32)
    for row, experts in zip(slots.reshape(-1, widest), (e for layer in groups for e in layer), strict=True):
        row[: len(experts)] = experts
    return slots
