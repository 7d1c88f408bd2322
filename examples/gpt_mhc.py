#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small GPT whose residual connection has several streams (mHC), trained on the bytes of a text file.

    examples/gpt_mhc.py [--text FILE] [--steps 100] [--streams 4] [--contract learned] [--recompute 4]

Without --text the model learns its own source. On a GPU where there is one. The model has nothing special but
HyperConnectionStack: it makes n streams of the embedding, lets every sub-layer read a mix of them (through an
RMSNorm) and write back to all of them, and makes one stream of n again at the end."""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weft.torch import HyperConnectionStack


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self, channels: int):
        super().__init__(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))


class GPT(nn.Module):
    def __init__(self, channels: int, layers: int, heads: int, context: int, vocabulary: int = 256, **mhc):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, channels), nn.Embedding(context, channels)
        sublayers = [s for _ in range(layers) for s in (Attention(channels, heads), MLP(channels))]
        self.stack = HyperConnectionStack(sublayers, channels, **mhc)
        self.norm, self.head = nn.RMSNorm(channels), nn.Linear(channels, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.stack(self.tokens(text) + self.places(places))))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    for name, default in dict(steps=100, batch=16, context=128, channels=128, layers=4, heads=4, streams=4).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--contract", choices=["mean", "sum", "learned"], default="mean")
    parser.add_argument("--recompute", type=int, help="rebuild the streams of so many sub-layers at a time")
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser


def make(args: argparse.Namespace) -> GPT:
    mhc = dict(streams=args.streams, contract=args.contract, dropout=args.dropout, recompute=args.recompute)
    return GPT(args.channels, args.layers, args.heads, args.context, **mhc)


def sample(text: Tensor, args: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of the text, and the same one byte later."""
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
    window = text[starts + torch.arange(args.context + 1)].long()
    return window[:, :-1], window[:, 1:]


def read(args: argparse.Namespace) -> Tensor:
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    if len(text) <= args.context:
        raise SystemExit(f"{args.text} has {len(text)} bytes; a window takes {args.context + 1}")
    return text


def main() -> None:
    args = arguments().parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, model, generator = read(args), make(args).to(device), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = time.monotonic()
    for step in range(1, args.steps + 1):
        x, y = (t.to(device) for t in sample(text, args, generator))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
