# SPDX-License-Identifier: Apache-2.0
"""Independent hyper-connections: sites and merges without a residual mix. Values and gradients of every operator are in
test_ops.py, stacks in test_stack.py, models of transformers in test_hf.py."""

import itertools

import cases
import pytest
import torch
import weft.torch as wt
from compare import same
from torch import nn

C, N = 16, 4
HY = wt.Numerics.preset("hy_v4")


def site(**options) -> wt.HyperConnection:
    return wt.HyperConnection(C, N, numerics="hy_v4", residual_mix=False, **options)


def stack(layers=3, **options) -> wt.HyperConnectionStack:
    torch.manual_seed(5)
    options = {"alpha_init": 0.4, "numerics": "hy_v4", "residual_mix": False, **options}
    sublayers = [nn.Sequential(nn.Linear(C, C), nn.Tanh()) for _ in range(layers)]
    return wt.HyperConnectionStack(sublayers, C, N, **options)


def test_parameters_and_results():
    connection = site(sub_norm=True)
    shapes = {k: tuple(p.shape) for k, p in connection.named_parameters()}
    assert shapes == {"phi": (2 * N, N * C), "alpha": (2,), "beta": (2 * N,), "sub_weight": (C,)}
    assert "residual_mix=False" in repr(connection)
    x = torch.randn(5, N, C)
    found = connection(x)
    assert found.res is None and found.pre.shape == found.post.shape == (5, N)
    y = connection.merge(x, found.u, found)
    same(y, wt.post(x, found.u, found.post, numerics=HY))
    assert wt.coef(torch.randn(3, 2 * N), torch.rand(3), torch.ones(2), torch.zeros(2 * N), "hy_v4")[2] is None
    assert wt.scale(torch.randn(3, 2 * N), torch.rand(3), torch.ones(2), torch.zeros(2 * N), "hy_v4")[2] is None
    with torch.inference_mode():
        assert connection(x).res is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=cases.short)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "(C, n)"])
def test_a_merge_has_the_bits_of_the_identity(dtype, swapped, device):
    """Forward and backward, with dropout and a bias."""
    maker = cases.Maker(N, C, (3, 5), dtype, device, swapped=swapped)
    x, f, post, bias = maker.streams(), maker.row(), maker.per_token(N), maker.param(C)
    eye = torch.eye(N, device=device, dtype=post.dtype).expand(3, 5, N, N)
    step = torch.tensor([7], device=device)
    found = []
    for res in (None, eye):
        leaves = [t.detach().requires_grad_() for t in (x, f, post, bias)]
        y = wt.post(*leaves[:3], res, leaves[3], numerics=HY, dropout=0.3, dropout_step=step)
        torch.manual_seed(2)
        y.backward(torch.randn_like(y))
        found.append((y.detach(), *(t.grad for t in leaves)))
    same(*found)


def test_streams_do_not_meet():
    x = torch.randn(2, N, C)
    x[:, 1] = torch.inf
    y = wt.post(x, torch.randn(2, C), torch.rand(2, N), numerics=HY)
    assert y[:, [0, 2, 3]].isfinite().all() and y[:, 1].isinf().all()


@pytest.mark.parametrize("before, after", [*itertools.product((False, True), repeat=2)])
def test_sites_of_both_kinds_behind_each_other(before, after):
    """A boundary is post, then pre, whichever of the two has a mix."""
    one = wt.HyperConnection(C, N, numerics="hy_v4", residual_mix=before)
    two = wt.HyperConnection(C, N, numerics="hy_v4", residual_mix=after)
    x, f = torch.randn(3, N, C), torch.randn(3, C)
    coef = one(x)
    got, y = two.follow(one, x, f, coef)
    same(y, one.merge(x, f, coef))
    same(tuple(got), tuple(two(y)))
    assert (got.res is None) is (not after)


def test_replay():
    x, layers, want = torch.randn(6, N, C), [], []
    y = x
    for _ in range(3):
        f, pre, post = torch.randn(6, C), torch.rand(6, N), torch.rand(6, N)
        layers.append(wt.ReplayLayer(pre=pre, f=f, post=post))
        u, y = wt.aggregate(y, pre), wt.post(y, f, post, numerics=HY)
        want.append((u, y))
    same(wt.replay(x, layers, HY), want)


@pytest.mark.parametrize("options", [{}, {"recompute": 2}, {"rebuild": True}, {"join": False}], ids=str)
def test_a_stack_goes_every_way(options):
    x = torch.randn(2, 5, C)
    results = []
    for more in ({}, options):
        model, leaf = stack(5, **more), x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, *(p.grad for p in model.parameters())))
    same(*results)


def test_compile(fresh_dynamo):
    """One graph; fake kernels know that there is no res."""
    model, x = stack(), torch.randn(2, 5, C)
    want = model(x)
    want.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    got.sum().backward()
    same((got.detach(), *(p.grad for p in model.parameters())), (want.detach(), *grads))


def test_opcheck():
    case = cases.make("pre", mixed=False)
    args = (*case.tensors.values(), wt.functional.pack(HY), False, 1e-6, 0)
    names = ("x", "phi", "alpha", "beta", "norm_weight", "sub_weight", "pre_in")
    args = (*(case.tensors[k] for k in names), *args[-4:])
    torch.library.opcheck(torch.ops.weft.mhc_pre.default, args)


def test_conversion_begins_as_the_blocks():
    """As long as the streams are copies of each other, which they are behind the entry and stay."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.RMSNorm(C, eps=1e-6), nn.Linear(C, C)

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    blocks = [Block().double() for _ in range(3)]
    x = torch.randn(2, 5, C, dtype=torch.float64)
    want = x
    for block in blocks:
        want = block(want)
    options = {"numerics": "hy_v4", "residual_mix": False, "dtype": torch.float64}
    got = wt.convert_blocks(blocks, [("norm", "mlp")], C, N, **options)(x)
    assert (got - want).abs().max() < 1e-12 * want.abs().max()


def test_post_eps():
    """A field of its own, after those of the first release; graphs of that have eight numbers."""
    assert HY.post_eps == 1e-6 and wt.Numerics.preset("deepseek_v4").post_eps == 0
    assert wt.Numerics(*wt.Numerics.preset("liger")[:8]) == wt.Numerics.preset("liger")
    h, ms, alpha, beta = torch.randn(3, 2 * N), torch.rand(3), torch.ones(2), torch.zeros(2 * N)
    with_eps = wt.coef(h, ms, alpha, beta, HY._replace(post_eps=0.25))[1]
    without = wt.coef(h, ms, alpha, beta, HY._replace(post_eps=0.0))[1]
    assert (with_eps - without - 0.25).abs().max() < 1e-6
    packed = wt.functional.pack(HY._replace(post_eps=0.0))
    assert len(packed) == 9
    same(torch.ops.weft.mhc_coef.default(h, ms, alpha, beta, packed[:8])[1], without)
