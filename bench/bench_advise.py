"""Does advice hold on batches that it was not chosen by? The named candidate beside the best of its grid, later on.

Fairness ledger
- Traces: gpt-oss-20b decode (the shipped cut, by counts of its decode steps); with --traces GLM-5.2 (six text domains)
  and DeepSeek-V3 (workloads of SGLang's published run) as well. Each model's own shape where its kernel was measured;
  GLM-5.2 as DeepSeek-V3, whose experts it has as many of.
- Placements from every third batch, the choice by those after them, judged again on those that are left: a choice
  that only fitted its batches loses here. The three parts have the same mix of domains and workloads, as parts of an
  hour do.
- Times are modelled (isoload.times); nothing here was measured. Loss: ms of a step of the chosen candidate over the
  best one's on the last third, by the middles of their ranges.

Usage: python bench/bench_advise.py [--traces FOLDER] [--write]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoload
from isoload.analysis.advice import Question, advise
from isoload.analysis.judge import judge_by
from isoload.analysis.models import MODELS, layer_time
from isoload.traces import Trace, read_trace
from lib import table
from lib.harness import command, write_results
from lib.streams import SHIPPED
from lib.trace_files import need

SETTINGS = (("prefill", 8, 4096), ("prefill", 32, 4096), ("decode", 8, 128), ("decode", 32, 128))
GPU, NODE = "h200", 8


def parts(trace: Trace) -> tuple[Trace, Trace]:
    """Batches to place and to choose by, and the same with others in the place of the latter; see judge_by."""
    counts = trace.batch_counts()
    n = len(counts) // 3
    first, second, third = (counts[start::3][:n] for start in range(3))
    both = (np.concatenate([first, others]) for others in (second, third))
    chosen, later = (Trace(trace.name, trace.num_experts, trace.top_k, part) for part in both)
    return chosen, later


def judge(name: str, trace: Trace, model: str) -> list[dict[str, Any]]:
    rows = []
    for phase, ranks, tokens in SETTINGS:
        if ranks > trace.num_experts // 2:
            continue
        shape, topology = MODELS[model], isoload.Topology(ranks, min(NODE, ranks))
        layer, _ = layer_time(GPU, "sglang", phase, shape, topology)
        asked = Question(
            replace(shape, layers=trace.num_layers), layer, topology, tokens, gathers=shape.is_deepseek
        )
        chosen, later = (advise(asked, judge_by(part, asked.model, ranks, tokens)) for part in parts(trace))
        best, label = later.answers[0], chosen.answers[0].candidate
        then = next(answer for answer in later.answers if answer.candidate == label)
        rows.append(
            {
                "trace": name,
                "phase": phase,
                "ranks": ranks,
                "tokens": tokens,
                "chosen": label.label,
                "verdict": chosen.verdict,
                "best": best.candidate.label,
                "loss": sum(then.ms) / sum(best.ms) - 1,
                "ms": sum(then.ms) / 2,
            }
        )
    return rows


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of npz traces")
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = [("gpt-oss-20b", read_trace(SHIPPED), "gpt-oss-20b")]
    if asked.traces is not None:
        for name, file in (("GLM-5.2", "glm52_domains_a"), ("DeepSeek-V3", "dsv3_sglang_longin")):
            given.append((name, need(asked.traces, file)[0], "deepseek-v3"))
    rows = [row for name, trace, model in given for row in judge(name, trace, model)]
    table.show_rows("the candidate that was chosen, on later batches", rows)
    if asked.write:
        print(write_results("bench_advise", rows))


if __name__ == "__main__":
    main()
