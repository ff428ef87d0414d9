"""Runs an SGLang engine over two CPU processes: python run_engine.py CHECKPOINT TOKENS.json [name=JSON value ...]

Names are sglang.Engine's options, and lengths: how many tokens to generate for each prompt; where there are more
than prompts, these come again; prompts: others than the harness's; update: a checkpoint whose weights the engine takes
before it generates everything once more."""

import json
import os
import sys

from checkpoint import PROMPTS

COMMON = {
    "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "disable_cuda_graph": True,
    "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "mem_fraction_static": 0.2, "max_total_tokens": 2048, "max_running_requests": 4, "context_length": 256,
    "tp_size": 2, "ep_size": 2, "log_level": "info",
}  # fmt: skip


def main() -> None:
    import sglang

    model, out, *given = sys.argv[1:]
    options = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in given)}
    given_prompts, update = options.pop("prompts", PROMPTS), options.pop("update", None)
    lengths = options.pop("lengths", [24] * len(given_prompts))
    engine = sglang.Engine(model_path=model, **(COMMON | options))
    try:
        greedy = [{"max_new_tokens": n, "temperature": 0, "ignore_eos": True} for n in lengths]
        prompts = [given_prompts[i % len(given_prompts)] for i in range(len(lengths))]
        results = engine.generate(input_ids=prompts, sampling_params=greedy)
        if update is not None:
            done = engine.update_weights_from_disk(update)
            assert done[0], done
            results += engine.generate(input_ids=prompts, sampling_params=greedy)
        with open(out, "w") as file:
            json.dump([result["output_ids"] for result in results], file)
        if "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR" in os.environ:
            engine.dump_expert_distribution_record()
    finally:
        engine.shutdown()


if __name__ == "__main__":  # engines spawn processes, which import this file
    main()
