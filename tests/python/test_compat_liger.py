# SPDX-License-Identifier: Apache-2.0
"""weft.compat.liger: against the equations, the module, misuse."""

import compat_oracle as oracle
import pytest
import torch
from compat_oracle import as_dtypes, check, check_compiled, depth, draw, dtypes
from torch import nn
from weft.compat import liger

sizes = pytest.mark.parametrize("lead, n, c", [((2, 4), 4, 40), ((5,), 2, 32), ((1, 1, 2), 3, 17)])
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")


def shapes(lead, n, c):
    gates = n * n + 2 * n
    return {"x": (*lead, n, c), "phi": (n * c, gates), "b": (gates,), **dict.fromkeys(ALPHAS, ())}


def expected_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6,
                    post_mult=2.0):  # fmt: skip
    n, c = x.shape[-2:]
    h, ms = oracle.project(x, phi.T.reshape(-1, n, c))
    alpha = torch.stack([alpha_pre, alpha_post, alpha_res])
    pre, post, logits = oracle.gates(h, ms, alpha, b, n, rms_eps, "inside", pre_eps, post_mult)
    return {"pre": pre, "post": post, "res": oracle.sinkhorn(logits, "softmax_eps", tmax, sinkhorn_eps)}


def coeffs(**arguments):
    wide = arguments["x"].dtype.itemsize > 2
    pre, post, res = liger.liger_mhc_coeffs(**arguments, allow_fp32=wide)
    return {"pre": pre, "post": post, "res": res}


@dtypes
@sizes
def test_coeffs(dtype, lead, n, c):
    inputs = as_dtypes(draw(1, **shapes(lead, n, c)), dtype, wide="phi b alpha_pre alpha_post alpha_res")
    tokens = inputs["x"][..., 0, 0].numel()
    check(coeffs, expected_coeffs, inputs, depth(n, c, tokens), alike=ALPHAS)


@pytest.mark.parametrize("phi_dtype", [torch.bfloat16, torch.float16])
def test_coeffs_with_a_narrow_phi(phi_dtype):
    inputs = as_dtypes(draw(2, **shapes((2, 3), 4, 24)), torch.bfloat16, wide="b alpha_pre alpha_post alpha_res")
    inputs["phi"] = inputs["phi"].to(phi_dtype)
    check(coeffs, expected_coeffs, inputs, depth(4, 24, 6), alike=ALPHAS)


def test_coeffs_take_every_constant():
    options = dict(tmax=4, rms_eps=0.5, pre_eps=0.1, sinkhorn_eps=0.05, post_mult=1.7)
    inputs = as_dtypes(draw(3, **shapes((4,), 4, 24)), torch.float32)
    check(
        lambda **a: coeffs(**a, **options),
        lambda **a: expected_coeffs(**a, **options),
        inputs,
        depth(4, 24, 4),
        alike=ALPHAS,
    )


@dtypes
@sizes
def test_pre(dtype, lead, n, c):
    inputs = as_dtypes(draw(4, x=(*lead, n, c), h_pre=(*lead, n)), dtype, wide="h_pre")
    check(
        lambda **a: {"u": liger.liger_mhc_pre(**a)},
        lambda x, h_pre: {"u": oracle.aggregate(x, h_pre)},
        inputs,
        depth(n, c, 0, 0),
    )


@dtypes
@sizes
def test_post_res(dtype, lead, n, c):
    inputs = draw(5, x=(*lead, n, c), f_out=(*lead, c), h_post=(*lead, n), h_res=(*lead, n, n))
    inputs = as_dtypes(inputs, dtype, wide="h_post h_res")
    check(
        lambda **a: {"y": liger.liger_mhc_post_res(**a)},
        lambda x, f_out, h_post, h_res: {"y": oracle.combine(x, f_out, h_post, h_res, None, "out_in")},
        inputs,
        depth(n, c, 0, 0),
    )


def test_orientation_of_h_res():
    x = torch.tensor([[10.0, 100.0], [1.0, 2.0]])
    res = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y = liger.liger_mhc_post_res(x, torch.zeros(2), torch.zeros(2), res)
    assert torch.equal(y, torch.tensor([[12.0, 104.0], [34.0, 308.0]]))


def whole_layer(x, f_out, **parameters):
    """A layer that does not look at its input."""
    y, coefficients = liger.liger_mhc_forward(
        x, lambda u: f_out, **parameters, allow_fp32=x.dtype.itemsize > 2, return_coeffs=True
    )
    return {"y": y, **dict(zip(("pre", "post", "res"), coefficients, strict=True))}


def expected_layer(x, f_out, **parameters):
    out = expected_coeffs(x, **parameters)
    return {"y": oracle.combine(x, f_out, out["post"], out["res"], None, "out_in"), **out}


@dtypes
@sizes
def test_forward(dtype, lead, n, c):
    inputs = draw(9, **shapes(lead, n, c), f_out=(*lead, c))
    inputs = as_dtypes(inputs, dtype, wide="phi b alpha_pre alpha_post alpha_res")
    tokens = inputs["x"][..., 0, 0].numel()
    stores = {"d_x": 2}  # the merge's, to which the site's is added
    check(whole_layer, expected_layer, inputs, depth(n, c, tokens), stores, ALPHAS)
    seen = []
    plain = {k: t for k, t in inputs.items() if k != "f_out"}
    alone = liger.liger_mhc_forward(**plain, layer=lambda u: seen.append(u) or u, allow_fp32=True)
    pre, post, res = liger.liger_mhc_coeffs(**plain, allow_fp32=True)
    assert torch.equal(seen[0], liger.liger_mhc_pre(inputs["x"], pre))
    assert torch.equal(alone, liger.liger_mhc_post_res(inputs["x"], seen[0], post, res))


@dtypes
@sizes
def test_apply(dtype, lead, n, c):
    inputs = draw(10, x=(*lead, n, c), f_out=(*lead, c), h_pre=(*lead, n), h_post=(*lead, n), h_res=(*lead, n, n))
    inputs = as_dtypes(inputs, dtype, wide="h_pre h_post h_res")

    def expected(x, f_out, h_pre, h_post, h_res):
        return {"y": oracle.combine(x, f_out, h_post, h_res, None, "out_in"), "u": oracle.aggregate(x, h_pre)}

    def both(**arguments):
        return dict(zip(("y", "u"), liger.liger_mhc_apply(**arguments, return_x_in=True), strict=True))

    check(both, expected, inputs, depth(n, c, 0, 0), {"d_x": 3})  # two, added by autograd
    assert torch.equal(liger.liger_mhc_apply(**inputs), both(**inputs)["y"])


# ---- the module --------------------------------------------------------------------------------------------


def expected_module(module, x, layer):
    """The module's parameters are leaves of fp64 here; layer is the inner function."""
    out = expected_coeffs(x, module["phi"], module["b"], *(module[a] for a in ALPHAS), tmax=module["tmax"])
    u = oracle.aggregate(x, out["pre"])
    return oracle.combine(x, layer(u), out["post"], out["res"], None, "out_in")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_module(dtype):
    n, c = 4, 24
    torch.manual_seed(0)
    linear = nn.Linear(c, c, dtype=dtype)
    module = liger.LigerMHC(linear, hc=n, c=c, tmax=7, phi_dtype=dtype, allow_fp32=True).to(dtype)
    assert set(dict(module.named_parameters())) == {
        "phi", "b", "alpha_pre", "alpha_post", "alpha_res", "layer.weight", "layer.bias"
    }  # fmt: skip
    assert module.phi.shape == (n * c, n * n + 2 * n) and 0.015 < float(module.phi.detach().std()) < 0.025
    with torch.no_grad():
        module.b.normal_()
    inputs = as_dtypes(draw(6, x=(2, 3, n, c)), dtype)
    inputs |= {name: p.detach() for name, p in module.named_parameters()}

    def call(x, **parameters):
        return {"y": torch.func.functional_call(module, parameters, (x,))}

    def expected(x, **p):
        layer = lambda u: u @ p["layer.weight"].T + p["layer.bias"]  # noqa: E731
        return {"y": expected_module({**p, "tmax": 7}, x, layer)}

    check(call, expected, inputs, 2 * depth(n, c, 6) + c, alike=ALPHAS)


def test_module_in_mixed_precision():
    # Streams in bf16, a layer in fp32, phi in fp16: the streams keep their dtype.
    module = liger.LigerMHC(nn.Linear(16, 16), hc=2, c=16)
    assert module.phi.dtype == torch.float16 and module.alpha_pre.shape == () and module.alpha_pre.item() == 1
    x = torch.randn(3, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    for name, p in module.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name
    assert x.grad.isfinite().all() and x.grad.abs().max() > 0


def test_backward_of_one_output_alone():
    inputs = {k: t.float().requires_grad_() for k, t in draw(7, **shapes((3,), 4, 8)).items()}
    _, post, _ = liger.liger_mhc_coeffs(**inputs, allow_fp32=True)
    post.sum().backward()
    assert inputs["alpha_post"].grad.abs() > 0
    assert inputs["alpha_pre"].grad is None or inputs["alpha_pre"].grad == 0


# ---- torch.compile -----------------------------------------------------------------------------------------


def test_compile():
    module = liger.LigerMHC(nn.Linear(16, 16), hc=4, c=16, phi_dtype=torch.float32, allow_fp32=True)
    inputs = as_dtypes(draw(8, x=(5, 4, 16)), torch.float32)

    def layer_of(x):
        return {"y": module(x)}

    check_compiled(layer_of, inputs)


# ---- misuse ------------------------------------------------------------------------------------------------

X, PHI, B, ONE = torch.zeros(3, 4, 8, dtype=torch.bfloat16), torch.zeros(32, 24), torch.zeros(24), torch.ones(())
WIDE = X.float(), PHI, B, ONE, ONE, ONE
MISUSE = {
    "phi is (K, N)": (
        lambda: liger.liger_mhc_coeffs(X, PHI.T, B, ONE, ONE, ONE),
        ValueError,
        r"phi: expected shape \(32, 24\), got \(24, 32\)",
    ),
    "b": (lambda: liger.liger_mhc_coeffs(X, PHI, B[1:], ONE, ONE, ONE), ValueError, "b: expected shape"),
    "alpha": (lambda: liger.liger_mhc_coeffs(X, PHI, B, ONE, 1.0, ONE), TypeError, "alpha_post: expected a tensor"),
    "tmax": (lambda: liger.liger_mhc_coeffs(X, PHI, B, ONE, ONE, ONE, tmax=0), ValueError, "iter"),
    "fp32": (lambda: liger.liger_mhc_coeffs(*WIDE), ValueError, "x: expected torch.bfloat16 or .* without allow_fp32"),
    "fp32 around a layer": (
        lambda: liger.liger_mhc_forward(WIDE[0], nn.Identity(), *WIDE[1:]),
        ValueError,
        "liger_mhc_forward: x: expected .* got torch.float32",
    ),
    "module's fp32": (lambda: liger.LigerMHC(nn.Identity(), hc=4, c=8)(X.float()), ValueError, "without allow_fp32"),
    "h_pre": (lambda: liger.liger_mhc_pre(X, B), ValueError, "h_pre: expected shape"),
    "f_out": (lambda: liger.liger_mhc_post_res(X, X, X[..., 0], X[..., :4]), ValueError, "f_out: expected shape"),
    "h_res": (lambda: liger.liger_mhc_post_res(X, X[:, 0], X[..., 0], X), ValueError, "h_res: expected shape"),
    "module's tmax": (lambda: liger.LigerMHC(nn.Identity(), hc=2, c=4, tmax=0), ValueError, "expected at least 1"),
    "module's x": (lambda: liger.LigerMHC(nn.Identity(), hc=2, c=8)(X), ValueError, r"x: expected shape \(3, 2, 8\)"),
}


@pytest.mark.parametrize("call, error, words", MISUSE.values(), ids=MISUSE)
def test_misuse(call, error, words):
    with pytest.raises(error, match=words):
        call()
