# SPDX-License-Identifier: Apache-2.0
"""gdn_rule_step, decoding with the rule: the same as the whole sequence, caches in place and in both memory orders, states of
every token, padding."""

import cases
import gdn_oracle
import pytest
import torch
import weft.torch as wt
from compare import same
from conftest import needs_gpu
from cuda_support import captured
from gdn_support import front, rows
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def tokens(batch: int, steps: int, device="cpu", dtype=torch.float32):
    """Query, key, value, beta and g of a layer's front."""
    with torch.no_grad():
        out = front(device, repeat=False)(rows(batch, steps, device=device, dtype=dtype))
    return (*out[:3], out.beta, out.g)


def cut(parts, span: slice):
    return [t[:, span] for t in parts]


def cache_like(parts, count: int, dtype=torch.float32):
    _, key, value = parts[:3]
    return torch.randn(count, value.shape[2], key.shape[3], value.shape[3], device=value.device).to(dtype)


@pytest.mark.parametrize("at_once", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_the_rule(dtype, at_once, device):
    """On the CPU to the bit, and within rounding of float64 anywhere."""
    cases.need("gdn_rule_step", device)
    parts = tokens(3, 6, device, dtype)
    cache = cache_like(parts, 7)
    before, pointer = cache.clone(), cache.data_ptr()
    index = torch.tensor([4, 0, 6], device=device)
    steps = [
        wt.gdn_rule_step(*cut(parts, slice(t, t + at_once)), state=cache, state_index=index)[0]
        for t in range(0, 6, at_once)
    ]
    o = torch.cat(steps, 1)
    if device == "cpu":
        whole, final = wt.gdn_rule(*parts, state=before[index], final_state=True)
        same(o, whole, "o")
        same(cache[index], final, "states")
    exact, last = gdn_oracle.gdn_rule(*(t.double() for t in parts), before[index].double())
    unit = torch.finfo(dtype).eps
    assert (o - exact).abs().max() <= 4 * unit * exact.abs().max()
    assert (cache[index] - last).abs().max() <= 64 * 2**-24 * last.abs().max()
    others = [1, 2, 3, 5]
    same(cache[others], before[others], "other rows")
    assert cache.data_ptr() == pointer


def test_both_memory_orders_and_token_states(device):
    cases.need("gdn_rule_step", device)
    parts = tokens(2, 3, device)
    cache = cache_like(parts, 4)
    turned = cache.mT.contiguous()
    index = torch.tensor([3, 1], device=device, dtype=torch.int32)
    o, kept = wt.gdn_rule_step(*parts, state=cache, state_index=index, token_states=True)
    again, _ = wt.gdn_rule_step(*parts, state=turned.mT, state_index=index)
    same(again, o, "o")
    same(turned.mT, cache, "states")
    assert kept.shape == (2, 3, *cache.shape[1:])
    same(kept[:, -1], cache[index.long()], "states after the last token")


def test_a_draft_leaves_the_cache_alone(device):
    """Speculative decoding: four tokens tried, two accepted; the next call goes on from there."""
    cases.need("gdn_rule_step", device)
    parts = tokens(2, 4, device, torch.bfloat16)
    cache = cache_like(parts, 3, torch.bfloat16)
    before, index = cache.clone(), torch.tensor([2, 0], device=device)
    drafted, kept = wt.gdn_rule_step(*parts, state=cache, state_index=index, update=False, token_states=True)
    same(cache, before, "the cache")
    assert kept.dtype == torch.bfloat16
    cache[index] = kept[:, 1]
    first = before.clone()
    o, _ = wt.gdn_rule_step(*cut(parts, slice(0, 2)), state=first, state_index=index)
    same(drafted[:, :2], o, "accepted tokens")
    same(cache, first, "states of accepted tokens")


def test_a_draft_is_no_new_version(device):
    """A graph that has saved the cache can still be differentiated, as nothing was written."""
    cases.need("gdn_rule_step", device)
    parts = tokens(2, 2, device)
    cache = cache_like(parts, 2)
    weight = torch.ones((), device=device, requires_grad=True)
    y = weight * cache
    before = cache._version
    wt.gdn_rule_step(*parts, state=cache, update=False)
    assert cache._version == before
    y.sum().backward()
    wt.gdn_rule_step(*parts, state=cache)
    assert cache._version > before


def test_padding_and_lengths(device):
    """Requests with 0 to 3 tokens in one row, one of them padding."""
    cases.need("gdn_rule_step", device)
    lengths = (2, 0, 3, 1)
    parts = tokens(1, sum(lengths) + 2, device)
    cu = torch.tensor([0, 2, 2, 5, 6], device=device)
    index = torch.tensor([4, 1, -1, 0], device=device)
    cache = cache_like(parts, 5)
    alone, before = cache.clone(), cache.clone()
    o, kept = wt.gdn_rule_step(*parts, state=cache, state_index=index, cu_seqlens=cu, token_states=True)
    assert not o[:, 2:5].any() and not o[:, 6:].any() and not kept[:, 2:5].any() and not kept[:, 6:].any()
    same(cache[[1, 2, 3]], before[[1, 2, 3]], "rows without new tokens")
    for at, row in ((slice(0, 2), 4), (slice(5, 6), 0)):
        one = torch.tensor([row], device=device)
        want, states = wt.gdn_rule_step(*cut(parts, at), state=alone, state_index=one, token_states=True)
        same(o[:, at], want, "a request by itself")
        same(kept[:, at], states, "its states")
    same(cache, alone, "states")


def test_bad_calls(device):
    cases.need("gdn_rule_step", device)
    parts = tokens(2, 1, device)
    cache = cache_like(parts, 3)
    calls = {
        "gdn_rule_step: it has no gradient": lambda: wt.gdn_rule_step(
            parts[0].detach().requires_grad_(), *parts[1:], state=cache
        ),
        "gdn_rule_step: head_map: expected": lambda: wt.gdn_rule_step(*parts, state=cache, head_map="striped"),
        "gdn_rule_step: state: dim 1": lambda: wt.gdn_rule_step(*parts, state=cache[:, :1]),
        "gdn_rule_step: state_index: expected indices": lambda: wt.gdn_rule_step(*parts, state=cache[:1]),
    }
    if device == "cpu":
        calls["gdn_rule_step: state_index.1.: expected -1 to 2, got 3"] = lambda: wt.gdn_rule_step(
            *parts, state=cache, state_index=torch.tensor([0, 3])
        )
        calls["gdn_rule_step: state_index.1.: expected a row of its own, got 2"] = lambda: wt.gdn_rule_step(
            *parts, state=cache, state_index=torch.tensor([2, 2])
        )
    before = cache.clone()
    for text, call in calls.items():
        with pytest.raises((ValueError, NotImplementedError), match=text):
            call()
    same(cache, before, "the cache")


class Decoder(nn.Module):
    def forward(self, parts, state, index):
        return wt.gdn_rule_step(*parts, state=state, state_index=index)[0]


def test_compiled(device):
    cases.need("gdn_rule_step", device)
    parts = tokens(2, 1, device)
    cache = cache_like(parts, 3)
    other, index = cache.clone(), torch.tensor([2, 0], device=device)
    compiled = torch.compile(Decoder(), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            same(compiled(parts, cache, index), Decoder()(parts, other, index), "o")
        same(cache, other, "states")


@needs_gpu
def test_captured():
    parts = tokens(2, 1, "cuda")
    cache = cache_like(parts, 3)
    other, index = cache.clone(), torch.tensor([2, 0], device="cuda")
    start = cache.clone()
    graph, (o, _) = captured(lambda: wt.gdn_rule_step(*parts, state=cache, state_index=index))
    for _ in range(2):
        cache.copy_(start)
        graph.replay()
        same(o, wt.gdn_rule_step(*parts, state=other, state_index=index)[0], "o")
        same(cache, other, "states")
        other.copy_(start)
