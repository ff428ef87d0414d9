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
    marks = [pytest.mark.slow, pytest.mark.exhaustive]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def first(cases: Sequence[Any], number: int = 1) -> list[Any]:
    """The first cases of a parametrize, the others by :func:`rest`."""
    return [*cases[:number], *rest(*cases[number:])]


def telling(cases: Sequence[pytest.Function]) -> tuple[list[pytest.Function], list[pytest.Function]]:
    """Few cases of one test that hold every value of each of its parameters, and the others. Values that a
    parametrize gives together count as one; where cases tell as much, the one whose values came least often. A test
    marked few(n) has the n first of them."""
    values = {case: frozenset(enumerate(case.callspec._idlist)) for case in cases}
    unseen, times = set().union(*values.values()), Counter[tuple[int, str]]()
    few = cases[0].get_closest_marker("few")
    chosen, others, most = [], list(cases), few.args[0] if few else len(cases)
    while unseen and len(chosen) < most:
        case = max(others, key=lambda one: (len(values[one] & unseen), -sum(times[v] for v in values[one])))
        others.remove(case)
        chosen.append(case)
        unseen -= values[case]
        times.update(values[case])
    return chosen, others


def every() -> int:
    """Every n-th problem of a sweep is drawn: EVERY=1 draws all, as `make test-all` does; on a GPU, where each call of
    an op copies its arguments and waits, bench/gpu_run.py sets more."""
    return int(os.environ.get("EVERY", "4"))


def cut(cases: Iterable[T]) -> Iterator[T]:
    """Every n-th of long loops, see :func:`every`."""
    return islice(cases, 0, None, every())
