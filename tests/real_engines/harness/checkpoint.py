"""Tiny checkpoints with random weights, made on the spot; Hugging Face's model of them is the oracle."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

WORDS = 512
PROMPTS = [list(range(1, 20)), list(range(5, 12)), list(range(40, 100, 3))]
# Of one or two words each, so that few experts get most copies of a prefill.
SKEWED = [[17 * i % 500 + 1] * 40 if i % 2 else [31 * i % 500 + 1, 7 * i % 500 + 1] * 18 for i in range(12)]


def make_qwen3_moe(
    folder: Path,
    head_dim: int = 16,
    num_dense: int = 0,
    tokens: int = 24,
    prompts: list[list[int]] = PROMPTS,
    seed: int = 0,
) -> list[list[int]]:
    """Saves a float32 model of 3 MoE layers and 16 experts whose routing is skewed; its greedy tokens for the prompts.

    num_dense: dense layers before the MoE layers.
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=num_dense + 3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, num_experts=16, num_experts_per_tok=4,
        decoder_sparse_step=1, mlp_only_layers=list(range(num_dense)), max_position_embeddings=512, dtype="float32",
        architectures=["Qwen3MoeForCausalLM"], eos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.08)
            if name.endswith("mlp.gate.weight"):
                weight.normal_(0, 0.5)
                weight[:4] *= 3
    model.save_pretrained(folder)
    return [greedy(model, prompt, tokens) for prompt in prompts]


def make_tokenizer(folder: Path) -> None:
    """A word for each of the model's ids, beside its weights: load generators count the words that come back."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def greedy(model: Qwen3MoeForCausalLM, prompt: list[int], tokens: int = 24) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return made[0, len(prompt) :].tolist()
