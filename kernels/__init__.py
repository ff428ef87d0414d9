"""isoload.kernels: Triton kernels for the token-parallel stages, each with a torch twin that computes the same.

The twins are in isoload.ops.counting and isoload.weights.experts. They call :func:`fit`; only where it is true is
Triton imported, with the module of kernels that is needed.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 1024  # elements, 8 per thread: in half precision one access of 16 bytes per thread and row, in float32 two
MOST_PARTS = 3  # of a sum: copies by home rows, replicas and borrowed ones


def fit(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: in CUDA memory, of DTYPES, where this machine can run Triton.

    Not under torch.compile, which fuses the twins itself, nor where autograd records: kernels leave it no trace, so
    they run inside of autograd's Functions only. Warns once on a machine that has the GPU, but no Triton.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    # A subclass, as fake tensors are, may have no memory that a kernel could read.
    plain = all(t.is_cuda and t.dtype in DTYPES and type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    return plain and _run_here()


@functools.cache
def why_not() -> str | None:
    """Why no Triton kernel runs on this machine; None if they do. Imports Triton, but only beside a CUDA device."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:  # older GPUs have no bfloat16
        return f"they need compute capability 8.0, this device has {major}.{minor}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install 'isoload[triton]'"
    return None


@functools.cache
def _run_here() -> bool:
    reason = why_not()
    if reason is not None:
        warnings.warn(f"isoload's Triton kernels are off, plain torch computes: {reason}", stacklevel=4)
    return reason is None


def tile(width: int) -> dict[str, int]:
    """How kernels cut [rows, width], a tile per program: ROWS and BLOCK (columns), powers of two whose product is TILE.

    Narrow rows share a tile.
    """
    block = min(1 << max(width - 1, 0).bit_length(), TILE)
    return {"ROWS": TILE // block, "BLOCK": block}


def cover(size: int, part: int) -> int:
    """Parts that cover a size."""
    return -(-size // part)
