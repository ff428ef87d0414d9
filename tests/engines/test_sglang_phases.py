"""SGLang's layers without SGLang: a policy for each phase, and what ranks exchange."""

from __future__ import annotations

import pytest
import torch

from isoload import Balancer, LocalGroup
from isoload.engines.sglang.layers import Layer, Layers
from isoload.policies import make_policy
from support.small_batches import draw_ids, make_placement, make_topology


def layers_of(*loads: str) -> Layers:
    layers, group, placement = Layers(), LocalGroup(make_topology()), make_placement()
    for i, word in enumerate(loads):
        layers.by_id[i] = Layer(Balancer(placement, i, group=group, loads=word), None)  # type: ignore[arg-type]
    return layers


@pytest.mark.parametrize(
    ("loads", "want"),
    [
        (["gathered", "gathered"], "loads gathered: one gather per layer"),
        (
            ["own", "gathered"],
            "loads gathered: one gather per layer and loads own: no collective in a pass, targets",
        ),
    ],
)
def test_what_is_exchanged_in_words(loads: list[str], want: str) -> None:
    assert layers_of(*loads).exchanged().startswith(want)


def test_each_phase_has_its_policy() -> None:
    """As if a Balancer had been made with it, tables and targets aside, which are the layer's."""
    policies = {"prefill": make_policy("exact"), "decode": make_policy("exact_active")}
    layers, ids = layers_of("gathered"), draw_ids(0)
    layer = layers.by_id[0]
    layer.plan_by(policies)
    group, want = layer.balancer.group, []
    for phase in ("prefill", "decode", "decode", "prefill"):
        layer.turn(lambda: phase)  # noqa: B023
        alone = Balancer(layer.balancer.placement, 0, policies[phase], group)
        want.append(alone(ids))
        for ours, theirs in zip(layer.balancer(ids), want[-1], strict=True):
            assert torch.equal(ours, theirs)
    assert any(not torch.equal(a, b) for a, b in zip(want[0], want[1], strict=True))
    assert layers.describe().startswith("policy exact in prefill, exact_active in decode on 1 of 1 layers")


def test_one_policy_for_both_phases_is_left_alone() -> None:
    layer = layers_of("gathered").by_id[0]
    layer.plan_by(dict.fromkeys(("prefill", "decode"), make_policy("lp")))
    layer.turn(lambda: "prefill")
    assert not layer.policies and layer.policy_name == "exact", "as it was made"


def test_a_traced_router_has_one_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph would keep the phase of the pass that was traced."""
    layer = layers_of("gathered").by_id[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer.turn(lambda: "prefill")
    layer.policies = {"prefill": make_policy("exact"), "decode": make_policy("lp")}
    with pytest.raises(
        RuntimeError, match="ISOLOAD_POLICY must be one for prefill and decode where the router is"
    ):
        layer.turn(lambda: "prefill")


@pytest.mark.parametrize(("phase", "loads"), [("prefill", "gathered"), ("decode", "own")])
def test_a_policy_that_cannot_plan_a_layer_is_refused_at_once(phase: str, loads: str) -> None:
    policies = dict.fromkeys(("prefill", "decode"), make_policy("exact"))
    layer = layers_of(loads).by_id[0]
    with pytest.raises(
        ValueError, match="placement must have shared experts" if loads == "gathered" else "policy"
    ):
        layer.plan_by(policies | {phase: make_policy("joint" if loads == "gathered" else "lp")})
