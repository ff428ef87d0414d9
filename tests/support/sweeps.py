"""Sweeps in two sizes: few cases in `make test`, all of them in `make test-all`; the longest loops cut on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sweep(name: str, short: int, whole: int) -> pytest.MarkDecorator:
    """Runs a test with ``name`` at both sizes, the whole one as a slow test."""
    return pytest.mark.parametrize(name, [short, *slow(whole)])


def slow(*cases: Any) -> list[Any]:
    """Slow cases of a parametrize, or tuples of them."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def slow_beyond(cases: Sequence[Any], number: int = 1) -> list[Any]:
    """The cases of a parametrize, slow from a number on."""
    return [*cases[:number], *slow(*cases[number:])]


def every() -> int:
    """Every n-th problem of a sweep is drawn: EVERY=1 draws all, as `make test-all` does; on a GPU, where each call of
    an op copies its arguments and waits, bench/gpu_run.py sets more."""
    return int(os.environ.get("EVERY", "4"))


def cut(cases: Iterable[T]) -> Iterator[T]:
    """Every n-th of long loops, see :func:`every`."""
    return islice(cases, 0, None, every())
