"""Tables that line up and fit, numbers that say what they are, JSON with all that tables have."""

import io
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from rich.console import Console

from isoload.analysis.inspection import inspect_trace
from isoload.analysis.metrics import PolicyFigures
from isoload.analysis.simulate import Replay
from isoload.cli import demo
from isoload.cli.doctor import Item, print_doctor
from isoload.cli.inspect import inspect_figures, print_inspection
from isoload.cli.replay import (
    FIGURES,
    TIMES,
    print_replay,
    replay_columns,
    replay_header,
    replay_json,
    replay_warnings,
)
from isoload.cli.tables import WIDTH, Column, Figure, columns_of, percent, table
from isoload.traces import Trace

# Every figure different, so that no two columns can be swapped unseen.
DYNAMIC = PolicyFigures(
    policy="dynamic",
    imbalance_mean=1.111,
    imbalance_p99=2.222,
    imbalance_max=3.333,
    rank_load_std=0.444,
    idle_share=0.055,
    gap_mean=0.123,
    gap_max=1.666,
    ideal_gap=0.177,
    remote_rank_rows=880,
    remote_node_rows=550,
    remote_rank_share=0.88,
    remote_node_share=0.55,
    node_dispatch_rows=430,
    node_dispatch_share=0.43,
    remote_rank_copy_share=0.89,
    remote_node_copy_share=0.56,
    shared_remote_share=None,
    shared_unvisited_share=None,
    active_experts=4.97,
    plan_us_median=66.61,
    plan_us_batched=12.34,
)
EXACT = replace(DYNAMIC, policy="exact", gap_mean=0.0, gap_max=0.0, idle_share=0.0001, imbalance_max=1.0)
SETTINGS = {
    "num_ranks": 8,
    "ranks_per_node": 4,
    "slots_per_rank": 5,
    "spare_slots": 0,
    "shared_experts": 0,
    "placer": "eplb",
    "calibrate": "first-half",
    "seed": 3,
    "model": "a/model",
    "num_experts": 32,
    "top_k": 4,
    "drawn": False,
    "calibration_batches": [7],
    "layers_with_freedom": 24,
}
REPLAY = Replay("tiny", SETTINGS, 3584, 24, 7, (DYNAMIC, EXACT))


def printed(show, *args, **options):
    out = io.StringIO()
    show(*args, Console(file=out, highlight=False, **options))
    return out.getvalue()


def squeezed(line):
    return " ".join(line.split())


def with_settings(**changed):
    return replace(REPLAY, settings={**SETTINGS, **changed})


def test_a_table_lines_up():
    heading, rows = table(
        [
            Column("", "name", ["a", "longer"]),
            Column("wide group", "x", ["1.0", "10.0"]),
            Column("g", "y", ["3", "4"]),
            Column("g", "z", ["5", "6"]),
        ]
    )
    assert heading == ["        wide group   g", "name             x  y z"]
    assert rows == ["a              1.0  3 5", "longer        10.0  4 6"]


def test_percent_tells_zero_from_nearly_zero():
    assert [percent(share) for share in (0.0, 1e-6, 0.1234, 1.758)] == ["0%", "0.0%", "12.3%", "175.8%"]


def test_wide_replay_table_shows_every_figure_in_its_column():
    heading, rows = table(replay_columns([DYNAMIC, EXACT], with_nodes=True, wide=True))
    titles = "policy mean p99 max bound worst ideal idle std rank node once rank node slots one batch"
    dynamic = (
        "dynamic 1.111 2.222 3.333 12.3% 166.6% 17.7% 5.5% 0.444 88.0% 55.0% 43.0% 89.0% 56.0% 5.0 66.6 12.3"
    )
    assert squeezed(heading[1]) == titles
    assert squeezed(rows[0]) == dynamic
    assert squeezed(rows[1]).startswith("exact 1.111 2.222 1.000 0% 0% 17.7% 0.0%")
    assert len({len(line) for line in (*rows, heading[1])}) == 1


def test_replay_table_shows_what_one_decides_by():
    """Within 80 columns, for the longest names of the documents too."""
    named = replace(EXACT, policy="waterfill_sampled:rule=dynamic")
    heading, rows = table(replay_columns([DYNAMIC, named], with_nodes=True))
    assert squeezed(heading[0]) == "imbalance max load over rows leave plan µs"
    assert squeezed(heading[1]) == "policy mean bound rank node one"
    assert squeezed(rows[0]) == "dynamic 1.111 12.3% 88.0% 55.0% 66.6"
    assert max(map(len, (*heading, *rows))) <= 80


def test_a_column_without_values_is_left_out():
    unknown = dict.fromkeys([field.name for field in fields(PolicyFigures) if "_rows" in field.name])
    shares = {"remote_rank_share": None, "remote_node_share": None, "node_dispatch_share": None}
    row = replace(DYNAMIC, **unknown, **shares)
    assert "rows leave" not in table(replay_columns([row], with_nodes=True, wide=True))[0][0]
    known = table(replay_columns([row, DYNAMIC], with_nodes=True))[1]
    assert squeezed(known[0]) == "dynamic 1.111 12.3% - - 66.6"


def test_replay_table_speaks_of_nodes_only_if_there_are_several():
    heading, rows = table(replay_columns([DYNAMIC], with_nodes=False, wide=True))
    assert "node" not in heading[1] and "55.0%" not in rows[0] and "56.0%" not in rows[0]


def test_replay_header():
    assert replay_header(REPLAY) == [
        "tiny (a/model)",
        "3584 tokens in 7 batches, routing as recorded; 24 layers, 32 experts, top-4",
        "8 ranks on 2 nodes, 5 slots per rank, placer eplb",
        "unseen: placed on the first 7 batches",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drawn": True}, "drawn from counts with seed 3"),
        ({"spare_slots": 2}, "5 slots per rank (2 spare)"),
        ({"ranks_per_node": 8}, "8 ranks on 1 node, "),
        ({"calibrate": "all"}, "\nseen: placed on the replayed batches"),
        ({"calibrate": "leave-one-out"}, "unseen: placed for each batch on the 7 others"),
        ({"calibrate": None, "placer": None}, "5 slots per rank\na given placement"),
        (
            {"top_k": 0, "drawn": True},
            "3584 copies in 7 batches, drawn from counts with seed 3; 24 layers, 32 experts\n",
        ),
        (
            {"calibrate": "leave-cluster-out", "calibration_batches": [6, 8]},
            "unseen: placed for each cluster on all others (6 or 8 batches)",
        ),
    ],
)
def test_replay_header_says_how(settings, words):
    assert words in "\n".join(replay_header(with_settings(**settings)))


def test_a_given_placement_is_named():
    given = with_settings(calibrate=None, placer=None)
    assert (
        replay_header(given, "seen: p.json, placed on these batches")[3]
        == "seen: p.json, placed on these batches"
    )


def test_what_a_replay_cannot_judge_is_said():
    assert replay_warnings(REPLAY) == []
    (unknown,) = replay_warnings(with_settings(top_k=0))
    assert (
        unknown
        == "The record does not state top-k: copies are drawn one by one, rows are not counted (--top-k)."
    )
    (fixed,) = replay_warnings(with_settings(layers_with_freedom=0))
    assert fixed.startswith("Every expert has one slot, so no policy has a choice: --slots-per-rank 6 gives")
    assert "no policy has a choice" in " ".join(
        printed(print_replay, with_settings(layers_with_freedom=0)).split()
    )


def test_a_model_is_named_only_if_known():
    assert replay_header(with_settings(model=None))[0] == "tiny"


@pytest.mark.parametrize("options", [{}, {"width": 40}, {"width": 200}], ids=["pipe", "narrow", "wide"])
def test_replay_prints_the_same_lines_everywhere(options):
    lines = printed(
        print_replay, with_settings(model="m" * 60 + " [bold]with words[/bold] " * 4), **options
    ).splitlines()
    assert max(map(len, lines)) <= WIDTH
    rows = [line for line in lines if line.startswith(("dynamic", "exact"))]
    assert [line.split()[0] for line in rows] == ["dynamic", "exact"]
    assert "[bold]" in "".join(lines)
    assert " ".join(lines[-2:]).endswith("--wide shows all figures.") and "imbalance: max/mean" in lines[-3]


def test_replay_json_names_every_figure():
    found = replay_json(REPLAY)
    assert found["policies"][0] == {
        "policy": "dynamic",
        "imbalance": {"mean": 1.111, "p99": 2.222, "max": 3.333},
        "rank_load_std": 0.444,
        "idle_share": 0.055,
        "gap": {"mean": 0.123, "max": 1.666},
        "ideal_gap": 0.177,
        "remote_rank_rows": 880,
        "remote_node_rows": 550,
        "remote_rank_share": 0.88,
        "remote_node_share": 0.55,
        "node_dispatch_rows": 430,
        "node_dispatch_share": 0.43,
        "remote_rank_copy_share": 0.89,
        "remote_node_copy_share": 0.56,
        "shared_remote_share": None,
        "shared_unvisited_share": None,
        "active_experts": 4.97,
        "plan_us": {"median": 66.61, "batched": 12.34},
    }
    assert {key: found[key] for key in ("trace", "tokens", "layers", "batches")} == {
        "trace": "tiny",
        "tokens": 3584,
        "layers": 24,
        "batches": 7,
    }
    shown = {field.name for field in fields(PolicyFigures)}
    assert {name for name in shown if "copy" in name} == {"remote_rank_copy_share", "remote_node_copy_share"}


def skewed_trace():
    counts = np.ones((2, 2, 24), dtype=np.int64)
    counts[0, 1, 5] = 27  # 27 of 50 copies
    counts[1, 1, 5] = 77  # 77 of 100
    return Trace("skewed", 24, 1, counts=counts, layer_ids=(3, 8), provenance={"model": "a/model"})


def test_inspect_table():
    figures, layers = inspect_figures(["4", "8", "16"]), inspect_trace(skewed_trace(), 4)
    heading, rows = table(columns_of(figures, layers))
    assert squeezed(heading[0]) == "hottest expert 4 ranks 8 ranks 16 ranks"
    assert squeezed(heading[1]) == "layer id /mean skew order least order least order least"
    assert squeezed(rows[0]) == "3 0 1.00 0% 1.00 1.00 1.00 1.00 1.33 1.00"
    assert squeezed(rows[1]) == "8 5 16.64 68.0% 2.92 2.62 5.48 5.24 10.72 10.48"
    wide = table(columns_of(figures, layers, wide=True))[1]
    assert squeezed(wide[1]).endswith("10.48 69.3% 65.5% 77.0% 0 76.0% 73.0% 82.0% 3.04 23 0 0 0 0 1")
    assert max(map(len, heading)) <= 80


def test_inspection_prints_its_extremes():
    trace = skewed_trace()
    lines = printed(lambda console: print_inspection(trace, 4, inspect_trace(trace, 4), console)).splitlines()
    assert lines[0] == "skewed (a/model)"
    assert lines[1] == "2 batches, 2 layers, 24 experts; in order, no replicas, on 4 ranks"
    assert "4 ranks: 1.96 in order, 1.81 at least; 1 of 2 layers need replicas" in lines
    assert "100% chosen by every token, 24.00 x." in " ".join(lines)
    assert "layers with an expert above 10 times the mean: 1 of 2" in lines
    assert lines[-1] == "largest share in any layer and batch: expert 77.0%, rank of 4 82.0%"
    assert max(map(len, lines)) <= WIDTH


def test_doctor_prints_what_is_off_and_why():
    out = printed(print_doctor, [Item("one", True, "1.0"), Item("other one", False, "not [there]")])
    assert out.splitlines() == ["one        on   1.0", "other one  off  not [there]"]


NAMES = [figure.key for figure in TIMES]
TIMES_ROW = {"mean_copies": 1.5, **dict(zip(NAMES, ["none", *map(float, range(1, 10))], strict=True))}
DEMO_ROW = dict(zip([figure.key for figure in demo.FIGURES], ["none", 1.5, 2.5, 35, 0.5], strict=True))
ROWS = {
    "replay": (FIGURES, DYNAMIC.to_json()),
    "inspect": (inspect_figures(["4", "8", "16"]), inspect_trace(skewed_trace(), 4)[0]),
    "times": (TIMES, TIMES_ROW),
    "demo": (demo.FIGURES, DEMO_ROW),
}


def leaves(value):
    return (
        [leaf for inner in value.values() for leaf in leaves(inner)] if isinstance(value, dict) else [value]
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_table_shows_what_the_json_has(name):
    """Every column shows a figure of its own, at its key of the JSON."""
    figures, row = ROWS[name]
    assert len({figure.key for figure in figures}) == len(figures)
    shown = [figure for figure in figures if figure.value(row) is not None]
    assert (
        table(columns_of(figures, [row], wide=True))[1][0].split()
        == " ".join(figure.cell(row) for figure in shown).split()
    )


def test_every_figure_of_a_replay_is_in_the_json():
    assert leaves(DYNAMIC.to_json()) == list(asdict(DYNAMIC).values())


def test_cells():
    row = {"name": "dynamic", "part": 0.123, "none": None, "size": 3 * 2**19, "inner": {"x": 1.0}}
    assert Figure("name", "", "").cell(row) == "dynamic"
    assert [Figure("part", "", "", form).cell(row) for form in ("%", ".3f")] == ["12.3%", "0.123"]
    assert Figure("none", "", "", "%").cell(row) == "-"
    assert Figure("size", "", "", "MiB").cell(row) == "1.5"
    assert Figure("inner.x", "", "", ".2f").cell(row) == "1.00", "a dot opens an object"
