"""Router replay through isoload.balance: given experts, the router's own weights of them, gradients through these."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoload
from isoload import KnownRoutes
from isoload.layer import replay
from isoload.layer.blocks import BlockExperts
from isoload.transport import CollectiveTransport
from support.processes import rank_outcomes
from support.sweeps import slow
from support.transformers_blocks import E, K, block_classes, blocks_of, make, run

pytest.importorskip("transformers", minversion="5.24", reason="older ones have fewer blocks")
pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = block_classes()
REFUSED = ("DeepseekV4SparseMoeBlock", "PhimoeSparseMoeBlock", "ZayaSparseMoeBlock")
NOT_TAKEN = (  # by isoload.balance, see test_every_block.py
    *("DbrxFFN", "JetMoeAttention", "Llama4TextMoe", "LongcatFlashMoE", "MuseSparkMoE", "NemotronHMoE"),
    *("NllbMoeSparseMLP", "Step3p7SparseMoeBlock", "SwitchTransformersSparseMLP", "VitPoseBackboneMoeMLP"),
)
# Its text and vision blocks get parts of the tokens. The other is a decoder's layer that is not made in a model.
APART = ("Ernie4_5_VLMoeSparseMoeBlock", "DiffusionGemmaDecoderTextLayer")

BLOCKS = [name for name in CLASSES if name not in (*NOT_TAKEN, *APART)]
TELLING = (
    "AfmoeSparseMoeBlock",
    "DeepseekV3MoE",
    "Gemma4TextDecoderLayer",
    "GptOssMLP",
    "Qwen3MoeSparseMoeBlock",
)


def watch(blocks: list[Any]) -> list[Any]:
    """The arguments of the blocks' experts, call by call."""
    seen: list[Any] = []
    for block in blocks:
        block.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    return seen


class WithRoutes(nn.Module):
    """Passes routes to every call of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.main_input_name = model, "input_ids"
        self.given: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs, **self.given)


@pytest.mark.parametrize(
    "block", [*TELLING, *REFUSED, *slow(*(name for name in BLOCKS if name not in (*TELLING, *REFUSED)))]
)
def test_every_family_replays_or_is_refused_by_name(block: str) -> None:
    """The router's own choices in reversed order give the same output; other choices reach the experts."""
    torch.set_num_threads(1)
    model = make(block, CLASSES[block])
    seen = watch(blocks_of(model, block))
    wanted = run(model)
    isoload.balance(model, 4)
    routes = torch.stack([ids for _, ids, _ in seen], dim=1).flip(-1)
    outer: Any = WithRoutes(model) if hasattr(model, "main_input_name") else model
    outer.given = {"routes": routes}
    if block in REFUSED:
        message = (
            f"routes need a router that chooses K=. of {E} experts by torch.topk, got a {block} that does not"
        )
        with pytest.raises(ValueError, match=message):
            run(outer)
        return
    torch.testing.assert_close(run(outer), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    passed = watch(blocks_of(model, block))
    outer.given = {"routes": (routes + 1) % E}
    run(outer)
    for index, (_, ids, weights) in enumerate(passed):
        assert ids.long().equal((routes[:, index] + 1) % E) and bool(weights.isfinite().all())


def softmax_weights(block: Any, rows: Tensor, ids: Tensor) -> Tensor:
    scores = (rows @ block.gate.weight.T).softmax(-1).gather(1, ids)
    return scores / scores.sum(-1, keepdim=True) if block.gate.norm_topk_prob else scores


def topk_softmax_weights(block: Any, rows: Tensor, ids: Tensor) -> Tensor:
    return (rows @ block.router.weight.T + block.router.bias).gather(1, ids).softmax(-1)


def sigmoid_weights(block: Any, rows: Tensor, ids: Tensor) -> Tensor:
    scores = (rows @ block.gate.weight.T).sigmoid().gather(1, ids)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20) * block.gate.routed_scaling_factor


@pytest.mark.parametrize(
    ("block", "oracle"),
    [
        ("Qwen3MoeSparseMoeBlock", softmax_weights),
        ("GptOssMLP", topk_softmax_weights),
        ("DeepseekV3MoE", sigmoid_weights),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_the_routers_and_gradients_pass(block: str, oracle: Any, recompute: bool) -> None:
    """For random routes with repeated experts and a masked token, by known plans, against the formula."""
    torch.set_num_threads(1)
    model: Any = make(block, CLASSES[block]).double().train()
    own, router = blocks_of(model, block), "router" if block == "GptOssMLP" else "gate"
    draw = torch.Generator().manual_seed(3)
    routes = torch.randint(E, (6, len(own), K), generator=draw)
    routes[2] = -1
    layers = isoload.balance(model, 4, policy="llep", min_chunk=1, threshold=1.0)
    seen = watch(own)
    known = KnownRoutes([list(routes.tensor_split(4))], layers[0].placement)
    plans = known.plans("llep", min_chunk=1, threshold=1.0).layers(0)
    if recompute:
        model.gradient_checkpointing_enable()
    output = model(torch.randint(1, 64, (1, 6), generator=draw), use_cache=False, routes=routes, plans=plans)[
        0
    ]
    (rows, _, weights), first = seen[0], getattr(own[0], router)
    wanted = oracle(own[0], rows, routes[:, 0].clamp(min=0))
    torch.testing.assert_close(weights.double(), wanted, rtol=0, atol=1e-6)  # routers compute in float32
    assert layers[0].group.traffic.bytes["gather"] == 0 and layers[0].last_plan is not None
    output.square().sum().backward()
    assert first.weight.grad is not None and bool(first.weight.grad.any())
    if recompute:
        again = copy.deepcopy(first.weight.grad)
        model.gradient_checkpointing_disable()
        model.zero_grad()
        draw.manual_seed(3)
        torch.randint(E, (6, len(own), K), generator=draw)
        tokens = torch.randint(1, 64, (1, 6), generator=draw)
        model(tokens, use_cache=False, routes=routes, plans=plans)[0].square().sum().backward()
        torch.testing.assert_close(again, first.weight.grad, rtol=1e-12, atol=1e-12)


def small_model() -> Any:
    torch.set_num_threads(1)
    return make("Qwen3MoeSparseMoeBlock", "qwen3_moe")


def checkpointed() -> tuple[Any, Tensor]:
    """A balanced model that recomputes its layers, and tokens for it."""
    model = small_model().train()
    isoload.balance(model, 4)
    model.gradient_checkpointing_enable()
    return model, torch.randint(1, 64, (1, 6))


def test_a_recompute_finds_the_routes_of_its_call_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = checkpointed()
    routes = [torch.rand(6, 2, E).topk(K).indices for _ in range(3)]

    def call(number: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(tokens, use_cache=False, routes=routes[number])[0].square().sum()

    for number in range(2):
        call(number, 5).backward()  # seeded alike, one after the other
    monkeypatch.setattr(replay, "MOST_CALLS", 2)
    losses = [call(number, number) for number in range(3)]
    for loss in losses[1:]:
        loss.backward()
    with pytest.raises(ValueError, match="recomputes a call whose routes are lost"):
        losses[0].backward()
    model, tokens = checkpointed()
    losses = [call(number, 5) for number in range(2)]
    for loss in losses:
        with pytest.raises(
            ValueError, match="routes are lost: run backward after at most 32 calls with routes, and do"
        ):
            loss.backward()


def test_calls_without_routes_do_not_change() -> None:
    model = small_model()
    wanted = run(model)
    isoload.balance(model, 4)
    outer: Any = WithRoutes(model)
    outer.given = {"routes": torch.zeros(6, 2, K, dtype=torch.uint8) + torch.arange(K, dtype=torch.uint8)}
    assert not torch.allclose(run(outer), wanted, atol=1e-3)
    outer.given = {"routes": None}
    torch.testing.assert_close(run(outer), wanted, rtol=0, atol=1e-5)
    copied = copy.deepcopy(model)
    assert any(isinstance(module, BlockExperts) for module in copied.modules())
    torch.testing.assert_close(run(copied), wanted, rtol=0, atol=1e-5)


WRONG: dict[str, tuple[Any, str]] = {
    "layers": (torch.zeros(6, 3, K, dtype=torch.int64), "routes must have the model's 2 MoE blocks, got 3 layers"),
    "tokens": (torch.arange(K).expand(5, 2, K), "routes must have the 6 tokens of Qwen3Moe.*, got those of 5 tokens"),
    "range": (torch.full((6, 2, K), E), f"routes must be in -1..{E - 1}, got {E}"),
    "masked": (torch.arange(-1, K - 1).expand(6, 2, K), "routes must have all K experts of a token or -1 in all K"),
    "shape": (torch.zeros(6, K), r"routes must be a tensor \[T, L, K\] or \[B, S, L, K\] of integers, got \[6, 2\]"),
    "K": (torch.zeros(6, 2, 3, dtype=torch.int64), f"routes need a router that chooses K=3 of {E} experts"),
    "plans": (None, "routes must be a tensor .* got NoneType"),
    "repeats": (torch.zeros(6, 2, K, dtype=torch.int64), "must not repeat an expert within a token"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_refused(wrong: str) -> None:
    model = small_model()
    isoload.balance(model, 2)
    routes, message = WRONG[wrong]
    outer: Any = WithRoutes(model)
    outer.given = {"plans": [None, None]} if routes is None else {"routes": routes}
    with pytest.raises(ValueError, match=message):
        run(outer)
    outer.given = {}
    assert run(outer).shape[-1] > 0


def wrong_on_rank_1(rank: int) -> None:
    model = small_model()
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(2, E), topology, E // 2 + 1)
    isoload.balance(model, topology, transport=CollectiveTransport(topology), placement=placement)
    outer: Any = WithRoutes(model)
    outer.given = {"routes": torch.arange(K).expand(6, 2 + (rank == 1), K)}
    run(outer)


def test_all_ranks_raise() -> None:
    for outcome in rank_outcomes(wrong_on_rank_1, 2, group_timeout=10.0):
        assert outcome.error is not None
        last = outcome.error.strip().splitlines()[-1]
        assert re.search("got 3 layers|rank 1 failed in stage count", last), outcome.error
