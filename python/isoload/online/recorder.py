"""Recorder: the loads of all layers, batch by batch, in memory of constant size, as input of ``place``.

Forward only adds to a table on the layer's device, so it can be captured and makes no host wait. When the memory is
full, neighbouring batches are added up, and each later batch spans as many steps as they do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isoload.balancing.counting import count
from isoload.layer.blocks import is_fused
from isoload.traces import Identity, Trace, write_trace
from isoload.transport import Call, Group
from isoload.wording import amount

MOST_EXPERTS = 2**15 - 1  # whose choices are kept as int16


class Recorder:
    """Records loads: set it as ``balancer.recorder``, or :meth:`watch` blocks that isoload does not run.

    Args:
        num_layers: L.
        num_experts: E, the routed experts.
        max_batches: largest number of batches that are kept, an even number.
        device: of the layers' topk_ids.
        layer_ids: [L] the model's own layer numbers. Default: positions 0..L-1 without a statement about the model.
        identity: meaning of layer_ids if they are not the model's own numbers.
        tokens: number of this process's latest tokens, padding included, whose choices are kept too, for placements
            that need them (docs/record-and-place.md); 0 = none. All layers must get the same tokens in the same order:
            no two batches in flight, and no layer that gets other tokens, such as a draft's.
        top_k: K, with tokens: routed experts of a token.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        max_batches: int = 64,
        device: torch.device | str = "cpu",
        layer_ids: Sequence[int] = (),
        identity: Identity | None = None,
        tokens: int = 0,
        top_k: int = 0,
    ) -> None:
        for name, number in (("num_layers", num_layers), ("num_experts", num_experts)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if max_batches < 2 or max_batches % 2:
            raise ValueError(f"max_batches must be even and at least 2, got {max_batches}")
        self.identity = identity or Identity("model" if layer_ids else "order")
        self.layer_ids = tuple(layer_ids) or tuple(range(num_layers))
        if len(set(self.layer_ids)) != num_layers:
            raise ValueError(f"layer_ids must be {num_layers} distinct numbers, got {list(self.layer_ids)}")
        if tokens < 0 or top_k < 0 or (tokens > 0) != (top_k > 0):
            raise ValueError(f"tokens and top_k must both be positive or both 0, got {tokens} and {top_k}")
        if tokens and num_experts > MOST_EXPERTS:
            raise ValueError(
                f"tokens must be 0 with more than {MOST_EXPERTS} experts, got {num_experts} experts"
            )
        self.num_experts, self.max_batches, self.tokens = num_experts, max_batches, tokens
        with torch.inference_mode(False):  # otherwise only inference mode could write them
            shape = num_layers, num_experts
            self._batches = torch.zeros(max_batches, *shape, dtype=torch.int64, device=device)
            self._now = torch.zeros(*shape, dtype=torch.int64, device=device)
            self._layers = list(self._now.unbind())  # views made once
            # Each layer writes its tokens one after another and begins again when its memory is full. Positions are on
            # the device, so that a captured or compiled layer can write.
            self._ids = torch.full((num_layers, tokens, top_k), -1, dtype=torch.int16, device=device)
            self._positions = torch.zeros(num_layers, dtype=torch.int64, device=device)  # tokens so far
        self._sources: dict[int, weakref.ref[object]] = {}
        self.top_k = 0  # K of the latest tokens, 0 = none yet: the K by which a replay draws
        self.clear()

    def __repr__(self) -> str:
        sizes = amount(self.num_layers, "layer"), amount(self.num_experts, "expert")
        batches = amount(self.num_batches, "batch", "batches")
        return f"Recorder({', '.join(sizes)}, {batches} of at most {self.max_batches})"

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def clear(self) -> None:
        """Clear all batches. The memory keeps its address, so captured graphs stay valid."""
        self._now.zero_()
        self._positions.zero_()
        self.num_batches, self.steps_per_batch, self._steps = 0, 1, 0

    def add(
        self,
        layer: int,
        counts: Sequence[Tensor],
        source: object,
        top_k: int = 0,
        ids: Sequence[Tensor] = (),
    ) -> None:
        """Add the copies of a batch, or of a part of one, in the layer at a position.

        Args:
            counts: [E] integers or longer, shared experts after the routed ones, of every owned rank.
            source: the layer that counts, so that two layers of one position are detected.
            top_k: K, the routed experts of a token; 0 = unknown.
            ids: [T, K] integers of every owned rank, the choices of its tokens, in front of columns of shared experts.
                Read with ``tokens`` only.
        """
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer must be in 0..{len(self._layers) - 1}, got {layer}")
        if not torch.compiler.is_compiling():
            self._check_source(layer, source)
        self.top_k = top_k  # not read here: compiled code would be recompiled once it is known
        for row in counts:
            if len(row) < self.num_experts or row.device != self._now.device:
                raise ValueError(
                    f"counts must be [{self.num_experts}] on {self._now.device}, got [{len(row)}] on {row.device}"
                )
        if self.tokens:
            self._check_choices(top_k, ids)
        for row in counts:
            self._layers[layer].add_(row[: self.num_experts])
        if self.tokens:
            self._keep_choices(layer, ids)

    def _check_choices(self, top_k: int, ids: Sequence[Tensor]) -> None:
        expected = self._ids.shape[2]
        if not len(ids):
            raise ValueError("ids must be given to a recorder with tokens, got none")
        for rows in ids:
            if rows.dim() != 2 or (top_k or rows.shape[1]) != expected or rows.shape[1] < expected:
                routed = f", {top_k} of them routed" if top_k else ""
                raise ValueError(
                    f"ids must be [T, {expected}], the recorder's top_k, got {list(rows.shape)}{routed}"
                )

    def _keep_choices(self, layer: int, ids: Sequence[Tensor]) -> None:
        rows = torch.cat([rank[:, : self._ids.shape[2]] for rank in ids])
        latest, position = rows[-self.tokens :], self._positions.select(0, layer)
        latest = torch.where((latest >= 0) & (latest < self.num_experts), latest, -1).to(self._ids.dtype)
        # If more tokens come than fit, the last ones are written to where they would be after all others.
        first = position + (len(rows) - len(latest))
        places = (first + torch.arange(len(latest), device=rows.device)) % self.tokens
        self._ids.select(0, layer).index_copy_(0, places, latest)
        position.add_(len(rows))

    def _check_source(self, layer: int, source: object) -> None:
        before = self._sources.get(layer, lambda: None)()
        if before is None:
            self._sources[layer] = weakref.ref(source)
        elif before is not source:
            raise ValueError(
                f"layer {layer} must be recorded by one layer of the model, got a second: give each its position"
            )

    def watch(self, block: nn.Module, layer: int) -> RemovableHandle:
        """Record a Hugging Face block that isoload does not run, until the handle's ``remove()``.

        transformers calls its experts with (hidden_states, top_k_index, top_k_weights).
        """
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module) or not is_fused(experts):
            raise ValueError(
                f"block must have experts that transformers fuses, got {type(block).__name__} with "
                f"{type(experts).__name__}: set balancer.recorder of a layer that isoload runs"
            )

        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            ids = named["top_k_index"] if "top_k_index" in named else args[1]
            self.add(layer, [count(ids, self.num_experts)], module, ids.shape[-1], [ids.flatten(0, -2)])

        record.watches = layer  # type: ignore[attr-defined]  # for check_unwatched
        return experts.register_forward_pre_hook(record, with_kwargs=True)

    def step(self) -> None:
        """End a batch. Call it after all layers have run, on every rank. The host does not wait."""
        self._steps += 1
        if self._steps < self.steps_per_batch:
            return
        if self.num_batches == self.max_batches:
            half = self.max_batches // 2
            self._batches[:half].copy_(self._batches[0::2] + self._batches[1::2])
            self.num_batches, self.steps_per_batch = half, 2 * self.steps_per_batch
            return  # the current batch is half of a longer one now
        self._batches[self.num_batches].copy_(self._now)
        self._now.zero_()
        self.num_batches, self._steps = self.num_batches + 1, 0

    def skip(self) -> None:
        """End a batch without keeping it; call it in place of :meth:`step`."""
        if self.tokens:
            raise ValueError(
                f"skip must come without tokens, whose choices are kept already, got {self.tokens}"
            )
        self._now.zero_()

    def counts(self, group: Group | None = None) -> Tensor:
        """Return [batches, L, E] int64 copies on the host, summed over all ranks of a group, which call it together.

        The result is a copy, which a thread may read. Without a group: the records of this process, which are complete
        if ranks hold the same tokens or the process owns every rank. All ranks raise if they recorded different numbers
        of batches.
        """
        recorded = self._batches[: self.num_batches]
        if group is None or len(group.ranks) == group.topology.num_ranks:
            return recorded.to("cpu", copy=True)
        names = ("batches recorded", "steps per batch", "layers", "experts", "top_k of recorded tokens")
        numbers = self.num_batches, self.steps_per_batch, *self._now.shape, self._ids.shape[2]
        facts = zip(names, numbers, strict=True)
        Call(group, device=self._now.device, facts=dict(facts)).agree("recorded loads")
        nothing = [torch.zeros_like(recorded[0].flatten())] * (len(group.ranks) - 1) if len(recorded) else []
        sums = [group.gather("recorded loads", [b.flatten(), *nothing]).sum(0).view_as(b) for b in recorded]
        return torch.stack(sums).cpu() if sums else recorded.to("cpu", copy=True)

    def choices(self, group: Group | None = None) -> Tensor:
        """Return [tokens, L, K] int32 choices of the latest tokens on the host, a rank's oldest first, -1 = masked.

        With a group: of all ranks, one after another; all ranks call it together. Tokens that are masked in every layer
        are left out, and an expert that a token chose twice is listed once.

        Raises:
            ValueError: on all ranks, if a rank's layers have seen different numbers of tokens.
        """
        if group is None or len(group.ranks) == group.topology.num_ranks:
            return self._own_choices()
        with group.agreeing("recorded tokens") as facts:
            choices = self._own_choices()
            facts["layers, top_k of recorded tokens"] = tuple(choices.shape[1:])
        return torch.cat(group.gather_objects("recorded tokens", choices))

    def _own_choices(self) -> Tensor:
        positions = self._positions.tolist()
        if len(set(positions)) > 1:
            numbers = ", ".join(f"{number} of layer {layer}" for layer, number in enumerate(positions))
            raise ValueError(f"tokens must be the same in all layers, got {numbers}: record with tokens=0")
        end = positions[0]
        places = torch.arange(max(0, end - self.tokens), end, device=self._ids.device) % max(1, self.tokens)
        choices = self._ids[:, places].transpose(0, 1).to("cpu", torch.int32)
        repeats = (choices.unsqueeze(3) == choices.unsqueeze(2)).tril(-1).any(3)  # known routes may have them
        choices = choices.masked_fill(repeats, -1)
        return choices[(choices >= 0).flatten(1).any(1)]

    def trace(self, group: Group | None = None, name: str = "recorded") -> Trace:
        """Return the complete batches with copies as a trace, and :meth:`choices` if they are recorded."""
        counts = self.counts(group)
        counts = counts[counts.flatten(1).any(1)]
        if not len(counts):
            raise ValueError(
                "trace must have at least one batch with copies: call step() after each, got none"
            )
        provenance = {"recorded by": "isoload.Recorder", "steps per batch": self.steps_per_batch}
        more: dict[str, Any] = {"layer_ids": self.layer_ids, "identity": self.identity}
        if self.tokens and len(choices := self.choices(group)):
            more["topk_ids"] = choices.numpy()
        return Trace(name, self.num_experts, self.top_k, counts.numpy(), provenance=provenance, **more)

    def save(self, path: str | Path, group: Group | None = None) -> None:
        """Write the trace as .npz; every process of the group calls it, the first one writes."""
        trace = self.trace(group)
        if group is None or group.ranks[0] == 0:
            write_trace(trace, path)
