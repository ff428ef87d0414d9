"""What DeepEP's buffers can carry, read from their sources, and its check.

The numbers: sgl-deep-ep-v25 0.1.0rc0 ``include/deep_ep/layout/ep/workspace.cuh`` and ``impls/ep/combine.cuh``;
sgl-deep-ep 0.1.2.post1 ``include/deep_ep/common/layout.cuh`` and ``buffers/legacy.py``; DeepEP's
``csrc/kernels/legacy/`` (``compiled.cuh``, ``intranode.cu``, ``internode.cu``, ``internode_ll.cu``, ``launch.cuh``),
which the wheel has compiled in.
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
    """The largest of each; ranks and hidden sizes where only some are compiled in.

    between_nodes     slots_per_rank over more ranks than NODE
    most_hidden       H: a warp's share of a row must fit into its shared memory
    distinct          whether a token's slots must differ: the kernels trap where they do not
    tokens_multiple   what R * C must divide by
    """

    slots_per_rank: int
    num_slots: int
    top_k: int
    between_nodes: int = 1024
    most_hidden: int = 2**31 - 1
    num_ranks: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    distinct: bool = False
    tokens_multiple: int = 1

    def check(self, kind: str, shape: Shape) -> None:
        """Raises ValueError for the first limit that the shape passes of a buffer of this kind."""
        for name in ("slots_per_rank", "top_k", "hidden", "max_tokens_per_rank"):
            if getattr(shape, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(shape, name)}")
        slots = (
            self.slots_per_rank if shape.num_ranks <= NODE else min(self.slots_per_rank, self.between_nodes)
        )
        for name, given, most in (
            ("slots_per_rank", shape.slots_per_rank, slots),
            ("ranks x slots_per_rank", shape.num_slots, self.num_slots),
            ("top_k", shape.top_k, self.top_k),
            ("hidden", shape.hidden, self.most_hidden),
        ):
            if given > most:
                raise ValueError(f"{name} must be at most {most} for DeepEP's {kind}, got {given}")
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


NODE = 8  # ranks that Buffer joins by NVLink
HIDDEN_MULTIPLE = 256  # a warp of 16-byte vectors of bfloat16, in every combine
_LEGACY_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # those with a tuned config
LIMITS = {
    "EPBuffer": Limits(slots_per_rank=512, num_slots=2048, top_k=32, distinct=True),
    "ElasticBuffer": Limits(slots_per_rank=256, num_slots=2048, top_k=32, distinct=True),
    "Buffer": Limits(
        slots_per_rank=128,
        num_slots=160 * 64,
        top_k=32,
        between_nodes=64,
        most_hidden=7936,
        num_ranks=_LEGACY_RANKS,
    ),
    "Buffer, low latency": Limits(
        slots_per_rank=1024,
        num_slots=14 * 132,  # fewer than 15 for each multiprocessor, which an H100 has 132 of
        top_k=11,
        hidden=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
        tokens_multiple=4,
    ),
}
