"""isoload.save, isoload.load and save_pretrained: what four processes save, other numbers of ranks go on from."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isoload
from isoload.layer.pretrained import whole_state
from support.hugging_face import EXPERTS, blocks, make_model
from support.processes import rank_outcomes, run_ranks

BATCHES = 4  # of every step, dealt over the ranks


def batch(step: int, number: int) -> Tensor:
    return torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(9 * step + number))


def balanced(name: str, ranks: int, seed: int = 0, local: bool = False) -> tuple[Any, list[isoload.MoE]]:
    """A model in float64 over the processes, with replicas and spare slots; other weights for another seed."""
    model, topology = make_model(name).double(), isoload.Topology(ranks)
    if seed:
        for parameter in model.parameters():
            parameter.data.mul_(1 + seed)
    counts = torch.arange(EXPERTS).repeat(len(blocks(model)), 1) ** 2
    placement = isoload.place(counts + 1, topology, slots_per_rank=EXPERTS // ranks + 2, spare_slots=1)
    transport = (isoload.LocalTransport if local else isoload.CollectiveTransport)(topology)
    options = {"policy": "llep", "min_chunk": 1, "threshold": 1.0}
    return model, isoload.balance(model, topology, transport=transport, placement=placement, **options)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": parameters[:3], "weight_decay": 0.0}, {"params": parameters[3:]}], lr=1e-3
    )


def step(
    model: Any, layers: list[isoload.MoE], optimizer: torch.optim.Optimizer, number: int, ranks: int
) -> None:
    """One step on the mean of all batches, whatever the number of ranks."""
    own = range(dist.get_rank(), BATCHES, ranks) if dist.is_initialized() else range(BATCHES)
    optimizer.zero_grad()
    for i in own:
        (model(batch(number, i), labels=batch(number, i)).loss / BATCHES).backward()
    experts = {p for layer in layers for p in layer.expert_parameters()}
    for parameter in model.parameters() if dist.is_initialized() else ():
        if parameter not in experts and parameter.grad is not None and not hasattr(parameter, "full_tensor"):
            dist.all_reduce(parameter.grad)
    optimizer.step()
    for layer in layers:
        layer.refresh_replicas()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(batch(77, 0)).logits


def train_and_save(rank: int, name: str, ranks: int, folder: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of the saved model, and logits and state after one more step."""
    model, layers = balanced(name, ranks)
    optimizer = make_optimizer(model)
    for number in range(2):
        step(model, layers, optimizer, number, ranks)
    model.save_pretrained(f"{folder}/pretrained", max_shard_size="20KB")
    isoload.save(model, optimizer, f"{folder}/program")
    saved = logits(model)
    step(model, layers, optimizer, 2, ranks)
    return saved, logits(model), whole_state(model)


def load_and_step(rank: int, name: str, ranks: int, folder: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model, layers = balanced(name, ranks, seed=1, local=not dist.is_initialized())
    optimizer = make_optimizer(model)
    isoload.load(model, optimizer, f"{folder}/program")
    loaded = logits(model)
    step(model, layers, optimizer, 2, ranks)
    return loaded, logits(model), whole_state(model)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_four_processes_save_and_other_numbers_go_on(name: str, tmp_path: Path) -> None:
    """Regression: every process wrote its own experts under the model's names into one folder."""
    torch.set_num_threads(1)
    outcomes = run_ranks(train_and_save, 4, name, 4, str(tmp_path), timeout=120.0)
    saved, after, state = outcomes[0]
    assert [bool(other[2]) for other in outcomes] == [True, False, False, False]
    stock = make_model(name)
    pretrained = type(stock).from_pretrained(
        tmp_path / "pretrained", dtype=torch.float64, experts_implementation="eager"
    )
    assert len(list((tmp_path / "pretrained").glob("model-*.safetensors"))) > 1
    assert {path.name for path in tmp_path.iterdir()} == {"pretrained", "program"}
    assert pretrained.state_dict().keys() == stock.state_dict().keys()
    assert_close(logits(pretrained), saved)
    for ranks in (2, 1):
        loaded = (
            run_ranks(load_and_step, 2, name, 2, str(tmp_path))[0]
            if ranks == 2
            else load_and_step(0, name, 2, str(tmp_path))  # two virtual ranks
        )
        assert_close(loaded[0], saved)
        assert_close(loaded[1], after)
        assert loaded[2].keys() == state.keys()
        for key, value in state.items():
            assert_close(loaded[2][key], value)


def train_from(
    rank: int, ranks: int, first: int, end: int, load: str | None, save: str | None
) -> dict[str, Tensor]:
    """Steps first to end - 1 between an isoload.load and an isoload.save."""
    model, layers = balanced("qwen3", ranks, seed=0 if load is None else 1)
    optimizer = make_optimizer(model)
    if load is not None:
        isoload.load(model, optimizer, load)
    for number in range(first, end):
        step(model, layers, optimizer, number, ranks)
    if save is not None:
        isoload.save(model, optimizer, save)
    return whole_state(model)


@pytest.mark.slow
def test_four_two_and_four_processes_equal_a_run_without_a_break(tmp_path: Path) -> None:
    two, four = f"{tmp_path}/two", f"{tmp_path}/four"
    run_ranks(train_from, 4, 4, 0, 2, None, two, timeout=120.0)
    run_ranks(train_from, 2, 2, 2, 3, two, four, timeout=120.0)
    resumed = run_ranks(train_from, 4, 4, 3, 5, four, None, timeout=120.0)[0]
    unbroken = run_ranks(train_from, 4, 4, 0, 5, None, None, timeout=120.0)[0]
    assert resumed.keys() == unbroken.keys() and len(unbroken) > 10
    assert max(float((resumed[key] - unbroken[key]).abs().max()) for key in unbroken) < 1e-11


class Plain(nn.Module):
    """Two layers of the caller's own between linear ones, and a buffer."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        topology = isoload.Topology(ranks)
        placement = isoload.place(
            torch.arange(2 * EXPERTS).view(2, -1) + 1, topology, slots_per_rank=EXPERTS // ranks + 1
        )
        transport = isoload.CollectiveTransport(topology)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        gate = nn.Linear(8, EXPERTS, bias=False, dtype=torch.float64)
        self.gate = gate

        def choose(rows: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = gate(rows).softmax(-1).topk(2)
            return ids, weights

        experts = isoload.ExpertWeights.random(EXPERTS, 8, 6, bias=True, dtype=torch.float64)
        self.layers = nn.ModuleList(isoload.MoE(choose, experts, transport, placement, i) for i in (0, 1))
        self.register_buffer("seen", torch.full((1,), seed))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + layer(self.linear(rows))
        return rows


def wrap(model: Plain, how: str) -> nn.Module:
    experts = {p for layer in model.layers for p in layer.expert_parameters()}
    if how == "ddp":
        return DistributedDataParallel(isoload.layer.ignore_in_ddp(model))
    if how == "fsdp":
        for module in (model.linear, model):
            fully_shard(module, ignored_params=experts)
            module.set_gradient_divide_factor(1.0)
    return torch.compile(model, backend="eager") if how == "compiled" else model


def train_plain(model: nn.Module, optimizer: Any, rank: int, ranks: int, how: str, number: int) -> None:
    layers = [m for m in model.modules() if isinstance(m, isoload.MoE)]
    rows = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = (model(rows.tensor_split(ranks)[rank]) ** 2).sum()
    (loss * (ranks if how == "ddp" else 1)).backward()
    experts = {p for layer in layers for p in layer.expert_parameters()}
    for parameter in model.parameters() if how in ("", "compiled") else ():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    for layer in layers:
        layer.refresh_replicas()


def plain_program(rank: int, ranks: int, how: str, folder: str, makes: bool) -> dict[str, Any]:
    model = wrap(Plain(ranks, seed=0 if makes else 1), how)
    experts = {id(p) for m in model.modules() if isinstance(m, isoload.MoE) for p in m.expert_parameters()}
    apart = [[p for p in model.parameters() if (id(p) in experts) == own] for own in (False, True)]
    lr = 0.01 if makes else 0.5
    optimizer = torch.optim.AdamW([{"params": group} for group in apart], lr=lr, foreach=True)
    if makes:
        train_plain(model, optimizer, rank, ranks, how, 0)
        isoload.save(model, optimizer, folder)
        isoload.save(model, optimizer, folder)  # in place of the first
    else:
        isoload.load(model, optimizer, folder)
    train_plain(model, optimizer, rank, ranks, how, 1)
    inner = model.module if how == "ddp" else model
    return whole_state(inner)


@pytest.mark.parametrize(("saves", "loads"), [("", "ddp"), ("ddp", "fsdp"), ("fsdp", ""), ("compiled", "")])
def test_programs_in_wrappers(saves: str, loads: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "program")
    wanted = run_ranks(plain_program, 4, 4, saves, folder, True)[0]
    got = run_ranks(plain_program, 2, 2, loads, folder, False)[0]
    assert got.keys() == wanted.keys() and {"seen", "layers.1.experts.down_bias"} < got.keys()
    for key, value in wanted.items():
        assert_close(got[key], value)


def saved_once(rank: int, folder: str) -> None:
    model = Plain(2)
    optimizer = torch.optim.AdamW(model.parameters())
    train_plain(model, optimizer, rank, 2, "", 0)
    isoload.save(model, optimizer, folder)
    isoload.save(model, None, f"{folder}-alone")
    torch.save(model.state_dict(), f"{folder}-rank{rank}.pt")


def load_wrongly(rank: int, folder: str, how: str) -> None:
    model = Plain(2, seed=1)
    before = copy.deepcopy(model.state_dict())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if how == "groups":
        halves = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": halves[:2]}, {"params": halves[2:]}])
    if how == "layers":
        del model.layers[1]
    if how == "others":
        model.more = nn.Linear(1, 1)
    if how == "sizes":
        model.float()
    source = {"alone": f"{folder}-alone", "rank": f"{folder}-rank{rank}.pt", "nothing": f"{folder}-none"}.get(
        how, folder
    )
    if how == "differs" and rank == 1:
        source = f"{folder}-alone"
    try:
        isoload.load(model, optimizer, source)
    finally:
        for key, value in model.state_dict().items():
            same = key not in before or how == "sizes" or torch.equal(value.view(-1), before[key].view(-1))
            assert same, "nothing changes before all is compared"


MESSAGES = {
    "groups": r"optimizer must have the parameter groups [[",
    "layers": "model must have the layers ['layers.0', 'layers.1'], as saved, got ['layers.0']",
    "others": "got a difference in ['more.bias', 'more.weight']",
    "sizes": "layers.0 must have {'experts': 8",
    "alone": "optimizer must be None for a program that was saved without one",
    "rank": "a state that one rank saved is loaded by model.load_state_dict on that rank",
    "nothing": "folder must be one that isoload.save wrote, with a file isoload.json, got",
    "differs": "saved program",
}


@pytest.mark.parametrize("how", MESSAGES)
def test_what_cannot_be_loaded_is_refused_on_all_ranks(how: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "program")
    run_ranks(saved_once, 2, folder)
    for outcome in rank_outcomes(load_wrongly, 2, folder, how, group_timeout=10.0):
        assert "ValueError" in str(outcome.error) and MESSAGES[how] in str(outcome.error), outcome


def save_wrongly(rank: int, folder: str, how: str) -> None:
    model = Plain(2)
    optimizer = torch.optim.AdamW(model.parameters())
    train_plain(model, optimizer, rank, 2, "", 0)
    if how == "alone" and rank == 1:
        return dist.barrier()
    if how == "state" and rank == 1:
        optimizer.state.pop(model.linear.weight)
    if how == "strange":
        optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])
    if how == "write" and rank == 0:
        torch.save = lambda *_: (_ for _ in ()).throw(OSError("no space left"))  # type: ignore[assignment]
    if how == "none":
        model = nn.Linear(1, 1)  # type: ignore[assignment]
    isoload.save(model, optimizer, folder)


SAVE_MESSAGES = {
    "state": "optimizer state of linear.weight must be the same on all ranks",
    "strange": "optimizer must hold only Parameters of the model, got another of shape [3]",
    "write": "no space left",
    "none": "model must have isoload layers",
    "other": "folder must be one that isoload.save wrote",
}


@pytest.mark.parametrize("how", SAVE_MESSAGES)
def test_what_cannot_be_saved_is_refused_on_all_ranks(how: str, tmp_path: Path) -> None:
    """And nothing half-written stays: neither a folder nor one next to it."""
    folder = tmp_path / "program"
    if how == "other":
        folder.mkdir()
        (folder / "notes.txt").write_text("kept")
    for outcome in rank_outcomes(save_wrongly, 2, str(folder), how, group_timeout=10.0):
        assert SAVE_MESSAGES[how] in str(outcome.error), outcome
    assert [path.name for path in tmp_path.iterdir()] == (["program"] if how == "other" else [])


def pretrained_alone(rank: int, folder: str, call: Callable[[Any, str], None]) -> None:
    model, _ = balanced("qwen3", 2)
    if rank == 0:
        with pytest.warns(
            UserWarning, match=r"rank 0 has called .*, but ranks \[1\] have not yet: call it on all ranks"
        ):
            call(model, folder)
    dist.barrier()


@pytest.mark.parametrize("call", ["save_pretrained", "isoload.save"])
def test_a_call_on_one_rank_alone_ends(call: str, tmp_path: Path) -> None:
    """Within the timeout of the group, without a collective: rank 0 names the ranks that are missing."""
    calls = {
        "save_pretrained": lambda model, folder: model.save_pretrained(folder),
        "isoload.save": lambda model, folder: isoload.save(model, None, folder),
    }
    first, _ = rank_outcomes(pretrained_alone, 2, str(tmp_path / "saved"), calls[call], group_timeout=4.0)
    wanted = f"rank 0 has called {call}, but ranks [1] have not within 4 seconds: call it on all ranks"
    assert wanted in str(first.error), first
    assert not (tmp_path / "saved").exists()


def sharded_pretrained(rank: int, folder: str) -> dict[str, Tensor]:
    model, layers = balanced("qwen3", 2)
    experts = {p for layer in layers for p in layer.expert_parameters()}
    for module in (*model.model.layers, model):
        fully_shard(module, ignored_params=experts)
        module.set_gradient_divide_factor(1.0)
    model.save_pretrained(folder)
    return whole_state(model)


def test_save_pretrained_under_fully_shard(tmp_path: Path) -> None:
    state, _ = run_ranks(sharded_pretrained, 2, str(tmp_path / "saved"))
    stock = type(make_model("qwen3")).from_pretrained(tmp_path / "saved", dtype=torch.float64).state_dict()
    assert stock.keys() == state.keys()
    assert all(torch.equal(stock[key], value) for key, value in state.items())


def pretrained_part(rank: int, folder: str) -> None:
    model, _ = balanced("qwen3", 2)
    again = copy.deepcopy(model)
    assert again.save_pretrained.__self__ is again
    with pytest.raises(
        ValueError, match=r"state_dict must hold the experts of all ranks, got .*\.rank_\d_of_2\."
    ):
        model.save_pretrained(folder, state_dict=model.state_dict())
    with pytest.raises(ValueError, match="push_to_hub must be False over processes"):
        model.save_pretrained(folder, push_to_hub=True)
    model.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="20KB")  # in place of one file


def pretrained_by_layer(rank: int, folder: str, fails: int | None) -> list[int]:
    """Save; of every part that is written the number of layers whose experts it holds."""
    model, _ = balanced("qwen3", 2)
    kind, layers = type(model), []
    stock = kind.save_pretrained

    def write(
        self: nn.Module, target: Any, main: bool, state: dict[str, Any], *rest: Any, **how: Any
    ) -> None:
        layers.append(len({key.split(".experts.")[0] for key in state if ".experts." in key}))
        if len(layers) == fails:
            raise OSError("no space left on device")
        stock(self, target, main, state, *rest, **how)

    kind.save_pretrained = write
    try:
        model.save_pretrained(folder)
    finally:
        kind.save_pretrained = stock
    return layers


def test_the_writer_holds_the_experts_of_one_layer(tmp_path: Path) -> None:
    """Regression: rank 0 gathered the experts of all layers before it wrote any."""
    first, second = run_ranks(pretrained_by_layer, 2, str(tmp_path / "saved"), None)
    assert first == [0, 1, 1] and second == []
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    sizes = [t.double().nbytes for t in make_model("qwen3").state_dict().values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_a_writer_that_fails_ends_the_call_on_all_ranks(tmp_path: Path) -> None:
    first, second = rank_outcomes(pretrained_by_layer, 2, str(tmp_path / "saved"), 2, group_timeout=20.0)
    assert "no space left on device" in str(first.error) and "rank 0" in str(second.error)
    assert list(tmp_path.iterdir()) == []


def test_parts_are_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_ranks(pretrained_part, 2, str(folder))
    assert not (folder / "model.safetensors").exists()
    shards = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert shards == {path.name for path in folder.glob("model-*.safetensors")}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
