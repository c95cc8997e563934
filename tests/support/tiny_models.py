"""Tiny random models of transformers, one for each ready plan of tensor parallelism and some that have none."""

from __future__ import annotations

from typing import Any

import torch

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
_EXPERTS = {**_GROUPED, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}

#: Families that have a ready plan → arguments of their configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "gemma": {**_GROUPED, "head_dim": 16},
    "gemma2": {**_GROUPED, "head_dim": 16},
    "gemma3_text": {**_GROUPED, "head_dim": 16},
    "olmo": _GROUPED,
    "phi": {**_SIZES, "qk_layernorm": True},
    "phi3": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    # The second layer is dense.
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 16,
        "pad_token_id": 1,
    },
    "bert": _SIZES,
    "roberta": {**_SIZES, "max_position_embeddings": 40, "pad_token_id": 1},
    "gpt_neox": _SIZES,
    "gpt2": {**_GPT, "bos_token_id": 0, "eos_token_id": 0},
}
#: Families without a ready plan.
OTHERS: dict[str, dict[str, Any]] = {"olmo2": _GROUPED, "granite": _GROUPED}


def tiny_model(family: str, seed: int = 0) -> Any:
    """Return a model of a family with random weights, in evaluation mode."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES, **OTHERS}[family])
    kind = "AutoModelForMaskedLM" if family in ("bert", "roberta") else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_config(config).eval()
