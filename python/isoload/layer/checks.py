"""What a layer's construction refuses, and the text by which ranks compare their activations."""

from __future__ import annotations

from isoload.experts.weights import Activation, ClampedGLU, ExpertWeights, SwiGLU
from isoload.placement import Placement
from isoload.transport import Group


def check_parts(dense: ExpertWeights, group: Group, placement: Placement, min_tokens: int) -> None:
    if dense.num_slots != placement.num_experts:
        raise ValueError(
            f"dense must hold num_experts={placement.num_experts} experts, got {dense.num_slots}"
        )
    if placement.topology.num_ranks != group.topology.num_ranks:
        raise ValueError(
            f"placement must be for the transport's {group.topology.num_ranks} ranks, "
            f"got {placement.topology.num_ranks}"
        )
    if min_tokens < 0:
        raise ValueError(f"min_tokens must be at least 0, got {min_tokens}")


def name_of(activation: Activation) -> str:
    """The same text on all ranks for the same activation; a function of the caller's own is compared by its name."""
    if isinstance(activation, SwiGLU | ClampedGLU):
        return repr(activation)
    return str(getattr(activation, "__qualname__", type(activation).__qualname__))
