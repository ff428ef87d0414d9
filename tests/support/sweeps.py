"""Sweeps in two sizes: few cases in `make test`, all of them in `make test-all`; the longest loops cut on a GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sweep(name: str, few: int, whole: int) -> pytest.MarkDecorator:
    """Runs a test with ``name`` at both sizes."""
    return pytest.mark.parametrize(name, [few, *rest(whole)])


def rest(*cases: Any) -> list[Any]:
    """Cases of a parametrize, or tuples of them, that `make test-all` runs beside the telling ones of `make test`."""
    return _marked(cases, pytest.mark.slow, pytest.mark.exhaustive)


def first(cases: Sequence[Any], number: int = 1) -> list[Any]:
    """The first cases of a parametrize for `make test`, the others for the gate."""
    return [*cases[:number], *_marked(cases[number:], pytest.mark.slow)]


def _marked(cases: Sequence[Any], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def mark_by_size(cases: Sequence[pytest.Function]) -> None:
    """Of one test's cases few hold every value of each of its parameters; all others are exhaustive. Of the few those
    beyond n are slow where the test is marked few(n). Values that a parametrize gives together count as one; where
    cases tell as much, the one comes whose values came least often."""
    values = {case: frozenset(enumerate(case.callspec._idlist)) for case in cases}
    unseen, times = set().union(*values.values()), Counter[tuple[int, str]]()
    chosen, others = [], list(cases)
    while unseen:
        case = max(others, key=lambda one: (len(values[one] & unseen), -sum(times[v] for v in values[one])))
        others.remove(case)
        chosen.append(case)
        unseen -= values[case]
        times.update(values[case])
    few = cases[0].get_closest_marker("few")
    for case in others + (chosen[few.args[0] :] if few else []):
        case.add_marker(pytest.mark.slow)
    for case in others:
        case.add_marker(pytest.mark.exhaustive)


def every() -> int:
    """Every n-th problem of a sweep is drawn: EVERY=1 draws all, as `make test-all` does; on a GPU, where each call of
    an op copies its arguments and waits, bench/gpu_run.py sets more."""
    return int(os.environ.get("EVERY", "4"))


def cut(cases: Iterable[T]) -> Iterator[T]:
    """Every n-th of long loops, see :func:`every`."""
    return islice(cases, 0, None, every())
