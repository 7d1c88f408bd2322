#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GPT in the manner of nanoGPT that has been trained with a plain residual connection goes on with several streams (mHC).

    examples/convert_nanogpt.py [--text FILE] [--steps 60] [--streams 4]

1. Train the plain model for half of the steps, and keep its checkpoint.
2. Convert it, in three lines: `convert`. The function of the model stays, its checkpoint names do not.
3. Load the checkpoint into a model that was converted before it was trained: `load_old`, by the map of names.
4. Train on. The streams begin as copies and part from each other.

Without --text the model learns its own source."""

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weft.torch import block_names, convert_blocks


class CausalSelfAttention(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(channels), CausalSelfAttention(channels, heads)
        self.ln_2, self.mlp = nn.LayerNorm(channels), MLP(channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, channels: int, layers: int, heads: int, context: int, vocabulary: int = 256):
        super().__init__()
        self.channels = channels
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, channels),
                "wpe": nn.Embedding(context, channels),
                "h": nn.ModuleList(Block(channels, heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(channels),
            }
        )
        self.lm_head = nn.Linear(channels, vocabulary, bias=False)
        nn.init.normal_(self.transformer.wte.weight, std=0.02)
        nn.init.normal_(self.transformer.wpe.weight, std=0.02)
        self.lm_head.weight = self.transformer.wte.weight  # tied, as in nanoGPT

    def forward(self, text: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.transformer.wte(text) + self.transformer.wpe(torch.arange(text.shape[1], device=text.device))
        for block in self.transformer.h:
            x = block(x, mask=mask)  # of the converted model: attention takes the mask, the MLP does not
        return self.lm_head(self.transformer.ln_f(x))


# ---- the recipe ------------------------------------------------------------------------------------------------------

NUMERICS = "transformer_engine"  # without an eps: the function of the model stays, up to rounding


def convert(model: GPT, streams: int) -> GPT:
    parts = [("ln_1", "attn"), ("ln_2", "mlp")]
    stack = convert_blocks(model.transformer.h, parts, model.channels, streams, numerics=NUMERICS)
    model.transformer.h = nn.ModuleList([stack])
    return model


def load_old(model: GPT, checkpoint: dict[str, Tensor]) -> list[str]:
    """Loads a checkpoint of the plain model into a converted one; returns the names that it has nothing for."""
    new = {f"transformer.h.{a}": f"transformer.h.0.{b}" for a, b in block_names(model.transformer.h[0]).items()}
    missing, unexpected = model.load_state_dict({new.get(k, k): t for k, t in checkpoint.items()}, strict=False)
    if unexpected:
        raise ValueError(f"not of this model: {', '.join(unexpected)}")
    return missing


# ---- the program -----------------------------------------------------------------------------------------------------


def train(model: GPT, text: Tensor, args: argparse.Namespace, first: int, last: int, generator) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(first, last + 1):
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
        window = text[starts + torch.arange(args.context + 1)].long()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (first, last):
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def parted(model: GPT, text: Tensor) -> float:
    """How far apart the streams are behind the last layer, by their size."""
    stack = model.transformer.h[0]
    x = stack.expand(model.transformer.wte(text))
    for layer in stack.layers:
        x = layer(x)
    return float((x - x.mean(-2, keepdim=True)).norm() / x.norm())


@torch.no_grad()
def logits(model: GPT, text: Tensor) -> Tensor:
    return model(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    for name, default in dict(steps=60, batch=8, context=64, channels=64, layers=3, heads=4, streams=4).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    sizes = (args.channels, args.layers, args.heads, args.context)
    model, generator, half = GPT(*sizes), torch.Generator().manual_seed(1), args.steps // 2
    train(model, text, args, 1, half, generator)
    checkpoint = copy.deepcopy(model.state_dict())

    probe = text[: args.context].long().unsqueeze(0)
    before = logits(model, probe)
    convert(model, args.streams)
    off = (logits(model, probe) - before).abs().max() / before.abs().max()
    print(f"converted: logits off by {float(off):.1e}")

    fresh = convert(GPT(*sizes), args.streams)
    missing = load_old(fresh, checkpoint)
    same = torch.equal(logits(fresh, probe), logits(model, probe))
    print(f"old checkpoint: {len(checkpoint)} tensors, {len(missing)} new ones stay fresh, same logits: {same}")

    print(f"streams apart: {parted(model, probe):.1e}")
    train(model, text, args, half + 1, args.steps, generator)
    print(f"streams apart: {parted(model, probe):.1e}")


if __name__ == "__main__":
    main()
