"""Faults that test_mutants.py seeds: what one is, those of the planners that fill spare slots ahead, and those of the
offline placers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file` and becomes `new`; then its test_<tests>.py must fail ("teams": its program).

    Faults that the file's own order would find late name the test that finds them. Of csrc the sources of the op that
    the tests are about are compiled again; `op` names it where the tests' file has another name.
    """

    file: str
    old: str
    new: str
    tests: str
    op: str = ""


OF_FILLS = {
    "an expert counts in full on every replica": Mutant(
        "csrc/algorithms/top_up.h", "<< kTopUpFraction, n)", "<< kTopUpFraction, 1)", "top_up"
    ),
    "a fill counted before it is made": Mutant(
        "csrc/algorithms/spare_fill.h",
        "{ exports[r] = 0; });\n  team.sync();",
        "{ exports[r] = 0; });",
        "teams",
    ),
}

OF_OWN = {
    "sources that rotate alike": Mutant(
        "csrc/algorithms/plan_own.h",
        "uint32_t(source) * 0xc13fa9a9u",
        "0",
        "plan_own::test_rotation_keeps_sources_from_rounding_alike",
    ),
    "an odd copy to either": Mutant(
        "csrc/algorithms/plan_own.h",
        "((gap & 1) && part_[p.rank1] > part_[p.rank0])",
        "(gap & 1)",
        "plan_own::test_peak_over_all_sources_is_that_of_the_optimum",
    ),
    "a block in which a replica ends is only looked up": Mutant(
        "csrc/cpu/counted_deal.h",
        "mark[split_ + i] >= upto_[i]",
        "mark[split_ + i] > upto_[i] + 1",
        "balance_own::test_replicas_that_end_in_any_block",
    ),
    "a replica without a share takes copies": Mutant(
        "csrc/cpu/counted_deal.h",
        "while (j < end && share_[t_.slots[j]] == 0) ++j;\n",
        "",
        "balance_own::test_equals_three_ops",
    ),
    "loads of other ranks left as they were": Mutant(
        "csrc/cpu/balance_same.h",
        "  std::fill(loads + in.E, loads + int64_t(in.R) * in.E, 0);\n",
        "  loads[in.R * in.E - 1] += in.R > 1;\n",
        "balance_same::test_equals_three_ops_and_the_reference",
    ),
    "an offset of all that is sent": Mutant(
        "csrc/algorithms/plan_own.h",
        "(base >> kOffsetBits)",
        "base",
        "plan_own::test_an_offset_counts_as_copies_that_are_there",
    ),
}

OF_PLACERS = {
    "ties of ranks flipped": Mutant(
        "csrc/placers/eplb.h", "weight_[r] < weight_[best]", "weight_[r] <= weight_[best]", "placers"
    ),
    "lanes added up in order": Mutant(
        "csrc/placers/layout.h",
        "return (lane[0] + lane[1]) + (lane[2] + lane[3]);",
        "return ((lane[0] + lane[1]) + lane[2]) + lane[3];",
        "place_builds::test_numpy_finds_the_same_objectives",
    ),
    "a home leaves its node": Mutant(
        "csrc/placers/exchanges.h",
        "return home < 0 || layout.problem->node[i] != home",
        "return true || layout.problem->node[i] != home",
        "scenario_pinned::test_experts_lie_in_order_and_replicas_in_the_room_left",
    ),
    "the last copy of an expert replaced": Mutant(
        "csrc/placers/repoints.h",
        "if (layout.copies[x] < 2) return false;",
        "if (layout.copies[x] < 1) return false;",
        "scenario::test_compiled_loops_and_numpy_give_the_same_slots",
    ),
    "circles of three left open": Mutant(
        "csrc/placers/level.h",
        "if (layout.copies[e] > 2)",
        "if (layout.copies[e] > 3)",
        "scenario::test_compiled_loops_and_numpy_give_the_same_slots",
    ),
    "a move too many": Mutant(
        "csrc/placers/search.h",
        "used_ + cost > limits_.moves) return;",
        "used_ + cost > limits_.moves + 1) return;",
        "scenario::test_with_before_at_most_so_many_slots_change_and_never_for_the_worse",
    ),
    "room left where homes leave no rank": Mutant(
        "csrc/placers/start.h", "  fill_room(layout, filled, risk);\n", "", "scenario_pinned"
    ),
    "the last start kept": Mutant(
        "csrc/placers/scenario.h",
        "if (least >= 0 && found >= least) return;",
        "",
        "scenario::test_compiled_loops_and_numpy_give_the_same_slots",
    ),
    "a layer left out": Mutant(
        "csrc/placers/loops.cpp",
        "(layer = next++) < layers;",
        "(layer = next++) < layers - 1;",
        "place_builds::test_numpy_finds_the_same_objectives",
    ),
}
