# SPDX-License-Identifier: Apache-2.0
"""GatedDeltaNet: against the layer of transformers' Qwen3-Next in a tiny random configuration, decoding with a cache, packed
sequences."""

import importlib.util
from pathlib import Path

import pytest
import torch
import weft.torch as wt
from compare import same
from torch.utils.checkpoint import checkpoint

HEADS = wt.GdnHeads(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
C = 24


def close(got, want, name, bound=1e-5):
    """Relative to the largest element; a NaN fails."""
    assert got.shape == want.shape, name
    assert (got - want).abs().max() <= bound * want.abs().max(), name


@pytest.fixture(scope="module")
def modeling():
    return pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.fixture
def theirs(modeling):
    config = modeling.Qwen3NextConfig(
        hidden_size=C,
        linear_num_key_heads=HEADS.key_heads,
        linear_num_value_heads=HEADS.value_heads,
        linear_key_head_dim=HEADS.key_dim,
        linear_value_head_dim=HEADS.value_dim,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = modeling.Qwen3NextGatedDeltaNet(config, 0)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5 if p.dim() > 1 else 0.3)
    return layer, config


@torch.no_grad()
def converted(layer) -> wt.GatedDeltaNet:
    """The same layer: the columns of the projections come in another order."""
    ours = wt.GatedDeltaNet(C, HEADS, eps=layer.layer_norm_epsilon)
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz.weight.T[None], layer.in_proj_ba.weight.T[None])
    ours.in_proj.weight.copy_(torch.cat([t[0].reshape(C, -1) for t in parts], 1).T)
    ours.front.conv_weight.copy_(layer.conv1d.weight[:, 0])
    ours.front.a_log.copy_(layer.A_log)
    ours.front.dt_bias.copy_(layer.dt_bias)
    ours.norm.weight.copy_(layer.norm.weight)
    ours.out_proj.weight.copy_(layer.out_proj.weight)
    return ours


def test_forward_and_gradients(theirs):
    layer, _ = theirs
    ours = converted(layer)
    x = torch.randn(2, 11, C, requires_grad=True)
    d_y = torch.randn(2, 11, C)
    names = ("out_proj.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight")
    mine = ("out_proj.weight", "front.conv_weight", "front.a_log", "front.dt_bias", "norm.weight")
    want, got = layer(x), ours(x)
    close(got, want, "y")
    of_theirs = torch.autograd.grad(want, (x, *(layer.get_parameter(n) for n in names)), d_y)
    of_ours = torch.autograd.grad(got, (x, *(ours.get_parameter(n) for n in mine)), d_y)
    for name, a, b in zip(("x", *names), of_ours, of_theirs, strict=True):
        close(a, b.squeeze(1) if name == "conv1d.weight" else b, name)
    (d_in,) = torch.autograd.grad(ours(x), ours.in_proj.weight, d_y)
    want_in = torch.autograd.grad(layer(x), (layer.in_proj_qkvz.weight, layer.in_proj_ba.weight), d_y)
    parts = layer.fix_query_key_value_ordering(want_in[0].T[None], want_in[1].T[None])
    close(d_in, torch.cat([t[0].reshape(C, -1) for t in parts], 1).T, "in_proj")


def test_prefill_and_decoding(theirs, modeling):
    """A prompt, then one token at a time, with both layers' own caches."""
    layer, config = theirs
    ours = converted(layer)
    x = torch.randn(2, 12, C)
    theirs_cache, cache = modeling.DynamicCache(config=config), ours.new_cache(5)
    if not hasattr(theirs_cache, "get_recurrent_state"):
        pytest.skip("the cache of transformers before 5.22 does not hand out its states")
    rows = torch.tensor([3, 1])
    with torch.no_grad():
        close(ours(x[:, :7], cache=cache, rows=rows), layer(x[:, :7], cache_params=theirs_cache), "prefill")
        for t in range(7, 12):
            token = x[:, t : t + 1]
            close(ours.step(token, cache, rows), layer(token, cache_params=theirs_cache), f"token {t}")
        close(cache.rule[rows], theirs_cache.get_recurrent_state(0), "states")
    assert not cache.rule[[0, 2, 4]].any() and not cache.conv[[0, 2, 4]].any()


def layer_of(device="cpu") -> wt.GatedDeltaNet:
    torch.manual_seed(5)
    return wt.GatedDeltaNet(C, HEADS, device=device)


def test_decoding_is_the_whole():
    """Prefill in pieces and tokens one or three at a time give what all at once gives: the operators to the bit, the two
    products with matrices as far as PyTorch's own agree."""
    layer = layer_of()
    x = torch.randn(3, 14, C)
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(3)
        parts = [layer(x[:, :4], cache=cache), layer(x[:, 4:9], cache=cache)]
        parts += [layer.step(x[:, t : t + n], cache) for t, n in ((9, 1), (10, 3), (13, 1))]
    close(torch.cat(parts, 1), whole, "y")


def test_packed():
    layer = layer_of()
    lengths = (5, 1, 6)
    x = torch.randn(1, 12, C)
    cu = torch.tensor([0, 5, 6, 12])
    cache, rows = layer.new_cache(4), torch.tensor([2, 0, 3])
    with torch.no_grad():
        y = layer(x, cu, cache, rows)
        for row, span in zip(rows.tolist(), x.split(lengths, 1), strict=True):
            alone = layer.new_cache(1)
            got = y[:, : span.shape[1]]
            close(got, layer(span, cache=alone), "y")
            close(cache.rule[row], alone.rule[0], "states")
            y = y[:, span.shape[1] :]
        next_tokens = torch.randn(1, 3, C)
        padded = torch.tensor([2, -1, 3])
        before = cache.conv[0].clone()
        out = layer.step(next_tokens, cache, padded, torch.tensor([0, 1, 2, 3]))
    assert not out[:, 1].any() and out[:, 0].any()
    same(cache.conv[0], before, "a row of no request")
    cache.clear(torch.tensor([2]))
    assert not cache.conv[2].any() and not cache.rule[2].any() and cache.rule[3].any()


def test_gradients_pass_a_cache_by():
    layer, cache = layer_of(), layer_of().new_cache(2)
    layer(torch.randn(2, 5, C), cache=cache).sum().backward()
    assert not cache.rule.requires_grad and all(p.grad is not None for p in layer.parameters())


def test_bad_rows():
    """A call with a cache has no padding: what is refused has changed nothing."""
    layer, x = layer_of(), torch.randn(2, 5, C)
    cache = layer.new_cache(3)
    with torch.no_grad():
        layer(torch.randn(3, 2, C), cache=cache)
    before = wt.GdnCache(*(t.clone() for t in cache))
    for text, rows in {
        r"rows.1.: expected 0 to 2, got -1": torch.tensor([0, -1]),
        r"rows.0.: expected 0 to 2, got 3": torch.tensor([3, 0]),
        r"rows.1.: expected a row of its own, got 2": torch.tensor([2, 2], dtype=torch.int32),
        r"rows: expected int32 or int64 .2., got torch.int64 .3.": torch.tensor([0, 1, 2]),
        r"rows: expected int32 or int64 .2., got torch.bool": torch.tensor([True, True]),
    }.items():
        with torch.no_grad(), pytest.raises(ValueError, match=text):
            layer(x, cache=cache, rows=rows)
    with torch.no_grad(), pytest.raises(ValueError, match="cache: expected a row for each of 4 sequences, got 3"):
        layer(torch.randn(4, 2, C), cache=cache)
    same(list(cache), list(before), "the cache")


def test_a_refused_step_changes_nothing():
    """Neither of a cache's two tensors moves on without the other."""
    layer, x = layer_of(), torch.randn(2, 1, C)
    good = layer.new_cache(3)
    caches = {
        "cache.rule: expected torch.float32, got torch.bfloat16": good._replace(rule=good.rule.bfloat16()),
        r"cache.rule: expected \[3, 4, 8, 16\] on cpu.* got \[2, 4, 8, 16\]": good._replace(rule=good.rule[:2]),
    }
    for text, cache in caches.items():
        with pytest.raises(ValueError, match=text):
            layer.step(x, cache)
        assert not cache.conv.any() and not cache.rule.any()
    with pytest.raises(ValueError, match="new_cache: dtype: expected torch.float32, got torch.bfloat16"):
        layer.new_cache(3, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):  # where the layer runs in bfloat16
        assert layer.step(x, layer.new_cache(3, torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="new_cache: dtype: expected torch.float64, got torch.float32"):
        layer.double().new_cache(3, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_new_cache_serves_the_layer(dtype):
    layer, x = layer_of().to(dtype), torch.randn(2, 3, C).to(dtype)
    for cache in (layer.new_cache(2), layer.new_cache(2, dtype)):
        with torch.no_grad():
            parts = [layer(x[:, :2], cache=cache), layer.step(x[:, 2:], cache)]
            close(torch.cat(parts, 1).double(), layer(x).double(), "y", 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_cache_in_a_checkpoint(reentrant):
    """Its second forward would go on from the states that the first has left."""
    layer, x = layer_of(), torch.randn(2, 5, C, requires_grad=True)
    cache = layer.new_cache(2)
    y = checkpoint(lambda x: layer(x, cache=cache), x, use_reentrant=reentrant)
    once = cache.rule.clone()
    with pytest.raises(RuntimeError, match="cache: expected no activation checkpoint"):
        y.sum().backward()
    same(cache.rule, once, "the cache")


@pytest.mark.parametrize("shape", [(2, 5000), (2, 0), (5,), (), (2, 2, 2, 2, 3)])
def test_norm_of_any_rows(shape):
    """The middle of three dimensions may be tokens: more than a tensor has heads, or none."""
    norm = wt.GatedRMSNorm(8)
    o, z = (torch.randn(*shape, 8, requires_grad=True) for _ in range(2))
    y = norm(o, z)
    assert y.shape == o.shape
    d_y = torch.randn_like(y)
    got = torch.autograd.grad(y, (o, z), d_y)
    flat = [t.detach().reshape(-1, 8).requires_grad_() for t in (o, z)]
    want = norm(*flat)
    same(y.reshape(-1, 8), want, "y")
    for a, b in zip(got, torch.autograd.grad(want, flat, d_y.reshape(-1, 8)), strict=True):
        same(a.reshape(-1, 8), b, "gradients")
    with pytest.raises(ValueError, match=r"gdn_norm: o and z: expected \[..., C\], the same of both"):
        norm(o, z.new_zeros(7, 8))


def test_bad_layers():
    for text, make in {
        "GatedDeltaNet: channels: expected": lambda: wt.GatedDeltaNet(0, HEADS),
        "GatedDeltaNet: options: expected": lambda: wt.GatedDeltaNet(C, HEADS, options=wt.GdnOptions(g_log2=True)),
        "GatedRMSNorm: gate: expected": lambda: wt.GatedDeltaNet(C, HEADS, gate="tanh"),
        "heads: expected sizes": lambda: wt.GatedDeltaNet(C, (3, 4, 8, 8)),
    }.items():
        with pytest.raises(ValueError, match=text):
            make()


def test_layer_of_the_c_model():
    """The layer that `bench/train_torch.py` trains beside `weft train --mixer gdn`, with the same parameters."""
    path = Path(__file__).resolve().parents[2] / "bench/gpt_torch.py"
    spec = importlib.util.spec_from_file_location("gpt_torch", path)
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    torch.manual_seed(3)
    theirs = plain.DeltaNet(24, 4, 2, 3)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = wt.GatedDeltaNet(24, wt.GdnHeads(key_heads=2, value_heads=4, key_dim=6, value_dim=6), 3)
    names = {"in_proj.weight": "proj.weight", "front.conv_weight": "conv.weight", "front.a_log": "a_log"}
    names |= {"front.dt_bias": "dt_bias", "norm.weight": "gated_norm.weight", "out_proj.weight": "out.weight"}
    ours.load_state_dict({mine: theirs.state_dict()[its] for mine, its in names.items()})
    x, up = torch.randn(2, 2, 150, 24)  # more than two chunks
    results = []
    for layer, parameters in ((ours, names), (theirs, names.values())):
        leaf = x.clone().requires_grad_()
        out = layer(leaf) if layer is ours else layer.run(leaf)
        of = dict(layer.named_parameters())
        results.append([out, *torch.autograd.grad(out, [leaf, *(of[name] for name in parameters)], up)])
    for name, mine, its in zip(("out", "x", *names), *results, strict=True):
        close(mine, its, name)
