"""Charts as SVG: what is drawn is what was given; and a page of the largest size that is promised."""

from __future__ import annotations

import re

import numpy as np
import pytest

from isoload.analysis import pages
from isoload.analysis.pages import figure, is_page, page, section, table
from support.pages import read_page


def paths(svg: str, colour: str) -> list[tuple[float, ...]]:
    """The rectangles of a colour: x, y, width, height."""
    found = re.findall(r'<path d="M([^"]*)"[^>]*fill="([^"]*)"', svg)
    shape = re.compile(r"(-?[\d.]+),(-?[\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+Z")
    kept = [shape.fullmatch(path) for path, fill in found if fill == colour]
    return [tuple(round(float(number), 6) for number in of.groups()) for of in kept]


def test_a_heat_map_has_a_cell_in_its_class_for_each_value() -> None:
    values = np.array([[0.2, 0.5, 0.9, 1.0], [1.1, 1.3, 1.5, 9.0]])
    svg = pages.draw(pages.heat(values, [3, 7], "rank", "layer"), "t", "s")
    for i, (x, y) in enumerate([(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]):
        ((left, top, width, height),) = paths(svg, f"var(--h{i})")
        assert (left, top) == (x * width, y * height) and width == pages.WIDTH / 4
    assert [label for label in re.findall(r">(\d+)</text>", svg)] == ["0", "1", "2", "3", "3", "7"]


def test_a_step_has_a_bar_for_each_event() -> None:
    events = [
        (0, "dispatch", 0.0, 1.0),
        (0, "experts", 1.0, 4.0),
        (1, "dispatch", 0.0, 1.0),
        (1, "experts", 1.0, 2.0),
        (1, "combine", 3.0, 4.0),
    ]
    svg = pages.draw(pages.gantt(events, ("dispatch", "experts", "combine"), 4.0), "a step", "of two ranks")
    first, second, third = (paths(svg, colour) for colour in pages.LINES[:3])
    scale = pages.WIDTH / 4
    assert sorted((x, width) for x, _, width, _ in first) == [(0, scale)] * 2
    assert sorted((x, width) for x, _, width, _ in second) == [(scale, scale), (scale, 3 * scale)]
    assert [(x, width) for x, _, width, _ in third] == [(3 * scale, scale)]
    assert {y for _, y, _, _ in first} == {y for _, y, _, _ in second} and third[0][1] > first[0][1]
    assert all(f">{name}</text>" in svg for name in ("dispatch", "experts", "combine", "rank", "ms"))


def test_two_steps_have_one_scale_and_the_same_colours() -> None:
    stages = ("plan", "dispatch", "experts")
    svg = pages.draw(pages.gantt([(0, "experts", 0.0, 1.0)], stages, 8.0), "a step", "of one rank")
    assert [(x, width) for x, _, width, _ in paths(svg, pages.LINES[2])] == [(0, pages.WIDTH / 8)]


def test_a_bar_of_parts_is_cut_in_their_order() -> None:
    parts = {"a": {"own": 0.25, "near": 0.25, "far": 0.5}}
    svg = pages.draw(pages.shares(parts), "t", "s")
    cut = [paths(svg, colour)[0] for colour in pages.PARTS]
    whole = pages.WIDTH - pages.LABELS
    assert [(x, width) for x, _, width, _ in cut] == [
        (0, whole / 4),
        (whole / 4, whole / 4),
        (whole / 2, whole / 2),
    ]


def test_a_point_stands_where_its_value_is() -> None:
    values = {"a": {"half": 1.0, "double": 3.0}, "b": {"half": 2.0, "double": 2.0}}
    svg = pages.draw(pages.points(values, "ms", ("var(--c0)", "var(--c1)"), 2.0), "t", "s")
    marks = svg.split("mark-symbol role-mark")[1].split("</g>")[0]  # without the legend
    found = re.findall(r'transform="translate\(([\d.]+),([\d.]+)\)"[^>]*fill="var\(--c(\d)\)"', marks)
    at = {(colour, float(y)): float(x) for x, y, colour in found}
    (low, same), (high, other) = ([at[key] for key in sorted(at) if key[0] == colour] for colour in "01")
    assert same == other == pytest.approx((low + high) / 2) and low < same < high


def test_lines_by_tokens_and_layers_name_what_they_show() -> None:
    rows = [(16, -0.2, 0.1, "-1.0 ms", True), (64, 0.1, 0.3, "+2.0 ms", False)]
    svg = pages.draw(pages.by_tokens(rows, (-0.3, 0.4), "var(--c2)"), "t", "s")
    assert "-1.0 ms" in svg and "+2.0 ms" in svg and 'fill="var(--paper)"' in svg
    svg = pages.draw(pages.by_number({"a": [1, 2], "b": [2, 1]}, [3, 4], "layer", "y", "b"), "t", "s")
    assert 'stroke="var(--c0)"' in svg and f'stroke="{pages.OWN}"' in svg


def test_labels_of_near_token_counts_lie_on_both_sides_of_the_line() -> None:
    rows = [(n, 0.1, 0.1, f"{n} ms", True) for n in (16, 64, 1024, 3000, 4096)]
    marks = pages.by_tokens(rows, (0.0, 0.2), "var(--c2)")
    above = {row["x"]: row["above"] for row in marks["data"]["values"]}
    assert above == {16: True, 64: True, 1024: True, 3000: False, 4096: True}
    svg = pages.draw(marks, "t", "s")
    height = {int(n): float(y) for y, n in re.findall(r'translate\([^,]*,([^)]*)\)"[^>]*>(\d+) ms<', svg)}
    assert len(height) == 5 and height[3000] > height[1024] + 20 == height[4096] + 20


def test_what_comes_from_files_is_text() -> None:
    evil = "<script>alert('x')</script>&\"</title>"
    spec = pages.by_number({evil: [1, 2]}, [0, 1], "layer", evil)
    body = section(
        evil, figure(evil, evil, spec, [evil, evil], [[evil, evil]]), table([evil, "n"], [[evil, 1]])
    )
    made = page(evil, [evil], evil, [evil], [body], {"trace": evil})
    reader = read_page(made)
    assert "<script" not in made and "".join(reader.words).count(evil) >= 8
    assert is_page(made) and not is_page("<!DOCTYPE html><html></html>")


@pytest.mark.slow
def test_the_largest_page_is_below_five_megabytes() -> None:
    """61 layers on 64 ranks: four heat maps of loads, two of rows, no two neighbours alike."""
    draw = np.random.default_rng(0)
    layers, ranks = range(61), range(64)
    parts = []
    for number in range(6):
        values = draw.uniform(0.3, 2.5, (61 if number < 4 else 64, 64))
        names = layers if number < 4 else ranks
        rows = [(name, *(f"{value:.2f}" for value in row)) for name, row in zip(names, values, strict=True)]
        header = "layer", *(f"rank {i}" for i in ranks)
        parts.append(figure(f"heat {number}", "s", pages.heat(values, names, "rank", "layer"), header, rows))
    figures = {"layers": draw.uniform(size=(61, 2, 100)).tolist()}
    made = page("t", ["w"], "h", ["l"], [section("s", *parts)], figures)
    read_page(made)
    assert 1_000_000 < len(made.encode()) < 5_000_000
