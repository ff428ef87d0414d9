"""Sweeps in two sizes: few cases in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import pytest


def sweep(name: str, few: int, whole: int) -> pytest.MarkDecorator:
    """Runs a test with ``name`` at both sizes."""
    marks = [pytest.mark.slow, pytest.mark.exhaustive]
    return pytest.mark.parametrize(name, [few, pytest.param(whole, marks=marks)])
