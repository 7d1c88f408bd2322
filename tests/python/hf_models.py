# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the families that weft.hf knows, with random weights."""

import torch
import transformers

VOCABULARY = 48
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "initializer_range": 0.2, "num_attention_heads": 4}
NO_TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN = {
    **(COMMON | NO_TOKENS | GATED_DELTA_NET),
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}
SMALL_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}


def deepseek_v4():
    config = transformers.DeepseekV4Config(
        **(COMMON | NO_TOKENS | MOE),
        num_hidden_layers=3,
        head_dim=16,
        q_lora_rank=16,
        n_routed_experts=4,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        sliding_window=8,
        partial_rotary_factor=0.5,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe"],
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    experts = torch.randint(0, 4, (VOCABULARY, 1))  # of each token: two that differ, or the gate has no gradient
    model.model.layers[0].mlp.gate.tid2eid.copy_(torch.cat([experts, (experts + 1) % 4], 1))
    return model


def glm5_next():
    text = {
        **(COMMON | NO_TOKENS | MOE),
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "intermediate_size": 24,
        "n_routed_experts": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_kpool": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    }
    vision = {**SMALL_VISION, "patch_size": 2, "image_size": 4, "projection_intermediate_size": 16}
    return transformers.Glm5NextForConditionalGeneration(
        transformers.Glm5NextConfig(text_config=text, vision_config=vision)
    )


def hy_v4():
    config = transformers.HYV4Config(
        **(COMMON | NO_TOKENS | MOE),
        num_hidden_layers=2,
        num_key_value_heads=4,
        intermediate_size=24,
        n_routed_experts=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_topk=8,
        index_head_dim=16,
        index_n_heads=2,
    )
    return transformers.HYV4ForCausalLM(config)


def qwen3_next():
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**QWEN, **EXPERTS, intermediate_size=24))


def qwen3_5():
    config = transformers.Qwen3_5TextConfig(**QWEN, intermediate_size=24)
    return transformers.Qwen3_5ForCausalLM(config)


def qwen3_5_moe():
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**QWEN, **EXPERTS))


def olmo_hybrid():
    return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**QWEN, intermediate_size=24))


def qwen4_exp():
    config = transformers.Qwen4ExpTextConfig(
        **QWEN,
        **EXPERTS,
        hc_lowrank=8,
        output_gate_type="sigmoid",
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    )
    return transformers.Qwen4ExpForCausalLM(config)


MAKE = {
    f.__name__: f for f in (deepseek_v4, glm5_next, hy_v4, qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid, qwen4_exp)
}
