"""transformers' expert parallelism over isoload: the same logits, tokens, gradients and steps as its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from isoload.engines import huggingface
from support.processes import run_ranks
from support.sweeps import slow

E = 8
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0, "head_dim": 8}
SIZES |= {"num_experts": E, "num_local_experts": E, "moe_intermediate_size": 16, "intermediate_size": 16}
LLEP = {"min_chunk": 1, "threshold": 1.0}
IDS = torch.tensor([list(range(1, 20)), list(range(5, 24))])


def save_model(kind: str, folder: Path) -> str:
    """A tiny checkpoint whose router prefers a few experts."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.1)
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(0, 0.5)
                parameter[:2] *= 3
    model.save_pretrained(folder)
    return str(folder)


def run(rank: int, ranks: int, path: str, implementation: str, sizes: dict[str, int], train: bool) -> Any:
    import transformers
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    def whole(tensor: Any) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    huggingface.register("isoload", **LLEP)
    more = {"tp_plan": "auto"} if sizes["tp_size"] > 1 else {}
    config = DistributedConfig(ep_size=ranks, ep_implementation=implementation, **sizes, **more)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=config
    )
    ids = IDS if sizes["tp_size"] > 1 else IDS[rank : rank + 1]
    model.train(train)
    found: dict[str, Any] = {"keys": sorted(model.state_dict())}
    with torch.no_grad():
        found["logits"] = whole(model(ids).logits)
    if sizes["tp_size"] > 1:
        how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found["tokens"] = model.generate(ids, **how)
    found["losses"] = []
    if train:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            found.setdefault(
                "grads", {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.step()
            found["losses"].append(float(whole(loss)))
        found["weights"] = {n: whole(p) for n, p in model.named_parameters()}
    made = huggingface.layers(model)
    found["borrowed"] = [m.last_plan is not None and m.last_plan.placed.unfilled is not None for m in made]
    found["peaks"] = [(int(m.last_plan.peak), int(m.last_plan.bound)) for m in made]
    found["aliased"] = all(
        not list(m.parameters()) and not any(len(s) for w in m.weights for s in w.stored_rows()) for m in made
    )
    return found


def same(got: torch.Tensor, want: torch.Tensor, bound: float = 2e-5) -> bool:
    return float((got - want).abs().max()) <= bound * max(1.0, float(want.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("GptOss", {"tp_size": 2}),
        pytest.param("Qwen3Moe", {"tp_size": 1, "fsdp_size": 2}, marks=pytest.mark.slow),
        *slow(("Qwen3Moe", {"tp_size": 2}), ("GptOss", {"tp_size": 1, "fsdp_size": 2})),
    ],
)
def test_trains_as_transformers_own_exchange(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    path = save_model(kind, tmp_path)
    stock, ours = (run_ranks(run, 2, 2, path, name, sizes, True) for name in ("all_to_all", "isoload"))
    for own, other in zip(ours, stock, strict=True):
        assert own["keys"] == other["keys"]
        assert same(own["logits"], other["logits"])
        assert own["losses"] == pytest.approx(other["losses"], rel=1e-4)
        assert own["grads"].keys() == other["grads"].keys()
        assert all(same(g, other["grads"][n]) for n, g in own["grads"].items())
        assert all(same(w, other["weights"][n], 2e-3) for n, w in own["weights"].items())
        assert "tokens" not in own or torch.equal(own["tokens"], other["tokens"])
        assert len(own["borrowed"]) == 2 and any(own["borrowed"]) and own["aliased"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"policy": "exact"}, r"policy must borrow experts \(llep, spill_cost\), got 'exact'"),
        ({"policy": "best"}, "policy must be one of none, "),
        ({"chunk": 1}, "option must be one of .* for policy llep, got 'chunk'"),
        ({"spare_slots": 0}, "spare_slots must be at least 1, got 0"),
    ],
)
def test_refused(how: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(ValueError, match=message):
        huggingface.register("isoload", **how)
