"""transformers: its expert parallelism, with isoload as the exchange of tokens.

A model loaded with ``DistributedConfig(..., ep_implementation="isoload")`` after :func:`register` runs its experts
through one isoload layer per experts module. The weights stay the DTensors that transformers sharded, gradients reach
them, and nothing is copied except borrowed experts.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoload.files import open_regular
from isoload.layer import MoE, clip_grad_norm_, ignore_in_ddp, load, save
from isoload.layer.blocks import check_fused, fused_activation, fused_stacks, no_gate
from isoload.layer.pretrained import save_pretrained, unwrapped, whole_state
from isoload.placers import place
from isoload.policies import Policy, make_policy
from isoload.topology import Topology
from isoload.transport import CollectiveTransport
from isoload.weights.shard import Shard


@dataclass(eq=False)
class Settings:
    """Settings that all layers of one registered name share; see :func:`register`."""

    policy: Policy
    spare_slots: int
    ranks_per_node: int
    transports: dict[Any, CollectiveTransport] = field(default_factory=dict)

    def transport(self, group: Any, num_ranks: int) -> CollectiveTransport:
        if group not in self.transports:
            self.transports[group] = CollectiveTransport(Topology(num_ranks, self.ranks_per_node), group)
        return self.transports[group]


_IN_USE: weakref.WeakKeyDictionary[nn.Module, BalancedExperts] = weakref.WeakKeyDictionary()


def register(
    name: str = "isoload",
    *,
    policy: str | Policy = "llep",
    spare_slots: int = 2,
    ranks_per_node: int = 0,
    **options: Any,
) -> None:
    """Add an ``ep_implementation`` to transformers. Call it on every rank before a model is loaded.

    Args:
        name: for ``DistributedConfig(ep_implementation=name)``.
        policy: one that borrows ("llep", "spill_cost"), a name or a Policy; ranks have their own experts, no replicas.
        spare_slots: experts that a rank can borrow at a time.
        ranks_per_node: of the expert-parallel group; 0 = all ranks on one node.
        **options: the policy's, e.g. min_chunk.

    Raises:
        ImportError: transformers has no expert parallelism that can be extended (5.23 has).
    """
    from transformers.distributed.expert_parallel import EPImplementationInterface

    chosen = make_policy(policy, options)
    if not chosen.borrows:
        raise ValueError(f"policy must borrow experts (llep, spill_cost), got {policy!r}")
    if spare_slots < 1:
        raise ValueError(f"spare_slots must be at least 1, got {spare_slots}")
    settings = Settings(chosen, spare_slots, ranks_per_node)
    EPImplementationInterface.register(name, lambda *parts: BalancedExperts(settings, *parts))


def layers(model: nn.Module) -> list[MoE]:
    """Return the isoload layers of a model in the order of its modules; layers that have not run yet are missing."""
    experts = [_IN_USE[module] for module in model.modules() if module in _IN_USE]
    return [balanced.layer for balanced in experts if balanced.layer is not None]


class BalancedExperts:
    """Replacement of transformers' own exchange for one experts module, sharded by expert over ep_mesh. Ranks of a
    tensor-parallel group (tp_mesh) hold the same rows; each takes a part of them."""

    def __init__(self, settings: Settings, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        check_fused(experts)
        self.settings, self.ep_mesh, self.tp_mesh = settings, ep_mesh, tp_mesh
        self.layer: MoE | None = None
        # During the call transformers replaces the DTensors by local parts, whose changes torch does not count.
        self._parameters: dict[str, Tensor] = {}
        experts.register_forward_pre_hook(self._note_parameters)
        self._experts = weakref.ref(experts)
        _IN_USE[experts] = self

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = self._make_layer()  # the weights are loaded only now
        parts = [self._own_rows(x) for x in (hidden_states, top_k_index, top_k_weights)]
        return self._all_rows(self.layer.compute(*parts), len(hidden_states))  # type: ignore[arg-type]

    def _note_parameters(self, experts: nn.Module, args: Any) -> None:
        self._parameters = dict(experts.named_parameters(recurse=False))

    def _make_layer(self) -> MoE:
        experts, num_ranks, rank = self._experts(), self.ep_mesh.size(), self.ep_mesh.get_local_rank()
        assert experts is not None
        num_experts = len(self._parameters["down_proj"])
        topology = Topology(num_ranks, self.settings.ranks_per_node)
        placement = place(
            torch.ones(1, num_experts), topology, placer="trivial", spare_slots=self.settings.spare_slots
        )
        shard = Shard(placement.home_experts(0, rank), lambda: fused_stacks(experts, self._parameters))
        transport = self.settings.transport(self.ep_mesh.get_group(), num_ranks)
        activation = fused_activation(experts)
        policy = self.settings.policy
        return MoE(no_gate, shard, transport, placement, policy=policy, activation=activation)

    def _own_rows(self, rows: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return rows
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor import Shard as Split

        whole = DTensor.from_local(rows, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Split(0)]).to_local()

    def _all_rows(self, rows: Tensor, num_tokens: int) -> Tensor:
        if self.tp_mesh.size() == 1:
            return rows
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Split

        width, rows = rows.shape[1], rows.contiguous()
        how: dict[str, Any] = {"shape": torch.Size([num_tokens, width]), "stride": (width, 1)}
        return DTensor.from_local(rows, self.tp_mesh, [Split(0)], run_check=False, **how).full_tensor()


def shared_scaler(scaler: Any) -> Any:
    """Return a loss scaler with the same options that skips a step on all ranks if gradients overflow on any rank."""
    if scaler is None or not dist.is_available() or not dist.is_initialized():
        return scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if isinstance(scaler, ShardedGradScaler):
        return scaler
    factors = scaler.get_backoff_factor(), scaler.get_growth_factor(), scaler.get_growth_interval()
    return ShardedGradScaler(scaler._device, scaler._init_scale, *factors, scaler.is_enabled())


PROGRAM = "isoload"  # folder of the saved program inside of a Trainer's checkpoint


class BalancedTraining:
    """Mixin for transformers' Trainer, to train a model that :func:`isoload.balance` changed over processes.

        class BalancedTrainer(BalancedTraining, Trainer): ...

    A checkpoint holds the weights as save_pretrained writes them, and a folder ``isoload`` of :func:`isoload.save`, for
    any number of processes. DistributedDataParallel does not touch the experts, replicas are refreshed after every
    step, gradients are clipped by their norm over all ranks, and an overflow in fp16 skips the step on all ranks.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Any
    state: Any

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        ignore_in_ddp(self.model)
        self.accelerator.scaler = shared_scaler(self.accelerator.scaler)
        self._refreshed: Any = None  # the optimizer after whose steps replicas are refreshed

    def create_optimizer(self, *args: Any, **how: Any) -> Any:
        optimizer = super().create_optimizer(*args, **how)  # type: ignore[misc]
        if optimizer is not self._refreshed:
            optimizer.register_step_post_hook(lambda *_: self._refresh())
            self._refreshed = optimizer
        return optimizer

    def _refresh(self) -> None:
        for module in self.model.modules():
            if isinstance(module, MoE):
                module.refresh_replicas()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model, self.args.max_grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder, model = output_dir or self.args.output_dir, unwrapped(self.model)
        if state_dict is None and hasattr(type(model), "save_pretrained"):
            save_pretrained(model, folder)  # on all ranks, a layer at a time
            if self.args.should_save:
                torch.save(self.args, os.path.join(folder, "training_args.bin"))
                words = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if words is not None:
                    words.save_pretrained(folder)
            return
        whole = whole_state(model) if state_dict is None else state_dict
        if self.args.should_save:
            super()._save(output_dir, whole)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self.model, self.optimizer, os.path.join(output_dir, PROGRAM))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load(self.model, None, os.path.join(resume_from_checkpoint, PROGRAM))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(self.model, self.optimizer, os.path.join(checkpoint, PROGRAM))
            with open_regular(Path(checkpoint, "scheduler.pt")) as file:
                self.lr_scheduler.load_state_dict(torch.load(file, weights_only=True))

    def _load_best_model(self) -> None:
        load(self.model, None, os.path.join(self.state.best_model_checkpoint, PROGRAM))
