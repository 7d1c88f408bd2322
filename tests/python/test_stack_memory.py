# SPDX-License-Identifier: Apache-2.0
"""Streams that a joined stack does not keep for backward: rebuild and recompute."""

import pytest
import torch
import weft.torch as wt
from compare import same
from recompute_support import Meter
from stack_support import KINDS, C, Mlp, N, calls_of, moved, stack, step

# ---- rebuild ---------------------------------------------------------------------------------------------------------


def kept_streams(model, x) -> int:
    """Bytes of the streams that the graph has saved for backward once the forward pass has ended, storage by storage,
    less the zeros of an entry, which are not that large. They are read from the graph, because under hooks that would
    list them recompute lets nothing go."""
    y = model(x)  # PyTorch 2.11 frees the graph with it, though its nodes are held
    nodes, found = [y.grad_fn], set()
    for node in nodes:
        if node not in found:
            found.add(node)
            nodes.extend(before for before, _ in node.next_functions if before is not None)
    saved = [t for node in found for t in getattr(node, "saved_tensors", ()) if t is not None]
    streams = [(t.untyped_storage(), t.nbytes) for t in saved if t.shape[-2:] == (N, C)]
    return sum({s.data_ptr(): s.nbytes() for s, least in streams if s.nbytes() >= least}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2, 5, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_rebuild_has_the_same_gradients(kind, layers, dtype, device):
    plain, model = (moved(stack(device, layers, rebuild=r, **KINDS[kind])).to(dtype) for r in (False, True))
    x = torch.randn(2, 3, C, device=device, dtype=dtype)
    want, got = step(plain, x), step(model, x)
    same(got[0], want[0], "result")
    if device.type == "cpu":
        same(got, want, "gradients")
        return
    unit = torch.finfo(dtype).eps / 2  # a GPU may take another kernel where y is absent
    for g, w in zip(got, want, strict=True):
        assert (g.float() - w.float()).abs().max() <= 4 * layers * max(unit, 8 * 2**-24) * w.float().abs().max()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 6, 7])
def test_rebuild_keeps_half_the_streams(layers, shifted, device):
    x = torch.randn(10, C, device=device, requires_grad=True)
    one = 10 * N * C * 4
    kept = {r: kept_streams(stack(device, layers, rebuild=r, shifted=shifted), x) for r in (False, True)}
    assert kept[False] == layers * one
    assert kept[True] == layers // 2 * one
    with torch.no_grad():
        assert calls_of(stack(device, layers, rebuild=True), x)["boundary"] == layers


def test_rebuild_around_a_layer_that_stays_apart(device):
    """Chains of 3 layers with the entry, and of 2, of which one tensor of streams each is kept, and a layer that keeps
    its own."""
    model, x = stack(device, layers=6, rebuild=True), torch.randn(10, C, device=device, requires_grad=True)
    model.layers[3].register_forward_hook(lambda module, args, output: None)
    assert kept_streams(model, x) == (1 + 1 + 1) * 10 * N * C * 4


def test_rebuild_lowers_the_memory_between_the_passes(device):
    """All that is alive, not only what hooks see: half of the streams of 8 layers, to the byte."""
    tokens, alive = 64, {}
    x = torch.randn(tokens, C, device=device, requires_grad=True)
    for rebuild in (False, True):
        model = stack(device, layers=8, rebuild=rebuild)
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = model(x)
            alive[rebuild] = torch.cuda.memory_allocated() - before
        else:
            with Meter(but=[x, *model.parameters()]) as meter:
                y = model(x)
                alive[rebuild] = meter.now()
        del y
    assert alive[False] - alive[True] == 4 * tokens * N * C * 4


def test_rebuild_without_gradients_keeps_nothing():
    """At most two stream tensors at a time, as without it."""
    x, peaks = torch.randn(64, C), []
    for rebuild in (False, True):
        model = stack(layers=4, rebuild=rebuild)
        with torch.no_grad(), Meter(but=[x, *model.parameters()]) as meter:
            model(x)
        peaks.append(meter.peak)
    assert peaks[0] == peaks[1]


def test_rebuild_through_a_retained_graph(device):
    model, x = stack(device, rebuild=True), torch.randn(3, C, device=device, requires_grad=True)
    y = model(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    same(torch.autograd.grad(y.sum(), x), first, "second backward pass")


def test_rebuild_notices_writes(device):
    """A sub-layer's output is what streams are made again of."""

    class Leaky(Mlp):
        def forward(self, u):
            self.out = super().forward(u)
            return self.out

    model = wt.HyperConnectionStack([Leaky(device=device) for _ in range(2)], C, N, device=device, rebuild=True)
    y = model(torch.randn(3, C, device=device, requires_grad=True))
    with torch.no_grad():
        model.layers[0].sublayer.out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_wrong_options():
    with pytest.raises(ValueError, match="rebuild: expected False with recompute, got True"):
        stack(rebuild=True, recompute=2)
    with pytest.raises(ValueError, match="rebuild: expected False with join=False, got True"):
        stack(rebuild=True, join=False)
    with pytest.raises(ValueError, match='contract: expected shifted=True with "pre", got False'):
        stack(contract="pre")


def test_wrong_sources(device):
    x, f = torch.randn(3, N, C, device=device, requires_grad=True), torch.randn(3, C, device=device)
    post, res = torch.rand(3, N, device=device), torch.rand(3, N, N, device=device)
    with pytest.raises(ValueError, match="mhc_post: source: expected dropout_step beside dropout, got None"):
        wt.post(x, f, post, res, numerics="liger", source=wt.Source(x, f, post, res, dropout=0.1))
    with pytest.raises(ValueError, match="mhc_post: expected grad_x or source, got both"):
        wt.post(x, f, post, res, numerics="liger", source=wt.Source(x, f, post, res), grad_x=wt.GradX())


# ---- recompute of joined layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_recompute_of_joined_layers(group, shifted, device):
    """Layers are joined across groups too. Alive between the passes: the streams at the beginning of each group."""
    layers, tokens = 7, 10
    plain, model = (
        moved(stack(device, layers, recompute=k, shifted=shifted, dropout=0.3, pair=True)) for k in (None, group)
    )
    x = torch.randn(tokens, C, device=device)
    same(step(model, x), step(plain, x), "results and gradients")
    assert calls_of(model, x)["boundary"] == layers
    assert kept_streams(model, x.requires_grad_()) == -(-layers // group) * tokens * N * C * 4
