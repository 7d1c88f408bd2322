# SPDX-License-Identifier: Apache-2.0
"""Small stacks, and what the tests of modules and stacks do with them."""

from collections import Counter

import torch
import weft.torch as wt
from compare import same
from library_support import Recorder
from torch import nn

C, N, L = 16, 4, 5
KINDS = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "dropout and bias": {"dropout": 0.3, "pair": True},
    "no norm": {"norm": False, "pair": True},
    "norm weight": {"norm_weight": True, "contract": "learned"},
    "out_in": {"numerics": "liger"},
    "shifted": {"shifted": True, "dropout": 0.3, "pair": True},
    "no residual mix": {
        "residual_mix": False,
        "numerics": "hy_v4",
        "dropout": 0.3,
        "pair": True,
        "contract": "learned",
    },
    "no residual mix, shifted": {"residual_mix": False, "numerics": "hy_v4", "shifted": True},
    "shifted to the end": {"shifted": True, "contract": "pre", "numerics": "deepseek_v41"},
}


class Mlp(nn.Module):
    """A sub-layer with dropout of its own, which draws from the generator too."""

    def __init__(self, dropout=0.0, pair=False, device=None):
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C, device=device), nn.Linear(2 * C, C, device=device)
        self.drop, self.pair = nn.Dropout(dropout), pair

    def forward(self, u, gain=1.0):
        hidden = self.drop(torch.tanh(self.up(u))) * gain
        return (hidden @ self.down.weight.T, self.down.bias) if self.pair else self.down(hidden)


def stack(device="cpu", layers=L, dropout=0.0, pair=False, **options) -> wt.HyperConnectionStack:
    torch.manual_seed(7)
    options = {"alpha_init": 0.3, **options}
    return wt.HyperConnectionStack(
        [Mlp(dropout, pair, device) for _ in range(layers)], C, N, dropout=dropout, device=device, **options
    )


def step(module, x, *args, seed=3, **kwargs) -> list:
    x = x.detach().requires_grad_()
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    y = module(x, *args, **kwargs)
    torch.manual_seed(99)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def moved(model):
    """Parameters unlike those of a fresh model: gains are not 1, biases not 0. The same for models of one shape."""
    torch.manual_seed(21)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def close(got, want, what: str) -> None:
    """Bits on the CPU; on a GPU fp32 roundoff of the largest element for each of some dozen operations."""
    if got[0].device.type == "cpu":
        return same(got, want, what)
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() <= 64 * 2**-24 * w.abs().max(), what


def calls_of(model, x) -> Counter:
    with Recorder() as recorder:
        model(x)
    return Counter(func.name().removeprefix("weft::mhc_") for func, _ in recorder.calls)
