"""Fit the constants of isoload.times to measured points by robust least squares; needs SciPy.

``isoload measure`` fits the points of one machine, bench/fit_times.py the tables of public measurements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from isoload.times.exchanges import Curve
from isoload.times.experts import kernel_us

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SOFT = 0.05  # relative errors from here on weigh linearly: a stray row does not bend a fit
# Of a, b, c, rho (microseconds) and p - 1. What a fit cannot tell stays where it starts.
LEAST, MOST = (1e-2, 1e-4, 1e-6, 1e-7, 0.02), (3e3, 3e2, 10.0, 1.0, 10.0)


def features(loads: Ints, tile: int) -> tuple[Floats, Floats]:
    """Return [...] the slots with copies, and the copies after each slot's are rounded up to a tile."""
    return (loads > 0).sum(-1).astype(np.float64), (-(-loads // tile) * tile).sum(-1).astype(np.float64)


def fit_kernel(
    loads: list[Ints],
    rows: Floats,
    us: Floats,
    tile: int,
    with_rows: bool = True,
    soft: float = SOFT,
    slower: float = 1.0,
) -> tuple[list[float], Floats]:
    """Return a, b, c, rho, p of kernel_us and the relative error of every point; without rows rho is 0.

    slower: how many times the device is slower than the GPUs that starts and bounds are about, at least 1.
    """
    active, padded = map(np.array, zip(*(features(each, tile) for each in loads), strict=True))

    def constants(x: Floats) -> tuple[float, float, float, float, float]:
        a, b, c, rho, p = np.exp(x).tolist()
        return a, b, c, rho if with_rows else 0.0, 1 + p

    def errors(x: Floats) -> Floats:
        logs: Floats = np.log(kernel_us(*constants(x), active, padded, rows) / us)
        return logs

    best: Any = None
    for rho in (1e-3, 6e-3):
        for p in (0.3, 2.0):
            start = np.log([max(us.min() / 2, 1.0), 5.0 * slower, 0.05 * slower, rho * slower, p])
            most = np.log(MOST) + np.log([slower, slower, slower, slower, 1.0])
            tried = least_squares(errors, start, loss="soft_l1", f_scale=soft, bounds=(np.log(LEAST), most))
            best = tried if best is None or tried.cost < best.cost else best
    return list(constants(best.x)), np.expm1(errors(best.x))


def fit_curve(tokens: Floats, us: Floats) -> tuple[list[float], Floats]:
    """Return a, s, q of a Curve and the relative error of every point."""

    def errors(x: Floats) -> Floats:
        result: Floats = np.log(Curve(*np.exp(x))(tokens) / us)
        return result

    start = np.log([us.min(), us[-1] / tokens[-1], 1.5])
    # A power beyond these makes a curve that points do not tell from one at the bound.
    bounds = ([-np.inf, -np.inf, np.log(0.3)], [np.inf, np.inf, np.log(6.0)])
    result = least_squares(errors, start, loss="soft_l1", f_scale=SOFT, bounds=bounds)
    return list(np.exp(result.x)), np.expm1(errors(result.x))
