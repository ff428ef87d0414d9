"""Runs a vLLM engine over two CPU processes: python run_vllm.py CHECKPOINT TOKENS.json [name=JSON value ...]

VLLM_DP_SIZE=2 and the variables beside it make it one of two engines of a data-parallel group. Each of these has its
own part of the prompts, and the second is done before the first.
"""

import json
import os
import sys

from checkpoint import PROMPTS

COMMON = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4,
    "tensor_parallel_size": 2, "enable_expert_parallel": True,
}  # fmt: skip


def main() -> None:
    from vllm import LLM, SamplingParams

    model, out, *given = sys.argv[1:]
    options = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in given)}
    tokens = options.pop("max_tokens", 24)
    engine = LLM(model=model, **(COMMON | options))
    try:
        rank, size = (
            int(os.environ.get(f"VLLM_DP_{name}", default)) for name, default in (("RANK", 0), ("SIZE", 1))
        )
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[rank::size]]
        greedy = SamplingParams(
            max_tokens=tokens - 8 * rank, temperature=0, detokenize=False, ignore_eos=True
        )
        results = engine.generate(prompts, greedy, use_tqdm=False)
        with open(out, "w") as file:
            json.dump([result.outputs[0].token_ids for result in results], file)
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # engines spawn processes, which import this file
    main()
