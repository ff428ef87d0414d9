"""Gates read from transformers' blocks choose and weigh as the blocks' own routers; which MoE blocks are taken."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isoload.layer.block_experts import is_known
from isoload.layer.modules import GATES, block_experts, block_gate

transformers = pytest.importorskip(
    "transformers", minversion="5.10", reason="older blocks are in test_modules.py"
)

E, K, H = 8, 2, 32
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), K),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **{
        "hidden_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    **{"n_group": 1, "topk_group": 1},
}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights as scored": {"norm_topk_prob": False},
    "weights of 1": {"norm_topk_prob": True},
    "scaled": {"routed_scaling_factor": 2.5},
    "groups": {"n_group": 4, "topk_group": 2},
}


def block_classes() -> Iterator[tuple[Any, type[nn.Module]]]:
    """Every class of transformers that makes fused experts, and its module."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "use_experts_implementation" not in path.read_text():
            continue
        module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for of in list(vars(module).values()):
            own = inspect.isclass(of) and issubclass(of, nn.Module) and of.__module__ == module.__name__
            if own and "self.experts =" in inspect.getsource(of):
                yield module, of


def module_of(name: str) -> tuple[Any, type[nn.Module]]:
    """The module that has a block's class, and the class."""
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if f"class {name}(" in path.read_text():
            module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            return module, getattr(module, name)
    pytest.skip(f"transformers {transformers.__version__} has no {name}")


def made(module: Any, block: type[nn.Module], **options: Any) -> nn.Module:
    """A block with random weights, by the first configuration of its module that makes one."""
    failed = ""
    for config in [
        of for name, of in vars(module).items() if name.endswith("Config") and inspect.isclass(of)
    ]:
        try:
            built = config(**{**SIZES, **options})
            built._experts_implementation = "eager"
            more = [p for p in inspect.signature(block.__init__).parameters.values() if p.default is p.empty]
            found = block(built, *[0] * (len(more) - 2))
        except Exception as error:  # of another part of the model
            failed = f"{type(error).__name__}: {error}"
            continue
        torch.manual_seed(31)
        for tensor in found.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.5)
        return found
    raise LookupError(f"{block.__name__} is not made: {failed}")


def dense(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids), E).scatter(1, ids, weights.float())


@pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("name", [name for name in GATES if name != "GptOssMLP"])
def test_chooses_as_the_blocks_own_router(name: str, options: dict[str, Any]) -> None:
    block = made(*module_of(name), **options)
    rows = torch.randn(40, H)
    own: Any = block.gate
    _, weights, ids = own(rows)
    torch.testing.assert_close(dense(*block_gate(block)(rows)), dense(ids, weights), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_moe_block_of_transformers_is_taken_or_refused_with_a_reason() -> None:
    """`isoload.balance` takes those whose experts it can compute; a gate is needed by "lookahead" alone."""
    taken, refused = [], {}
    for module, of in block_classes():
        try:
            block = made(module, of)
        except LookupError as error:
            refused[of.__name__] = str(error)
            continue
        if not is_known(block):
            refused[of.__name__] = "no fused experts of its own"
            continue
        try:
            block_experts(block)
        except ValueError as error:
            refused[of.__name__] = str(error)
            continue
        taken.append(f"{of.__name__}{'' if of.__name__ in GATES else ' (its gate is not read)'}")
    print(
        *(f"taken: {name}" for name in taken),
        *(f"refused: {name}: {why}" for name, why in refused.items()),
        sep="\n",
    )
    assert len(taken) > 40 and all(refused.values())
