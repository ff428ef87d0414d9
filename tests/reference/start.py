"""Where plan_exact begins: the objectives. What the peak does not demand stays as the start had it.

Each start gives all copies of the replicated experts to their replicas and adds them to ``load`` [R].
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReplicatedExpert:
    """An expert with replicas on several ranks; both maps are in ascending rank order."""

    expert: int
    total: int  # copies in this batch
    slots: dict[int, int]  # rank -> slot
    quota: dict[int, int]  # rank -> copies it computes

    def givers(self) -> list[int]:
        return [r for r, copies in self.quota.items() if copies > 0]

    def deal(self, ranks: list[int], copies: int) -> None:
        """Equal parts to these ranks; the ranks that take the remainder rotate with the expert's number."""
        for i, r in enumerate(ranks):
            self.quota[r] += copies // len(ranks) + ((i - self.expert) % len(ranks) < copies % len(ranks))


def spread(experts: list[ReplicatedExpert], load: list[int]) -> None:
    """Every expert evenly over its replicas."""
    for x in experts:
        x.deal(list(x.slots), x.total)
        add_to(load, x)


def local(
    experts: list[ReplicatedExpert], load: list[int], loads: list[list[int]], ranks_per_node: int
) -> None:
    """Copies (loads [R, E]) stay on their source rank if it has a replica; else they spread over the replicas
    of its node, else over all."""
    for x in experts:
        far = 0
        for first in range(0, len(load), ranks_per_node):
            node = range(first, first + ranks_per_node)
            here = [r for r in node if r in x.slots]
            for r in here:
                x.quota[r] += loads[r][x.expert]
            near = sum(loads[r][x.expert] for r in node if r not in x.slots)
            if here:
                x.deal(here, near)
            else:
                far += near
        x.deal(list(x.slots), far)
        add_to(load, x)


def add_to(load: list[int], x: ReplicatedExpert) -> None:
    for r, copies in x.quota.items():
        load[r] += copies
