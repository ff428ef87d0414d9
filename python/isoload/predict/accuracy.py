"""How often a predictor is right, per expert and token."""

from __future__ import annotations

import numpy as np
import torch

from isoload.balancing.prediction import tokens_of
from isoload.predict.linear import Linear
from isoload.predict.path_table import PathTable
from isoload.traces import Trace


def accuracy(predictor: Linear | PathTable, trace: Trace) -> list[float]:
    """For layers 1.., the part of the true choices of a trace's tokens that are among the K predicted."""
    chosen = tokens_of(trace)
    if (predictor.num_layers, predictor.num_experts) != (trace.num_layers, trace.num_experts):
        raise ValueError(
            f"predictor must be of {trace.num_layers} layers and {trace.num_experts} experts as the trace, "
            f"got {predictor.num_layers} and {predictor.num_experts}"
        )
    found = []
    for layer in range(1, trace.num_layers):
        near = torch.from_numpy(np.ascontiguousarray(chosen[:, :layer][:, ::-1]))
        if isinstance(predictor, Linear):
            guessed = predictor.choose(layer, near, chosen.shape[-1])
        else:
            guessed = predictor.choose(layer, near)
        hits = (torch.from_numpy(chosen[:, layer])[:, :, None] == guessed[:, None, :]).any(-1)
        found.append(float(hits.double().mean()))
    return found
