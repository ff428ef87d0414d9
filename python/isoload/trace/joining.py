"""Several traces as one: batches of the same layers, or layers of the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isoload.traces.identity import joined, matching_rows
from isoload.traces.record import Ints, Trace


def same_layers(first: Trace, other: Trace) -> Trace:
    """Return the other trace with the layers of the first, in its order and numbering.

    Raises:
        ValueError: the two are of different models, layers or numbers of experts.
    """
    names = f"trace {first.name}", f"trace {other.name}"
    if first.num_experts != other.num_experts:
        raise ValueError(
            f"num_experts must agree in all traces, {first.name} has {first.num_experts}, "
            f"{other.name} {other.num_experts}"
        )
    rows = matching_rows(first.identity, first.layer_ids, names[0], other.identity, other.layer_ids, names[1])
    if len(rows) < other.num_layers:
        raise ValueError(
            f"layers must agree in all traces, {names[0]} has {first.identity.describe(first.layer_ids)}, "
            f"{names[1]} has {other.identity.describe(other.layer_ids)}"
        )
    identity = joined(first.identity, other.identity, *names)
    return replace(other.select_layers(rows), layer_ids=first.layer_ids, identity=identity)


def join_batches(traces: Sequence[Trace], name: str) -> Trace:
    """Return one trace with the batches of all, one after the other; each recording is a cluster of its own.

    Per-token choices are kept where every trace has them.

    Raises:
        ValueError: different models, layers, experts or top_k.
    """
    first = traces[0]
    if len(traces) == 1:
        return first
    known = sorted({trace.top_k for trace in traces} - {0})
    if len(known) > 1:
        raise ValueError(f"top_k must agree in all traces, got {known}")
    parts = [first, *(same_layers(first, trace) for trace in traces[1:])]
    identity = first.identity
    for part in parts[1:]:
        identity = joined(identity, part.identity, f"trace {first.name}", f"trace {part.name}")
    fields: dict[str, Any] = {"counts": np.concatenate([part.batch_counts() for part in parts])}
    tokens = [_tokens_per_batch(part) for part in parts]
    if all(batches is not None for batches in tokens):
        fields["tokens_per_batch"] = np.concatenate([batches for batches in tokens if batches is not None])
    if all(part.topk_ids is not None and part.topk_ids.shape[2] == first.top_k for part in parts):
        fields["topk_ids"] = np.concatenate([part.topk_ids for part in parts if part.topk_ids is not None])
        fields["seq_id"] = _sequences(parts)
    labels = [part.cluster or [str(number)] * part.num_batches for number, part in enumerate(parts)]
    return Trace(
        name,
        first.num_experts,
        known[0] if known else 0,
        cluster=tuple(label for batches in labels for label in batches),
        layer_ids=first.layer_ids,
        provenance={"recordings": [{"name": part.name, **part.provenance} for part in parts]},
        identity=identity,
        **fields,
    )


def _tokens_per_batch(trace: Trace) -> Ints | None:
    if trace.tokens_per_batch is None and trace.counts is None and trace.topk_ids is not None:
        return np.array([len(trace.topk_ids)])
    return trace.tokens_per_batch


def _sequences(parts: Sequence[Trace]) -> Ints | None:
    """[tokens] distinct sequences in distinct traces; None where some trace does not know its own."""
    joined_ids, start = [], 0
    for part in parts:
        if part.seq_id is None:
            return None
        joined_ids.append(part.seq_id - part.seq_id.min() + start)
        start = int(joined_ids[-1].max()) + 1
    return np.concatenate(joined_ids)


def join_stages(traces: Sequence[Trace], name: str) -> Trace:
    """Return one trace with the layers of all stages of a pipeline, each with counts of the same batches.

    Args:
        traces: stages in the order of the pipeline; layers that have the model's own numbers keep them.
        name: of the new trace.

    Raises:
        ValueError: stages that recorded different numbers of batches, experts or top_k.
    """
    first = traces[0]
    for trace in traces[1:]:
        for what in ("num_experts", "num_batches"):
            one, other = getattr(first, what), getattr(trace, what)
            if one != other:
                raise ValueError(
                    f"{what} must agree in all stages, {first.name} has {one}, {trace.name} has {other}: "
                    "give the files of one recording, one file per stage"
                )
        joined(first.identity, trace.identity, f"trace {first.name}", f"trace {trace.name}")
    counts = np.concatenate([trace.batch_counts() for trace in traces], axis=1)
    layers = np.arange(counts.shape[1])
    for trace in traces:
        if trace.identity.numbering != "model" and trace.layer_ids != tuple(range(trace.num_layers)):
            raise ValueError(
                f"a stage must have a row for each of its MoE layers, trace {trace.name} has "
                f"{trace.identity.describe(trace.layer_ids)}"
            )
    if first.identity.numbering == "model":
        numbers = np.array([layer for trace in traces for layer in trace.layer_ids])
        order = numbers.argsort()
        counts, layers = counts[:, order], numbers[order]
    return Trace(
        name,
        first.num_experts,
        first.top_k,
        counts=counts,
        layer_ids=tuple(layers.tolist()),
        provenance={**first.provenance, "stages": [trace.name for trace in traces]},
        identity=first.identity,
    )
