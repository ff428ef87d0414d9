"""vLLM's own kernel of the choice of replicas, in Triton's interpreter, against the harness's rule: slots and what is
recorded. Prints how many cases are equal."""

import ast
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from vllm_cpu import map_and_record

NAMES = ("_eplb_map_and_record_i32_kernel", "_eplb_map_and_record_triton")
EXPERTS, SLOTS = 16, 24


def vllms_functions() -> str:
    """Their text in the installed file, where they stand under a condition that no CPU meets."""
    folder = Path(find_spec("vllm").submodule_search_locations[0])
    text = (folder / "model_executor/layers/fused_moe/router/base_router.py").read_text()
    found = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    return "\n\n".join(ast.unparse(found[name]) for name in NAMES)


def main() -> None:
    made = Path(sys.argv[1]) / "vllms_kernel.py"  # Triton reads a kernel's text from its file
    made.write_text(f"import torch\nimport triton\nimport triton.language as tl\n\n{vllms_functions()}\n")
    sys.path.insert(0, str(made.parent))
    from vllms_kernel import _eplb_map_and_record_triton as theirs

    generator = torch.Generator().manual_seed(0)
    cases = [
        (tokens, record, valid)
        for tokens in (1, 3, 64, 300)
        for record in (True, False)
        for valid in (None, 0, tokens // 2, tokens)
    ]
    equal = sum(is_equal(theirs, generator, *case) for case in cases)
    print(f"equal: {equal} of {len(cases)}")


def is_equal(
    theirs: Callable[..., Tensor], generator: torch.Generator, tokens: int, record: bool, valid: int | None
) -> bool:
    """Whether vLLM's function and the harness's return the same slots and record the same loads."""
    replicas = torch.randint(0, EXPERTS, (SLOTS - EXPERTS,), generator=generator)
    table = torch.cat([torch.arange(EXPERTS), replicas])
    counts = torch.bincount(table, minlength=EXPERTS)
    maps = torch.full((EXPERTS, SLOTS), -1)
    for expert in range(EXPERTS):
        maps[expert, : counts[expert]] = (table == expert).nonzero().flatten()
    ids = torch.randint(-1, EXPERTS, (tokens, 4), generator=generator, dtype=torch.int32)
    rows = None if valid is None else torch.tensor(valid, dtype=torch.int32)
    found = []
    for function in (theirs, map_and_record):
        loads = torch.ones(SLOTS, dtype=torch.int32)
        slots = function(
            topk_ids=ids, logical_to_physical_map=maps, logical_replica_count=counts,
            expert_load_view=loads, record_enabled=torch.tensor(record), num_unpadded_tokens=rows,
        )  # fmt: skip
        found.append((slots, loads))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


if __name__ == "__main__":
    main()
