# SPDX-License-Identifier: Apache-2.0
"""weft.compat.megatron's module: against the equations, against the results of Megatron's module, recompute, misuse.

Most tests run twice, with weft and with the plain PyTorch of use_native(True), which has to be right as well."""

import os
import subprocess
import sys
from types import SimpleNamespace

import compat_oracle as oracle
import pytest
import torch
from compat_oracle import as_dtypes, assert_close, assert_golden, check, differentiate, draw, golden
from megatron_support import ALPHAS, EPS, PARAMETERS, depth, dtypes, sizes
from torch import nn
from weft.compat import megatron
from weft.torch import CheckpointWithoutOutputManager

pytestmark = pytest.mark.usefixtures("native")


def config(n=4, c=40, iterations=20, **fields):
    defaults = dict(mhc_num_residual_streams=n, hidden_size=c, mhc_sinkhorn_iterations=iterations,
                    mhc_init_gating_factor=0.01, params_dtype=torch.float32, sequence_parallel=False,
                    perform_initialization=True)  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def make(n=4, c=40, iterations=20, dtype=torch.float32, seed=0, **fields):
    """A module whose parameters are all random, so that every one of them matters."""
    torch.manual_seed(seed)
    module = megatron.HyperConnectionModule(config(n, c, iterations, params_dtype=dtype, **fields), 1)
    with torch.no_grad():
        module.bias.normal_()
        for name in ALPHAS:
            getattr(module, name).normal_()
    return module


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


def expected_mappings(x, p, n, iterations, rule="clamp"):
    streams = x.unflatten(-1, (n, -1))
    c = streams.shape[-1]
    h, ms = oracle.project(streams, p["mapping_proj.weight"].reshape(-1, n, c))
    alpha = torch.cat([p[k] for k in ALPHAS])
    pre, post, logits = oracle.gates(h, ms, alpha, p["bias"], n, EPS, "outside", 0.0, 2.0)
    return pre, post, oracle.sinkhorn(logits, rule, iterations, EPS)


# ---- signatures and parameters -----------------------------------------------------------------------------

MERGE = "self, h_res, original_residual, h_post, layer_output_with_bias, dropout_prob, training, fused"
GATES = "x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps=1e-06, compute_h_eps=1e-06"
SIGNATURES = {
    "native_sinkhorn": "input_logits, num_iterations, eps=1e-06",
    "native_h_aggregate": "x, h_pre",
    "native_h_aggregate_into": "x, h_pre, out",
    "native_h_post_bda": "h_res, original_residual, h_post, x, bias",
    "native_proj_rms": "x, weight, eps=1e-06",
    "native_proj_rms_compute_h": GATES,
    "native_fused_add_3": "a, b, c",
    "learned_output_contract": "hidden_states, head_fn, base, scale, n, eps",
    "fused_sinkhorn": "input_logits, num_iterations, eps=1e-06",
    "fused_h_aggregate": "x, h_pre",
    "fused_h_aggregate_into": "x, h_pre, out",
    "fused_h_post_bda": "h_res, original_residual, h_post, x, bias",
    "fused_proj_rms": "x, weight, eps=1e-06",
    "fused_proj_rms_compute_h": GATES,
    "get_bias_dropout_add": "training, fused, mhc_recompute_manager=None",
    "build_mhc_recompute_layer_plan": "num_layers, mhc_recompute_layer_num, use_mhc_recompute",
    "finalize_mhc_recompute_layer": "mhc_manager, hidden_states, is_last_in_recompute_block",
    "SinkhornKnopp.apply": "H_res_logits, num_iterations",
    "HyperConnectionModule": "config, layer_number",
    "HyperConnectionModule.forward": "self, hidden_states, mhc_recompute_manager=None",
    "HyperConnectionModule.compute_mappings": "self, x",
    "HyperConnectionModule._projection_and_get_norm": "self, x",
    "HyperConnectionModule._compute_h": "self, proj, r",
    "HyperConnectionModule.aggregate": "self, x, h_pre",
    "HyperConnectionModule.apply_h_res": "self, h_res, residual",
    "HyperConnectionModule._apply_h_post": "self, x, h_post",
    "HyperConnectionModule.apply_h_post": "self, x_with_bias, h_post, manager=None",
    "HyperConnectionModule.fused_h_res_h_post_bda": f"{MERGE}, manager=None",
    "HyperConnectionModule._fused_h_res_h_post_bda_native": MERGE,
    "HyperConnectionModule._fused_h_res_h_post_bda_with_checkpoint": f"{MERGE}, manager",
    "HyperConnectionModule.input_expand": "x, n",
    "HyperConnectionModule.output_contract": "x, n",
}


@pytest.mark.parametrize("name, parameters", SIGNATURES.items(), ids=SIGNATURES)
def test_signature(name, parameters):
    function = megatron
    for part in name.split("."):
        function = getattr(function, part)
    assert oracle.signature(function) == parameters


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


# ---- main: against the equations ---------------------------------------------------------------------------


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


# ---- recompute ---------------------------------------------------------------------------------------------


def sublayer(u):
    return torch.tanh(u)


def stack(modules, x, managers, p=0.0):
    """The modules one after the other; managers: (manager, whether its group ends here) of every module."""
    discarded = []
    for module, (manager, ends) in zip(modules, managers, strict=True):
        u, res, post = module(x, mhc_recompute_manager=manager)
        f = sublayer(u)
        # The last merge of a group stays: others read it before the group is replayed.
        y = module.fused_h_res_h_post_bda(
            res, x, post, (f, module.f_bias), p, True, True, manager=None if ends else manager
        )
        if manager is not None:
            discarded += [u] if ends else [u, y]
            if ends:
                manager.discard_all_outputs_and_register_unified_recompute(y)
        x = y
    return x, discarded


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
@pytest.mark.parametrize("groups", [(3,), (1, 2), (2, 1)], ids=str)
def test_recompute_changes_nothing(groups, p):
    c, n = 16, 4
    modules = [make(n, c, 5, seed=i) for i in range(3)]
    for i, module in enumerate(modules):
        module.f_bias = nn.Parameter(torch.randn(c, generator=torch.Generator().manual_seed(i)))
    x = draw(17, x=(8, 2, n * c))["x"].float()
    d_y = torch.randn(8, 2, n * c, generator=torch.Generator().manual_seed(7))
    plan = []
    for size in groups:
        manager = CheckpointWithoutOutputManager()
        plan += [(manager, i == size - 1) for i in range(size)]
    runs = []
    for managers in ([(None, True)] * 3, plan):
        leaf = x.clone().requires_grad_()
        for module in modules:
            module.zero_grad()
        torch.manual_seed(11)
        y, discarded = stack(modules, leaf, managers, p)
        assert all(t.untyped_storage().nbytes() == 0 for t in discarded)
        assert len(discarded) == (0 if managers is not plan else 3 + 3 - len(groups))
        y.backward(d_y)
        grads = [q.grad.clone() for module in modules for q in module.parameters()]
        runs.append([y.detach().clone(), leaf.grad, *grads])
    names = ["y", "d_x", *(f"{i}.{k}" for i, m in enumerate(modules) for k, _ in m.named_parameters())]
    for name, plain, managed in zip(names, *runs, strict=True):
        assert plain.isfinite().all() and plain.abs().max() > 0, name
        assert_close(name, managed, plain, 256)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_apply_h_post_with_a_manager(biased):
    module, manager = make(4, 16), CheckpointWithoutOutputManager()
    inputs = as_dtypes(draw(18, f=(8, 2, 16), h_post=(8, 2, 4)), torch.float32)
    bias = torch.randn(16) if biased else None  # a bias without gradient is fine

    def call(f, h_post, manager):
        expanded, expanded_bias = module.apply_h_post((f, bias), h_post, manager)
        y = torch.tanh(expanded if expanded_bias is None else expanded + expanded_bias)
        if manager is not None:
            assert len(manager.checkpoints) == 1 + biased
            manager.discard_all_outputs_and_register_unified_recompute(y)
            assert expanded.untyped_storage().nbytes() == 0
        return {"y": y}

    plain, upstream, d_plain = differentiate(lambda **a: call(**a, manager=None), inputs)
    managed, _, d_managed = differentiate(lambda **a: call(**a, manager=manager), inputs, upstream)
    assert torch.equal(plain["y"], managed["y"])
    for name, value in d_plain.items():
        assert_close(name, d_managed[name], value, 16)


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
    plain, upstream, d_plain = differentiate(layer, inputs)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    whole, _, d_whole = differentiate(compiled, inputs, upstream)
    assert_close("y", whole["y"], plain["y"], 64)
    for name, value in d_plain.items():
        assert_close(f"d_{name}", d_whole[name], value, 64)


# ---- bias, dropout, add ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bias_dropout_add(fused, biased, dtype):
    inputs = as_dtypes(draw(19, x=(5, 2, 16), residual=(5, 2, 16), **({"bias": (16,)} if biased else {})), dtype)
    for training, p in ((True, 0.0), (False, 0.4)):
        function = megatron.get_bias_dropout_add(training, fused)
        check(
            lambda x, residual, bias=None: {"y": function((x, bias), residual, p)},  # noqa: B023
            lambda x, residual, bias=0.0: {"y": x + bias + residual},
            inputs,
            64,
            {"y": 2 + biased},
        )
    if not biased:  # a tensor alone is a pair without a bias
        x, residual = inputs["x"], inputs["residual"]
        assert torch.equal(function(x, residual, 0.0), function((x, None), residual, 0.0))


def test_bias_dropout_add_drops():
    x, residual = torch.ones(64, 64), torch.zeros(64, 64)
    y = megatron.get_bias_dropout_add(True, False)((x, None), residual, 0.25)
    kept = y != 0
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / 0.75)) and abs(kept.float().mean().item() - 0.75) < 0.03


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("managers", [1, 2])
@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
def test_bias_dropout_add_with_managers(fused, biased, managers, p):
    """Two operations, in one group or in two chained ones, replay to the gradients of the plain run."""
    shapes = {"x": (5, 2, 16), "residual": (5, 2, 16), **({"bias": (16,)} if biased else {})}
    inputs = as_dtypes(draw(20, **shapes), torch.float32)

    def run(x, residual, bias=None, *, groups):
        torch.manual_seed(5)
        discarded = []
        first, second = groups[0], groups[-1]
        a = megatron.get_bias_dropout_add(True, fused, first)((torch.tanh(x), bias), residual, p)
        b = torch.sin(a)
        if first is not second:
            first.discard_all_outputs_and_register_unified_recompute(b)
        c = megatron.get_bias_dropout_add(True, fused, second)((torch.tanh(b), bias), b, p)
        y = torch.sin(c)
        if second is not None:
            discarded = [a, c]
            second.discard_all_outputs_and_register_unified_recompute(y)
        assert all(t.untyped_storage().nbytes() == 0 for t in discarded)
        return {"y": y}

    made = [CheckpointWithoutOutputManager() for _ in range(managers)]
    plain, upstream, d_plain = differentiate(lambda **a: run(**a, groups=[None]), inputs)
    managed, _, d_managed = differentiate(lambda **a: run(**a, groups=made), inputs, upstream)
    assert [len(m.checkpoints) for m in made] in ([2], [1, 1], [0], [0, 0])
    assert torch.equal(plain["y"], managed["y"])
    for name, value in d_plain.items():
        assert value.abs().max() > 0
        assert_close(f"d_{name}", d_managed[name], value, 16)


# ---- with and without Megatron -----------------------------------------------------------------------------

FAKE = """
from torch import nn
import torch
class HyperConnectionModule(nn.Module):
    def __init__(self, config, layer_number):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.n, self.hidden_size = config.mhc_num_residual_streams, config.hidden_size
        self.sinkhorn_iterations = config.mhc_sinkhorn_iterations
        self.mapping_proj = nn.Linear(self.n * self.hidden_size, self.n * self.n + 2 * self.n, bias=False)
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            setattr(self, name, nn.Parameter(torch.full((1,), config.mhc_init_gating_factor)))
        self.bias = nn.Parameter(torch.zeros(self.n * self.n + 2 * self.n))
        if getattr(config, "slots", False):
            self._sinkhorn_op = None
"""
USE = """
from types import SimpleNamespace
import torch
from megatron.core.transformer.hyper_connection import HyperConnectionModule as Base
from weft.compat.megatron import HyperConnectionModule, uses_native
assert issubclass(HyperConnectionModule, Base) and HyperConnectionModule is not Base
assert uses_native() == NATIVE
config = SimpleNamespace(mhc_num_residual_streams=2, hidden_size=8, mhc_sinkhorn_iterations=5,
                         mhc_init_gating_factor=0.1)
u, res, post = HyperConnectionModule(config, 1)(torch.ones(3, 1, 16))
assert u.shape == (3, 1, 8) and (res.sum(-2) - 1).abs().max() < 1e-5
config.slots = True
try:
    HyperConnectionModule(config, 1)
except NotImplementedError as error:
    assert "bind" in str(error)
else:
    raise AssertionError("a module of branch dev was accepted")
"""


def test_derives_from_megatron_where_there_is_one(tmp_path, native):
    package = tmp_path / "megatron" / "core" / "transformer"
    package.mkdir(parents=True)
    (package / "hyper_connection.py").write_text(FAKE)
    environment = {**os.environ, "WEFT_COMPAT_NATIVE": str(int(native))}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", USE.replace("NATIVE", str(native))]
    subprocess.run(command, env=environment, check=True, timeout=120)


def test_does_not_need_megatron():
    assert megatron.HyperConnectionModule.__mro__[1].__module__.startswith("weft.compat.megatron")


# ---- misuse ------------------------------------------------------------------------------------------------

M = megatron
X, W, B, ONE = torch.zeros(3, 1, 32), torch.zeros(24, 32), torch.zeros(24), torch.zeros(1)
RES, POST, F = torch.zeros(3, 1, 4, 4), torch.zeros(3, 1, 4), torch.zeros(3, 1, 8)
S = X.view(3, 1, 4, 8)
bda = M.get_bias_dropout_add(True, False)


def merge(res=RES, x=X, post=POST, f=F, bias=None, p=0.0):
    return make(4, 8).fused_h_res_h_post_bda(res, x, post, (f, bias), p, True, False)


MISUSE = {
    "streams": (lambda: make(0, 8), ValueError, "config: expected streams"),
    "iterations": (lambda: make(4, 8, 0), ValueError, "mhc_sinkhorn_iterations of at least 1"),
    "no streams": (
        lambda: M.HyperConnectionModule(SimpleNamespace(hidden_size=8), 1),
        AttributeError,
        "mhc_num_residual_streams or num_residual_streams",
    ),
    "width": (lambda: make(4, 8)(X[..., :31]), ValueError, r"x: expected shape \(3, 1, 32\)"),
    "not a tensor": (lambda: make(4, 8)(None), TypeError, "x: expected a tensor, got NoneType"),
    "h_pre": (lambda: make(4, 8).aggregate(X, F), ValueError, "h_pre: expected shape"),
    "h_res": (lambda: merge(res=POST), ValueError, "h_res: expected shape"),
    "h_post": (lambda: merge(post=F), ValueError, "h_post: expected shape"),
    "f": (lambda: merge(f=X), ValueError, "layer output: expected shape"),
    "bias": (lambda: merge(bias=B), ValueError, r"bias: expected shape \(8,\)"),
    "dropout": (lambda: merge(p=1.0), ValueError, "0 <= dropout_prob < 1, got 1.0"),
    "contract": (lambda: M.HyperConnectionModule.output_contract(X, 3), ValueError, "multiple of n = 3"),
    "square": (lambda: M.fused_sinkhorn(F, 5), ValueError, "input_logits: expected shape"),
    "rounds": (lambda: M.fused_sinkhorn(RES, 0), ValueError, "num_iterations: expected at least 1"),
    "native rounds": (lambda: M.native_sinkhorn(RES, 0), ValueError, "num_iterations: expected at least 1"),
    "into another shape": (lambda: M.fused_h_aggregate_into(S, POST, X), ValueError, "out: expected shape"),
    "into another dtype": (lambda: M.fused_h_aggregate_into(S, POST, F.half()), ValueError, "out: expected contiguous"),
    "into a parameter": (
        lambda: M.native_h_aggregate_into(S, POST, F.clone().requires_grad_()),
        ValueError,
        "outside of autograd",
    ),
    "weight": (lambda: M.fused_proj_rms(X.view(3, 32), W[:, :30]), ValueError, "weight: expected shape"),
    "rows": (
        lambda: M.fused_proj_rms_compute_h(X.view(3, 32), W[:20], ONE, ONE, ONE, B, 4),
        ValueError,
        r"weight: expected shape \(24, 32\)",
    ),
    "head": (lambda: M.learned_output_contract(X, W[:3], B[:4], ONE, 4, 1e-6), ValueError, "head_fn: expected shape"),
    "head's n": (lambda: M.learned_output_contract(X, W[:3], B[:3], ONE, 3, 1e-6), ValueError, "multiple of n = 3"),
    "add": (lambda: M.native_fused_add_3(X, X, F), ValueError, "c: expected shape"),
    "slots": (lambda: M.bind(nn.Linear(2, 2)), ValueError, "expected a module with slots"),
    "another preset": (lambda: M.bind(nn.Linear(2, 2), "liger"), ValueError, "preset: expected one of megatron_main"),
    "residual": (lambda: bda((X, None), F, 0.0), ValueError, "residual: expected shape"),
    "prob": (lambda: bda((X, None), X, 1.0), ValueError, "0 <= prob < 1"),
}


@pytest.mark.parametrize("call, error, words", MISUSE.values(), ids=MISUSE)
def test_misuse(call, error, words):
    with pytest.raises(error, match=words):
        call()
