"""The wheels of DeepEP themselves, unpacked by `make test-deepep`: what they take, and what their references compute.

Importing them needs a GPU; their plain-torch references run over gloo, behind the adapter, in the conformance suite.
"""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isoload import Topology
from isoload.transport.deep_ep import transport
from support import deep_ep_double
from support.batches import MAX_TOKENS, batches
from support.conformance import CASES
from support.deep_ep_signatures import SIGNATURES, VERSIONS
from support.deep_ep_transports import BUFFERS, CANCELLING, any_shape
from support.deep_ep_wheels import PACKAGES, WHEELS, references, signatures_in, version_of, why_absent
from support.processes import run_ranks

unpacked = pytest.mark.skipif(why_absent() is not None, reason=str(why_absent()))
ELSEWHERE = {"bytes", "traffic", "equals_local"}  # see test_deep_ep.py
RECORDED = {name: text for methods in SIGNATURES.values() for name, text in methods.items()}


def own_arguments(name: str) -> str:
    made, method = name.split(".")
    given = (
        inspect.signature(inspect.getattr_static(BUFFERS[made], method).__func__)
        if name.endswith(("config", "hint"))
        else inspect.signature(getattr(BUFFERS[made], method))
    )
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given.parameters.values()
    )


@pytest.mark.parametrize("name", RECORDED)
def test_doubles_have_the_recorded_arguments(name: str) -> None:
    assert own_arguments(name) == RECORDED[name].replace(
        "sm_read_gbs=200, sm_write_gbs=50", "sm_read_gbs=0, sm_write_gbs=0"
    )


@unpacked
@pytest.mark.parametrize("distribution", PACKAGES)
def test_wheels_have_the_recorded_arguments(distribution: str) -> None:
    recorded = SIGNATURES[distribution]
    assert signatures_in(PACKAGES[distribution], set(recorded)) == recorded
    assert version_of(distribution) == VERSIONS[distribution], "read the new version, then record it"


@unpacked
def test_wheels_are_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WHEELS))
    first, second = transport.installed()
    assert (str(first), first.buffers) == (f"sgl-deep-ep-v25 {VERSIONS['sgl-deep-ep-v25']}", ("EPBuffer",))
    assert (str(second), second.buffers) == (
        f"sgl-deep-ep {VERSIONS['sgl-deep-ep']}",
        ("ElasticBuffer", "Buffer"),
    )
    assert first.borrows and not second.borrows
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sgl-deep-ep-v25 .* does not start here: ImportError: .*CUDA"):
            transport.load_buffer()


def rows_of(refs: Any, x: Tensor, topk_idx: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    return refs.dispatch(x, topk_idx, weights, MAX_TOKENS, num_experts)


def reduce_by(refs: Any) -> Any:
    """The double's sum of rows, by the wheel's own combine of [T, K, H] values."""

    def reduce(parts: Any, tokens: Any, topk_idx: Tensor, size: int, bias: Tensor | None) -> Tensor:
        num_ranks, hidden = len(parts), parts[0].shape[1]
        values = torch.zeros(*topk_idx.shape, hidden, dtype=torch.bfloat16)
        owner = topk_idx.div(size, rounding_mode="floor")
        for rank, (part, chosen) in enumerate(zip(parts, tokens, strict=True)):
            first = (owner[chosen] == rank).int().argmax(1)  # the whole row at one of the rank's copies
            values[chosen, first] = part
        made = refs.combine(values, topk_idx, 1, num_ranks, size * num_ranks, bias, True, False)
        return made.bfloat16()

    return reduce


def referenced(module: str, made: Any) -> Any:
    """A double whose rows and sums are those of the wheel's references."""
    refs = references(module)

    class Referenced(made):  # type: ignore[misc]
        reduce = staticmethod(reduce_by(refs))

        def _dispatch(self, x: Any, topk_idx: Any, weights: Any, num_experts: Any, *how: Any) -> Any:
            found = super()._dispatch(x, topk_idx, weights, num_experts, *how)
            if topk_idx is None:
                return found
            rows, local, gates, sources, counts = rows_of(refs, x, topk_idx, weights, num_experts)
            assert counts.tolist() == found[3].got and sources.tolist() == sorted(sources.tolist())
            number = len(rows)
            for mine, theirs in zip(found[:3], (rows, local, gates), strict=True):
                assert torch.equal(mine[:number], theirs)
                mine[:number] = theirs
            return found

    Referenced.__name__ = made.__name__
    return Referenced


def all_cases(rank: int, num_ranks: int, module: str, made: Any, waits: bool) -> dict[str, str]:
    buffer, failed = referenced(module, made), {}
    for name in sorted(CASES.keys() - ELSEWHERE):
        try:
            CASES[name](lambda: any_shape(Topology(num_ranks), buffer, waits))
        except AssertionError:
            failed[name] = traceback.format_exc()
    return failed


RUNS = [
    (2, "deep_ep_v25", deep_ep_double.EPBuffer, True),
    (4, "deep_ep_v25", deep_ep_double.EPBuffer, False),
    (2, "deep_ep", deep_ep_double.ElasticBuffer, True),
]


@unpacked
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[1]}-{run[0]}")
def test_conformance_of_the_references(run: Any) -> None:
    for rank, failed in enumerate(run_ranks(all_cases, run[0], *run, timeout=200)):
        assert not failed, f"rank {rank}: " + "\n".join(failed.values())


def sums_of_both(rank: int, num_ranks: int, module: str) -> int:
    """The double's sum beside the wheel's, bit for bit, with copies on one rank that DeepEP adds up itself."""
    refs, compared = references(module), 0
    for batch in batches(num_ranks, torch.bfloat16, 16):
        topk_idx, size = batch.slots[rank], batch.slots_per_rank
        tokens = deep_ep_double.tokens_to(topk_idx, size * num_ranks, num_ranks)
        parts = [batch.x[rank][t] * CANCELLING[d] for d, t in enumerate(tokens)]
        for bias in (None, batch.x[rank] * 3):
            ours = deep_ep_double.sum_copies(parts, tokens, topk_idx, size, bias)
            theirs = reduce_by(refs)(parts, tokens, topk_idx, size, bias)
            assert torch.equal(ours, theirs), batch.name
            compared += ours.numel()
    dist.barrier()
    return compared


@unpacked
@pytest.mark.slow
@pytest.mark.parametrize("module", PACKAGES.values())
def test_the_double_adds_as_the_references_do(module: str) -> None:
    assert min(run_ranks(sums_of_both, 3, 3, module)) > 1000
