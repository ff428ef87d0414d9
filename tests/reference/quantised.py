"""The values of quantised weights in NumPy, each number from its bits: exact, in float64.

e4m3, e2m1 and e8m0 from their bits, OCP Microscaling Formats (MX) v1.0; NVFP4's two scales from NVIDIA's definition.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCKS = {"fp8": (128, 128), "MXFP8": (1, 32), "MXFP4": (1, 32), "NVFP4": (1, 16)}


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; all ones is no number, there are no infinities."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def e2m1(code: int) -> float:
    """Sign, two bits of exponent with bias 1, one of mantissa; all are numbers."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


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
    if name in ("MXFP4", "NVFP4"):
        pairs = np.array([[e2m1(byte & 15), e2m1(byte >> 4)] for byte in range(256)])
        values = pairs[weight].reshape(len(weight), -1)
    else:
        values = np.array([e4m3(byte) for byte in range(256)])[weight]
    if name == "fp8":
        scales = scale.astype(np.float64)
    else:
        scales = np.array([(e4m3 if name == "NVFP4" else e8m0)(byte) for byte in range(256)])[scale]
    rows, width = BLOCKS[name]
    out, columns = values.shape
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            values[i * rows : (i + 1) * rows, j * width : (j + 1) * width] *= scales[i, j]
    for part, other in enumerate(second):
        values[part * out // len(second) : (part + 1) * out // len(second)] *= other
    assert scales.shape == (-(-out // rows), -(-columns // width))
    return values
