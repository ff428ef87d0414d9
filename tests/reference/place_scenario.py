"""The placer ``scenario`` on NumPy arrays: the same slots as csrc/placers/scenario.h."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from reference.place_layout import Floats, Ints, Layout, Problem, lane_sum
from reference.place_search import Limits, Search

TRIES = 64  # numbers of copies that are tried where slots are few


def place_scenario(
    loads: Floats,
    weight: Floats,
    tick: Floats,
    node: Ints,
    home: Ints,
    capacity: Ints,
    risks: Floats,
    rival: Ints | None,
    before: Ints | None,
    width: int,
    exact: bool,
    few_slots: bool,
    steps: int,
    moves: int,
    threads: int = 1,
) -> tuple[Ints, Floats]:
    """Slots [L, R, width] int32 and the objective of each layer [L]; placers/compiled.py has the arguments.

    Raises:
        ValueError: slots before that leave experts without room; more moves needed than there are.
    """
    slots, objective = [], []
    for layer in range(len(loads)):
        problem = Problem(loads[layer], weight, tick, node, home[layer], capacity[layer], width, exact)
        old = None if before is None else before[layer].ravel()
        other = None if rival is None else rival[layer].ravel()
        found, value = plan_layer(problem, risks[:, layer], other, Limits(steps, moves, few_slots, old))
        slots.append(found.reshape(-1, width))
        objective.append(value)
    return np.array(slots, dtype=np.int32), np.array(objective)


def plan_layer(problem: Problem, risks: Floats, rival: Ints | None, limits: Limits) -> tuple[Any, float]:
    """One layer: a search from every start, and the best of all."""
    even = replace(problem, exact=False)
    if limits.before is not None:
        layout = take_over(Layout(problem), limits.before)
        value = Search(layout, limits).run()
        return layout.slot, value
    ends = []
    for risk in risks:
        layout = start_by_risk(even, risk, limits.few_slots and limits.steps > 0)
        value = Search(layout, limits).run()
        if problem.exact:
            layout.problem = problem
            value = Search(layout, limits).run()
        ends.append((layout.slot, value))
    if rival is not None:
        layout = take_over(Layout(problem), rival)
        least = min((value for _, value in ends), default=np.inf)
        if Search(layout, replace(limits, steps=0)).run() < least:
            value = Search(layout, limits).run()
            ends.append((layout.slot, value))
    return min(ends, key=lambda end: end[1])  # the first of equals


def start_by_risk(problem: Problem, risk: Floats, few_slots: bool) -> Layout:
    """A layout by risk; with few slots on a rank the best of several with fewer copies of some experts."""
    ranks, tries = (problem.capacity > 0).sum(), TRIES if few_slots else 0
    best = Layout(problem)
    lay_out(best, choose_copies(problem, risk, np.full(len(risk), ranks)), risk)
    better = True
    while better and tries > 0:
        better, copies = False, best.copies
        fewer = [(e, n) for e in np.argsort(-copies, kind="stable") for n in range(copies[e] - 1, 0, -1)]
        for e, n in fewer[:tries]:
            most = np.where(copies > 1, copies, ranks)
            most[e] = n
            layout = Layout(problem)
            lay_out(layout, choose_copies(problem, risk, most), risk)
            if layout.objective() < best.objective():
                best, better = layout, True
        tries -= len(fewer[:tries])
    return best


def choose_copies(problem: Problem, risk: Floats, most: Any) -> Any:
    """[E] copies: one each, then one more for the largest risk per copy, at most ``most``, until the room is full."""
    copies, part = np.ones(len(risk), int), np.where(most > 1, risk, -1)
    for _ in range(int(problem.capacity.sum()) - len(risk)):
        e = int(part.argmax())
        if part[e] < 0:
            break
        copies[e] += 1
        part[e] = risk[e] / copies[e] if copies[e] < most[e] else -1
    return copies


def lay_out(layout: Layout, copies: Any, risk: Floats) -> None:
    """Copies that a node must keep first, then all others; the largest risk per copy first. Where homes leave no rank
    for a further copy, other experts get its room."""
    home, filled = layout.problem.home, np.zeros(layout.ranks, int)
    order = np.argsort(-(risk / copies), kind="stable")
    for e in order[home[order] >= 0]:
        _put(layout, filled, int(e), copies[e], int(home[e]))
    for e in order:
        for _ in range(int(home[e] >= 0), copies[e]):
            _put(layout, filled, int(e), copies[e], -1)
    if (layout.copies == copies).all():
        return
    for e in np.flatnonzero(layout.copies < copies):
        layout.split_evenly(int(e))
    fill_room(layout, filled, risk)


def fill_room(layout: Layout, filled: Any, risk: Floats) -> None:
    """Gives the room that is left to further copies, the largest risk per copy first."""
    each = risk / layout.copies
    while each.max() >= 0:
        e = int(each.argmax())
        part = np.trunc(layout.problem.load[e] / (layout.copies[e] + 1))
        r = best_rank(layout, filled, e, part, -1)
        if r >= 0:
            layout.note(r * layout.problem.width + filled[r], e, 1)
            filled[r] += 1
            layout.split_evenly(e)
        each[e] = risk[e] / layout.copies[e] if r >= 0 else -1


def _put(layout: Layout, filled: Any, e: int, copies: int, node: int) -> None:
    part = np.trunc(layout.problem.load[e] / copies)
    r = best_rank(layout, filled, e, part, node)
    if r < 0 and node >= 0:
        raise ValueError("groups must leave room for their experts on their node")
    if r < 0:
        r = give_room(layout, filled, e)
    if r < 0:
        return  # never an expert's first copy: no rank holds it, and room was counted
    p = r * layout.problem.width + filled[r]
    filled[r] += 1
    layout.note(p, e, 1)
    layout.carry(p, part)


def best_rank(layout: Layout, filled: Any, e: int, part: Floats, node: int) -> int:
    """The rank with room whose load meets the part least; -1 if there is none."""
    problem = layout.problem
    closed = (filled == problem.capacity) | layout.holds[:, e]
    if node >= 0:
        closed |= problem.node != node
    meets = lane_sum((layout.rank_load + part) * part) * problem.tick
    best = int(np.where(closed, np.inf, meets).argmin())
    return -1 if closed[best] else best


def give_room(layout: Layout, filled: Any, e: int) -> Any:
    """Every rank with room holds e: a full rank gives an expert's slot to one with room; the giving rank, -1 if none
    can."""
    width, capacity = layout.problem.width, layout.problem.capacity
    for giver in np.flatnonzero(~layout.holds[:, e]).tolist():
        for p in range(giver * width, giver * width + int(filled[giver])):
            for taker in np.flatnonzero(filled < capacity).tolist():
                if not layout.may_move(layout.slot[p], giver, taker):
                    continue
                layout.exchange(p, taker * width + filled[taker])
                filled[[giver, taker]] += (-1, 1)
                last = giver * width + filled[giver]
                if p != last:
                    layout.exchange(p, last)
                return giver
    return -1


def take_over(layout: Layout, slots: Ints) -> Layout:
    """The layout with slots [R * width]; -1 = empty."""
    for p in np.flatnonzero(slots >= 0):
        layout.note(int(p), int(slots[p]), 1)
    for e in np.flatnonzero(layout.copies):
        layout.split_evenly(int(e))
    return layout
