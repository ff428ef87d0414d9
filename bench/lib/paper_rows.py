"""The tables of docs/papers.md: bench/paper_claims.md, with the figures of results/papers.jsonl in its braces."""

from __future__ import annotations

import re
from typing import NamedTuple

from lib.paper_jobs import JOBS
from lib.result_tables import TABLES, Row, read
from lib.table import Table, cell
from lib.trace_files import BENCH, IN_CLONE


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


TABLES |= {f"papers_{paper}": lambda paper=paper: build(paper) for paper in read_claims()}
