#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a DeepSeek-V4 of Hugging Face transformers with weft in its hyper-connections, on the bytes of a text.

    examples/finetune_deepseek_v4.py [--model FOLDER] [--text FILE] [--steps 40] [--out FOLDER]

The model is what `save_pretrained` wrote to --model, or without it a tiny one with random weights; on a CPU it takes
less than a minute. Without --text it learns this file. weft takes part by one line, `weft.hf.apply(model)`: optimiser,
generation and checkpoint are transformers' and PyTorch's own, and what --out gets is read without weft."""

import argparse
import logging
import time
from pathlib import Path

import torch
import weft.hf
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

BYTES = 256
CONTEXT = 64


def tiny() -> DeepseekV4ForCausalLM:
    config = DeepseekV4Config(
        vocab_size=BYTES,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        mlp_layer_types=["moe"] * 3,
        num_attention_heads=4,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        sliding_window=32,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return DeepseekV4ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder written by save_pretrained, with a vocabulary of bytes")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)

    model = DeepseekV4ForCausalLM.from_pretrained(options.model) if options.model else tiny()
    print(weft.hf.apply(model))

    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    began = time.time()
    model.train()
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - CONTEXT, (options.batch,))
        batch = torch.stack([text[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}  loss {loss.item():.3f}  {time.time() - began:.1f} s")

    model.eval()
    prompt = text[:16].unsqueeze(0)
    written = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, 16:]
    print("goes on with", repr(bytes(written.tolist()).decode(errors="replace")))

    if options.out:
        model.save_pretrained(options.out)
        plain = DeepseekV4ForCausalLM.from_pretrained(options.out).eval()
        with torch.no_grad():
            difference = (plain(prompt).logits - model(prompt).logits).abs().max().item()
        print(f"without weft, from {options.out}: logits differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()
