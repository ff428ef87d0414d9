"""The tables of the papers: bench/paper_claims.md, with the figures of results/papers.jsonl in its braces.

bench/paper_tables.md has all rows, docs/papers.md those in SHOWN, without their commands.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lib.paper_jobs import JOBS
from lib.result_tables import TABLES, Row, read
from lib.table import Table, cell
from lib.trace_files import BENCH, IN_CLONE

# Rows of docs/papers.md, by how they begin: what a claim or a decision rests on, contradictions and losses included.
SHOWN = {
    "craft": ("Abstract", "Figure 4: hottest", "Section 5.2", "Figure 9, balance: DeepSeek", "Section 5.3"),
    "blog": (
        *("No EPLB: Waterfill", "EPLB, 16 redundant experts: Waterfill"),
        *("EPLB, no redundant experts: LPLB", "EPLB, 32 redundant experts: LPLB", "The same matrix"),
    ),
    "grace": ("Abstract", "Section 4.2", "Figure 5, OLMoE", "TAR, rows between nodes", "TAR, idle share"),
    "llep": ("Section 5.1", "The same settings", "Figures 1a and 4: speed-up", "Figure 1c", "Figure 3a"),
    "libra": ("Abstract", "Figure 9: imbalance", "Table 1: right predictions of Libra", "Section 3.1"),
}


class Claim(NamedTuple):
    what: str
    theirs: str
    here: str  # a format of the jobs' figures, "-": nothing without what `how` needs
    why: str
    how: str  # jobs, a command in backticks, or `needs` and what

    @property
    def jobs(self) -> list[str]:
        names = self.how.split()
        return names if set(names) <= set(JOBS) else []


def read_claims() -> dict[str, list[Claim]]:
    """Claims by paper."""
    sections = re.split(r"^## (.*)\n", (BENCH / "paper_claims.md").read_text(), flags=re.M)[1:]
    papers = dict(zip(sections[::2], sections[1::2], strict=True))
    return {
        paper: [Claim(*line[2:-2].split(" | ")) for line in re.findall(r"^\| .* \|$", text, re.M)[1:]]
        for paper, text in papers.items()
    }


def command(claim: Claim) -> str:
    """The last cell: the jobs' command with the traces that no clone has, or `how` as it stands."""
    if not claim.jobs:
        return claim.how
    absent = sorted({trace for name in claim.jobs for trace in JOBS[name].traces} - set(IN_CLONE))
    times = " --times" * any(JOBS[name].timed for name in claim.jobs)
    text = f"`python bench/papers.py --only {' '.join(claim.jobs)}{times}`"
    return text + (f", needs {', '.join(absent)} of `python bench/fetch_traces.py`" if absent else "")


def shown(claim: Claim, figures: dict[str, Row]) -> list[str]:
    """The cells of a claim; without the jobs' figures those that have braces are empty."""
    known = claim.jobs and all(name in figures for name in claim.jobs)
    texts = ["" if "{" in text and not known else cell(text, figures) for text in (claim.here, claim.why)]
    return [
        claim.what,
        claim.theirs,
        "" if claim.here == "-" else texts[0],
        texts[1] or "not run yet",
        command(claim),
    ]


def build(paper: str) -> Table:
    figures = {row["job"]: row["figures"] for row in read("papers")}
    rows = [shown(claim, figures) for claim in read_claims()[paper]]
    return "in the paper | paper | here | why they differ | command", rows


def build_short(paper: str) -> Table:
    head, rows = build(paper)
    return head.removesuffix(" | command"), [row[:-1] for row in rows if row[0].startswith(SHOWN[paper])]


TABLES |= {f"papers_{paper}": lambda paper=paper: build(paper) for paper in read_claims()}
TABLES |= {f"papers_{paper}_short": lambda paper=paper: build_short(paper) for paper in SHOWN}
