# SPDX-License-Identifier: Apache-2.0
"""weft.compat.transformer_engine: against the equations, against TransformerEngine's own results, misuse."""

import gc
import weakref

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
    dtypes,
    golden,
)
from weft.compat import transformer_engine as te

EPS = 2.0**-23
sizes = pytest.mark.parametrize("s, b, c, n", [(3, 2, 40, 4), (1, 5, 33, 2), (2, 2, 17, 3), (1, 1, 8, 6)])


def rows_of(phi, c, n):
    """(N, C*n) with k = c*n + i, as (N, n, C)."""
    return phi.reshape(phi.shape[0], c, n).mT


def parameters(c, n, gain=False):
    gates = 2 * n + n * n
    shapes = {"phi": (gates, c * n), "alpha": (3,), "beta": (1, gates)}
    return {**shapes, "norm_weight": (c * n,)} if gain else shapes


def expected_mix(x, phi, alpha, beta, norm_weight=None):
    c, n = x.shape[-2:]
    gain = None if norm_weight is None else norm_weight.reshape(c, n).mT
    h, ms = oracle.project(x.mT, rows_of(phi, c, n), gain)
    pre, post, logits = oracle.gates(h, ms, alpha, beta.reshape(-1), n, EPS, "inside", 0.0, 2.0)
    res = oracle.sinkhorn(logits, "log", 20, 0.0)
    return {"u": oracle.aggregate(x.mT, pre), "post": post, "res": res}


def expected_layer(x, f, bias=None, **parameters):
    out = expected_mix(x, **parameters)
    y = oracle.combine(x.mT, f, out["post"], out["res"], bias, "in_out").mT
    return {"u": out["u"], "y": y}


def layer(x, f, bias=None, buffer=None, **parameters):
    """Both calls of a layer; the sub-layer in between is f, which does not depend on its input here."""
    u, post, res = te.mhc_generate_mix_and_aggregate(x, **parameters, use_tf32=False, fused_grad_x_acc_buffer=buffer)
    n = x.shape[-1]
    y = te.mhc_fused_expand_combine(f, bias, post, x, res, n, fused_grad_x_acc_buffer=buffer)
    return {"u": u, "y": y}


def layer_by_parts(x, f, phi, alpha, beta, bias=None, norm_weight=None, buffer=None):
    s, b, c, n = x.shape
    h, ms = te.mhc_fused_projection(x.view(s * b, c * n), phi, False, norm_weight, buffer)
    pre, post, logits = te.mhc_fused_scale(h, alpha, beta, ms, n)
    res = te.mhc_fused_sinkhorn(logits.view(s, b, n, n), n)
    u = te.mhc_fused_aggregate(x, pre.view(s, b, n), n, False, buffer)
    y = te.mhc_fused_expand_combine(f, bias, post.view(s, b, n), x, res, n, False, buffer)
    return {"u": u, "y": y}


# ---- against the equations ---------------------------------------------------------------------------------


@dtypes
@sizes
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "norm_weight"])
def test_generate_mix_and_aggregate(dtype, s, b, c, n, gain):
    inputs = draw(1, x=(s, b, c, n), **parameters(c, n, gain))
    inputs = as_dtypes(inputs, dtype, wide="phi alpha beta norm_weight")

    def call(**arguments):
        u, post, res = te.mhc_generate_mix_and_aggregate(**arguments)
        assert u.dtype == dtype and post.dtype == res.dtype == inputs["alpha"].dtype
        assert u.is_contiguous() and u.shape == (s, b, c)
        return {"u": u, "post": post, "res": res}

    check(call, expected_mix, inputs, depth(n, c, s * b))


@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_have_a_dtype_of_their_own(dtype, parameter_dtype):
    s, b, c, n = 2, 3, 24, 4
    inputs = draw(2, x=(s, b, c, n), **parameters(c, n))
    inputs = {k: t.to(dtype if k == "x" else parameter_dtype) for k, t in inputs.items()}

    def call(**arguments):
        return dict(zip(("u", "post", "res"), te.mhc_generate_mix_and_aggregate(**arguments), strict=True))

    check(call, expected_mix, inputs, depth(n, c, s * b))


@dtypes
@sizes
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "norm_weight"])
@pytest.mark.parametrize("use_tf32, use_split_k", [(False, False), (True, True)])
def test_projection(dtype, s, b, c, n, gain, use_tf32, use_split_k):
    names = ("x", "phi", "norm_weight") if gain else ("x", "phi")
    inputs = draw(3, x=(s * b, c * n), **parameters(c, n, gain))
    inputs = as_dtypes({k: inputs[k] for k in names}, dtype, wide="phi norm_weight")
    gates = 2 * n + n * n

    def call(x, phi, norm_weight=None):
        h, ms = te.mhc_fused_projection(x, phi, use_tf32, norm_weight, use_split_k=use_split_k)
        assert h.shape == (s * b, -(-gates // 32) * 32) and ms.shape == (s * b,)
        assert (h[:, gates:] == 0).all()
        return {"h": h, "ms": ms}

    def expected(x, phi, norm_weight=None):
        gain = None if norm_weight is None else norm_weight.reshape(c, n).mT
        h, ms = oracle.project(x.reshape(-1, c, n).mT, rows_of(phi, c, n), gain)
        return {"h": torch.cat([h, h.new_zeros(s * b, -gates % 32)], 1), "ms": ms}

    check(call, expected, inputs, depth(n, c, s * b, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, n", [(6, 4), (5, 2), (1, 3)])
def test_scale(dtype, tokens, n):
    gates, columns = 2 * n + n * n, 32
    inputs = draw(4, H=(tokens, columns), alpha=(3,), beta=(1, gates), ms=(tokens,))
    inputs["ms"] = inputs["ms"].square() + 0.1
    inputs = as_dtypes(inputs, dtype, wide="alpha beta ms")

    def call(**arguments):
        pre, post, res = te.mhc_fused_scale(**arguments, n=n)
        assert pre.dtype == post.dtype == res.dtype == dtype
        return {"pre": pre, "post": post, "res": res}

    def expected(H, alpha, beta, ms):
        h = H[:, :gates]
        pre, post, logits = oracle.gates(h, ms, alpha, beta.reshape(-1), n, EPS, "inside", 0.0, 2.0)
        return {"pre": pre, "post": post, "res": logits.flatten(1)}

    check(call, expected, inputs, depth(gates, 1, tokens, 0), {"d_alpha": 4, "d_beta": 4, "d_ms": 4})


def test_scale_does_not_read_the_padding():
    inputs = draw(5, H=(3, 32), alpha=(3,), beta=(1, 24), ms=(3,))
    h, ms = inputs["H"].float(), inputs["ms"].square().float() + 0.1
    clean = te.mhc_fused_scale(h, inputs["alpha"].float(), inputs["beta"].float(), ms, 4)
    h[:, 24:] = float("nan")
    for a, b in zip(clean, te.mhc_fused_scale(h, inputs["alpha"].float(), inputs["beta"].float(), ms, 4), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, iterations, recompute_hist", [(4, 20, True), (4, 1, False), (2, 5, True), (3, 7, False)])
def test_sinkhorn(dtype, n, iterations, recompute_hist):
    inputs = as_dtypes(draw(6, H_res=(3, 2, n, n)), dtype)

    def call(H_res):
        res = te.mhc_fused_sinkhorn(H_res, n, recompute_hist, iterations)
        assert res.dtype == dtype
        return {"res": res}

    check(
        call, lambda H_res: {"res": oracle.sinkhorn(H_res, "log", iterations, 0.0)}, inputs, depth(n, 1, 0, iterations)
    )


@dtypes
@sizes
@pytest.mark.parametrize("flat", [False, True], ids=["(s,b,n)", "(s*b,n)"])
def test_aggregate(dtype, s, b, c, n, flat):
    lead = (s * b,) if flat else (s, b)
    inputs = as_dtypes(draw(7, x=(s, b, c, n), H_pre=(*lead, n)), dtype, wide="H_pre")
    check(
        lambda **arguments: {"u": te.mhc_fused_aggregate(**arguments, n=n)},
        lambda x, H_pre: {"u": oracle.aggregate(x.mT, H_pre.reshape(s, b, n))},
        inputs,
        depth(n, c, 0, 0),
    )


@dtypes
@sizes
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_expand_combine(dtype, s, b, c, n, biased):
    shapes = {"x": (s, b, c, n), "f": (s, b, c), "H_post": (s, b, n), "H_res": (s, b, n, n)}
    if biased:
        shapes["bias"] = (c,)
    inputs = as_dtypes(draw(8, **shapes), dtype, wide="H_post H_res")

    def call(bias=None, **arguments):
        y = te.mhc_fused_expand_combine(**arguments, bias=bias, n=n)
        assert y.shape == (s, b, c, n) and y.is_contiguous()
        return {"y": y}

    def expected(x, f, H_post, H_res, bias=None):
        return {"y": oracle.combine(x.mT, f, H_post, H_res, bias, "in_out").mT}

    check(call, expected, inputs, depth(n, c, s * b, 0))


def test_orientation_of_h_res():
    # Two streams, rows of H_res are inputs: stream 0 of the result is 1 * x0 + 3 * x1.
    x = torch.tensor([[10.0, 1.0], [100.0, 2.0]]).reshape(1, 1, 2, 2)
    res = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 1, 2, 2)
    zero = torch.zeros(1, 1, 2)
    y = te.mhc_fused_expand_combine(zero, None, zero, x, res, 2)
    assert torch.equal(y, torch.tensor([[13.0, 24.0], [106.0, 208.0]]).reshape(1, 1, 2, 2))


@pytest.mark.parametrize("function", [layer, layer_by_parts])
@pytest.mark.parametrize("buffer", [None, torch.empty(0)], ids=["plain", "buffer"])
def test_no_tokens(function, buffer):
    inputs = as_dtypes(draw(9, x=(0, 2, 8, 4), f=(0, 2, 8), **parameters(8, 4)), torch.float32)
    results, _, grads = differentiate(lambda **a: function(**a, buffer=buffer), inputs)
    assert results["y"].shape == (0, 2, 8, 4)
    assert (grads["phi"] == 0).all() and grads["phi"].shape == (24, 32)


# ---- the shared buffer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [layer, layer_by_parts])
def test_buffer_sums_before_it_rounds(dtype, function):
    s, b, c, n = 3, 2, 40, 4
    inputs = draw(10, x=(s, b, c, n), f=(s, b, c), bias=(c,), **parameters(c, n, True))
    inputs = as_dtypes(inputs, dtype, wide="phi alpha beta norm_weight")

    def call(**arguments):
        buffer = torch.full_like(arguments["x"], float("nan"), dtype=inputs["alpha"].dtype)
        return function(**arguments, buffer=buffer.view(-1))

    # One rounding of d_x: the sum of three parts is kept wide until the end.
    check(call, expected_layer, inputs, depth(n, c, s * b))
    assert not te._opened


def test_without_buffer_autograd_adds_rounded_parts():
    s, b, c, n = 3, 2, 40, 4
    inputs = draw(10, x=(s, b, c, n), f=(s, b, c), bias=(c,), **parameters(c, n, True))
    inputs = as_dtypes(inputs, torch.bfloat16, wide="phi alpha beta norm_weight")
    # Three parts, two sums.
    check(layer_by_parts, expected_layer, inputs, depth(n, c, s * b), {"d_x": 5})


def test_buffer_serves_one_layer_after_the_other():
    s, b, c, n = 2, 2, 24, 4
    inputs = draw(11, x=(s, b, c, n), f=(s, b, c), **parameters(c, n)) | {
        f"{k}2": t for k, t in draw(12, f=(s, b, c), **parameters(c, n)).items()
    }
    inputs = as_dtypes(inputs, torch.float32)

    def two(function, shared):
        def run(x, f, phi, alpha, beta, f2, phi2, alpha2, beta2):
            buffer = {"buffer": torch.empty_like(x)} if shared else {}
            first = function(x=x, f=f, phi=phi, alpha=alpha, beta=beta, **buffer)
            second = function(x=first["y"], f=f2, phi=phi2, alpha=alpha2, beta=beta2, **buffer)
            return {"u": first["u"], "u2": second["u"], "y": second["y"]}

        return run

    check(two(layer, True), two(expected_layer, False), inputs, 2 * depth(n, c, s * b))


def test_gradient_does_not_alias_the_buffer():
    inputs = as_dtypes(draw(13, x=(2, 1, 8, 4), f=(2, 1, 8), **parameters(8, 4)), torch.float32)
    buffer = torch.empty(64)
    _, _, grads = differentiate(lambda **a: layer(**a, buffer=buffer), inputs)
    before = grads["x"].clone()
    buffer.fill_(float("nan"))
    assert torch.equal(grads["x"], before)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "given up after the projection"])
def test_buffer_is_not_kept(whole):
    inputs = as_dtypes(draw(14, x=(2, 1, 8, 4), f=(2, 1, 8), **parameters(8, 4)), torch.float32)

    def train():
        buffer = torch.empty(64)
        if whole:
            differentiate(lambda **a: layer(**a, buffer=buffer), inputs)
        else:
            x = inputs["x"].clone().requires_grad_()
            te.mhc_fused_projection(x.view(2, 32), inputs["phi"], fused_grad_x_acc_buffer=buffer)
        return weakref.ref(buffer)

    buffer = train()
    gc.collect()
    assert buffer() is None and not te._opened


def test_buffer_is_ignored_without_gradients():
    inputs = as_dtypes(draw(15, x=(2, 1, 8, 4), f=(2, 1, 8), **parameters(8, 4)), torch.float32)
    buffer = torch.full((64,), float("nan"))
    with torch.no_grad():
        got, want = layer(**inputs, buffer=buffer), layer(**inputs)
    for name, value in want.items():
        assert_close(name, got[name], value, depth(4, 8))
    assert buffer.isnan().all()


@pytest.mark.parametrize("case", ["not opened", "another x", "closed"])
def test_buffer_misuse(case):
    x = torch.randn(2, 1, 8, 4, requires_grad=True)
    other = torch.randn(2, 1, 8, 4, requires_grad=True)
    phi, pre = torch.randn(24, 32), torch.randn(2, 1, 4)
    zero, res = torch.zeros(2, 1, 8), torch.zeros(2, 1, 4, 4)
    buffer = {"fused_grad_x_acc_buffer": torch.empty(64)}

    def refuses(got, function, *args):
        with pytest.raises(RuntimeError, match=f"fused_grad_x_acc_buffer: expected the buffer .*, got one that {got}"):
            function(*args, **buffer)

    if case == "not opened":
        return refuses("no projection has opened", te.mhc_fused_aggregate, x, pre, 4)
    graph = [te.mhc_fused_projection(x.view(2, 32), phi, **buffer)]  # a buffer is open as long as the graph is there
    if case == "another x":
        return refuses("was opened for another x", te.mhc_fused_aggregate, other, pre, 4)
    graph.append(te.mhc_fused_expand_combine(zero, None, pre, x, res, 4, **buffer))
    refuses("no projection has opened", te.mhc_fused_expand_combine, zero, None, pre, x, res, 4)


# ---- against TransformerEngine -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["pipeline", "parts", "buffer"])
@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_golden(case, function):
    g = golden("mhc_te_open")[case]
    names = [k for k in ("x", "phi", "alpha", "beta", "f", "bias", "norm_weight") if k in g]
    buffer = torch.empty(g["x"].numel()) if function == "buffer" else None

    def call(**arguments):
        out = (layer_by_parts if function == "parts" else layer)(**arguments, buffer=buffer)
        return {"aggregate": out["u"], "combine": out["y"]}

    upstream = {k: g[f"d_{k}"] for k in ("aggregate", "combine")}
    results, _, grads = differentiate(call, {k: g[k] for k in names}, upstream)
    for name, value in results.items():
        assert_golden(case, name, value, g[name], 1e-5)
    for name in names:
        assert_golden(case, f"d_{name}", grads[name], g[f"d_{name}"], 1e-5)


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_golden_intermediates(case):
    g = golden("mhc_te_open")[case]
    s, b, c, n = g["x"].shape
    h, ms = te.mhc_fused_projection(g["x"].view(s * b, c * n), g["phi"], False, g.get("norm_weight"))
    pre, post, logits = te.mhc_fused_scale(h, g["alpha"], g["beta"], ms, n)
    res = te.mhc_fused_sinkhorn(logits.view(s, b, n, n))
    got = {"H": h[:, :24], "ms": ms, "h_pre": pre, "h_post": post, "h_res_logits": logits, "h_res": res}
    for name, value in got.items():
        assert_golden(case, name, value, g[name], 1e-5)


# ---- torch.compile -----------------------------------------------------------------------------------------


def test_compile():
    inputs = as_dtypes(draw(16, x=(3, 2, 16, 4), bias=(16,), **parameters(16, 4, True)), torch.float32)

    def layer_of(x, bias, **parameters):
        u, post, res = te.mhc_generate_mix_and_aggregate(x, **parameters)
        return {"y": te.mhc_fused_expand_combine(torch.tanh(u), bias, post, x, res, 4)}

    check_compiled(layer_of, inputs)


# ---- misuse ------------------------------------------------------------------------------------------------

X, PHI, ALPHA, BETA = torch.zeros(2, 1, 8, 4), torch.zeros(24, 32), torch.zeros(3), torch.zeros(1, 24)
PRE, RES, F = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 8)
MISUSE = {
    "phi columns": (lambda: te.mhc_fused_projection(X.view(2, 32), PHI[:, :28]), ValueError, "phi: expected shape"),
    "phi rows": (lambda: te.mhc_fused_projection(X.view(2, 32), PHI[:23]), ValueError, "2n .* got 23"),
    "not flat": (lambda: te.mhc_fused_projection(X, PHI), ValueError, r"expected \(M, K\)"),
    "not a tensor": (lambda: te.mhc_fused_projection([1.0], PHI), TypeError, "x: expected a tensor, got list"),
    "norm_weight in use_tf32's place": (
        lambda: te.mhc_generate_mix_and_aggregate(X, PHI, ALPHA, BETA, True),
        TypeError,
        "norm_weight: expected a tensor, got bool",
    ),
    "alpha": (lambda: te.mhc_generate_mix_and_aggregate(X, PHI, ALPHA[:2], BETA), ValueError, "alpha: expected"),
    "beta": (lambda: te.mhc_generate_mix_and_aggregate(X, PHI, ALPHA, BETA[:, 1:]), ValueError, "beta: expected"),
    "gain": (
        lambda: te.mhc_generate_mix_and_aggregate(X, PHI, ALPHA, BETA, torch.zeros(8)),
        ValueError,
        r"norm_weight: expected shape \(32,\), got \(8,\)",
    ),
    "H columns": (lambda: te.mhc_fused_scale(PHI[:2, :20], ALPHA, BETA, ALPHA[:2], 4), ValueError, "H: expected"),
    "ms": (lambda: te.mhc_fused_scale(PHI[:2], ALPHA, BETA, ALPHA, 4), ValueError, "ms: expected shape"),
    "sinkhorn n": (lambda: te.mhc_fused_sinkhorn(RES, 3), ValueError, "H_res: expected shape"),
    "sinkhorn iters": (lambda: te.mhc_fused_sinkhorn(RES, iters=0), ValueError, "iter"),
    "aggregate n": (lambda: te.mhc_fused_aggregate(X, PRE, 8), ValueError, "n: expected 4, the last axis of x"),
    "H_pre": (lambda: te.mhc_fused_aggregate(X, PRE[:1], 4), ValueError, "H_pre: expected shape"),
    "f": (lambda: te.mhc_fused_expand_combine(F[:1], None, PRE, X, RES, 4), ValueError, "f: expected shape"),
    "bias": (lambda: te.mhc_fused_expand_combine(F, F, PRE, X, RES, 4), ValueError, "bias: expected shape"),
    "H_res": (lambda: te.mhc_fused_expand_combine(F, None, PRE, X, PRE, 4), ValueError, "H_res: expected shape"),
    "f's dtype": (
        lambda: te.mhc_fused_expand_combine(F.bfloat16(), None, PRE, X, RES, 4),
        (ValueError, NotImplementedError),
        "f",
    ),
    "buffer's size": (
        lambda: te.mhc_fused_aggregate(X, PRE, 4, fused_grad_x_acc_buffer=torch.zeros(63)),
        ValueError,
        "fused_grad_x_acc_buffer: expected 64 elements",
    ),
    "buffer's dtype": (
        lambda: te.mhc_fused_aggregate(X, PRE, 4, fused_grad_x_acc_buffer=torch.zeros(64).bfloat16()),
        ValueError,
        "fused_grad_x_acc_buffer: expected contiguous torch.float32",
    ),
}


@pytest.mark.parametrize("call, error, words", MISUSE.values(), ids=MISUSE)
def test_misuse(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_enforce_deterministic():
    """Always, as docs/guides/drop-ins.md says."""
    assert te.ENFORCE_DETERMINISTIC is True
