"""SGLang over all GPUs of this machine on a made model, with isoload and without: the last row of bench_cluster.

python bench/lib/cluster_sglang.py FOLDER GPUS      # prints one line of JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WORDS, EXPERTS_PER_GPU, TOKENS = 512, 8, 32
PROMPTS = [list(range(1, 20)), list(range(5, 12)), list(range(40, 100, 3))]
ATTACHED = "isoload: attached to SGLang"


def make_model(folder: Path, gpus: int) -> None:
    """Save a bfloat16 Qwen3 MoE model of two layers, wide enough for DeepEP, with random weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=2048, intermediate_size=512, moe_intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=max(8, gpus), head_dim=128, num_experts=EXPERTS_PER_GPU * gpus,
        num_experts_per_tok=4, decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=512,
        dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"], eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def serve(folder: Path, gpus: int) -> None:
    """Generate greedily and print the tokens."""
    import sglang

    engine = sglang.Engine(
        model_path=str(folder), skip_tokenizer_init=True, tp_size=gpus, ep_size=gpus, moe_a2a_backend="deepep",
        ep_num_redundant_experts=gpus, ep_dispatch_algorithm="dynamic", enable_eplb=True, mem_fraction_static=0.3,
    )  # fmt: skip
    done = engine.generate(
        input_ids=PROMPTS, sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    )
    print("TOKENS " + json.dumps([of["output_ids"] for of in done]))
    engine.shutdown()


def main() -> int:
    folder, gpus = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        serve(folder, gpus)
        return 0
    make_model(folder, gpus)
    tokens, attached = {}, False
    for name, more in {"stock": {}, "isoload": {"ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1"}}.items():
        words = [sys.executable, __file__, str(folder), str(gpus), "serve"]
        done = subprocess.run(words, env=os.environ | more, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
        if done.returncode or not lines:
            tail = " ".join((done.stdout + done.stderr).splitlines()[-5:])
            print(
                json.dumps(
                    {"outcome": "wrong", "text": f"{name} ended with {done.returncode}: {tail}"[:2000]}
                )
            )
            return 0
        tokens[name] = json.loads(lines[0].removeprefix("TOKENS "))
        attached |= name == "isoload" and ATTACHED in done.stdout + done.stderr
    pairs = [
        (one, other) for both in zip(*tokens.values(), strict=True) for one, other in zip(*both, strict=True)
    ]
    alike = sum(one == other for one, other in pairs) / len(pairs)
    # Another replica adds in another order in bfloat16, so that single tokens of random weights may differ.
    right = attached and alike > 0.5
    text = f"{100 * alike:.0f} % of greedy tokens alike, isoload {'attached' if attached else 'not attached'}"
    print(json.dumps({"outcome": "right" if right else "wrong", "text": text}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
