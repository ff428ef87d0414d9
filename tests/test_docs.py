"""docs/*.md: every policy and option is there, commands and examples run, figures in prose are those of their file.

Tables from results files are generated: see tests/bench/test_tables.py.
"""

import contextlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from isoload import POLICIES
from isoload.placers import PLACERS
from support.documents import blocks, printed
from support.processes import run_program

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
POLICY_PAGE, PLACER_PAGE = DOCS / "policies.md", DOCS / "placers.md"
MEASURED, COMPARED = DOCS / "results-cpu.md", DOCS / "results-policies.md"
RESULTS = ROOT / "bench" / "results"


def rows_of(page, heading):
    """Return the rows of the tables under a heading, as lists of cells, without the heads."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.S | re.M)[1]
    rows = re.findall(r"^\| (`.*) \|$", section, re.M)
    return [row.split(" | ") for row in rows]


POLICY_ROWS = {re.match(r"`(\w+)`", row[0])[1]: row for row in rows_of(POLICY_PAGE, "All policies")}


def results(name):
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def prose(path):
    return " ".join(path.read_text().split())


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_every_policy_has_its_row_in_order():
    assert list(POLICY_ROWS) == list(POLICIES)
    for name, row in POLICY_ROWS.items():
        assert len(row) == 4 and all(row) and ". Source: " in row[1], name
        published = ".published" in POLICIES[name].__module__  # which only compare
        assert row[0].split("<br>")[0] == f"`{name}`" + " (published)" * published


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_needs_the_loads_of_each_source_is_marked(policy):
    if POLICIES[policy].needs == "per_source":
        assert POLICY_ROWS[policy][2].startswith("`[R, E]`")


def check_options(cell, kind):
    """Compare the options in a cell, with their defaults, with the fields of a policy or placer."""
    defaults = {
        field.name: f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        for field in fields(kind)
    }
    assert cell == (", ".join(f"`{name}={default}`" for name, default in defaults.items()) or "-")


@pytest.mark.parametrize("policy", POLICIES)
def test_options_of_a_policy_are_in_its_row_and_explained(policy):
    check_options(POLICY_ROWS[policy][0].partition("<br>")[2] or "-", POLICIES[policy])
    explained = {
        (option, name)
        for row in rows_of(POLICY_PAGE, "Options")
        for option in re.findall(r"`(\w+)`", row[0])
        for name in re.findall(r"`(\w+)`", row[1])
    }
    assert {(field.name, policy) for field in fields(POLICIES[policy])} <= explained


def test_every_placer_and_each_of_its_options_is_in_the_tables():
    rows = rows_of(PLACER_PAGE, "All placers")
    placers = {row[0].strip("`"): row for row in rows if len(row) == 4}
    explained = {option for row in rows if len(row) == 2 for option in re.findall(r"`(\w+)`", row[0])}
    assert list(placers) == list(PLACERS)
    for name, kind in PLACERS.items():
        check_options(placers[name][3], kind)
        assert {field.name for field in fields(kind)} <= explained


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_named_paths_and_anchors_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    quoted = re.findall(r"`([\w.-]*/[\w./-]*)`", text)
    assert [p for p in quoted if not (ROOT / p).exists()] == []
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page, tmp_path):
    (tmp_path / "examples").symlink_to(
        ROOT / "examples"
    )  # files that an example writes stay out of the repository
    for code in blocks(page, "python"):
        status, said = run_program(code, tmp_path)
        assert status == 0, said


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_shell_blocks_say_what_they_need_and_are_run_in_ci(page):
    """A page's blocks run in one fresh shell, in .ci/first_hour; but those of engines, which need GPUs."""
    commands = blocks(page, "sh")
    if not commands or page.stem in ("sglang", "sglang-policies", "vllm", "times"):
        return
    assert commands[0].startswith("make run ") == (page.name == "README.md")
    activated = [body for body in commands if not body.startswith("make ")]
    assert activated[0].startswith(". .venv/bin/activate ")
    run = re.search(r"for page in README.md docs/\{(.+)\}.md", (ROOT / ".ci" / "first_hour").read_text())[1]
    assert page.name == "README.md" or page.stem in run.split(",")


SHOWN = {"results-cpu.md": 1, "advise.md": 1, "replicas.md": 1}  # outputs of a page


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page == MEASURED)) for page in PAGES],
    ids=lambda page: page.name,
)
def test_shown_replays_are_what_replay_prints(page, monkeypatch):
    """Each shell block with a replay is followed by its output; planning times may differ."""
    pairs = re.findall(
        r"^```sh\nisoload ((?:replay|advise|place) .*?)\n```\n+```text\n(.*?)^```$",
        page.read_text(),
        re.S | re.M,
    )
    assert len(pairs) == len(blocks(page, "text")) == SHOWN.get(page.name, 0)
    monkeypatch.chdir(ROOT)
    for command, shown in pairs:
        assert without_times(shown) == without_times(printed(shlex.split(command.replace("\\\n", ""))))


def test_the_mean_step_of_both_phases_has_the_quoted_verdict(monkeypatch):
    (command,) = (body for body in blocks(DOCS / "advise.md", "sh") if "--prefill-share" in body)
    monkeypatch.chdir(ROOT)
    found = " ".join(printed(shlex.split(command.replace("\\\n", ""))[1:]).split())
    assert re.search(
        "isoload: not worth it.*it saves .* a step of prefill and takes .* longer a step of decode", found
    )


def without_times(text):
    rows = [line.split() for line in text.strip().splitlines()]
    times = {False: 1, True: 2}  # columns that end a row, without and with --wide
    return [row[: -times[len(row) > 8]] if row and row[0].split(":")[0] in POLICIES else row for row in rows]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_bench_commands_name_scripts_with_these_options(page):
    for script, options in re.findall(r"python (bench/\w+\.py)([^`]*)`", page.read_text()):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{script} {option}"


def test_balance_claims_hold():
    """What the page says of the whole results file, not of a row."""
    rows, page = results("bench_balance"), prose(COMPARED)
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


def test_costs_of_sampling_are_those_of_the_results_file():
    cells = {}
    for row in results("bench_replicas"):
        key = row["trace"], row["ranks"], row["replicas"], row["tokens"]
        cells.setdefault(key, {})[row["policy"]] = 1 + row["gap_mean"]
    page = prose(COMPARED)

    def sampled(tokens):
        costs = [100 * (c["lp_sampled"] / c["lp"] - 1) for key, c in cells.items() if key[3] == tokens]
        return min(costs), max(costs)

    def five_steps(trace, *, small):
        gaps = [c["affine5"] for key, c in cells.items() if key[0] == trace and (key[3] == 64) == small]
        return [100 * gap - 100 for gap in (min(gaps), max(gaps))]

    ends = "{:.0f} to {:.0f} % at 64 tokens, {:.1f} to {:.1f} % at 1024, at most {:.1f} % at 65536"
    assert ends.format(*sampled(64), *sampled(1024), sampled(65536)[1]) in page
    assert "cost {:.0f} to {:.0f} % under".format(*five_steps("GLM-5.2", small=False)) in page
    largest = [five_steps("DeepSeek-V3", small=small)[1] for small in (True, False)]
    assert "up to {:.0f} % at 64 tokens and {:.0f} % above".format(*largest) in page


def test_planning_times_are_those_of_the_results_files():
    def ends(values):
        return f"{min(values):.1f} to {max(values):.1f} times"

    times = [row["plan_us"] for row in results("bench_lp")]
    for solver, dtype in (("lp32", "float32"), ("lp64", "float64")):
        ratios = [t[solver]["batch"] / t["exact"]["batch"] for t in times]
        said = f"{ends(ratios)}( `exact`'s time)? in {dtype}"
        assert re.search(said, prose(POLICY_PAGE)), ends(ratios)
    rows = [row for row in results("bench_plan") if "table" not in row]
    public = max(row["public_us"]["median"] for row in rows)
    late = next(row["ranks"] for row in rows if row["share_row_us"] > 10)
    said = f"public call takes at most {public:.1f} us, the share row first passes 10 us at {late} ranks."
    assert said in prose(MEASURED)


def test_training_losses_are_those_of_the_results_file():
    rows = {
        row["policy"]: row
        for row in results("bench_layer")
        if row["kind"] == "virtual" and row["routing"].startswith("gptoss")
    }
    without, exact = rows["no replicas"], rows["exact"]

    def pair(key, unit, digits=0):
        return f"{exact[key] / unit:.{digits}f} MB for {without[key] / unit:.{digits}f}"

    page = prose(MEASURED)
    assert f"from {without['busiest_copies']:.0f} to {exact['busiest_copies']:.0f} copies" in page
    assert f"sends {pair('backward_bytes', 1e6, 1)}" in page
    assert f"memory is {pair('training_peak_bytes', 1e6)}" in page
    assert f"step sends {exact['refresh_bytes'] / 1e6:.1f} MB" in page and without["refresh_bytes"] == 0


def test_shares_of_right_predictions_are_those_of_the_results_file():
    rows, page = results("bench_lookahead"), prose(DOCS / "libra.md")

    def ends(name):
        shares = [100 * row[name] for row in rows]
        return f"{min(shares):.1f} to {max(shares):.1f} %"

    assert f"predicted {ends('lookahead')} of the tokens' choices" in page
    assert f"the most popular experts of earlier batches {ends('popularity')}" in page


def by_policy(output):
    """Return the rows of a replay by policy, as words."""
    rows = map(str.split, output.splitlines())
    return {row[0]: row[1:] for row in rows if row and row[0].split(":")[0] in POLICIES}


def node_rows(row):
    return row[9 if len(row) > 8 else 3].replace("%", " %")


def test_figures_quoted_from_the_replay_are_in_it():
    (first,) = map(by_policy, blocks(MEASURED, "text"))
    assert first["exact"][0] == "1.042"
    losses = prose(MEASURED)
    assert f"({node_rows(first['exact'])}) than `static` does ({node_rows(first['static'])})" in losses


@pytest.mark.slow
def test_figures_quoted_from_the_replay_with_a_shared_expert_are_in_it(monkeypatch):
    page = prose(MEASURED)
    (command,) = re.findall(r"`isoload (replay [^`]*--shared-experts 1[^`]*)`", page)
    monkeypatch.chdir(ROOT)
    shared = by_policy(printed(shlex.split(command)))
    names = ("shared_local", "waterfill_sampled", "waterfill_sampled:rule=dynamic", "waterfill", "joint")
    means = [shared[name][0] for name in names]
    assert (
        "`shared_local` ends at {}, SGLang's two rules of Waterfill (sampled, re-implemented) at {}".format(
            *means
        )
        in page
    )
    assert "and {}, `waterfill` at {} and `joint` at {}.".format(*means[2:]) in page
    static, waterfill = (
        [cell.replace("%", " %") for cell in shared[name][11:13]] for name in (names[1], names[3])
    )
    assert (
        "sends {} of the shared copies to another rank, {} to a rank that the token does not".format(*static)
        in page
    )
    assert "with `waterfill` it is {} and {}.".format(*waterfill) in page


@pytest.mark.slow
def test_figures_quoted_from_the_replay_of_small_batches_are_in_it(monkeypatch):
    page = prose(MEASURED)
    (command,) = re.findall(r"`isoload (replay [^`]*--batch-tokens 16[^`]*)`", page)
    monkeypatch.chdir(ROOT)
    small = by_policy(printed(shlex.split(command)))
    means = [small[policy][0] for policy in ("exact", "even", "static")]
    assert "`exact` ends at {}, where `even` has {} and `static` {}".format(*means) in page


def least_to_most(values, digits=0):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_planning_times_without_a_table_are_those_of_the_results_files():
    page, shared = prose(COMPARED), results("bench_shared")
    joint = [row["joint_us"] for row in shared]
    assert (shared[0]["ranks"], shared[-1]["ranks"]) == (16, 128)
    assert f"`joint` takes {joint[0]:.1f} µs per layer on 16 ranks and {joint[-1]:.1f} on 128" in page
    public = least_to_most([row["public_us"]["joint"] for row in shared])
    assert f"a public call takes {public} µs" in page
    fills = {(row["time"], row["ranks"]): row for row in results("bench_fill") if "time" in row}
    medians, most = (
        {name: [fills[name, ranks][key] for ranks in (8, 64)] for name in ("llep", "spill_cost")}
        for key in ("median_us", "slowest_us")
    )
    assert f"`llep` takes {least_to_most(medians['llep'])} µs in the median" in page
    assert f"`spill_cost` {least_to_most(medians['spill_cost'])}, at most" in page
    assert f"at most {max(most['llep']):.0f} and {max(most['spill_cost']):.0f} in 512 drawn" in page


def test_figures_of_placers_without_a_table_are_those_of_the_results_file():
    rows, page, more = (
        results("bench_place"),
        prose(DOCS / "record-and-place.md"),
        prose(DOCS / "results-placement.md"),
    )

    def kind(name):
        return [row for row in rows if row["table"] == name]

    for placer, said in (
        ("eplb", "in {} ms with `eplb`"),
        ("search=False", "{} with `search=False`"),
        ("scenario", "{} with `scenario`"),
        ("split=exact", "{} with `split=exact`"),
    ):
        times = [row["ms"] for row in kind("times") if row["placer"] == placer]
        digits = 0 if min(times) > 100 else 1
        assert said.format(least_to_most(times, digits).replace("6.0 to", "6 to")) in page, placer
        assert all(row["ms"] <= row["goal"] for row in kind("times"))
    for trace, said in (
        (
            "DeepSeek-V3",
            "ends at {} without replicas, {} with one more slot of a rank, {} with two and {} with four",
        ),
        ("GLM-5.2", "GLM-5.2 at {}, {}, {} and {}."),
    ):
        found = [row for row in kind("slots") if (row["trace"], row["placer"]) == (trace, "eplb")]
        found.sort(key=lambda row: row["slots"])
        assert said.format(*(f"{row['exact']:.3f}" for row in found)) in page, trace
    moves = {row["moves"]: row for row in kind("moves")}
    few, many, none, scratch = (moves[n] for n in (5, 43, 0, None))
    assert f"With 5 moves of slots per layer and plan ({100 * few['changed']:.1f} % of the slots)" in more
    assert f"is {100 * few['of_scratch']:.1f} % of that from scratch" in more
    assert f"(which changes {100 * scratch['changed']:.1f} %)" in more
    assert f"43 moves ({100 * many['changed']:.1f} %) it is {100 * many['of_scratch']:.1f} %" in more
    assert f"without any {100 * none['of_scratch']:.1f} %" in more
    recorder = [row["us_a_layer"] for row in kind("recorder")]
    assert "adds {:.1f} µs to a layer's call on the CPU, and {:.1f} µs".format(*recorder) in more


def test_replicas_of_craft_are_those_of_the_results_file():
    rows = {(row["experts"], row["ranks"]): row for row in results("bench_craft")}
    few, many = rows[256, 32], rows[256, 96]
    page = prose(DOCS / "results-placement.md")
    assert f"`knee` takes {few['knee']} replicas of a rank on 32 ranks and {many['knee']} on 96" in page
    for said, key, digits in (
        ("The balance is then {} and {}", "at_knee", 3),
        ("with {} and {} GiB of a rank", "gib_at_knee", 2),
        ("it is {} and {} without replicas", "base", 3),
        ("and {} and {} with a slot more on every", "eplb", 3),
        ("which takes {} and {} GiB", "gib_eplb", 2),
    ):
        assert said.format(*(f"{row[key]:.{digits}f}" for row in (few, many))) in page, said
    assert all(row["gain"] == 1 for row in rows.values())


def test_every_choice_of_advise_was_the_best_later():
    rows = results("bench_advise")
    assert len(rows) == 10 and all(row["loss"] == 0 for row in rows)
    assert "In all ten settings the chosen candidate was the best" in prose(DOCS / "times.md")


def test_gains_by_known_speeds_are_those_of_the_results_file():
    (row,) = [
        row
        for row in results("bench_speeds")
        if (row["speeds"], row["ranks"], row["placer"]) == ("one at 0.9", 16, "scenario")
    ]
    page = prose(DOCS / "times.md")
    assert f"takes {row['nothing']:.3f} times as long" in page
    assert (
        f"{row['plan']:.3f} times if the plan has the speeds, and {row['both']:.3f} times if the placement has"
        in page
    )


def test_borrowing_numbers_are_those_of_the_results_file():
    text, cells = prose(DOCS / "results-cpu.md"), {}
    for row in results("bench_llep"):
        if row["kind"] == "layer":
            key = row["shape"], f"{100 * row['share']:.0f} % into {row['num_hot']}", row["form"]
            cells.setdefault(key, {})[row["policy"]] = row
    slower = [c["LLEP"] for c in cells.values() if c["LLEP"]["busiest_ms"] >= c["EP"]["busiest_ms"]]
    more = sum(c["LLEP"]["rows_left"] > c["EP"]["rows_left"] for c in cells.values())
    assert f"not below EP's in {len(slower)} of {len(cells)} settings, where nothing moved" in text
    assert not any(row["moved"] for row in slower)
    assert f"in {more} of {len(cells)} settings LLEP sends rows to more ranks" in text
    assert max(c["LLEP"]["copies_ratio"] for c in cells.values() if c["LLEP"]["moved"]) <= 1.02
    one = [
        c["LLEP"]["ratio"]
        for key, c in cells.items()
        if key[1:2] == ("95 % into 1",) and key[0] != "Figure 1"
    ]
    pairs = [
        (cells[key]["LLEP"], cells[("gpt-oss-120b", *key[1:])]["LLEP"])
        for key in cells
        if key[0] == "Figure 1"
    ]
    assert len(pairs) == 24 and all(a["copies_ratio"] == b["copies_ratio"] for a, b in pairs)
    assert f"takes {min(one):.2f} to {max(one):.2f} of balanced routing's time" in text
    still = [c for c in cells.values() if not c["LLEP"]["moved"]]
    assert all(c["LLEP by experts"]["moved"] for c in cells.values())
    assert all(c["EP"]["copies_ratio"] <= 1.3 for c in still)
    sweep = [r for r in results("bench_llep") if r.get("sweep") == "lambda" and r["policy"] != "EP"]
    assert sweep and all(r["moved"] for r in sweep if r["policy"] == "LLEP by experts")
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
    page = prose(COMPARED)
    assert len(rows) == 9
    many, few = ([row["unvisited"] for row in rows if row["top_k"] == k] for k in (8, 2))
    ours, static = ([100 * row[rule] for row in many] for rule in ("ours", "static"))
    assert (
        f"{least_to_most(ours, 2)} % of all with top-8, where `static` sends {least_to_most(static, 1)} %"
        in page
    )
    assert f"`dynamic` up to {100 * max(row['dynamic'] for row in many):.1f} %" in page
    lost = [100 * row[rule] for rule in ("ours", "best") for row in few]
    assert (
        "sends {:.2f} and {:.2f} %, where a maximum flow over single tokens sends {:.2f} and {:.2f} %".format(
            *lost
        )
        in page
    )


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


@pytest.mark.slow
def test_pictures_are_what_the_script_draws(benches, tmp_path, monkeypatch):
    import picture_balance
    import picture_loads

    monkeypatch.setattr(sys, "argv", ["a picture", "--out", str(tmp_path)])
    with contextlib.redirect_stdout(None):
        picture_balance.main(), picture_loads.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert drawn == kept
    shown = "".join(page.read_text() for page in (MEASURED, COMPARED, DOCS / "own-counts.md"))
    assert {name for name in kept if f"pictures/{name}" in shown} == set(kept)
