"""Faults that test_mutants.py seeds: what one is, and those of the planners that fill spare slots ahead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file` and becomes `new`; then its test_<tests>.py must fail ("teams": its program).

    Faults that the file's own order would find late name the test that finds them.
    """

    file: str
    old: str
    new: str
    tests: str


OF_FILLS = {
    "a local expert taken by rank order": Mutant(
        "csrc/algorithms/plan_replication.h", "fill_.load(r, e) > most &&", "most == 0 &&", "plan_replication"
    ),
    "a taker passes the mean": Mutant(
        "csrc/algorithms/plan_replication.h", "+ own <= mean", "<= mean", "plan_replication"
    ),
    "the repaired plan stalls": Mutant(
        "csrc/algorithms/plan_replication.h",
        "      if (problem_.printed) return false;\n    }\n    return",
        "      return false;\n    }\n    return",
        "plan_replication",
    ),
    "an expert counts in full on every replica": Mutant(
        "csrc/algorithms/top_up.h", "<< kTopUpFraction) / n", "<< kTopUpFraction)", "top_up"
    ),
    "a rank gives more than its excess": Mutant(
        "csrc/algorithms/shard_tokens.h", "!in_.printed && copies", "false && copies", "shard_tokens"
    ),
    "copies sharded before they are added up": Mutant(
        "csrc/algorithms/shard_tokens.h",
        "ws_.load[r] += quota_[p];\n    });\n    team_.sync();",
        "ws_.load[r] += quota_[p];\n    });",
        "teams",
    ),
    "a fill counted before it is made": Mutant(
        "csrc/algorithms/spare_fill.h",
        "ws.exports[r] = 0; });\n    team_.sync();",
        "ws.exports[r] = 0; });",
        "teams",
    ),
}
