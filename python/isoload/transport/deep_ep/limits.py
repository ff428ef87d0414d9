"""What DeepEP's buffers can carry, read from their sources, and its check.

The numbers: sgl-deep-ep-v25 0.1.0rc0 ``include/deep_ep/layout/ep/workspace.cuh`` and ``impls/ep/combine.cuh``;
sgl-deep-ep 0.1.2.post1 ``include/deep_ep/common/layout.cuh`` and ``buffers/legacy.py``; DeepEP's
``csrc/kernels/legacy/`` (``compiled.cuh``, ``internode_ll.cu``, ``launch.cuh``), which the wheel has compiled in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a buffer is made for: R ranks, S slots per rank, K choices per token, H columns, C tokens per rank."""

    num_ranks: int
    slots_per_rank: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int

    @property
    def num_slots(self) -> int:
        """P, DeepEP's num_experts."""
        return self.num_ranks * self.slots_per_rank


@dataclass(frozen=True)
class Limits:
    """The largest of each, and what H must divide by; ranks and hidden sizes where only some are compiled in.

    distinct          whether a token's slots must differ: the kernels trap where they do not
    tokens_multiple   what R * C must divide by
    """

    slots_per_rank: int
    num_slots: int
    top_k: int
    num_ranks: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    distinct: bool = False
    tokens_multiple: int = 1

    def check(self, kind: str, shape: Shape) -> None:
        """Raises ValueError for the first limit that the shape passes of a buffer of this kind."""
        for name in ("slots_per_rank", "top_k", "hidden", "max_tokens_per_rank"):
            if getattr(shape, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(shape, name)}")
        for name in ("slots_per_rank", "num_slots", "top_k"):
            if getattr(shape, name) > getattr(self, name):
                what = "ranks x slots_per_rank" if name == "num_slots" else name
                raise ValueError(
                    f"{what} must be at most {getattr(self, name)} for DeepEP's {kind}, got {getattr(shape, name)}"
                )
        if shape.hidden % HIDDEN_MULTIPLE:
            raise ValueError(
                f"hidden must be a multiple of {HIDDEN_MULTIPLE} for DeepEP's {kind}, got {shape.hidden}"
            )
        for name, allowed in (("hidden", self.hidden), ("num_ranks", self.num_ranks)):
            if allowed and getattr(shape, name) not in allowed:
                some = ", ".join(map(str, allowed))
                raise ValueError(
                    f"{name} must be one of {some} for DeepEP's {kind}, got {getattr(shape, name)}"
                )
        rows = shape.num_ranks * shape.max_tokens_per_rank
        if rows % self.tokens_multiple:
            raise ValueError(
                f"ranks x max_tokens_per_rank must be a multiple of {self.tokens_multiple} for DeepEP's {kind}, "
                f"got {rows}"
            )


HIDDEN_MULTIPLE = 256  # a warp of 16-byte vectors of bfloat16, in every combine
_LEGACY_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # those with a tuned config
LIMITS = {
    "EPBuffer": Limits(slots_per_rank=512, num_slots=2048, top_k=32, distinct=True),
    "ElasticBuffer": Limits(slots_per_rank=256, num_slots=2048, top_k=32, distinct=True),
    "Buffer": Limits(slots_per_rank=1024, num_slots=160 * 1024, top_k=32, num_ranks=_LEGACY_RANKS),
    "Buffer, low latency": Limits(
        slots_per_rank=1024,
        num_slots=160 * 1024,
        top_k=16,
        hidden=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
        tokens_multiple=4,
    ),
}
