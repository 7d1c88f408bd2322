# SPDX-License-Identifier: Apache-2.0
"""What a site reads its streams for has one gradient: the head of the site adds its own to the readers'."""

import cases
import oracle
import pytest
import torch
import weft.torch as wt
from cases import DTYPES, short
from compare import check, same
from megatron_support import make
from torch.utils.checkpoint import checkpoint
from weft.compat import liger, tile_kernels, transformer_engine
from weft.torch import joins

C, N, T = 6, 4, 3


def site(x, f, sub_norm=True, **head):
    """In two calls, around a sub-layer whose output is f times its input."""
    coef = wt.pre(x, **head, numerics=cases.SHORT, sub_norm=sub_norm, sub_eps=cases.SUB_EPS)
    return wt.post(x, f * coef.u, coef.post, coef.res, numerics=cases.SHORT)


def site_in_parts(x, f, phi, alpha, beta):
    h, ms = wt.project(x, phi)
    pre, post, logits = wt.scale(h, ms, alpha, beta, cases.SHORT)
    u = wt.aggregate(x, pre)
    return wt.post(x, f * u, post, wt.sinkhorn(logits, cases.SHORT), numerics=cases.SHORT)


def site_by_transformer_engine(x, f, phi, alpha, beta):
    """Its layout, in which every call makes views of its own."""
    te, x = transformer_engine, x.transpose(-1, -2)
    lead = x.shape[:2]
    h, ms = te.mhc_fused_projection(x.reshape(-1, C * N), phi.transpose(-1, -2).flatten(1), False)
    pre, post, logits = te.mhc_fused_scale(h, alpha, beta.unsqueeze(0), ms, N)
    res = te.mhc_fused_sinkhorn(logits.view(*lead, N, N), N)
    u = te.mhc_fused_aggregate(x, pre.view(*lead, N), N, False)
    y = te.mhc_fused_expand_combine(f * u, None, post.view(*lead, N), x, res, N, False)
    return y.transpose(-1, -2)


def tensors_of(device, dtype=torch.float32, swapped=True):
    m = cases.Maker(N, C, (T, 2), dtype, device, swapped=swapped)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = 2 * N + N * N
    return {
        "x": m.streams(),
        "f": m.row(),
        "phi": torch.randn(rows, N, C, device=device, dtype=wide) / C,
        "alpha": torch.tensor([0.7, 1.1, 0.9], device=device, dtype=wide),
        "beta": torch.randn(rows, device=device, dtype=wide) / 4,
    }


def site_by_mix_and_aggregate(x, f, phi, alpha, beta):
    te, x = transformer_engine, x.transpose(-1, -2)
    rows = phi.transpose(-1, -2).flatten(1)
    u, post, res = te.mhc_generate_mix_and_aggregate(x, rows, alpha, beta, use_tf32=False)
    return te.mhc_fused_expand_combine(f * u, None, post, x, res, N, False).transpose(-1, -2)


SITES = {"two calls": site, "parts": site_in_parts, "transformer_engine": site_by_mix_and_aggregate}
IN_VIEWS = {"projection by itself": site_by_transformer_engine}


def sums_of(function, shape):
    """How many tensors of so many elements were added to another one by PyTorch. A dispatch mode would be a case in
    which autograd adds."""
    with torch.profiler.profile(record_shapes=True) as seen:
        function()
    elements = torch.Size(shape).numel()
    adds = [e for e in seen.events() if e.name in ("aten::add", "aten::add_")]
    return sum(bool(e.input_shapes) and torch.Size(e.input_shapes[0]).numel() == elements for e in adds)


def apart(monkeypatch):
    monkeypatch.setattr(joins, "heir_of", lambda ctx: None)


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "made"])
def test_no_sum_by_autograd(name, leaf, device, monkeypatch):
    tensors = tensors_of(device)
    x = tensors.pop("x").detach().requires_grad_()
    upstream = torch.randn_like(x)

    def backward():
        streams = x if leaf else x * 1
        y = SITES[name](streams, **tensors)
        return lambda: torch.autograd.grad(y, x, upstream)

    assert sums_of(backward(), x.shape) == 0
    apart(monkeypatch)
    assert sums_of(backward(), x.shape) == (2 if name == "parts" else 1)


@pytest.mark.parametrize("name", SITES | IN_VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=short)
def test_the_gradients_are_those_of_autograd(name, dtype, device, monkeypatch):
    """The same terms in another order of rounding: two sums of three terms, each of which is read from the operators."""
    tensors = tensors_of(device, dtype)
    upstream = torch.randn_like(tensors["x"])

    def gradients():
        leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
        return torch.autograd.grad((SITES | IN_VIEWS)[name](**leaves), tuple(leaves.values()), upstream)

    joined = gradients()
    apart(monkeypatch)
    for key, got, want in zip(tensors, joined, gradients(), strict=True):
        if key != "x":
            same(got, want, key)
            continue
        # The largest term is within 64 times the largest sum of these tensors; two roundings on either side.
        bound = 4 * 64 * torch.finfo(dtype).eps / 2 * float(want.abs().max())
        assert float((got - want).abs().max()) <= bound


@pytest.mark.parametrize("swapped", [False, True])
def test_against_the_expression(swapped, device):
    def plain(x, f, **head):
        u, _, post, res = oracle.pre(
            x, **head, numerics=cases.SHORT, sub_norm=True, sub_eps=cases.SUB_EPS, stored_u=None
        )
        return oracle.post(x, f * u, post, res, numerics=cases.SHORT)

    case = cases.make("pre_norm", device=device, swapped=swapped)
    check(site, plain, {**case.tensors, "f": torch.randn(2, 3, C, device=device)})


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_bits_do_not_depend_on_the_run(dtype, device):
    tensors = tensors_of(device, dtype)
    results = []
    for _ in range(2):
        leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
        y = site_in_parts(**leaves)
        results.append(torch.autograd.grad(y, tuple(leaves.values()), torch.ones_like(y)))
    same(results[0], results[1], "the second run")


# ---- what is another x ----------------------------------------------------------------------------------------------


def heads(device, change, monkeypatch, name="two calls"):
    """The gradient of x with joins and without where `change` comes between the head and the reader."""
    tensors = tensors_of(device)
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        x = tensors["x"].detach().requires_grad_()
        streams = x * 1
        coef = wt.pre(streams, tensors["phi"], tensors["alpha"], tensors["beta"], numerics=cases.SHORT)
        streams = change(streams)
        y = wt.post(streams, coef.u, coef.post, coef.res, numerics=cases.SHORT)
        found.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
    return found


@pytest.mark.parametrize(
    "change",
    [lambda x: x * 2, lambda x: x.detach(), lambda x: x.clone(), lambda x: x.flip(0), lambda x: x.view(x.shape)],
    ids=["another", "detached", "a copy", "another view", "the same view"],
)
def test_another_x_is_autograds(change, device, monkeypatch):
    joined, want = heads(device, change, monkeypatch)
    torch.testing.assert_close(joined, want, rtol=2**-20, atol=2**-20)


@pytest.mark.parametrize("where", ["head", "reader"])
def test_hooks_on_a_view(where, device, monkeypatch):
    """A view of x is a tensor of its own: a hook there has its share of the gradient, and no other."""
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        torch.manual_seed(5)
        tensors = tensors_of(device)
        x = tensors["x"].detach().requires_grad_()
        views = {"head": x.view_as(x), "reader": x.view_as(x)}
        views[where].register_hook(lambda grad: 0.1 * grad)
        head = (tensors[k] for k in ("phi", "alpha", "beta"))
        coef = wt.pre(views["head"], *head, numerics=cases.SHORT)
        y = wt.post(views["reader"], coef.u, coef.post, coef.res, numerics=cases.SHORT)
        found.append(torch.autograd.grad(y, (x, views["reader"]), torch.ones_like(y)))
    for got, want in zip(*found, strict=True):
        compare(got, want)


class Twice(torch.autograd.Function):
    """A node with attributes of the names that weft's nodes have."""

    @staticmethod
    def forward(ctx, t):
        ctx.operator = ctx.part = "mhc_pre"
        return 2 * t

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_foreign_nodes_in_between(device, monkeypatch):
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        leaves, coef, _ = built(device)
        y = wt.post(leaves["x"], leaves["f"], Twice.apply(coef.post), coef.res, numerics=cases.SHORT)
        found.append(torch.autograd.grad(y, leaves["x"], torch.ones_like(y))[0])
    compare(*found)


def test_streams_changed_in_place(device):
    """Autograd knows that the head's x is gone, and says so."""
    tensors = tensors_of(device)
    x = tensors["x"].detach().requires_grad_()
    streams = x * 1
    coef = wt.pre(streams, tensors["phi"], tensors["alpha"], tensors["beta"], numerics=cases.SHORT)
    streams.mul_(2)
    y = wt.post(streams, coef.u, coef.post, coef.res, numerics=cases.SHORT)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- backward passes of all kinds ------------------------------------------------------------------------------------


def built(device, consumers=1):
    torch.manual_seed(5)
    tensors = tensors_of(device)
    leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
    x = leaves["x"]
    coef = wt.pre(x, leaves["phi"], leaves["alpha"], leaves["beta"], numerics=cases.SHORT)
    ys = [wt.post(x, (k + 1) * leaves["f"], coef.post, coef.res, numerics=cases.SHORT) for k in range(consumers)]
    return leaves, coef, ys


def compare(got, want):
    torch.testing.assert_close(got, want, rtol=2**-18, atol=2**-18 * float(want.abs().max()))


def test_several_readers_and_other_consumers(device, monkeypatch):
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        leaves, coef, ys = built(device, consumers=3)
        weight = torch.linspace(-1, 1, leaves["x"].numel(), device=device).view_as(leaves["x"])
        loss = sum(y.square().sum() for y in ys) + (weight * leaves["x"]).sum() + coef.u.sum()
        found.append(torch.autograd.grad(loss, leaves["x"])[0])
    compare(*found)


def test_a_part_of_the_graph(device, monkeypatch):
    """The head takes no part in the first, the readers in the second; x is asked for in none of the third."""
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        leaves, coef, (y,) = built(device)
        x, ones = leaves["x"], torch.ones_like(y)
        alone = wt.post(x, leaves["f"], coef.post.detach(), coef.res.detach(), numerics=cases.SHORT)
        (first,) = torch.autograd.grad(alone, x, ones, retain_graph=True)
        (second,) = torch.autograd.grad(coef.u.sum(), x, retain_graph=True)
        (third,) = torch.autograd.grad(y, leaves["phi"], ones, retain_graph=True)
        (fourth,) = torch.autograd.grad(y, coef.post, ones, retain_graph=True)
        (fifth,) = torch.autograd.grad(y, x, ones)
        found.append((first, second, third, fourth, fifth))
    for got, want in zip(*found, strict=True):
        compare(got, want)


def test_twice_through_a_retained_graph_and_after_a_failure(device):
    leaves, _, (y,) = built(device)
    ones = torch.ones_like(y)
    first = torch.autograd.grad(y, leaves["x"], ones, retain_graph=True)
    handle = leaves["phi"].register_hook(lambda grad: None)
    handle.remove()
    failing = y.grad_fn.register_hook(lambda *grads: 1 / 0)  # after the reader, before the head
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y, leaves["x"], ones, retain_graph=True)
    failing.remove()
    same(torch.autograd.grad(y, leaves["x"], ones, retain_graph=True), first, "after a failure")
    same(torch.autograd.grad(y, leaves["x"], ones), first, "the last backward pass")


def test_hooks_see_the_whole_gradient(device):
    leaves, _, (y,) = built(device)
    seen = []
    leaves["x"].register_hook(seen.append)
    (got,) = torch.autograd.grad(y, leaves["x"], torch.ones_like(y))
    assert len(seen) == 1
    same(seen[0], got, "the hook's")


def test_batched_gradients(device, monkeypatch):
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        leaves, _, (y,) = built(device)
        upstream = torch.stack([torch.ones_like(y), 2 * torch.ones_like(y)])
        found.append(torch.autograd.grad(y, leaves["x"], upstream, is_grads_batched=True)[0])
    compare(*found)


def test_nodes_that_are_run_by_hand(device):
    _, _, (y,) = built(device)
    with torch.no_grad():
        d_x, *_ = [g for g in y.grad_fn.apply(torch.ones_like(y)) if g is not None]
    assert d_x.shape == y.shape


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant, device):
    tensors = tensors_of(device)
    found = []
    for run in (site_in_parts, lambda *a: checkpoint(site_in_parts, *a, use_reentrant=reentrant)):
        leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
        y = run(*leaves.values())
        found.append(
            torch.autograd.grad(y, tuple(leaves.values()), torch.ones_like(y)) if run is site_in_parts else None
        )
        if run is not site_in_parts:
            y.backward(torch.ones_like(y))
            found[-1] = tuple(t.grad for t in leaves.values())
    same(found[1], found[0], "checkpointed")


def test_a_compiled_site(device):
    tensors = tensors_of(device)
    x = tensors["x"].detach().requires_grad_()
    compiled = torch.compile(site_in_parts, fullgraph=True, backend="aot_eager")
    found = []
    for run in (site_in_parts, compiled):
        y = run(x, *(tensors[k] for k in ("f", "phi", "alpha", "beta")))
        found.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
    compare(*found)


def test_a_gradient_to_differentiate(device):
    """create_graph=True is autograd's: no gradient goes past it, and none of ours can be differentiated again."""
    leaves, _, (y,) = built(device)
    ones = torch.ones_like(y).requires_grad_()
    (got,) = torch.autograd.grad(y, leaves["x"], ones, create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        got.sum().backward()


# ---- drop-ins ---------------------------------------------------------------------------------------------------------


def tile_kernels_site(x, f, phi, alpha, beta):
    u, (post, comb) = tile_kernels.mhc_pre(x, phi.flatten(1), alpha, beta)
    return tile_kernels.mhc_post(f * u, x, post, comb)


def tile_kernels_parts(x, f, phi, alpha, beta):
    mixes = tile_kernels.mhc_pre_norm_fn(x, phi.flatten(1), None, 1e-6)
    pre, post, logits = tile_kernels.mhc_pre_split_mixes(mixes, alpha, beta, N, 1.0, 1e-6)
    comb = tile_kernels.sinkhorn_normalize(logits)
    return tile_kernels.mhc_post(f * tile_kernels.mhc_pre_apply_mix(x, pre), x, post, comb)


def liger_site(x, f, phi, alpha, beta):
    rows = phi.flatten(1).T
    coeffs = liger.liger_mhc_coeffs(x, rows, beta, *alpha, allow_fp32=True)
    return liger.liger_mhc_post_res(x, f * liger.liger_mhc_pre(x, coeffs[0]), coeffs[1], coeffs[2])


def megatron_module(x, f, phi, alpha, beta):
    module = make(N, C, seed=3).to(x.device)
    x = x.flatten(-2)
    u, res, post = module(x)
    y = module.fused_h_res_h_post_bda(res, x, post, (f * u, None), 0.0, True, True)
    return y.unflatten(-1, (N, C))


DROP_INS = [tile_kernels_site, tile_kernels_parts, liger_site, megatron_module]


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda f: f.__name__)
def test_drop_ins_layer_by_layer(drop_in, device, monkeypatch):
    found = []
    for patch in (False, True):
        if patch:
            apart(monkeypatch)
        torch.manual_seed(5)
        tensors = tensors_of(device, swapped=False)
        x = tensors.pop("x").detach().requires_grad_()
        y = drop_in(x * 1, **tensors)
        grads = []
        sums = sums_of(lambda y=y, x=x, grads=grads: grads.append(torch.autograd.grad(y.sum(), x)[0]), x.shape)
        found.append((sums, grads[0]))
    assert found[0][0] == 0 and found[1][0] > 0
    compare(found[0][1], found[1][1])
