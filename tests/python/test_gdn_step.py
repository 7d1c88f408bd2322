# SPDX-License-Identifier: Apache-2.0
"""gdn_pre_step, decoding: the bits of the whole sequence, caches written in place, compilers and graphs."""

import pytest
import torch
import weft.torch as wt
from compare import same
from conftest import needs_gpu
from cuda_support import captured
from gdn_support import HEADS, front, rows
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_have_the_bits_of_the_whole(dtype, tokens, device):
    module = front(device)
    proj = rows(3, 12, device=device, dtype=dtype)
    whole = module(proj)
    cache = torch.randn(7, HEADS.channels, 3, device=device).to(dtype)
    slots = torch.tensor([4, 0, 6], device=device)
    cache[slots] = 0
    before = cache.clone()
    pointer = cache.data_ptr()
    steps = [module.step(proj[:, t : t + tokens], cache, slots) for t in range(0, 12, tokens)]
    for k in range(6):
        same(torch.cat([s[k] for s in steps], 1), whole[k].detach(), f"result {k}")
    final = module(proj, final_state=True).final_state
    same(cache[slots], final.detach(), "the states")
    others = [1, 2, 3, 5]
    same(cache[others], before[others], "other rows")
    assert cache.data_ptr() == pointer


def test_padding_requests(device):
    """Index -1: zero results, no state touched; the other requests have their bits."""
    module = front(device)
    proj = rows(4, 1, device=device)
    cache = torch.randn(5, HEADS.channels, 3, device=device)
    alone = cache.clone()
    slots = torch.tensor([2, -1, 0, -1], device=device, dtype=torch.int32)
    before = cache.clone()
    got = module.step(proj, cache, slots)
    for t in got[:6]:
        assert not t[[1, 3]].any()
    same(cache[[1, 3, 4]], before[[1, 3, 4]], "rows of nobody")
    want = module.step(proj[[0, 2]], alone, slots[[0, 2]])
    for k in range(6):
        same(got[k][[0, 2]], want[k], f"result {k}")
    same(cache, alone, "states")


def test_steps_of_different_lengths(device):
    """Requests with 0 to 3 new tokens each, in one row with cu_seqlens."""
    module = front(device)
    lengths = (2, 0, 3, 1)
    proj = rows(sum(lengths), device=device)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    cache = torch.randn(4, HEADS.channels, 5, device=device)
    want = module(proj, cu_seqlens=cu, state=cache.clone(), final_state=True)
    got = module.step(proj, cache, cu_seqlens=cu)
    same(got[:6], [t.detach() for t in want[:6]], "results")
    same(cache, want.final_state.detach(), "states")


def test_a_step_is_seen_by_autograd(device):
    """It writes its argument: the version moves on, and a graph that kept the old contents says so."""
    module = front(device)
    cache = module.new_state(2)
    held = nn.Parameter(torch.ones_like(cache))
    product = held * cache
    version = cache._version
    module.step(rows(2, 1, device=device), cache)
    assert cache._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_step_has_no_gradient(device):
    module = front(device)
    parameters = (module.conv_weight, module.a_log, module.dt_bias, module.conv_bias)
    with pytest.raises(NotImplementedError, match="gdn_pre_step: it has no gradient: call it under torch.no_grad()"):
        wt.gdn_pre_step(rows(2, 1, device=device), *parameters, state=module.new_state(2), heads=HEADS)


def test_step_in_inference_mode(device):
    module = front(device)
    proj = rows(2, 1, device=device)
    cache, other = module.new_state(2), module.new_state(2)
    want = module.step(proj, other)
    with torch.inference_mode():
        same(module.step(proj.clone(), cache.clone())[:6], want[:6], "inference mode")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_step_compiles(backend, device):
    """In one graph, cache updated in place."""
    module = front(device)
    proj = rows(2, 3, device=device)
    slots = torch.tensor([1, -1], device=device)
    cache = torch.randn(3, HEADS.channels, 3, device=device)
    caches = [cache, cache.clone()]
    want = module.step(proj, caches[0], slots)
    got = torch.compile(module.step, fullgraph=True, backend=backend)(proj, caches[1], slots)
    same(got[:6], want[:6], "results")
    same(caches[1], caches[0], "caches")


@needs_gpu
def test_step_in_a_cuda_graph():
    device = torch.device("cuda", 0)
    module = front(device)
    proj, slots = rows(3, 1, device=device), torch.tensor([2, -1, 0], device=device)
    cache, other = (torch.zeros(4, HEADS.channels, 3, device=device) for _ in range(2))
    graph, out = captured(lambda: module.step(proj, cache, slots))
    cache.zero_()
    for _ in range(3):
        proj.normal_()
        graph.replay()
        same([t.clone() for t in out[:6]], module.step(proj, other, slots)[:6], "replay")
        same(cache, other, "states")
