"""The settings of bench_dispatch: layer shapes, phases, a scale; every line's placement and policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import isoload
from isoload.policies import Policy, make_policy

MIN_CHUNK = 1024  # of llep, as published; divided like the tokens
ROW_MULTIPLE = 8  # columns: rows of 16 bytes, which grouped GEMMs want
H100_FLOPS = 600e12  # in bfloat16, a large GEMM: by this spill_cost prices an import


@dataclass(frozen=True)
class Shape:
    """A layer at full size: E experts of width H and intermediate width I, top-K, and shared experts as wide."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared: int = 0


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("DeepSeek-V3", 7168, 2048, 256, 8, 1),
        Shape("Qwen3-235B", 4096, 1536, 128, 8),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4),
    )
}
PHASES = {"decode": 128, "prefill": 4096}  # tokens per rank


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One layer in one phase on R ranks.

    scale: by which widths, and the tokens of a prefill, are divided; experts, top-K and a decode's tokens stay.
    full_tokens: of a rank, before scaling; None = the phase's.
    """

    shape: Shape
    phase: str
    ranks: int
    ranks_per_node: int
    scale: int = 1
    dtype: torch.dtype = torch.bfloat16
    full_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Of a rank."""
        full = self.full_tokens or PHASES[self.phase]
        return full if self.phase == "decode" else max(1, full // self.scale)

    @property
    def hidden(self) -> int:
        return self._scaled(self.shape.hidden)

    @property
    def intermediate(self) -> int:
        return self._scaled(self.shape.intermediate)

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * self.dtype.itemsize

    @property
    def topology(self) -> isoload.Topology:
        return isoload.Topology(self.ranks, self.ranks_per_node)

    def facts(self) -> dict[str, Any]:
        """What every row of the results says of its setting."""
        shape = self.shape
        return {
            "shape": shape.name,
            "phase": self.phase,
            "ranks": self.ranks,
            "ranks_per_node": self.ranks_per_node,
            "tokens_per_rank": self.tokens,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "shared_experts": shape.shared,
            "dtype": str(self.dtype).removeprefix("torch."),
            "scale": self.scale,
        }

    def _scaled(self, width: int) -> int:
        return max(1, width // self.scale // ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True)
class Line:
    """A line of the table: who plans, and in which room: see :func:`make_placement`."""

    policy: str
    room: str
    needs_shared: bool = False


NO_BALANCE = Line("none", "plain")
LINES = {
    line.policy: line
    for line in (
        NO_BALANCE,
        Line("static", "replicas"),
        Line("dynamic", "replicas"),
        Line("lp", "replicas"),
        Line("exact", "replicas"),
        Line("waterfill", "replicas", needs_shared=True),
        Line("joint", "replicas", needs_shared=True),
        Line("llep", "spare"),
        Line("spill_cost", "spare"),
        Line("libra", "spare"),
        Line("hedge", "spare"),
        Line("grace", "grace"),
    )
}


def why_not(line: Line, setting: Setting) -> str | None:
    """Why a setting has no such line; None = it has."""
    if line.needs_shared and not setting.shape.shared:
        return f"{setting.shape.name} has no shared expert"
    if line.room != "plain" and setting.ranks == 1:
        return "one rank has nothing to balance"
    return None


def make_placement(setting: Setting, room: str, seen: isoload.traces.Trace | Any) -> isoload.Placement:
    """Where the experts lie.

    plain: in order, one slot each. replicas: placer `eplb`, one slot more for every eight of a rank's, at least one.
    spare: in order, and as many spare slots. grace: placer `grace`, as many slots as it wants. Shared experts on top.

    Args:
        setting: the layer.
        room: of these.
        seen: the routing that it may be made from, a Trace or counts [batches, 1, E].

    Raises:
        ValueError: the placer cannot use what was seen.
        ImportError: it lacks a library.
    """
    topology, shared = setting.topology, setting.shape.shared
    own = -(-setting.shape.experts // setting.ranks)
    more = max(1, own // 8)
    if room == "grace":
        return isoload.place(seen, topology, placer="grace", num_shared=shared)
    if room == "plain":
        return isoload.place(seen, topology, placer="trivial", num_shared=shared)
    size = own + more + shared
    if room == "spare":
        return isoload.place(seen, topology, size, placer="trivial", spare_slots=more, num_shared=shared)
    return isoload.place(seen, topology, size, placer="eplb", num_shared=shared)


def policy_of(line: Line, setting: Setting) -> Policy:
    """With chunks, and what an import costs in copies, scaled like a prefill's tokens."""
    shrunk = (setting.full_tokens or PHASES[setting.phase]) // setting.tokens
    options: dict[str, dict[str, Any]] = {
        "llep": {"min_chunk": max(1, MIN_CHUNK // shrunk)},
        "spill_cost": {
            "expert_bytes": setting.expert_bytes / shrunk,
            "token_us": 6e6 * setting.hidden * setting.intermediate / H100_FLOPS,
            "min_chunk": max(1, 256 // shrunk),
        },
    }
    return make_policy(line.policy, options.get(line.policy, {}))
