"""Experts of published checkpoints: a rank reads its own out of safetensors files, or out of a state."""

from isoload.checkpoints.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
