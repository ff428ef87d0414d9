"""bench/tables.py: the documents' tables are those of the results files; markers that do not fit are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GENERATED = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.S)


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import tables

    return tables


def test_every_table_of_the_documents_is_current(tables):
    done = subprocess.run(
        [sys.executable, "bench/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    shown = [name for page in tables.pages() for name, _ in GENERATED.findall(page.read_text())]
    assert sorted({*shown}) == sorted(tables.TABLES)  # replay is in README and on the first page


def test_measured_figures_stand_in_generated_tables_only(tables):
    """A number with decimals in a table by hand would drift from its results file; a paper's sections do not."""
    for page in (page for page in tables.pages() if page.name != "support.md"):  # of versions
        text = re.sub(r"^```.*?^```", "", GENERATED.sub("", page.read_text()), flags=re.S | re.M)
        by_hand = [line for line in text.splitlines() if line.startswith("|")]
        assert [
            line for line in by_hand if re.search(r"\d\.\d", re.sub(r"`.*?`|Section [\d.]+", "", line))
        ] == [], page.name


def copy_of_the_documents(folder):
    for page in (
        "README.md",
        "docs/results-policies.md",
        "docs/own-counts.md",
    ):
        (folder / page).parent.mkdir(exist_ok=True)
        (folder / page).write_text((ROOT / page).read_text())


def run(tables, monkeypatch, folder, *options):
    monkeypatch.setattr(sys, "argv", ["tables.py", *options])
    return tables.main(folder)


def test_a_changed_figure_is_found_and_written_again(tables, monkeypatch, tmp_path, capsys):
    copy_of_the_documents(tmp_path)
    page = tmp_path / "docs" / "results-policies.md"
    kept = page.read_text()
    page.write_text(re.sub(r"\| 16\+32 \| [\d.]+ \|", "| 16+32 | 9.87 |", kept, count=1))
    assert page.read_text() != kept
    assert run(tables, monkeypatch, tmp_path, "--check") == 1
    printed = capsys.readouterr().out
    assert "docs/results-policies.md: 3 tables, 1 not current\n  planning\n" in printed
    assert page.read_text() != kept, "--check writes nothing"
    assert run(tables, monkeypatch, tmp_path) == 0
    assert page.read_text() == kept
    assert run(tables, monkeypatch, tmp_path, "--check") == 0


def test_a_changed_result_makes_its_table_old(tables, monkeypatch, tmp_path):
    from lib import result_tables

    rows = result_tables.read("bench_plan")
    rows[0]["plan_us"]["batch"] = 99.0
    (tmp_path / "bench_plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    text = "<!-- table: planning -->\n<!-- end -->\n"
    new, names, changed = tables.renew(text, "page.md")
    assert names == changed == ["planning"] and "| 16+32 | 99.00 |" in new
    assert tables.renew(new, "page.md") == (new, ["planning"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a\n<!-- table: plan -->\n<!-- end -->\n",
            r"page.md:2: no table 'plan'; there are replay, .*, borrow",
        ),
        ("<!-- table: planning -->\n| a |\n", r"page.md:1: table planning has no <!-- end -->"),
        (
            "<!-- table: planning -->\n<!-- table: sampling -->\n<!-- end -->",
            r"page.md:1: table planning has no <!-- end -->",
        ),
        ("a\n\n<!-- end -->\n", r"page.md:3: <!-- end --> without <!-- table: NAME -->"),
    ],
)
def test_markers_that_do_not_fit_are_refused(tables, text, message):
    with pytest.raises(ValueError, match=message):
        tables.renew(text, "page.md")


def test_rows_as_wide_as_their_head(tables, monkeypatch):
    monkeypatch.setitem(tables.TABLES, "sampling", lambda: ("a | b", [["1", "2"], ["3"]]))
    with pytest.raises(ValueError, match=r"table sampling has 2 columns, got a row of 1: \['3'\]"):
        tables.markdown("sampling")
