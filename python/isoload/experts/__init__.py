"""Grouped expert compute: the weights of a rank's slots, copies in slot order, grouped GEMMs."""

from isoload.experts.compute import run_experts
from isoload.experts.weights import Activation, ClampedGLU, ExpertWeights, SwiGLU

__all__ = ["Activation", "ClampedGLU", "ExpertWeights", "SwiGLU", "run_experts"]
