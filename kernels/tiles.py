"""How the kernels cut [rows, width] into tiles: one per program, 1024 elements, 8 per thread.

In half precision that is one access of 16 bytes per thread and row, in float32 two. Narrow rows share a tile.
"""

from __future__ import annotations

TILE = 1024


def tile(width: int) -> dict[str, int]:
    """ROWS and BLOCK (columns) of a tile: powers of two whose product is TILE."""
    block = min(1 << max(width - 1, 0).bit_length(), TILE)
    return {"ROWS": TILE // block, "BLOCK": block}


def cover(size: int, part: int) -> int:
    """Parts that cover a size."""
    return -(-size // part)
