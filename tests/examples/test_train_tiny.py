"""examples/train_tiny.py: one training run whatever the policy, and the dense model's on one process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from torch import nn
from typer.testing import CliRunner

import isoload
from isoload.transport import LocalTransport
from support.processes import run_program, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import tiny_measure  # noqa: E402
import train_tiny  # noqa: E402

RANKS, STEPS = 2, 3
BLOCKS = 4  # more than the spare pool has buffers, so that backward borrows again
POLICIES = ("none", "llep:min_chunk=1:threshold=1", "exact")


def make_settings(**changed):
    given = {"layers": 2, "steps": STEPS, "policies": POLICIES, "ranks": RANKS, "dtype": "float64", "seed": 3}
    given |= {"spare_slots": 2, "replicas": 1, "save": None, "text": train_tiny.TEXT}
    return train_tiny.Settings(**given | changed)


class DenseMoE(nn.Module):
    """The layer written out: every expert over the rows that chose it."""

    def __init__(self, moe):
        super().__init__()
        self.gate = moe.gate
        self.gate_up = nn.Parameter(torch.cat([rank.gate_up.detach() for rank in moe.weights]))
        self.down = nn.Parameter(torch.cat([rank.down.detach() for rank in moe.weights]))

    def forward(self, rows):
        ids, weights = self.gate(rows)
        total = torch.zeros_like(rows)
        for expert in range(train_tiny.EXPERTS):
            token, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (rows[token] @ self.gate_up[expert].T).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ self.down[expert].T
            total = total.index_add(0, token, y * weights[token, k, None])
        return total


def train_dense(settings):
    """Losses, and the gradients of the first step by name, of one process that has all sequences and experts."""
    model = train_tiny.make_model(settings, "none", LocalTransport(isoload.Topology(RANKS)))
    for block in model.blocks:
        block.moe = DenseMoE(block.moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train_tiny.LEARNING_RATE)
    losses, grads = [], {}
    for step in range(STEPS):
        tokens = torch.cat([settings.batch(step, rank) for rank in range(RANKS)])
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        grads = grads or {name: p.grad.clone().numpy() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, grads


def train_rank(rank, settings):
    """By policy: losses, the first gradients, the sums of the trained weights, and what was borrowed."""
    torch.set_num_threads(1)
    out = {}
    for policy in settings.policies:
        transport = isoload.CollectiveTransport(isoload.Topology(RANKS))
        model = train_tiny.make_model(settings, policy, transport)
        train_tiny.global_gradients(model, settings.batch(0, rank))
        grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        trained, run = train_tiny.train(settings, policy, rank)
        weights = {
            n: p.detach().numpy().copy() for n, p in trained.named_parameters() if ".weights." not in n
        }
        out[policy] = run.losses, grads, weights, run.sent, run.peak, run.rows.tolist(), run.copies.tolist()
    return out


@pytest.fixture(scope="module")
def trained():
    settings = make_settings(layers=BLOCKS, policies=(POLICIES[0], POLICIES[2]))
    replicated = run_ranks(train_rank, RANKS, settings)
    # Replicas level the ranks, and llep would have nothing to borrow.
    borrowing = run_ranks(train_rank, RANKS, replace(settings, policies=(POLICIES[1],), replicas=0))
    return [{**a, **b} for a, b in zip(replicated, borrowing, strict=True)]


@pytest.fixture(scope="module")
def dense():
    return train_dense(make_settings(layers=BLOCKS))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_and_gradients_are_the_dense_model_s(trained, dense, policy):
    losses, grads = dense
    placement = make_settings(replicas=int(policy != POLICIES[1])).placement()
    home_rank = placement.home_slot[0] // placement.slots_per_rank  # alike in all layers; uneven, 9 and 7
    for rank, ours in enumerate(trained):
        np.testing.assert_allclose(ours[policy][0], losses, rtol=0, atol=1e-10)  # seen: 9e-16
        for name, grad in ours[policy][1].items():
            layer, is_expert, stack = name.partition("weights.0.")
            wanted = grads[layer + stack]
            if is_expert:
                wanted = wanted[(home_rank == rank).numpy()]
            np.testing.assert_allclose(grad, wanted, rtol=0, atol=1e-12, err_msg=name)  # seen: 3e-17


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_of_a_parameter_stay_equal(trained, policy):
    first, *others = (ours[policy][2] for ours in trained)
    assert len(first) > 20
    for other in others:
        for name, weight in first.items():
            np.testing.assert_array_equal(other[name], weight, err_msg=name)


def test_what_is_measured(trained):
    none, llep, exact = (trained[0][policy] for policy in POLICIES)
    for _, _, _, sent, peak, rows, copies in (none, llep, exact):
        tokens = RANKS * train_tiny.SEQUENCES * train_tiny.LENGTH
        assert np.shape(rows) == np.shape(copies) == (STEPS * BLOCKS, RANKS)
        assert (np.sum(copies, axis=1) == train_tiny.TOP_K * tokens).all()
        assert (np.sum(rows, axis=1) >= tokens).all() and (np.array(rows) <= copies).all()
        assert peak > 1e6 and sent["dispatch"] > 0
    assert 0 < llep[3]["borrow backward"] <= llep[3]["borrow"]
    assert none[3]["borrow"] == 0 < llep[3]["borrow"] == llep[3]["borrowed gradients"]
    assert np.max(llep[6], axis=1).mean() < np.max(none[6], axis=1).mean()
    assert [ours[POLICIES[1]][4:] for ours in trained] == [llep[4:]] * RANKS
    assert none[3]["replica gradients"] > 0 and exact[3]["refresh"] > 0


def run_script(*words):
    done = subprocess.run([sys.executable, *words], cwd=EXAMPLES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_script_prints_and_saves(tmp_path):
    path = tmp_path / "routing.npz"
    words = ["examples/train_tiny.py", "--layers=3", "--steps=2", "--ranks=2", f"--save={path}"]
    code = f"import runpy, sys; sys.argv = {words}; runpy.run_path(sys.argv[0], run_name='__main__')"
    status, shown = run_program(code, EXAMPLES.parent)
    assert status == 0, shown
    assert float(shown.split("between the loss curves:")[1].split()[0]) < 1e-10
    for row in ("loss of step 1", "rows, busiest rank", "kB of borrowed gradients", "peak MB"):
        assert row in shown
    for policy in train_tiny.POLICIES.split(","):
        assert re.search(rf"^{policy}: 2 steps in \d+ s$", shown, re.M)
        assert re.search(rf"^copies of each rank under {policy}\n(  rank \d █+.*\n){{2}}", shown, re.M)
    saved, trace = np.load(path), isoload.read_trace(path)
    rows = train_tiny.SEQUENCES * train_tiny.LENGTH
    batches, layers, experts = train_tiny.FRESH_BATCHES, 3, train_tiny.EXPERTS
    tokens = batches * RANKS * rows
    shapes = {
        "hidden": (tokens, layers, train_tiny.HIDDEN),
        "gate": (layers, experts, train_tiny.HIDDEN),
        "topk_ids": (tokens, layers, train_tiny.TOP_K),
        "counts": (batches, layers, experts),
        "tokens_per_batch": (batches,),
        "seq_id": (tokens,),
        "source_rank": (tokens,),
    }
    assert {name: array.shape for name, array in saved.items()} == shapes
    assert (trace.num_experts, trace.num_layers, trace.num_batches) == (experts, layers, batches)
    # what the router saw gives what it chose, in every layer: rows and choices belong together
    logits = np.einsum("tlh,leh->tle", saved["hidden"], saved["gate"])
    np.testing.assert_array_equal(np.argsort(-logits, axis=2)[..., :2], saved["topk_ids"])
    assert set(Counter(saved["seq_id"].tolist()).values()) == {train_tiny.LENGTH}
    np.testing.assert_array_equal(saved["source_rank"].reshape(batches, RANKS, rows)[0, :, 0], range(RANKS))
    accuracy = re.search(r"mean of layers 1..2: lookahead [\d.]+%, popularity ([\d.]+%)\n", shown)
    assert accuracy[1] == f"{popularity_accuracy(saved):.1%}"


def share_found(predicted, chosen):
    """Of choices [tokens, K], those among the token's predicted [tokens, K]; by sets, token by token."""
    return np.mean([len(set(p) & set(c)) / len(c) for p, c in zip(predicted, chosen, strict=True)])


def popularity_accuracy(saved):
    """Of the batches after the first, from counts that batches before add up to."""
    batch = np.repeat(np.arange(len(saved["counts"])), saved["tokens_per_batch"])
    shares = []
    for n in range(1, len(saved["counts"])):
        for layer in range(1, saved["counts"].shape[1]):
            chosen = saved["topk_ids"][batch == n, layer]
            total = saved["counts"][:n, layer].sum(0).tolist()
            best = sorted(range(len(total)), key=lambda expert: (-total[expert], expert))[: chosen.shape[1]]
            shares.append(share_found([best] * len(chosen), chosen))
    return np.mean(shares)


def lookahead_accuracy(saved, norms):
    """A layer's rows, freed of its norm's weights and given the next norm's, through the next gate."""
    later = slice(saved["tokens_per_batch"][0], None)
    shares = []
    for layer in range(1, saved["hidden"].shape[1]):
        (gain, bias), (next_gain, next_bias) = norms[layer - 1 : layer + 1]
        rows = (saved["hidden"][later, layer - 1] - bias) / gain * next_gain + next_bias
        predicted = np.argsort(-rows @ saved["gate"][layer].T, axis=1)[:, : train_tiny.TOP_K]
        shares.append(share_found(predicted, saved["topk_ids"][later, layer]))
    return np.mean(shares)


def predict_rank(rank, settings):
    """The accuracy, and every norm's weights, here far from equal; saves the routing that it was measured on."""
    torch.set_num_threads(1)
    model, _ = train_tiny.train(settings, "none", rank)
    norms = [block.norms[1] for block in model.blocks]
    draw = torch.Generator().manual_seed(0)
    for norm in norms:
        for weight in norm.parameters():
            torch.nn.init.uniform_(weight, 0.5, 2, generator=draw)
    # Few tokens, so that the most popular experts differ between ranks and batches.
    fresh = [settings.batch(STEPS + n, rank)[:1, :-1] for n in range(6)]
    accuracy = tiny_measure.prediction_accuracy(model, norms, fresh, train_tiny.EXPERTS)
    tiny_measure.save_routing(settings.save, model, fresh, train_tiny.EXPERTS)
    return accuracy, [[weight.detach().numpy() for weight in norm.parameters()] for norm in norms]


def test_accuracy_is_that_of_the_saved_choices(tmp_path):
    settings = make_settings(layers=3, policies=("none",), save=tmp_path / "routing.npz")
    (accuracy, norms), (others, _) = run_ranks(predict_rank, RANKS, settings)
    saved = np.load(settings.save)
    wanted = {"lookahead": lookahead_accuracy(saved, norms), "popularity": popularity_accuracy(saved)}
    assert accuracy == others == pytest.approx(wanted, rel=1e-12)
    assert 0 < wanted["popularity"] < 1 and 0 < wanted["lookahead"] < 1


@pytest.mark.slow
def test_torchrun_starts_it():
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    shown = run_script(*launcher, "examples/train_tiny.py", "--steps=1", "--policies=llep:min_chunk=1")
    assert "1 steps, 2 ranks, float64" in shown
    assert "accuracy" not in shown  # of two layers, the default, only one could be predicted


@pytest.mark.parametrize(
    "words, message",
    {
        "layers": ("--layers 0", "layers must be at least 1, got 0"),
        "steps": ("--steps 0", "steps must be at least 1, got 0"),
        "ranks": ("--ranks 3", "ranks must divide the 16 experts, got 3"),
        "no ranks": ("--ranks 0", "ranks must divide the 16 experts, got 0"),
        "dtype": ("--dtype bfloat16", "dtype must be float64 or float32, got 'bfloat16'"),
        "replicas": ("--replicas -1", "replicas must be at least 0, got -1"),
        "no freedom": ("--spare-slots 0", "spare_slots must be at least 1 without replicas, got 0"),
        "no spare slots": (
            "--spare-slots 0 --replicas 1",
            "spare_slots must be at least 1 for policy llep, got 0",
        ),
        "negative": ("--spare-slots -1 --replicas 2", "spare_slots must be at least 0, got -1"),
        "policy": ("--policies none,best", "policy must be one of none, "),
        "sampled": ("--policies dynamic", "policies must plan quotas, dynamic samples"),
        "suffix": ("--save x.pt", "save must be an .npz in a folder that exists, got 'x.pt'"),
        "folder": ("--save gone/x.npz", "save must be an .npz in a folder that exists, got 'gone/x.npz'"),
        "text": ("--text gone.md", "No such file or directory: 'gone.md'"),
    }.values(),
    ids=lambda given: given.split()[0],
)
def test_bad_options_are_named(words, message):
    app = typer.Typer()
    app.command()(train_tiny.main)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert message in done.stderr


def test_text_must_fill_a_sequence(tmp_path):
    (tmp_path / "short.md").write_text("x" * 64)
    with pytest.raises(ValueError, match="text must have more than 64 bytes, got 64"):
        make_settings(text=tmp_path / "short.md")
