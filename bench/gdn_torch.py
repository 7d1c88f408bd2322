# SPDX-License-Identifier: Apache-2.0
"""What stands in front of the gated delta rule as plain PyTorch, and data for it: rows of bench/compare_torch.py.

Heads are those of a common model: 16 of query and key, 32 of value, 128 wide, four taps."""

import torch
import torch.nn.functional as F
import weft_ctypes as weft
from mhc_torch import Case

KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 16, 32, 128, 4
L2_EPS = 1e-6


def gdn_pre(q, k, v, z, b, a, weight, a_log, dt_bias):
    """[B, S, heads, dim] each; computed in fp32 and rounded once, where a result is stored. The convolution is a sum of
    shifted products: on a CPU that is many times as fast as F.conv1d with a group for each channel."""
    batch, steps = q.shape[:2]
    x = torch.cat([part.flatten(2) for part in (q, k, v)], -1).float()
    taps = weight.shape[1]
    x = F.pad(x, (0, 0, taps - 1, 0))
    y = F.silu(sum(x[:, j : j + steps] * weight[:, j] for j in range(taps)))
    keys = q.shape[2] * q.shape[3]
    heads = [part.view(batch, steps, -1, q.shape[3]) for part in y[..., : 2 * keys].split(keys, -1)]
    repeat = v.shape[2] // q.shape[2]
    unit = [h * torch.rsqrt(h.square().sum(-1, keepdim=True) + L2_EPS) for h in heads]
    query, key = (h.to(q.dtype).repeat_interleave(repeat, 2) for h in unit)
    value = y[..., 2 * keys :].reshape(v.shape).to(v.dtype)
    g = -a_log.exp() * F.softplus(a.float() + dt_bias)
    return query, key, value, z.clone(), torch.sigmoid(b.float()).to(b.dtype), g


def make_gdn_cases(tokens, dtype):
    torch.manual_seed(2)

    def rows(heads, *dim):
        return torch.randn(1, tokens, heads, *dim, dtype=dtype)

    inputs = {
        "q": rows(KEY_HEADS, DIM),
        "k": rows(KEY_HEADS, DIM),
        "v": rows(VALUE_HEADS, DIM),
        "z": rows(VALUE_HEADS, DIM),
        "b": rows(VALUE_HEADS),
        "a": rows(VALUE_HEADS),
        "weight": torch.randn((2 * KEY_HEADS + VALUE_HEADS) * DIM, WIDTH) / 2,
        "a_log": torch.rand(VALUE_HEADS) * 2.77,
        "dt_bias": torch.randn(VALUE_HEADS),
    }
    options = weft.GdnOptions(l2norm=1, l2_eps=L2_EPS, q_scale=1, beta_scale=1)
    outputs = ("query", "key", "value", "gate", "beta", "g")
    return [Case("gdn_pre", inputs, outputs, {"options": options}, narrow="bwd", function=gdn_pre)]
