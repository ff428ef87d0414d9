"""The values of quantised weights, one number at a time, in NumPy: exact, in float64.

e4m3, e2m1 and e8m0 from their bits, OCP Microscaling Formats (MX) v1.0; NVFP4's two scales from NVIDIA's definition.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

BLOCKS = {"fp8": (128, 128), "MXFP8": (1, 32), "MXFP4": (1, 32), "NVFP4": (1, 16)}


@cache
def e4m3(byte: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; all ones is no number, there are no infinities."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@cache
def e2m1(code: int) -> float:
    """Sign, two bits of exponent with bias 1, one of mantissa; all are numbers."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


@cache
def e8m0(byte: int) -> float:
    """A power of two with bias 127, from 2**-127 on; 255 is no number."""
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def dequantise(
    name: str, weight: NDArray[np.uint8], scale: NDArray[np.generic], second: list[float]
) -> NDArray[np.float64]:
    """[out, in] of one matrix.

    Args:
        name: of the format.
        weight: [out, in], or [out, in / 2] of two e2m1, the lower four bits first.
        scale: [blocks of out, blocks of in]: float32 in fp8, else bytes.
        second: NVFP4's scale of the matrix; equal parts of out may have one each. None in other formats.
    """
    packed = name in ("MXFP4", "NVFP4")
    out, columns = weight.shape[0], weight.shape[1] * (2 if packed else 1)
    rows, width = BLOCKS[name]
    values = np.empty((out, columns))
    for i in range(out):
        for j in range(columns):
            if packed:
                byte = int(weight[i, j // 2])
                value = e2m1(byte >> 4 if j % 2 else byte & 15)
            else:
                value = e4m3(int(weight[i, j]))
            of_block = scale[i // rows, j // width]
            if name == "fp8":
                value *= float(of_block)
            else:
                value *= e4m3(int(of_block)) if name == "NVFP4" else e8m0(int(of_block))
            for part, other in enumerate(second):
                if i * len(second) // out == part:
                    value *= other
            values[i, j] = value
    return values
