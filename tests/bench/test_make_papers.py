"""`make papers`: its figures are those of bench/paper_tables.md, on jobs of seconds; what it leaves out is named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "bench" / "traces"
PAGE = ROOT / "bench" / "paper_tables.md"
QUICK = ("craft_memory", "llep_plans", "llep_shares", "libra_models")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import papers
    from lib import harness, paper_jobs, paper_rows, result_tables

    return SimpleNamespace(
        papers=papers, jobs=paper_jobs, rows=paper_rows, harness=harness, tables=result_tables
    )


@pytest.mark.parametrize("name", QUICK)
def test_figures_are_those_of_the_page(bench: SimpleNamespace, name: str) -> None:
    kept = {row["job"]: row["figures"] for row in bench.harness.read_results("papers")}
    found = bench.jobs.JOBS[name].run(FOLDER)
    assert json.loads(json.dumps(found)) == kept[name]
    page = PAGE.read_text()
    claims = [
        claim for claims in bench.rows.read_claims().values() for claim in claims if claim.jobs == [name]
    ]
    assert claims
    for claim in claims:
        assert f"| {' | '.join(bench.rows.shown(claim, {name: found}))} |" in page, claim.what


def test_every_job_has_a_row_and_every_row_its_figures(bench: SimpleNamespace) -> None:
    claims = [claim for claims in bench.rows.read_claims().values() for claim in claims]
    kept = {row["job"]: row["figures"] for row in bench.harness.read_results("papers")}
    assert {name for claim in claims for name in claim.jobs} == set(bench.jobs.JOBS)
    assert all(len(claim) == 5 for claim in claims)
    for claim in claims:
        for _, field, _, _ in Formatter().parse(claim.here + claim.why):
            if field is not None:
                assert field.split("[")[0] in claim.jobs, claim.what
                if not bench.jobs.JOBS[field.split("[")[0]].timed:
                    Formatter().get_field(field, (), kept)  # a table leaves the place of an unknown key empty
    assert set(kept) >= {name for name, job in bench.jobs.JOBS.items() if not job.timed}


def test_without_its_figures_a_row_is_empty_and_has_its_command(bench: SimpleNamespace) -> None:
    (claim, *_) = [claim for claim in bench.rows.read_claims()["craft"] if claim.jobs == ["craft_skew"]]
    cells = bench.rows.shown(claim, {})
    assert cells[2] == "" and cells[4].startswith(
        "`python bench/papers.py --only craft_skew`, needs dsv3_sglang_longin"
    )


def test_a_clone_keeps_the_figures_of_traces_that_it_lacks(
    bench: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command as a whole, on one job, beside one without its trace and one of wall time."""
    results, page = tmp_path / "results", tmp_path / "papers.md"
    shutil.copytree(ROOT / "bench" / "results", results)
    rows = [row for row in bench.harness.read_results("papers") if row["job"] != "craft_memory"]
    bench.harness.write_results("papers", rows, folder=results)
    page.write_text(PAGE.read_text())
    for module in (bench.harness, bench.tables):
        monkeypatch.setattr(module, "RESULTS", results)
    for name in ("read_results", "write_results"):
        call = getattr(bench.harness, name)
        monkeypatch.setattr(bench.papers, name, lambda *given, call=call: call(*given, folder=results))
    monkeypatch.setattr(bench.papers, "PAGES", [page])
    monkeypatch.setattr(bench.papers, "ROOT", tmp_path)
    words = ["papers", "--only", "craft_memory", "craft_skew", "craft_planning", "--traces", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--processes", "1"])
    assert bench.papers.main() == 0
    said = capsys.readouterr().out
    assert "craft_skew is left out: no dsv3_sglang_longin in --traces" in said
    assert "craft_planning is left out: no dsv3_sglang_longin" in said and "1 of 1" in said
    assert page.read_text() == PAGE.read_text(), "the rows are those of the page"
    assert (results / "papers.jsonl").read_text().count("\n") == len(rows) + 1
