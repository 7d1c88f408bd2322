# SPDX-License-Identifier: Apache-2.0
"""Bytes that recompute keeps, counted storage by storage, against the formulas of stream_bytes."""

import pytest
import torch
from recompute_support import Meter
from weft.torch import (
    CheckpointWithoutOutput,
    aggregate,
    best_group,
    build_mhc_recompute_layer_plan,
    finalize_mhc_recompute_layer,
    post,
    rmsnorm,
    stream_bytes,
)

TOKENS, CHANNELS = 6, 16


class Sublayer(torch.autograd.Function):
    """A sub-layer that keeps its input and nothing else that is as large."""

    @staticmethod
    def forward(ctx, u, w):
        ctx.save_for_backward(u, w)
        return u @ w

    @staticmethod
    def backward(ctx, grad):
        u, w = ctx.saved_tensors
        return grad @ w.T, u.T @ grad


def merge(x, f, h_post, h_res):
    return post(x, f, h_post, h_res, numerics="megatron_main")


def maps(x):
    # Small, and so kept. What they are made of is not watched.
    h = x.detach().mean(-1)
    return h.sigmoid(), h.cos(), (h.unsqueeze(-1) + h.unsqueeze(-2)).softmax(-1)


def stack(meter, x, weights, group, norm_out, recompute):
    """The sublayers of a transformer without what is inside them."""
    managers, ends = build_mhc_recompute_layer_plan(len(weights) // 2, group, recompute)
    for i, w in enumerate(weights):
        manager = managers[i // 2]

        def run(fn, *args, keep=manager is None, manager=manager):
            def watched(*args):
                return meter.watch(fn(*args))

            return watched(*args) if keep else CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(watched, *args)

        boundary = i % 2 == 1 and ends[i // 2]
        pre, h_post, h_res = maps(x)
        u = run(aggregate, x, pre)
        f = Sublayer.apply(run(rmsnorm, u) if norm_out else u, w)
        del u
        x = run(merge, x, f, h_post, h_res, keep=manager is None or boundary)
        if i % 2 == 1:
            finalize_mhc_recompute_layer(manager, x, boundary)
    return x


def step(layers, streams, group, norm_out, recompute):
    """One forward and backward: what it left between them, its peaks, and a gradient."""
    g = torch.Generator().manual_seed(5)
    entry = torch.randn(TOKENS, streams, CHANNELS, generator=g, requires_grad=True)
    weights = [torch.randn(CHANNELS, CHANNELS, generator=g, requires_grad=True) for _ in range(2 * layers)]
    meter = Meter()
    with meter:
        x = meter.watch(entry * 1)
        x = stack(meter, x, weights, group, norm_out, recompute)
        forward = meter.peak
        loss = x.mean(-2).square().sum()
        del x
        resident = meter.now()
        meter.restart()
        loss.backward()
    return resident, forward, meter.peak, entry.grad, meter.now()


SHAPES = [(8, 2, 4), (8, 1, 4), (8, None, 4), (6, 3, 2), (4, 2, 1), (7, 3, 4), (5, 2, 8)]


@pytest.mark.parametrize("norm_out", [True, False])
@pytest.mark.parametrize("layers,group,streams", SHAPES)
def test_peaks_follow_the_formulas(way, layers, group, streams, norm_out):
    want = stream_bytes(TOKENS, CHANNELS, streams, layers, group, element_size=4, norm_out=norm_out)
    resident, forward, backward, grad, left = step(layers, streams, group, norm_out, recompute=True)
    exact = layers % (group or layers) == 0
    assert resident == want.resident
    assert forward == want.grouped if exact else forward <= want.grouped
    assert backward <= want.grouped
    assert left == 0

    _, forward, _, expected, left = step(layers, streams, group, norm_out, recompute=False)
    assert forward == want.none and left == 0
    torch.testing.assert_close(grad, expected, atol=0, rtol=0)


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_the_best_group_has_the_lowest_peak(layers):
    peaks = [step(layers, 4, k, True, recompute=True)[1] for k in range(1, layers + 1)]
    assert peaks[best_group(layers, 4) - 1] == min(peaks)
