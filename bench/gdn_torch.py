# SPDX-License-Identifier: Apache-2.0
"""What stands in front of the gated delta rule as plain PyTorch, and data for it: rows of bench/compare_torch.py.

Heads are those of a common model: 16 of query and key, 32 of value, 128 wide, four taps."""

import torch
import torch.nn.functional as F
import weft.torch as wt
from mhc_torch import Case

KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 16, 32, 128, 4
HEADS = wt.GdnHeads(KEY_HEADS, VALUE_HEADS, DIM, DIM)
L2_EPS = 1e-6


def gdn_pre(proj, weight, a_log, dt_bias):
    """Rows [B, S, columns]; computed in fp32 and rounded once, where a result is stored. The convolution is a sum of
    shifted products: on a CPU that is many times as fast as F.conv1d with a group for each channel."""
    steps, taps, keys = proj.shape[1], weight.shape[1], KEY_HEADS * DIM
    sizes = [HEADS.channels, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS]
    qkv, z, b, a = proj.split(sizes, -1)
    x = F.pad(qkv.float(), (0, 0, taps - 1, 0))
    y = F.silu(sum(x[:, j : j + steps] * weight[:, j] for j in range(taps)))
    heads = [part.unflatten(-1, (KEY_HEADS, DIM)) for part in y[..., : 2 * keys].split(keys, -1)]
    unit = [h * torch.rsqrt(h.square().sum(-1, keepdim=True) + L2_EPS) for h in heads]
    query, key = (h.to(proj.dtype).repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for h in unit)
    value = y[..., 2 * keys :].unflatten(-1, (VALUE_HEADS, DIM)).to(proj.dtype)
    g = -a_log.exp() * F.softplus(a.float() + dt_bias)
    gate = z.unflatten(-1, (VALUE_HEADS, DIM)).contiguous()
    return query, key, value, gate, torch.sigmoid(b.float()).to(proj.dtype), g


def make_gdn_cases(tokens, dtype, sequences=1):
    torch.manual_seed(2)
    inputs = {
        "proj": torch.randn(sequences, tokens // sequences, HEADS.columns, dtype=dtype),
        "weight": torch.randn(HEADS.channels, WIDTH) / 2,
        "a_log": torch.rand(VALUE_HEADS) * 2.77,
        "dt_bias": torch.randn(VALUE_HEADS),
    }
    options = wt.GdnOptions(l2_eps=L2_EPS)

    def weft(*tensors):
        return tuple(wt.gdn_pre(*tensors, heads=HEADS, options=options)[:6])

    outputs = ("query", "key", "value", "gate", "beta", "g")
    return [Case("gdn_pre", inputs, outputs, weft, narrow="bwd", function=gdn_pre)]
