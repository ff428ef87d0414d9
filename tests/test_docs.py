"""docs/balancing.md: every policy and option is there, every command runs, every number is the one in its file."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from isoload import POLICIES
from support.documents import blocks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "balancing.md"
PAGES = sorted(PAGE.parent.glob("*.md"))
RESULTS = ROOT / "bench" / "results"
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.S | re.M))
RULES = ("static", "dynamic", "blog", "counts", "ours", "best")


def results(name):
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def table(path, first):
    """Rows of cells of the table whose heading starts with `first`; none if the document has no such table."""
    found = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", path.read_text(), re.M)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()]


def test_every_policy_has_its_section_in_order():
    assert list(SECTIONS) == list(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_section_says_what_it_must(policy):
    for heading in ("Formula", "Guarantee", "Cost", "Use it", "Source"):
        assert f"**{heading}.**" in SECTIONS[policy], heading


@pytest.mark.parametrize("policy", POLICIES)
def test_options_are_the_options(policy):
    (text,) = re.findall(r"\*\*Options\.\*\* (.*?)(?=\n\n)", SECTIONS[policy], re.S) or ["none."]
    named = re.findall(r"`(\w+)=", text)
    assert named == [field.name for field in fields(POLICIES[policy])]
    for field in fields(POLICIES[policy]):
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        assert f"`{field.name}={default}`" in text, f"default of {field.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_paths_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    quoted = re.findall(r"`([\w.-]*/[\w./-]*)`", text)
    linked = re.findall(r"\]\((?!http|#)([^)#]+)\)", text)
    assert [p for p in quoted if not (ROOT / p).exists()] == []
    assert [p for p in linked if not (PAGE.parent / p).exists()] == []
    assert page != PAGE or len(linked) >= 3, "the pictures"
    anchors = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page):
    for code in blocks(page, "python"):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_shown_replays_are_what_replay_prints():
    """Each shell block with a replay is followed by its output; planning times may differ."""
    pairs = re.findall(
        r"^```sh\nisoload (replay .*?)\n```\n+```text\n(.*?)^```$", PAGE.read_text(), re.S | re.M
    )
    assert len(pairs) == len(blocks(PAGE, "text")) > 0
    for command, shown in pairs:
        words = [sys.executable, "-m", "isoload", *shlex.split(command.replace("\\\n", ""))]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert without_times(shown) == without_times(done.stdout)


def without_times(text):
    rows = [line.split() for line in text.strip().splitlines()]
    return [row[:-3] if len(row) > 12 and row[0].split(":")[0] in POLICIES else row for row in rows]


def test_bench_commands_name_scripts_with_these_options():
    for script, options in re.findall(r"python (bench/\w+\.py)([^`\n]*)", PAGE.read_text()):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{script} {option}"


def balance_cells(trace, placement, tokens):
    """A row of the table of bench_balance: changes of the busiest rank, then of the rows that leave their rank."""
    key = trace, placement, int(tokens)
    cell = [r for r in results("bench_balance") if (r["trace"], r["placement"], r["tokens"]) == key]
    home, *others = cell
    rows = " / ".join(f"{100 * cell[i]['rows']:+.1f}" for i in (1, 2, 3, 5))
    busiest = [f"{100 * r['busiest']:+.1f}" for r in others]
    return [trace, placement, tokens, f"{home['imbalance_mean']:.3f}", *busiest, rows]


@pytest.mark.parametrize("document", ["README.md", "docs/balancing.md"])
def test_balance_numbers_are_those_of_the_results_file(document):
    rows = table(ROOT / document, "trace | placement")
    assert len(rows) >= 4
    for row in rows:
        assert row == balance_cells(*row[:3])


def test_balance_claims_hold():
    """What the page says of the whole results file, not of a row."""
    rows, page = results("bench_balance"), " ".join(PAGE.read_text().split())
    static = [r for r in rows if r["policy"].endswith("rule=static") and r["tokens"] >= 1024]
    raised = sum(r["busiest"] > 0 for r in static)
    assert f"in {raised} of the {len(static)} rows from 1024 tokens on" in page

    def most(policy, large):
        mine = [
            r["rows"] for r in rows if r["policy"] == policy and r["trace"].startswith("gpt-oss") != large
        ]
        return 100 * max(mine)

    assert f"`joint` adds up to {most('joint', True):.1f} %" in page and most("waterfill", True) < 0.1
    assert f"add up to {most('joint', False):.1f} and {most('waterfill', False):.1f} %" in page


def traffic_cells(row):
    unvisited = [f"{100 * row['unvisited'][rule]:.2f} ({row['peak'][rule]:.3f})" for rule in RULES]
    ratio = "none sent" if row["fewer"] is None else f"{row['fewer']:.0f}x"
    setting = (
        f"{row['ranks']}+{row['replicas']}",
        f"top-{row['top_k']}",
        str(row["tokens"]),
        str(row["drift"]),
    )
    return [*setting, *unvisited, ratio]


def test_traffic_numbers_are_those_of_the_results_file():
    expected = [traffic_cells(row) for row in results("bench_shared_traffic")]
    assert table(PAGE, "R+replicas") == expected
    short = table(ROOT / "README.md", "R+replicas")
    assert len(short) >= 4 and all(row in expected for row in short)


def test_costs_of_sampling_are_those_of_the_results_file():
    cells = {}
    for row in results("bench_replicas"):
        key = row["trace"], f"{row['ranks']}+{row['replicas']}", str(row["tokens"])
        cells.setdefault(key, {})[row["policy"]] = row
    shown = table(PAGE, "model")
    assert len(shown) >= 20
    for row in shown:
        cell = cells[tuple(row[:3])]
        gaps = [f"{100 * cell[policy]['gap_mean']:.2f}" for policy in cell if policy != "exact"]
        assert row[3:] == [f"{cell['exact']['imbalance_mean']:.3f}", *gaps]

    def extremes(policy, base, tokens):
        costs = [
            100 * ((1 + c[policy]["gap_mean"]) / (1 + c[base]["gap_mean"]) - 1)
            for key, c in cells.items()
            if key[2] == tokens
        ]
        return min(costs), max(costs)

    assert extremes("lp_sampled", "lp", "64")[0] > 0.9 and extremes("lp_sampled", "lp", "64")[1] < 21.5
    assert extremes("lp_sampled", "lp", "1024")[1] < 9 and extremes("lp_sampled", "lp", "65536")[1] < 1.1
    glm = [c["affine5"]["gap_mean"] for key, c in cells.items() if key[0] == "GLM-5.2" and key[2] != "64"]
    assert min(glm) > 0.03 and max(glm) < 0.1


def test_slots_and_copies_are_those_of_the_results_files():
    names = {"gpt-oss-20b": "gptoss20b_decode", "DeepSeek-V3": "dsv3_sglang_longin"}
    for trace, tokens, *splits in table(PAGE, "trace | tokens | even: slots, copies, us"):
        kept = results(f"bench_active_{names[trace.split(',')[0]]}")
        expected = [
            f"{row['slots']:.1f}, {row['copies']:.0f}, {row['us']:.0f}"
            for row in kept
            if row["tokens"] == int(tokens)
        ]
        assert splits == expected


def test_time_numbers_are_those_of_the_results_file():
    expected = []
    for row in results("bench_shared"):
        ops = [f"{row[key]:.2f}" for key in ("exact_us", "exact_pour_us", "share_by_rank_us", "waterfill_us")]
        public = [f"{row['public_us'][policy]:.0f}" for policy in ("exact", "waterfill", "joint")]
        tokens = [f"{row[key]:.0f}" for key in ("route_shared_us", "static_us", "dynamic_us")]
        expected.append(
            [f"{row['ranks']}+{row['replicas']}", *ops, f"{row['joint_us']:.1f}", " / ".join(public), *tokens]
        )
    assert table(PAGE, "ranks+replicas") == expected


def test_spill_numbers_are_those_of_the_results_file():
    rows, text = results("bench_spill"), " ".join(SECTIONS["spill_cost"].split())
    times = {(r["time"], r["ranks"]): r for r in rows if "time" in r}
    gaps = {n: [100 * r[f"gap_spare{n}"] for r in rows if "time" not in r] for n in (2, 4, 8)}
    shown = {n: f"{sum(g) / len(g):.2f} % in the mean and {max(g):.2f} % at most" for n, g in gaps.items()}
    assert f"{shown[4]} with 4 spare slots" in text
    for n in (2, 8):
        assert f"{shown[n].replace(' % in the mean', '').replace(' at most', '')} with {n}" in text
    assert f"on {len(gaps[4])} instances" in text and max(gaps[4]) <= 5 and sum(gaps[4]) / len(gaps[4]) <= 2
    both = [times["spill_cost", ranks] for ranks in (8, 64)]
    assert "{:.0f} us on 8 ranks and {:.0f} us on 64".format(*(r["median_us"] for r in both)) in text
    assert "{:.0f} and {:.0f} us in the slowest".format(*(r["slowest_us"] for r in both)) in text
    llep = [times["llep", ranks][key] for key in ("median_us", "slowest_us") for ranks in (8, 64)]
    assert "(`llep`: {:.0f}, {:.0f}, {:.0f}, {:.0f})".format(*llep) in text


def test_borrowing_numbers_are_those_of_the_results_file():
    page, cells = PAGE.parent / "borrowing.md", {}
    for row in results("bench_llep"):
        if row["kind"] == "layer":
            key = row["shape"], f"{100 * row['share']:.0f} % into {row['num_hot']}", row["form"]
            cells.setdefault(key, {})[row["policy"]] = row
    shown = table(page, "layer | tokens into experts")
    assert len(shown) >= 12
    for layer, setting, form, *numbers in shown:
        ep, llep = (cells[layer, setting, form][policy] for policy in ("EP", "LLEP"))
        assert numbers == [
            f"{ep['copies_ratio']:.2f} / {llep['copies_ratio']:.3f}",
            f"{ep['ratio']:.2f} / {llep['ratio']:.2f}",
            f"{llep['gemms_ratio']:.2f}",
            f"{llep['moved']}, {llep['weight_bytes'] / 1e6:.1f}",
            f"{ep['rows_left']} / {llep['rows_left']}",
            f"{ep['peak_bytes'] / 1e6:.0f} / {llep['peak_bytes'] / 1e6:.0f}",
        ]
    text = " ".join(page.read_text().split())
    slower = [c["LLEP"] for c in cells.values() if c["LLEP"]["busiest_ms"] >= c["EP"]["busiest_ms"]]
    more = sum(c["LLEP"]["rows_left"] > c["EP"]["rows_left"] for c in cells.values())
    assert f"not below EP's in {len(slower)} of {len(cells)} settings, where nothing moved" in text
    assert not any(row["moved"] for row in slower)
    assert f"in {more} of {len(cells)} settings LLEP sends rows to more ranks" in text
    assert max(c["LLEP"]["copies_ratio"] for c in cells.values() if c["LLEP"]["moved"]) <= 1.02
    one = [c["LLEP"]["ratio"] for key, c in cells.items() if key[1] == "95 % into 1"]
    assert f"takes {min(one):.2f} to {max(one):.2f} of balanced routing's time" in text
    ep, llep = (
        next(
            r
            for r in results("bench_llep")
            if r["kind"] == "processes" and (r["share"], r["num_hot"], r["policy"]) == (0.95, 4, policy)
        )
        for policy in ("EP", "LLEP")
    )
    assert f"{ep['forward_ms']:.0f} ms under EP and {llep['forward_ms']:.0f} ms under LLEP forward" in text
    assert f"{ep['backward_ms']:.0f} and {llep['backward_ms']:.0f} ms backward" in text
    peaks = [row["training_peak_bytes"] / 1e6 for row in (ep, llep)]
    assert "{:.0f} and {:.0f} MB at the peak of training".format(*peaks) in text


def test_shared_copies_travel_as_little_as_promised():
    """At least five times fewer unvisited copies than SGLang's static rule, eight in the median, at no higher peak."""
    rows = results("bench_shared_traffic")
    ratios = sorted(float("inf") if row["fewer"] is None else row["fewer"] for row in rows)
    assert ratios[0] >= 5 and ratios[len(ratios) // 2] >= 8
    for row in rows:
        assert row["worst_peak_of_ours"] == 1
        assert row["peak"]["ours"] <= min(row["peak"][rule] for rule in ("static", "dynamic", "blog"))
        assert row["peak"]["visited"] <= row["peak"]["blog"]


@pytest.fixture
def benches(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def same(found, kept):
    """What a bench finds today is what its results file says; the machine's columns aside."""

    def plain(row):
        return json.loads(json.dumps(row), parse_float=lambda digits: round(float(digits), 9))

    return plain({key: kept[key] for key in found}) == plain(found)


def test_traffic_is_found_again(benches):
    import bench_shared_traffic as bench

    for position in (1, 7):
        assert same(bench.bench_setting(bench.SETTINGS[position]), results("bench_shared_traffic")[position])


def test_balance_is_found_again(benches):
    import bench_balance as bench

    key = bench.TRACES[bench.SHIPPED.stem], "red32", 256
    kept = [r for r in results("bench_balance") if (r["trace"], r["placement"], r["tokens"]) == key]
    found = bench.run(bench.SHIPPED, *key[1:])
    assert len(kept) == len(found) and all(map(same, found, kept))


def test_pictures_are_what_the_script_draws(benches, tmp_path, monkeypatch):
    import picture_balance

    monkeypatch.setattr(sys, "argv", ["picture_balance.py", "--out", str(tmp_path)])
    with contextlib.redirect_stdout(None):
        picture_balance.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (PAGE.parent / "pictures").iterdir()}
    assert drawn == kept
    assert {name for name in kept if f"pictures/{name}" in PAGE.read_text()} == set(kept)
