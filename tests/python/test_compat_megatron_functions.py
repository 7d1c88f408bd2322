# SPDX-License-Identifier: Apache-2.0
"""weft.compat.megatron's free functions, fused and native, against the equations."""

import compat_oracle as oracle
import pytest
import torch
from compat_oracle import as_dtypes, check, depth, draw
from megatron_support import ALPHAS, PARAMETERS, dtypes, sizes
from torch import nn
from weft.compat import megatron

pytestmark = pytest.mark.usefixtures("native")

both = pytest.mark.parametrize("prefix", ["fused", "native"])


def function(prefix, name):
    return getattr(megatron, f"{prefix}_{name}")


@both
@dtypes
@pytest.mark.parametrize("s, b, n, iterations", [(2, 4, 4, 5), (1, 1, 2, 10), (3, 2, 4, 20), (2, 1, 3, 1)])
def test_sinkhorn(prefix, dtype, s, b, n, iterations):
    inputs = as_dtypes(draw(7, logits=(s, b, n, n)), dtype)
    for eps in (1e-6, 0.05):
        check(
            lambda logits: {"a": function(prefix, "sinkhorn")(logits, iterations, eps)},  # noqa: B023
            lambda logits: {"a": oracle.sinkhorn(logits, "softmax_eps", iterations, eps)},  # noqa: B023
            inputs,
            depth(n, 1, 0, iterations),
        )


@both
@dtypes
@sizes
def test_h_aggregate(prefix, dtype, s, b, n, c):
    inputs = as_dtypes(draw(8, x=(s, b, n, c), h_pre=(s, b, n)), dtype, wide=PARAMETERS)
    expected = lambda x, h_pre: {"u": oracle.aggregate(x, h_pre)}  # noqa: E731
    check(lambda **a: {"u": function(prefix, "h_aggregate")(**a)}, expected, inputs, depth(n, c, 0, 0))

    def into(**arguments):
        out = torch.full((s, b, c), float("nan"), dtype=dtype, device=arguments["x"].device)
        for _ in range(2):  # a replay writes the same memory again
            u = function(prefix, "h_aggregate_into")(**arguments, out=out)
            assert u.data_ptr() == out.data_ptr() and not out.requires_grad
        assert torch.equal(out, function(prefix, "h_aggregate")(**arguments))
        return {"u": u}

    check(into, expected, inputs, depth(n, c, 0, 0))


@pytest.mark.parametrize("coefficients", [torch.float32, torch.bfloat16])
def test_d_h_pre_is_summed_wide(coefficients):
    # Over many channels a sum of rounded products would be further off than one rounding of the result.
    inputs = draw(9, x=(2, 1, 4, 4096), h_pre=(2, 1, 4))
    inputs = {"x": inputs["x"].bfloat16(), "h_pre": inputs["h_pre"].to(coefficients)}
    check(
        lambda **a: {"u": megatron.fused_h_aggregate(**a)},
        lambda x, h_pre: {"u": oracle.aggregate(x, h_pre)},
        inputs,
        128,
    )


@both
@dtypes
@sizes
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_h_post_bda(prefix, dtype, s, b, n, c, biased):
    shapes = {"h_res": (s, b, n, n), "original_residual": (s, b, n, c), "h_post": (s, b, n), "x": (s, b, c)}
    inputs = draw(10, **shapes, **({"bias": (c,)} if biased else {}))
    inputs = as_dtypes(inputs, dtype, wide="h_res h_post")

    def expected(h_res, original_residual, h_post, x, bias=None):
        return {"y": oracle.combine(original_residual, x, h_post, h_res, bias, "in_out")}

    check(
        lambda bias=None, **a: {"y": function(prefix, "h_post_bda")(**a, bias=bias)},
        expected,
        inputs,
        depth(n, c, s * b, 0),
    )


@dtypes
@sizes
def test_h_post_bda_into(dtype, s, b, n, c):
    shapes = {"h_res": (s, b, n, n), "original_residual": (s, b, n, c), "h_post": (s, b, n), "x": (s, b, c)}
    inputs = as_dtypes(draw(17, **shapes, bias=(c,)), dtype, wide="h_res h_post bias")

    def into(**arguments):
        out = torch.full((s, b, n, c), float("nan"), dtype=dtype, device=arguments["x"].device)
        for _ in range(2):  # a replay writes the same memory again
            y = megatron.fused_h_post_bda_into(**arguments, out=out)
            assert y.data_ptr() == out.data_ptr() and not out.requires_grad
        assert torch.equal(out, megatron.fused_h_post_bda(**arguments))
        return {"y": y}

    def expected(h_res, original_residual, h_post, x, bias):
        return {"y": oracle.combine(original_residual, x, h_post, h_res, bias, "in_out")}

    check(into, expected, inputs, depth(n, c, s * b, 0))


def test_into_makes_no_copy(native, device):
    """The operator writes into `out` itself: PyTorch sees neither an allocation of the result nor a copy of it."""
    if native:
        pytest.skip("plain PyTorch computes and copies")
    x, h_pre = torch.randn(3, 2, 4, 8, device=device), torch.rand(3, 2, 4, device=device)
    res, f = torch.rand(3, 2, 4, 4, device=device), torch.randn(3, 2, 8, device=device)
    calls = {
        "fused_h_aggregate": ((x, h_pre), torch.empty_like(f)),
        "fused_h_post_bda": ((res, x, h_pre, f, None), torch.empty_like(x)),
    }
    made, unwanted = [], ["aten::copy_", "aten::clone"]
    if device.type == "cpu":  # a workspace on a GPU is memory too
        unwanted.append("aten::empty")
    for name, (arguments, out) in calls.items():
        for grad in (False, True):
            tensors = [t.clone().requires_grad_(grad) if isinstance(t, torch.Tensor) else t for t in arguments]
            want = getattr(megatron, name)(*tensors)
            with torch.autograd.profiler.profile() as profile:
                result = getattr(megatron, f"{name}_into")(*tensors, out)
            made.append([e.name for e in profile.function_events if e.name in unwanted])
            assert torch.equal(result, want)
    assert made == [[]] * 4


@both
@dtypes
@pytest.mark.parametrize("tokens, rows, width", [(6, 24, 160), (4, 8, 66), (3, 5, 7)])
def test_proj_rms(prefix, dtype, tokens, rows, width):
    inputs = as_dtypes(draw(11, x=(tokens, width), weight=(rows, width)), dtype, wide="weight")

    def call(**arguments):
        proj, r = function(prefix, "proj_rms")(**arguments, eps=0.25)
        assert proj.dtype == r.dtype == dtype and r.shape == (tokens, 1)
        return {"proj": proj, "r": r}

    def expected(x, weight):
        return {"proj": x @ weight.T, "r": 1 / (x.square().mean(1, keepdim=True).sqrt() + 0.25)}

    check(call, expected, inputs, depth(1, width, tokens, 0))


@both
@dtypes
@pytest.mark.parametrize("tokens, n, c", [(6, 4, 40), (4, 2, 33)])
def test_proj_rms_compute_h(prefix, dtype, tokens, n, c):
    rows = n * n + 2 * n
    inputs = draw(12, x=(tokens, n * c), weight=(rows, n * c), bias=(rows,), **dict.fromkeys(ALPHAS, (1,)))
    inputs = as_dtypes(inputs, dtype, wide=PARAMETERS)
    options = dict(eps=0.25, compute_h_eps=0.125)
    names = ("pre", "post", "logits", "r")

    def expected(x, weight, bias, **alphas):
        alpha = torch.cat([alphas[k] for k in ALPHAS])
        h, ms = oracle.project(x.reshape(tokens, n, c), weight.reshape(rows, n, c))
        pre, post, logits = oracle.gates(h, ms, alpha, bias, n, 0.25, "outside", 0.125, 2.0)
        return dict(zip(names, (pre, post, logits.flatten(1), ms.sqrt().unsqueeze(1)), strict=True))

    check(
        lambda **a: dict(zip(names, function(prefix, "proj_rms_compute_h")(**a, n=n, **options), strict=True)),
        expected,
        inputs,
        depth(n, c, tokens, 0),
        alike=ALPHAS,
    )


@dtypes
@sizes
def test_learned_output_contract(dtype, s, b, n, c):
    inputs = draw(13, hidden_states=(s, b, n * c), head_fn=(n, n * c), base=(n,), scale=(1,))
    inputs = as_dtypes(inputs, dtype, wide=PARAMETERS)
    eps = 0.03

    def expected(hidden_states, head_fn, base, scale):
        x = hidden_states.unflatten(-1, (n, c))
        h, ms = oracle.project(x, head_fn.reshape(n, n, c))
        return {"u": oracle.aggregate(x, torch.sigmoid(scale * h / (ms + eps).sqrt().unsqueeze(-1) + base) + eps)}

    check(
        lambda **a: {"u": megatron.learned_output_contract(**a, n=n, eps=eps)},
        expected,
        inputs,
        depth(n, c, s * b, 0),
        alike=("scale", "base"),
    )


@both
@dtypes
def test_fused_add_3(prefix, dtype):
    add = megatron.fused_add_3 if prefix == "fused" else megatron.native_fused_add_3
    inputs = as_dtypes(draw(14, a=(3, 5), b=(3, 5), c=(3, 5)), dtype)
    check(lambda **t: {"y": add(**t)}, lambda a, b, c: {"y": a + b + c}, inputs, depth(3, 1, 0, 0))


RULES = {
    "megatron_dev": ("softmax_eps", "in_out"),
    "megatron_dsv4": ("add", "out_in"),
    "megatron_main": ("clamp", "out_in"),
}


@pytest.mark.parametrize("preset", RULES)
def test_bind(preset):
    rule, apply = RULES[preset]
    module = nn.Module()
    for slot in ("_sinkhorn_op", "_h_aggregate_op", "_h_post_bda_op", "_proj_rms_op", "_proj_rms_compute_h_op"):
        setattr(module, slot, None)
    assert megatron.bind(module, preset) is module
    logits = as_dtypes(draw(15, logits=(3, 2, 4, 4)), torch.float64)
    check(
        lambda logits: {"a": module._sinkhorn_op(logits, 3, 0.1)},
        lambda logits: {"a": oracle.sinkhorn(logits, rule, 3, 0.1)},
        logits,
        depth(4, 1, 0, 3),
    )
    merge = draw(16, h_res=(2, 1, 4, 4), x=(2, 1, 4, 8), h_post=(2, 1, 4), f=(2, 1, 8))
    check(
        lambda h_res, x, h_post, f: {"y": module._h_post_bda_op(h_res, x, h_post, f, None)},
        lambda h_res, x, h_post, f: {"y": oracle.combine(x, f, h_post, h_res, None, apply)},
        merge,
        depth(4, 8),
    )
    assert module._h_aggregate_op is megatron.fused_h_aggregate
    assert module._proj_rms_op is megatron.fused_proj_rms
    assert (module._proj_rms_compute_h_op is None) == (preset != "megatron_dev")
    assert not hasattr(module, "_h_aggregate_into_op")  # a slot that was not there stays away
