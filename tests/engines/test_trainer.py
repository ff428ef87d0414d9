"""transformers' Trainer and accelerate around a model whose experts lie on two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import isoload
from isoload.engines.huggingface import BalancedTraining
from isoload.layer.pretrained import whole_state
from support.hugging_face import EXPERTS, blocks, make_model
from support.processes import rank_outcomes, run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")


def be_launched(rank: int, ranks: int) -> None:
    """What torchrun sets, read by accelerate."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


def balanced(ranks: int) -> tuple[Any, list[isoload.MoE]]:
    model, topology = make_model("qwen3").train(), isoload.Topology(ranks)
    counts = torch.arange(EXPERTS).repeat(len(blocks(model)), 1) ** 2
    placement = isoload.place(counts + 1, topology, slots_per_rank=EXPERTS // ranks + 1)
    return model, isoload.balance(
        model, topology, transport=isoload.CollectiveTransport(topology), placement=placement
    )


def make_trainer(model: Any, folder: str, kind: type, **how: Any) -> Any:
    from transformers import TrainingArguments

    draw = torch.Generator().manual_seed(7)
    texts = [
        {"input_ids": (ids := torch.randint(1, 64, (9,), generator=draw)), "labels": ids} for _ in range(32)
    ]
    how = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.1, **how}
    args = TrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        seed=3,
        **how,
    )
    return kind(model=model, args=args, train_dataset=texts)


def trained(rank: int, ranks: int, folder: str, resume: str | None) -> dict[str, torch.Tensor]:
    from transformers import Trainer

    class BalancedTrainer(BalancedTraining, Trainer):
        pass

    be_launched(rank, ranks)
    model, _ = balanced(ranks)
    if resume is not None:
        for parameter in model.parameters():
            parameter.data.zero_()
    trainer = make_trainer(model, folder, BalancedTrainer)
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    copies = [torch.empty_like(model.lm_head.weight) for _ in range(ranks)]
    dist.all_gather(copies, model.lm_head.weight.detach())
    assert all(torch.equal(copy, copies[0]) for copy in copies), "copies stay equal"
    return whole_state(model)


def test_a_trainer_resumes(tmp_path: Path) -> None:
    """After two of four steps, as if it had gone on; every checkpoint is one that stock transformers loads."""
    wanted = run_ranks(trained, 2, 2, str(tmp_path / "first"), None, timeout=120.0)[0]
    checkpoint = tmp_path / "first" / "checkpoint-2"
    assert {"isoload", "model.safetensors.index.json", "scheduler.pt"} <= {
        path.name for path in checkpoint.iterdir()
    }
    got = run_ranks(trained, 2, 2, str(tmp_path / "second"), str(checkpoint), timeout=120.0)[0]
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6)
    stock = type(make_model("qwen3")).from_pretrained(tmp_path / "second" / "checkpoint-4").state_dict()
    for key, value in wanted.items():
        torch.testing.assert_close(stock[key], value, rtol=1e-5, atol=1e-6)


def plain_trainer(rank: int, folder: str, max_grad_norm: float) -> None:
    from transformers import Trainer

    be_launched(rank, 2)
    model, layers = balanced(2)
    trainer = make_trainer(
        isoload.layer.ignore_in_ddp(model),
        folder,
        Trainer,
        save_strategy="no",
        max_steps=1,
        max_grad_norm=max_grad_norm,
    )
    trainer.create_optimizer().register_step_post_hook(
        lambda *_: [layer.refresh_replicas() for layer in layers]
    )
    trainer.train()
    trainer.save_model(folder)
    dist.barrier()


def test_a_plain_trainer_says_what_is_missing(tmp_path: Path) -> None:
    """Regression: it clipped by the norm of one rank, and saved one rank's experts; only rank 0 saves."""
    for outcome in rank_outcomes(plain_trainer, 2, str(tmp_path), 1.0, timeout=120.0):
        assert "(transformers' Trainer: isoload.engines.huggingface.BalancedTraining), got" in str(
            outcome.error
        )
    first, _ = rank_outcomes(plain_trainer, 2, str(tmp_path), 0.0, timeout=120.0, group_timeout=10.0)
    assert "rank 0 has called save_pretrained, but ranks [1] have not within 10 seconds" in str(
        first.error
    ), first


def accelerated(rank: int, folder: str, how: str) -> None:
    from accelerate import Accelerator

    be_launched(rank, 2)
    accelerator = Accelerator(cpu=True)
    model, _ = balanced(2)
    model = accelerator.prepare(isoload.layer.ignore_in_ddp(model))
    if how == "save_state":
        accelerator.save_state(folder)
    elif how == "save_model":
        accelerator.save_model(model, folder)
    else:
        inner = accelerator.unwrap_model(model)
        inner.save_pretrained(
            folder,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )


@pytest.mark.parametrize("how", ["save_state", "save_model", "get_state_dict"])
def test_accelerate_does_not_save_one_rank_s_experts(how: str, tmp_path: Path) -> None:
    for outcome in rank_outcomes(accelerated, 2, str(tmp_path), how, timeout=90.0, group_timeout=10.0):
        assert "ValueError" in str(outcome.error), outcome
        assert "on all ranks call isoload.save(model, optimizer, folder)" in str(outcome.error)
    assert not list(tmp_path.rglob("*.safetensors"))
