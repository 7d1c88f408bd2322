# SPDX-License-Identifier: Apache-2.0
"""The modules: parameters, initial behaviour, recompute inside a stack, conversions."""

import copy
import math

import pytest
import torch
import weft.torch as wt
from compare import same
from stack_support import C, L, N, stack, step
from torch import nn

# ---- parameters ------------------------------------------------------------------------------------------------------


def test_state_dict_keys():
    site = wt.HyperConnection(C, N, norm_weight=True, sub_norm=True)
    shapes = {k: tuple(t.shape) for k, t in site.state_dict().items()}
    gates = N * (N + 2)
    want = {"phi": (gates, N * C), "alpha": (3,), "beta": (gates,), "norm_weight": (N * C,), "sub_weight": (C,)}
    assert shapes == want
    assert set(wt.HyperConnection(C, N).state_dict()) == {"phi", "alpha", "beta"}
    layer = wt.HyperConnectionLayer(nn.Linear(C, C, bias=False), C, N)
    assert set(layer.state_dict()) == {
        *(f"connection.{k}" for k in ("phi", "alpha", "beta", "sub_weight")),
        "sublayer.weight",
    }
    assert {k: tuple(t.shape) for k, t in wt.Head(C, N).state_dict().items()} == {
        "phi": (N, N * C),
        "alpha": (1,),
        "beta": (N,),
    }
    keys = set(stack(layers=2, contract="learned").state_dict())
    assert {"layers.1.connection.phi", "layers.0.sublayer.up.weight", "contract.phi"} <= keys
    assert not wt.Expand(N).state_dict() and not wt.Contract().state_dict()
    assert all(t.dtype == torch.float32 for t in site.state_dict().values())


@pytest.mark.parametrize("contract", ["mean", "learned"])
def test_state_dict_round_trip(contract, device, tmp_path):
    one, other = stack(device, contract=contract), stack(device, contract=contract, alpha_init=0.7)
    with torch.no_grad():
        for p in one.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, C, device=device)
    assert not torch.equal(one(x), other(x))
    torch.save(one.state_dict(), tmp_path / "stack.pt")
    other.load_state_dict(torch.load(tmp_path / "stack.pt", weights_only=True))
    same(step(other, x), step(one, x), "loaded")


def test_wrong_arguments():
    for arguments in ((0, N), (C, 0), (C, 33)):
        with pytest.raises(ValueError, match="HyperConnection: expected channels >= 1 and streams 1 to 32"):
            wt.HyperConnection(*arguments)
    with pytest.raises(ValueError, match="alpha_init: expected a finite number, got nan"):
        wt.HyperConnection(C, N, alpha_init=float("nan"))
    with pytest.raises(ValueError, match="expected one of weft's presets, got 'deepseek'"):
        wt.HyperConnection(C, N, numerics="deepseek")
    with pytest.raises(ValueError, match="sinkhorn: expected one of log, .*got 'exp'"):
        wt.HyperConnection(C, N, numerics=wt.Numerics.preset("liger")._replace(sinkhorn="exp"))
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"dropout: expected a number in \[0, 1\), got"):
            wt.HyperConnectionLayer(nn.Identity(), C, N, dropout=p)
    for k in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="recompute: expected None or 1 and more"):
            stack(recompute=k)
    with pytest.raises(ValueError, match="mhc_contract: kind: expected one of mean, sum, got 'max'"):
        stack(contract="max")
    site = wt.HyperConnection(C, N)
    for x in (torch.randn(3, N + 1, C), torch.randn(3, N, C - 1), torch.randn(C)):
        with pytest.raises(ValueError, match=rf"HyperConnection: x: expected \[\.\.\., {N}, {C}\], got"):
            site(x)


def test_options_reach_the_learned_head():
    """main_grad of a stack is main_grad of all its parameters."""
    model = wt.HyperConnectionStack([nn.Identity()], C, N, contract="learned", main_grad=True)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    model(torch.randn(3, C)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None and p.main_grad.any(), name


# ---- initial behaviour -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
def test_flat_gates(streams, device):
    """alpha 0 and beta 0: pre 1/2, post 1, res 1/n, whatever x is. (transformer_engine has no eps in its gates.)"""
    options = {"numerics": "transformer_engine", "alpha_init": 0.0, "first_mix": "uniform"}
    site = wt.HyperConnection(C, streams, **options, device=device)
    x = torch.randn(3, streams, C, device=device)
    coef = site(x)
    assert torch.equal(coef.pre, torch.full_like(coef.pre, 0.5))
    assert torch.equal(coef.post, torch.ones_like(coef.post))
    # exp(-log n) or 1/n after twenty divisions of equal numbers: a unit for each of a few roundings.
    assert ((coef.res - 1 / streams).abs() <= 8 * 2**-24 / streams).all()
    torch.testing.assert_close(coef.u, x.sum(-2) / 2, rtol=2**-22, atol=2**-22 * streams)


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("site", [0, 5])
def test_identity_mix(site, streams, device):
    """alpha 0: res is e^4 on the diagonal by 1 elsewhere, post 1; pre has 1 as its sum, and 1/16 n for each of the streams
    that are not this site's."""
    made = wt.HyperConnection(
        C, streams, numerics="transformer_engine", alpha_init=0.0, site=site, device=device, dtype=torch.float64
    )
    coef = made(torch.randn(3, streams, C, device=device, dtype=torch.float64))
    assert torch.equal(coef.post, torch.ones_like(coef.post))
    far = 1 / (math.exp(4) + streams - 1)
    res = torch.full((streams, streams), far, dtype=torch.float64).fill_diagonal_(math.exp(4) * far)
    pre = torch.full((streams,), 1 / 16 / streams, dtype=torch.float64)
    pre[site % streams] = 1 - (streams - 1) / 16 / streams
    if streams == 1:
        pre[:] = 0.5
    for got, want in ((coef.res, res), (coef.pre, pre)):
        torch.testing.assert_close(got, want.to(device).expand_as(got), rtol=0, atol=1e-14)


def test_first_mix_of_a_stack():
    """Sites are numbered through, by first_site in a stage, and shifted, what a site predicts is the next one's."""

    def reads(**options):
        made = wt.HyperConnectionStack([nn.Identity() for _ in range(5)], C, N, **options)
        return [int(layer.connection.beta[:N].argmax()) for layer in made.layers]

    assert reads() == [0, 1, 2, 3, 0]
    assert reads(first_site=6) == [2, 3, 0, 1, 2]
    assert reads(shifted=True) == [1, 2, 3, 0, 1]
    flat = wt.HyperConnectionStack([nn.Identity()], C, N, first_mix="uniform")
    assert not flat.layers[0].connection.beta.any()
    with pytest.raises(ValueError, match="first_mix: expected one of uniform, identity, got 'one'"):
        wt.HyperConnection(C, N, first_mix="one")


@pytest.mark.parametrize("first_mix", ["uniform", "identity"])
@pytest.mark.parametrize("norm", [True, False])
def test_fresh_stack_is_the_plain_residual_network(norm, first_mix, device):
    """With gates that do not look at the streams these stay equal: x + f(norm(x)). The aggregate is x times the sum of
    pre: 1 with the identity, n/2 with flat gates, which an RMSNorm undoes up to its eps; without a norm a sub-layer sees
    n/2 x."""
    model = stack(device, alpha_init=0.0, norm=norm, first_mix=first_mix, numerics="transformer_engine")
    x = torch.randn(3, C, device=device)
    plain = x.double()
    gain = N / 2 if first_mix == "uniform" else 1
    for layer in model.double().layers:
        u = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6) if norm else plain * gain
        plain = plain + layer.sublayer(u)
    model.float()
    got = model(x).double()
    # eps 1e-6 against ms of order 1 and (n/2)^2 ms: 1e-6 relative in u; and fp32 roundoff. Per layer.
    assert ((got - plain).abs() <= L * (1e-6 + 32 * 2**-24) * (1 + plain.abs().max())).all()


def test_expand_contract_and_head(device):
    u = torch.randn(2, 3, C, device=device)
    x = wt.Expand(N)(u)
    same(x, u[..., None, :].expand(2, 3, N, C).contiguous(), "Expand")
    same(wt.Contract()(x), u, "mean of copies")
    same(wt.Contract("sum")(x), 4 * u, "sum of copies")
    head = wt.Head(C, N, device=device)
    with torch.no_grad():
        head.alpha.zero_()
    # Gates of 1/2 + 1e-6: n (1/2 + 1e-6) u.
    torch.testing.assert_close(head(x), N * (0.5 + 1e-6) * u, rtol=2**-21, atol=0)
    assert "channels=16, streams=4" in repr(wt.HyperConnection(C, N))


# ---- a layer ---------------------------------------------------------------------------------------------------------


def test_sublayer_that_leaves_its_bias(device):
    """(f, bias) merges to what f + bias would: (f + bias) is formed in fp32 either way."""
    x = torch.randn(3, C, device=device)
    pair, whole = step(stack(device, pair=True), x), step(stack(device), x)
    for g, w in zip(pair, whole, strict=True):
        # Linear may add the bias inside its product: fp32 roundoff of the largest term, through L layers.
        assert (g - w).abs().max() <= L * 32 * 2**-24 * w.abs().max()
    assert all(g.abs().max() > 0 for g in pair)


def test_arguments_reach_every_sublayer(device):
    model, x = stack(device), torch.randn(3, C, device=device)
    same(model(x, 0.5), model(x, gain=0.5), "positional and keyword")
    assert not torch.equal(model(x, 0.5), model(x))
    same(step(stack(device, recompute=2), x, gain=0.5), step(model, x, 0.5), "with recompute")


def test_eval_mode(device):
    model = stack(device, dropout=0.3, recompute=2)
    x = torch.randn(3, C, device=device)
    assert not torch.equal(model(x), model(x))
    model.eval()
    same(model(x), model(x), "eval")
    same(model(x), stack(device).eval()(x), "eval and no dropout")
    with torch.no_grad():
        same(model(x), stack(device)(x), "no_grad")


def test_pipeline_stages(device):
    """expand=False and contract=None: two halves are the whole."""
    whole = stack(device, layers=4)
    first = stack(device, layers=2, contract=None)
    second = stack(device, layers=2, expand=False)
    first.layers.load_state_dict(nn.ModuleList(whole.layers[:2]).state_dict())
    second.layers.load_state_dict(nn.ModuleList(whole.layers[2:]).state_dict())
    x = torch.randn(3, C, device=device)
    same(second(first(x)), whole(x), "two stages")


def test_shifted_sites(device):
    """pre_in: u is aggregated with the coefficients of the site before; merge takes this site's own."""
    site = wt.HyperConnection(C, N, alpha_init=0.3, device=device)
    x = torch.randn(3, N, C, device=device)
    one_hot = torch.zeros(3, N, device=device)
    one_hot[:, 0] = 1
    coef = site(x, one_hot)
    same(coef.u, x[:, 0], "first site: stream 0")
    same(coef[1:], site(x)[1:], "coefficients do not depend on pre_in")


# ---- recompute -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", [False, True], ids=["f", "f and bias"])
@pytest.mark.parametrize("group", [1, 2, 3, L])
def test_recompute_is_bitwise(group, pair, dtype, device):
    """Results and gradients, with dropout in the sub-layers and in the merge."""
    x = torch.randn(2, 3, C, device=device, dtype=dtype)
    plain, model = (stack(device, dropout=0.3, pair=pair, recompute=k).to(dtype) for k in (None, group))
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.add_(0.1 * torch.randn_like(one))  # gains and biases that are not 1 and 0
            other.copy_(one)
    want = step(plain, x)
    same(step(model, x), want, f"groups of {group}")
    same(step(model, x), want, "the next step")
    assert not torch.equal(step(model, x, seed=4)[0], want[0])


def test_recompute_through_a_retained_graph(device):
    model, x = stack(device, recompute=2), torch.randn(3, C, device=device, requires_grad=True)
    y = model(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    same(torch.autograd.grad(y.sum(), x), first, "second backward pass")


def test_recompute_of_sublayers_that_use_up_their_input(device):
    """The output of such a sub-layer is the memory that would be let go; and what it wrote to cannot be rebuilt."""

    class View(nn.Module):
        def forward(self, u):
            return u.view(u.shape)

    x = torch.randn(3, C, device=device)
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(C, C, device=device))
    for sub in (nn.Identity(), View(), nn.ReLU(inplace=True), in_place):
        results = []
        for k in (None, 2):
            torch.manual_seed(1)
            model = wt.HyperConnectionStack([sub] * 3, C, N, alpha_init=0.3, device=device, recompute=k)
            results.append(step(model, x))
        same(results[1], results[0], type(sub).__name__)


def test_recompute_without_gradients_of_the_input(device):
    """Parameters alone need gradients; frozen layers keep their memory."""
    x = torch.randn(3, C, device=device)
    results = []
    for k in (None, 2):
        model = stack(device, recompute=k)
        for p in model.layers[0].parameters():
            p.requires_grad_(False)
        torch.manual_seed(3)
        model(x).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    same(results[1], results[0], "gradients")


@pytest.mark.parametrize("group", [None, 1, 2, 3, 7])
def test_recompute_frees_what_it_says(group, device):
    """Alive between forward and backward: the streams at the beginning of each group, and no sub-layer input. Without
    recompute all of them."""
    layers, tokens = 7, 10
    model = stack(device, layers=layers, recompute=group)
    streams, inputs = [], []
    for layer in model.layers:
        layer.sublayer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        layer.connection.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    y = model(torch.randn(tokens, C, device=device, requires_grad=True))

    def alive(tensors) -> int:
        return sum({id(t): t.untyped_storage().nbytes() for t in tensors}.values())

    assert len(streams) == len(inputs) == layers
    groups = layers if group is None else -(-layers // group)
    assert alive(streams) == groups * tokens * N * C * 4
    assert alive(inputs) == (layers * tokens * C * 4 if group is None else 0)
    y.sum().backward()
    assert alive(inputs) == layers * tokens * C * 4, "rebuilt for backward"


# ---- conversions -----------------------------------------------------------------------------------------------------


def test_deepcopy(device):
    model = stack(device, recompute=2)
    x = torch.randn(3, C, device=device)
    step(model, x)
    twin = copy.deepcopy(model)
    same(step(twin, x), step(model, x), "copy")
    with torch.no_grad():
        twin.layers[0].connection.phi.zero_()
    assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    """`.bfloat16()` of a model: parameters are rounded, and what is computed is the function of the rounded ones."""
    model = stack(device, contract="learned").to(dtype)
    x = torch.randn(5, C, device=device).to(dtype)
    y, d_x, *grads = step(model, x)
    assert y.dtype == d_x.dtype == dtype and all(g.dtype == dtype for g in grads)
    assert all(torch.isfinite(t).all() for t in (y, d_x, *grads))
    site = model.layers[0].connection
    streams = model.expand(x)
    wide = copy.deepcopy(site).float()
    # 16-bit weights on a GPU may take another kernel than the same values in fp32; h differs by fp32 roundoff then.
    for got, want in zip(site(streams)[1:], wide(streams)[1:], strict=True):
        assert (got - want).abs().max() <= 2**-16 * want.abs().max()


def test_double_on_the_reference():
    model, x = stack(contract="learned"), torch.randn(3, C)
    narrow = model(x)
    wide = model.double()(x.double())
    assert wide.dtype == torch.float64
    assert (narrow - wide).abs().max() <= L * 64 * 2**-24 * wide.abs().max()


def test_meta_device():
    """Built without memory, given memory, initialised."""
    made = stack("meta", contract="learned")
    assert all(p.is_meta for p in made.parameters())
    assert made(torch.empty(3, C, device="meta")).shape == (3, C)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(torch.nan)
    for module in made.modules():
        if isinstance(module, (wt.HyperConnection, wt.Head, nn.Linear)):
            module.reset_parameters()
    assert all(torch.isfinite(p).all() for p in made.parameters())
    site = made.layers[0].connection
    assert torch.equal(site.alpha, torch.full((3,), 0.3))
    assert all(
        torch.equal(a.connection.beta, b.connection.beta) for a, b in zip(made.layers, stack().layers, strict=True)
    )
    assert torch.equal(site.sub_weight, torch.ones(C))
    assert torch.isfinite(made(torch.randn(3, C))).all()
