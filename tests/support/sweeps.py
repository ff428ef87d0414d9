"""Sweeps in two sizes: few cases in `make test`, all of them in `make test-all`; the longest loops cut on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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


def cut(cases: Iterable[T]) -> Iterator[T]:
    """Every n-th with EVERY=n in the environment, as bench/gpu_run.py sets it: there each call of an op copies its
    arguments to the GPU and waits."""
    return islice(cases, 0, None, int(os.environ.get("EVERY", "1")))
