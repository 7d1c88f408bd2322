# SPDX-License-Identifier: Apache-2.0
"""weft.compat.megatron's module: against the equations, against the results of Megatron's module.

Most tests run twice, with weft and with the plain PyTorch of use_native(True), which has to be right as well."""

from types import SimpleNamespace

import compat_oracle as oracle
import pytest
import torch
from compat_oracle import (
    as_dtypes,
    assert_close,
    assert_golden,
    check,
    check_compiled,
    depth,
    differentiate,
    draw,
    golden,
)
from megatron_support import ALPHAS, EPS, PARAMETERS, config, dtypes, make, sizes
from torch import nn
from weft.compat import megatron

pytestmark = pytest.mark.usefixtures("native")


def parameters_of(module):
    return {name: p.detach() for name, p in module.named_parameters()}


def with_parameters(module, parameters, method, *args, **kwargs):
    """A method of the module with other parameters in their place."""

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self):
            return getattr(self.inner, method)(*args, **kwargs)

    return torch.func.functional_call(Call(), {f"inner.{k}": v for k, v in parameters.items()}, ())


def expected_mappings(x, p, n, iterations):
    streams = x.unflatten(-1, (n, -1))
    c = streams.shape[-1]
    h, ms = oracle.project(streams, p["mapping_proj.weight"].reshape(-1, n, c))
    alpha = torch.cat([p[k] for k in ALPHAS])
    pre, post, logits = oracle.gates(h, ms, alpha, p["bias"], n, EPS, "outside", 0.0, 2.0)
    return pre, post, oracle.sinkhorn(logits, "clamp", iterations, EPS)


# ---- parameters --------------------------------------------------------------------------------------------


def test_parameters():
    module = megatron.HyperConnectionModule(config(4, 40), 7)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    alphas = dict.fromkeys(ALPHAS, (1,))
    assert shapes == {"mapping_proj.weight": (24, 160), "bias": (24,), **alphas}
    assert module.layer_number == 7
    bound = (6 / (160 + 24)) ** 0.5
    largest = module.mapping_proj.weight.abs().max().item()
    assert 0.9 * bound < largest <= bound
    assert all(getattr(module, name).item() == pytest.approx(0.01) for name in ALPHAS)
    assert (module.bias == 0).all()
    assert not hasattr(module.bias, "sequence_parallel")


def test_configuration():
    module = megatron.HyperConnectionModule(config(params_dtype=torch.bfloat16, sequence_parallel=True), 1)
    for name, parameter in module.named_parameters():
        assert parameter.sequence_parallel is True and parameter.dtype == torch.bfloat16, name
    dev = SimpleNamespace(num_residual_streams=3, hidden_size=8, mhc_sinkhorn_iterations=5,
                          mhc_init_gating_factor=0.5)  # fmt: skip
    module = megatron.HyperConnectionModule(dev, 1)
    assert module.mapping_proj.weight.shape == (15, 24) and module.alpha_res.item() == 0.5


def test_at_initialisation_it_is_a_residual_connection():
    n, c = 4, 40
    module = megatron.HyperConnectionModule(config(n, c, mhc_init_gating_factor=1e-7), 1)
    v, f = torch.randn(3, 2, c), torch.randn(3, 2, c)
    x = module.input_expand(v, n)
    u, res, post = module(x)
    assert_close("u", u, n / 2 * v.double(), 64)
    assert_close("post", post, torch.ones(3, 2, n), 64)
    assert_close("res", res, torch.full((3, 2, n, n), 1 / n), 64)
    y = module.fused_h_res_h_post_bda(res, x, post, (f, None), 0.0, True, False)
    assert_close("y", module.output_contract(y, n), (v + f).double(), 64)


# ---- against the equations ---------------------------------------------------------------------------------


@dtypes
@sizes
@pytest.mark.parametrize("iterations", [20, 1, 5])
def test_forward(dtype, s, b, n, c, iterations, native):
    module = make(n, c, iterations, torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = as_dtypes({**draw(1, x=(s, b, n * c)), **parameters_of(module)}, dtype, wide=PARAMETERS)
    full = inputs["bias"].dtype

    def call(x, **p):
        u, res, post = with_parameters(module, p, "forward", x)
        assert u.dtype == dtype and res.dtype == post.dtype == full
        return {"u": u, "res": res, "post": post}

    def expected(x, **p):
        pre, post, res = expected_mappings(x, p, n, iterations)
        return {"u": oracle.aggregate(x.unflatten(-1, (n, c)), pre), "res": res, "post": post}

    # weft sums the mapping's and the aggregate's part of d_x before it rounds, autograd rounds both and the sum.
    stores = {"d_x": 3} if native else {}
    check(call, expected, inputs, depth(n, c, s * b, iterations), stores, alike=ALPHAS)


@dtypes
@sizes
def test_mappings(dtype, s, b, n, c):
    module = make(n, c, 20, torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = as_dtypes({**draw(2, x=(s, b, n * c)), **parameters_of(module)}, dtype, wide=PARAMETERS)
    names = ("pre", "post", "res")
    check(
        lambda x, **p: dict(zip(names, with_parameters(module, p, "compute_mappings", x), strict=True)),
        lambda x, **p: dict(zip(names, expected_mappings(x, p, n, 20), strict=True)),
        inputs,
        depth(n, c, s * b),
        alike=ALPHAS,
    )


@dtypes
@sizes
def test_mappings_in_two_steps(dtype, s, b, n, c):
    module = make(n, c, 20, torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = as_dtypes({**draw(3, x=(s, b, n * c)), **parameters_of(module)}, dtype, wide=PARAMETERS)

    def call(x, **p):
        proj, r = with_parameters(module, p, "_projection_and_get_norm", x)
        pre, post, logits = with_parameters(module, p, "_compute_h", proj, r)
        assert proj.shape == (s, b, n * n + 2 * n) and r.shape == (s, b, 1) and logits.shape == (s, b, n * n)
        res = megatron.SinkhornKnopp.apply(logits.view(s, b, n, n), 20)
        return {"pre": pre, "post": post, "res": res}

    def expected(x, **p):
        return dict(zip(("pre", "post", "res"), expected_mappings(x, p, n, 20), strict=True))

    check(call, expected, inputs, depth(n, c, s * b), alike=ALPHAS)


def test_bf16_parameters():
    module = make(4, 40, 20, torch.bfloat16)
    inputs = {**as_dtypes(draw(4, x=(3, 2, 160)), torch.bfloat16), **parameters_of(module)}
    names = ("pre", "post", "res")
    check(
        lambda x, **p: dict(zip(names, with_parameters(module, p, "compute_mappings", x), strict=True)),
        lambda x, **p: dict(zip(names, expected_mappings(x, p, 4, 20), strict=True)),
        inputs,
        depth(4, 40, 6),
        alike=ALPHAS,
    )


def merge_inputs(s, b, n, c, biased, dtype):
    shapes = {"h_res": (s, b, n, n), "x": (s, b, n * c), "h_post": (s, b, n), "f": (s, b, c)}
    if biased:
        shapes["f_bias"] = (c,)
    return as_dtypes(draw(5, **shapes), dtype, wide=PARAMETERS)


def expected_merge(h_res, x, h_post, f, f_bias=None):
    n = h_post.shape[-1]
    y = oracle.combine(x.unflatten(-1, (n, -1)), f, h_post, h_res, f_bias, "out_in")
    return {"y": y.flatten(-2)}


@dtypes
@sizes
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("p, training", [(0.0, True), (0.3, False)])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_merge(dtype, s, b, n, c, biased, p, training, fused):
    module = make(n, c)

    def call(h_res, x, h_post, f, f_bias=None):
        y = module.fused_h_res_h_post_bda(h_res, x, h_post, (f, f_bias), p, training, fused)
        assert y.shape == (s, b, n * c) and y.is_contiguous() and y.storage_offset() == 0
        return {"y": y}

    check(call, expected_merge, merge_inputs(s, b, n, c, biased, dtype), depth(n, c, s * b, 0))


def test_merge_converts_the_layer_output():
    module = make(2, 8)
    inputs = merge_inputs(3, 1, 2, 8, True, torch.float32)
    inputs["f"] = inputs["f"].bfloat16()

    def call(h_res, x, h_post, f, f_bias):
        return {"y": module.fused_h_res_h_post_bda(h_res, x, h_post, (f, f_bias), 0.0, True, True)}

    check(call, expected_merge, inputs, depth(2, 8, 3, 0))


def test_parts_of_the_merge_add_up():
    module = make(4, 16)
    inputs = merge_inputs(3, 2, 4, 16, True, torch.float32)

    def call(h_res, x, h_post, f, f_bias):
        expanded, bias = module.apply_h_post((f, f_bias), h_post)
        return {"y": module.apply_h_res(h_res, x) + expanded + bias}

    check(call, expected_merge, inputs, depth(4, 16, 6, 0))
    assert module.apply_h_post((inputs["f"], None), inputs["h_post"])[1] is None


def test_dropout():
    s, b, n, c, p = 16, 8, 4, 64, 0.25
    module = make(n, c)
    inputs = {k: t.requires_grad_() for k, t in merge_inputs(s, b, n, c, True, torch.float32).items()}
    h_res, x, h_post, f, f_bias = (inputs[k] for k in ("h_res", "x", "h_post", "f", "f_bias"))

    def run():
        return module.fused_h_res_h_post_bda(h_res, x, h_post, (f, f_bias), p, True, False)

    torch.manual_seed(3)
    y = run()
    torch.manual_seed(3)
    assert torch.equal(y, run())
    assert not torch.equal(y, run())
    mixed = (h_res @ x.unflatten(-1, (n, c))).double()
    branch = (h_post.unsqueeze(-1) * (f + f_bias).unsqueeze(-2)).double()
    factor = (y.double().unflatten(-1, (n, c)) - mixed) / branch
    clear = branch.abs() > 0.05  # elsewhere the quotient says nothing
    kept = factor.round() == 1
    assert ((factor[clear] - kept[clear] / (1 - p)).abs() < 1e-3).all()
    # 32768 draws: four standard deviations are 0.0096; streams and tokens have masks of their own.
    assert abs(kept[clear].float().mean().item() - (1 - p)) < 0.0096
    assert all((kept[..., 0, :] != kept[..., i, :]).any() for i in range(1, n))
    assert (kept[0] != kept[1]).any()
    mask = torch.where(clear, kept / (1 - p), torch.nan)
    d_y = torch.randn_like(y)
    d_f, d_post = torch.autograd.grad(y, (f, h_post), d_y)
    want = (mask * d_y.double().unflatten(-1, (n, c)) * h_post.double().unsqueeze(-1)).sum(-2)
    sure = want.isfinite()
    assert sure.float().mean() > 0.5
    assert_close("d_f", d_f[sure], want[sure].detach(), 64)
    inner = (f + f_bias).double().unsqueeze(-2)
    full = (torch.where(clear, mask, 0.0) * d_y.double().unflatten(-1, (n, c)) * inner).sum(-1)
    # An unclear element contributes nothing or all of itself.
    slack = ((~clear) * d_y.unflatten(-1, (n, c)).abs() * inner.abs() / (1 - p)).sum(-1)
    assert ((d_post - full).abs() <= slack + 1e-4).all()


def test_orientation():
    # main: row i of H_res is what output stream i takes; dev: column i.
    res = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 1, 2, 2)
    x = torch.tensor([10.0, 100.0, 1.0, 2.0]).reshape(1, 1, 4)
    zero = torch.zeros(1, 1, 2)
    module = make(2, 2)
    main = module.fused_h_res_h_post_bda(res, x, zero, (zero, None), 0.0, True, False)
    assert torch.equal(main.flatten(), torch.tensor([12.0, 104.0, 34.0, 308.0]))
    assert torch.equal(module.apply_h_res(res, x), main)
    for merge in (megatron.fused_h_post_bda, megatron.native_h_post_bda):
        dev = merge(res, x.view(1, 1, 2, 2), zero, zero, None)
        assert torch.equal(dev.flatten(), torch.tensor([13.0, 106.0, 24.0, 208.0]))


@dtypes
@pytest.mark.parametrize("n", [1, 2, 4])
def test_expand_and_contract(dtype, n):
    inputs = as_dtypes(draw(6, x=(3, 2, 24)), dtype)
    check(
        lambda x: {"y": megatron.HyperConnectionModule.input_expand(x, n)},
        lambda x: {"y": torch.cat([x] * n, -1)},
        inputs,
        depth(n, 1, 0, 0),
        {"d_x": n},  # plain PyTorch sums the streams in their own dtype
    )
    check(
        lambda x: {"y": megatron.HyperConnectionModule.output_contract(x, n)},
        lambda x: {"y": sum(x.chunk(n, -1)) / n},
        inputs,
        depth(n, 1, 0, 0),
    )


def test_empty_sequence_and_zeros():
    module = make(4, 8)
    for x in (torch.zeros(0, 2, 32), torch.zeros(3, 2, 32)):
        x.requires_grad_()
        module.zero_grad()
        u, res, post = module(x)
        y = module.fused_h_res_h_post_bda(res, x, post, (u, None), 0.0, True, True)
        y.sum().backward()
        assert x.grad.isfinite().all() and x.grad.shape == x.shape
        assert module.mapping_proj.weight.grad is not None and (module.mapping_proj.weight.grad == 0).all()


@pytest.mark.parametrize("case, n, iterations", [("case0", 4, 20), ("case1", 2, 5), ("case2", 3, 20), ("case3", 8, 20)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=["f64", "f32"])
def test_golden(case, n, iterations, dtype, tolerance):
    g = {k: t.to(dtype) for k, t in golden("mhc_megatron_open")[case].items()}
    c = g["f"].shape[-1]
    module = make(n, c, iterations, dtype)
    at = {"mapping_proj.weight": "weight", "bias": "bias", **{k: k for k in ALPHAS}}
    inputs = {**{k: g[v] for k, v in at.items()}, **{k: g[k] for k in ("x", "f", "f_bias")}}

    def call(x, f, f_bias, **p):
        u, res, post = with_parameters(module, p, "forward", x)
        y = module.fused_h_res_h_post_bda(res, x, post, (f, f_bias), 0.0, True, False)
        return {"aggregate": u, "combine": y}

    upstream = {k: g[f"d_{k}"] for k in ("aggregate", "combine")}
    results, _, grads = differentiate(call, inputs, upstream)
    for name, value in results.items():
        assert_golden(case, name, value, g[name], tolerance)
    for name, value in grads.items():
        key = f"d_{at.get(name, name)}"
        # The three alphas are sums of like terms; one of them may cancel.
        want = torch.cat([g[f"d_{k}"] for k in ALPHAS]) if name in ALPHAS else g[key]
        got = torch.cat([grads[k] for k in ALPHAS]) if name in ALPHAS else value
        assert_golden(case, key, got, want, tolerance)
    pre, post, res = with_parameters(module, {k: g[v] for k, v in at.items()}, "compute_mappings", g["x"])
    for name, value in {"h_pre": pre, "h_post": post, "h_res": res}.items():
        assert_golden(case, name, value, g[name], tolerance)


# ---- torch.compile -----------------------------------------------------------------------------------------


def test_compile():
    module = make(4, 16)

    def layer(x, bias):
        u, res, post = module(x)
        y = module.fused_h_res_h_post_bda(res, x, post, (torch.tanh(u), bias), 0.0, True, True)
        streams = y.unflatten(-1, (4, 16))
        mix = megatron.fused_sinkhorn(res, 3)
        return {"y": megatron.fused_h_post_bda(mix, streams, post, torch.tanh(u), bias)}

    inputs = as_dtypes(draw(21, x=(3, 2, 64), bias=(16,)), torch.float32)
    check_compiled(layer, inputs)
