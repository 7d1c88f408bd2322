#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves a model with residual streams and Gated DeltaNet one token at a time, with the bits of a prompt read at once.

    examples/serve_by_token.py [--tokens 24] [--batch 3]

weft's operators give a token the same bits whatever else is in the call, so a model has them too as soon as the rest of
it does. PyTorch's matrix products do not: how nn.Linear sums depends on the number of rows. Here they run inside
ByToken, which shows its module one token at a time. That is the simplest way and a slow one; a server has batch-invariant
products in this place."""

import argparse

import torch
import weft.torch as wt
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = wt.GdnHeads(key_heads=2, value_heads=4, key_dim=16, value_dim=16)


class ByToken(nn.Module):
    """A module of [C] -> [D], run for one token after the other: what it computes for one cannot depend on others."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *cache) -> Tensor:
        rows = [self.module(row.clone()) for row in x.flatten(0, -2)]  # a copy begins at the same alignment
        return torch.stack(rows).unflatten(0, x.shape[:-1])


class Gated(nn.Module):
    """The end of a Gated DeltaNet layer: [o | z] -> out(o silu(z))."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.out = nn.Linear(width, channels, bias=False)

    def forward(self, row: Tensor) -> Tensor:
        o, z = row.chunk(2)
        return self.out(o * F.silu(z))


class GatedDeltaNet(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        width = HEADS.value_heads * HEADS.value_dim
        self.into = ByToken(nn.Linear(channels, HEADS.columns, bias=False))
        self.front = wt.GatedDeltaFront(HEADS, gate="view")
        self.norm = nn.Parameter(torch.ones(HEADS.value_dim))
        self.out = ByToken(Gated(width, channels))

    def new_cache(self, batch: int) -> tuple[Tensor, Tensor]:
        """States of the convolution and of the rule, for `batch` sequences."""
        rule = torch.zeros(batch, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim, device=self.norm.device)
        return self.front.new_state(batch), rule

    def forward(self, u: Tensor, cache: dict) -> Tensor:
        conv, rule = cache[self]
        front = self.front.step(self.into(u), conv)  # any number of tokens; conv moves on in place
        o, state = wt.gdn_rule(front.query, front.key, front.value, front.beta, front.g, state=rule, final_state=True)
        rule.copy_(state)
        return self.out(torch.cat([wt.rmsnorm(o, self.norm).flatten(-2), front.gate.flatten(-2)], -1))


class Model(nn.Module):
    def __init__(self, channels: int = 64, layers: int = 3, vocabulary: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, channels)
        sublayers: list[nn.Module] = []
        for _ in range(layers):
            mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.SiLU(), nn.Linear(2 * channels, channels))
            sublayers += [GatedDeltaNet(channels), ByToken(mlp)]
        self.stack = wt.HyperConnectionStack(sublayers, channels, contract="learned", alpha_init=1.0)
        self.head = ByToken(nn.Sequential(nn.RMSNorm(channels), nn.Linear(channels, vocabulary)))

    def new_cache(self, batch: int) -> dict:
        return {m: m.new_cache(batch) for m in self.modules() if isinstance(m, GatedDeltaNet)}

    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: dict | None = None) -> Tensor:
        """Logits of each token of [B, S]; the cache goes on with them."""
        cache = self.new_cache(len(tokens)) if cache is None else cache
        return self.head(self.stack(self.embedding(tokens), cache))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    prompt = torch.randint(0, 64, (options.batch, 8))
    cache = model.new_cache(options.batch)
    logits = [model(prompt, cache)]
    for _ in range(options.tokens):
        logits.append(model(logits[-1][:, -1:].argmax(-1), cache))
    served = torch.cat(logits, 1)
    written = torch.cat([prompt, served[:, 7:-1].argmax(-1)], 1)
    at_once = model(written)
    alone = torch.cat([model(sequence.unsqueeze(0)) for sequence in written])
    print(f"{options.batch} sequences, {written.shape[1]} tokens, logits {tuple(served.shape)}")
    print("one token at a time, at once:", "same bits" if torch.equal(served, at_once) else "DIFFERENT")
    print("in a batch, alone:", "same bits" if torch.equal(at_once, alone) else "DIFFERENT")


if __name__ == "__main__":
    main()
