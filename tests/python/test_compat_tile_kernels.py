# SPDX-License-Identifier: Apache-2.0
"""weft.compat.tile_kernels: against the equations, against the results of TileKernels' references, misuse."""

import importlib.util

import compat_oracle as oracle
import pytest
import torch
from compat_oracle import as_dtypes, assert_golden, check, check_compiled, depth, differentiate, draw, dtypes, golden
from peer_signatures import PEERS
from test_compat_signatures import root_of
from weft.compat import tile_kernels as tk

sizes = pytest.mark.parametrize("lead, n, c", [((2, 3), 4, 40), ((5,), 2, 33), ((1, 1, 2), 3, 17), ((1,), 5, 8)])
PARAMETERS = "fn scale base norm_weight"


def layer_shapes(lead, n, c, gain=False):
    gates = n * (n + 2)
    shapes = {"residual": (*lead, n, c), "fn": (gates, n * c), "scale": (3,), "base": (gates,)}
    return {**shapes, "norm_weight": (n * c,)} if gain else shapes


def expected_pre(residual, fn, scale, base, norm_weight=None, *, norm_eps=1e-6, post_mult_value=1.0, pre_eps=1e-6,
                 sinkhorn_eps=1e-6, sinkhorn_repeat=10):  # fmt: skip
    n, c = residual.shape[-2:]
    gain = None if norm_weight is None else norm_weight.reshape(n, c)
    h, ms = oracle.project(residual, fn.reshape(-1, n, c), gain)
    pre, post, logits = oracle.gates(h, ms, scale, base, n, norm_eps, "inside", pre_eps, post_mult_value)
    comb = oracle.sinkhorn(logits, "softmax_eps", sinkhorn_repeat, sinkhorn_eps)
    return {"u": oracle.aggregate(residual, pre), "post": post.unsqueeze(-1), "comb": comb}


def expected_head(residual, fn, scale, base, norm_weight=None, *, norm_eps=1e-6, pre_eps=1e-6):
    n, c = residual.shape[-2:]
    gain = None if norm_weight is None else norm_weight.reshape(n, c)
    h, ms = oracle.project(residual, fn.reshape(-1, n, c)[:n], gain)
    gate = torch.sigmoid(scale * h / (ms + norm_eps).sqrt().unsqueeze(-1) + base) + pre_eps
    return {"u": oracle.aggregate(residual, gate)}


def pre(**arguments):
    u, (post, comb) = tk.mhc_pre(**arguments)
    return {"u": u, "post": post, "comb": comb}


# ---- against the equations ---------------------------------------------------------------------------------


@dtypes
@sizes
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "norm_weight"])
def test_pre(dtype, lead, n, c, gain):
    inputs = as_dtypes(draw(1, **layer_shapes(lead, n, c, gain)), dtype, wide=PARAMETERS)
    tokens = inputs["residual"][..., 0, 0].numel()
    check(lambda **a: pre(**a, mhc_mult=n), expected_pre, inputs, depth(n, c, tokens))


def test_pre_takes_every_constant():
    options = dict(norm_eps=0.5, post_mult_value=1.7, pre_eps=0.1, sinkhorn_eps=0.05, sinkhorn_repeat=3)
    inputs = as_dtypes(draw(2, **layer_shapes((4,), 4, 24)), torch.float32)
    check(
        lambda **a: pre(**a, **options, n_splits=3),
        lambda **a: expected_pre(**a, **options),
        inputs,
        depth(4, 24, 4),
    )


def test_inference_is_training_without_gradients():
    inputs = as_dtypes(draw(3, **layer_shapes((2, 3), 4, 24, True)), torch.bfloat16, wide=PARAMETERS)
    training = pre(**inputs)
    with torch.no_grad():
        inference = pre(**inputs)
        unweighted = pre(**{k: t for k, t in inputs.items() if k != "norm_weight"})
    for name, value in training.items():
        assert torch.equal(value, inference[name]), name
    assert not torch.equal(inference["u"], unweighted["u"])


@dtypes
@sizes
def test_post(dtype, lead, n, c):
    shapes = {"x": (*lead, c), "residual": (*lead, n, c), "post_layer_mix": (*lead, n, 1)}
    inputs = draw(4, **shapes, comb_res_mix=(*lead, n, n))
    inputs = as_dtypes(inputs, dtype, wide="post_layer_mix comb_res_mix")

    def expected(x, residual, post_layer_mix, comb_res_mix):
        return {"y": oracle.combine(residual, x, post_layer_mix.squeeze(-1), comb_res_mix, None, "in_out")}

    check(lambda **a: {"y": tk.mhc_post(**a)}, expected, inputs, depth(n, c, 0, 0))


def test_post_into_out():
    inputs = draw(5, x=(3, 8), residual=(3, 4, 8), post_layer_mix=(3, 4, 1), comb_res_mix=(3, 4, 4))
    inputs = as_dtypes(inputs, torch.float32)

    def into(**arguments):
        out = torch.full_like(arguments["residual"], float("nan"), requires_grad=False)
        y = tk.mhc_post(**arguments, out=out)
        assert y.data_ptr() == out.data_ptr() and not out.requires_grad
        assert torch.equal(out, tk.mhc_post(**arguments))
        return {"y": y}

    def expected(x, residual, post_layer_mix, comb_res_mix):
        return {"y": oracle.combine(residual, x, post_layer_mix.squeeze(-1), comb_res_mix, None, "in_out")}

    check(into, expected, inputs, depth(4, 8, 0, 0))


def test_orientation_of_comb():
    residual = torch.tensor([[10.0, 100.0], [1.0, 2.0]]).reshape(1, 2, 2)
    comb = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 2, 2)
    y = tk.mhc_post(torch.zeros(1, 2), residual, torch.zeros(1, 2, 1), comb)
    assert torch.equal(y, torch.tensor([[13.0, 106.0], [24.0, 208.0]]).reshape(1, 2, 2))


@dtypes
@sizes
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "norm_weight"])
@pytest.mark.parametrize("scalar", [False, True], ids=["scale (1,)", "scale ()"])
def test_head(dtype, lead, n, c, gain, scalar):
    shapes = {"residual": (*lead, n, c), "fn": (n, n * c), "scale": () if scalar else (1,), "base": (n,)}
    if gain:
        shapes["norm_weight"] = (n * c,)
    inputs = as_dtypes(draw(6, **shapes), dtype, wide=PARAMETERS)
    tokens = inputs["residual"][..., 0, 0].numel()
    options = dict(norm_eps=0.3, pre_eps=0.02)
    check(
        lambda **a: {"u": tk.mhc_head(**a, mhc_mult=n, **options)},
        lambda **a: expected_head(**a, **options),
        inputs,
        depth(n, c, tokens, 0),
        alike=("scale", "base"),
    )


def test_head_takes_the_first_rows_of_a_longer_fn():
    inputs = as_dtypes(draw(7, residual=(5, 4, 16), fn=(24, 64), scale=(1,), base=(4,)), torch.float32)
    check(lambda **a: {"u": tk.mhc_head(**a)}, expected_head, inputs, depth(4, 16, 5, 0), alike=("scale", "base"))


@dtypes
@pytest.mark.parametrize("lead, n, c", [((2, 3), 4, 40), ((5,), 2, 33), ((), 8, 7)])
def test_expand(dtype, lead, n, c):
    inputs = as_dtypes(draw(8, hidden=(*lead, c)), dtype)

    def into(hidden):
        out = torch.full((*lead, n, c), float("nan"), dtype=dtype, device=hidden.device)
        x = tk.expand_to_mhc(hidden, n, out)
        assert x.data_ptr() == out.data_ptr() and torch.equal(out, tk.expand_to_mhc(hidden, n))
        return {"x": x}

    for function in (lambda hidden: {"x": tk.expand_to_mhc(hidden, n)}, into):
        check(function, lambda hidden: {"x": torch.stack([hidden] * n, -2)}, inputs, depth(n, 1, 0, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n, repeat, eps", [(4, 10, 1e-6), (4, 1, 1e-6), (2, 20, 0.05), (3, 7, 1e-3)])
def test_sinkhorn_normalize(dtype, n, repeat, eps):
    inputs = as_dtypes(draw(9, x=(2, 3, n, n)), dtype)
    check(
        lambda x: {"a": tk.sinkhorn_normalize(x, repeat, eps)},
        lambda x: {"a": oracle.sinkhorn(x, "softmax_eps", repeat, eps)},
        inputs,
        depth(n, 1, 0, repeat),
    )


@pytest.mark.parametrize("layers, posts", [(1, 1), (1, 0), (3, 2), (3, 3), (5, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_multilayer_recompute_equals_the_layers(layers, posts, dtype):
    lead, n, c = (2, 3), 4, 40
    drawn = draw(10, x=(*lead, n, c), pre=(layers, *lead, n, 1), f=(posts, *lead, c), post=(posts, *lead, n, 1),
                 comb=(posts, *lead, n, n))  # fmt: skip
    x, f = drawn["x"].to(dtype), list(drawn["f"].to(dtype))
    pre, post, comb = (list(drawn[k].float()) for k in ("pre", "post", "comb"))
    inputs = [torch.full((*lead, c), float("nan"), dtype=dtype) for _ in range(layers)]
    residuals = [torch.full((*lead, n, c), float("nan"), dtype=dtype) for _ in range(posts)]
    tk.mhc_multilayer_recompute(x, pre, f, post, comb, inputs, residuals)
    for i in range(layers):
        want = oracle.aggregate(x.double(), pre[i].double().squeeze(-1))
        oracle.assert_close(f"layer_input {i}", inputs[i], want, depth(n, 1, 0, 0))
        if i < posts:
            want = tk.mhc_post(f[i], x, post[i], comb[i])
            assert torch.equal(residuals[i], want), i
            x = want


def test_multilayer_recompute_writes_where_it_is_told():
    drawn = draw(12, x=(3, 4, 8), pre=(3, 4, 1), f=(3, 8), post=(3, 4, 1), comb=(3, 4, 4))
    x, pre, f, post, comb = (t.float() for t in drawn.values())
    u, y = torch.empty(3, 8), torch.empty(3, 4, 8)
    with torch.autograd.profiler.profile() as profile:
        tk.mhc_multilayer_recompute(x, [pre], [f], [post], [comb], [u], [y])
    assert not [e.name for e in profile.function_events if e.name in ("aten::copy_", "aten::empty")]
    assert torch.equal(y, tk.mhc_post(f, x, post, comb))
    for bad in (u.half(), torch.empty(8, 3).t()):
        with pytest.raises(ValueError, match=r"layer_input_list\[0\]: expected contiguous torch.float32"):
            tk.mhc_multilayer_recompute(x, [pre], [f], [post], [comb], [bad], [y])


# ---- the parts of mhc_pre ----------------------------------------------------------------------------------


@dtypes
@sizes
def test_pre_big_fuse(dtype, lead, n, c):
    inputs = as_dtypes(draw(13, **layer_shapes(lead, n, c)), dtype, wide=PARAMETERS)
    options = dict(norm_eps=0.5, post_mult_value=1.7, pre_eps=0.1, sinkhorn_eps=0.05, sinkhorn_repeat=3)

    def call(residual, fn, scale, base):
        post, comb, u = tk.mhc_pre_big_fuse(residual, fn, scale, base, 0.5, 0.1, 0.05, 1.7, 3)
        return {"u": u, "post": post, "comb": comb}

    tokens = inputs["residual"][..., 0, 0].numel()
    check(call, lambda **a: expected_pre(**a, **options), inputs, depth(n, c, tokens))
    for name, value in call(**inputs).items():
        assert torch.equal(value, pre(**inputs, **options, mhc_mult=n)[name]), name


@dtypes
@sizes
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "norm_weight"])
def test_parts_of_pre(dtype, lead, n, c, gain):
    """The four calls that mhc_pre is made of in training: together, with the gradients of all of them."""
    inputs = as_dtypes(draw(14, **layer_shapes(lead, n, c, gain)), dtype, wide=PARAMETERS)
    options = dict(norm_eps=0.5, post_mult_value=1.7, pre_eps=0.1, sinkhorn_eps=0.05, sinkhorn_repeat=3)

    def call(residual, fn, scale, base, norm_weight=None):
        mixes = tk.mhc_pre_norm_fn(residual, fn, norm_weight, 0.5)
        mix, post, comb = tk.mhc_pre_split_mixes(mixes, scale, base, n, 1.7, 0.1)
        assert mixes.shape == (*lead, n * (n + 2)) and mix.shape == post.shape == (*lead, n, 1)
        assert mixes.dtype == mix.dtype == scale.dtype
        return {"u": tk.mhc_pre_apply_mix(residual, mix), "post": post, "comb": tk.sinkhorn_normalize(comb, 3, 0.05)}

    tokens = inputs["residual"][..., 0, 0].numel()
    stores = {"d_residual": 3}  # two, added by autograd
    check(call, lambda **a: expected_pre(**a, **options), inputs, depth(n, c, tokens), stores)


@dtypes
@sizes
def test_parts_of_head(dtype, lead, n, c):
    shapes = {"residual": (*lead, n, c), "fn": (n, n * c), "scale": (1,), "base": (n,)}
    inputs = as_dtypes(draw(15, **shapes), dtype, wide=PARAMETERS)

    def call(residual, fn, scale, base):
        mix = tk.mhc_head_compute_mix(tk.mhc_pre_norm_fn(residual, fn, None, 0.3), scale, base, 0.02)
        out = residual.new_full((*lead, c), float("nan"))
        u = tk.mhc_pre_apply_mix(residual, mix.unsqueeze(-1), out)
        assert u.data_ptr() == out.data_ptr() and not out.requires_grad
        return {"u": u}

    tokens = inputs["residual"][..., 0, 0].numel()
    expected = lambda **a: expected_head(**a, norm_eps=0.3, pre_eps=0.02)  # noqa: E731
    check(call, expected, inputs, depth(n, c, tokens, 0), {"d_residual": 3}, ("scale", "base"))


@dtypes
@sizes
def test_post_by_passes(dtype, lead, n, c):
    """mhc_post_fwd and mhc_post_bwd have the bits of mhc_post and of its gradients."""
    shapes = {"x": (*lead, c), "residual": (*lead, n, c), "post_layer_mix": (*lead, n, 1)}
    inputs = draw(16, **shapes, comb_res_mix=(*lead, n, n))
    inputs = as_dtypes(inputs, dtype, wide="post_layer_mix comb_res_mix")
    results, upstream, grads = differentiate(lambda **a: {"y": tk.mhc_post(**a)}, inputs)
    leaves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
    y = tk.mhc_post_fwd(**leaves)
    assert torch.equal(y, results["y"]) and not y.requires_grad
    found = tk.mhc_post_bwd(**leaves, d_o=upstream["y"])
    for name, grad in zip(("x", "residual", "post_layer_mix", "comb_res_mix"), found, strict=True):
        assert torch.equal(grad, grads[name]) and grad.dtype == inputs[name].dtype, name
    residual = inputs["residual"].clone()
    assert tk.mhc_post_fwd(**{**inputs, "residual": residual}, out=residual).data_ptr() == residual.data_ptr()
    assert torch.equal(residual, y), "in place"


def test_expand_from_embedding():
    x = torch.randn(2, 3, 8)
    assert torch.equal(tk.expand_from_embedding(x), tk.expand_to_mhc(x, 4))
    assert torch.equal(tk.expand_from_embedding(x, mhc_mult=2), tk.expand_to_mhc(x, 2))


# ---- against TileKernels -----------------------------------------------------------------------------------

CASES = {"case0": 20, "case1": 10, "case2": 20}


@pytest.mark.parametrize("case, repeat", CASES.items())
def test_golden_layer(case, repeat):
    g = golden("mhc_deepseek_open")[case]
    names = {"residual": "x", "fn": "fn", "scale": "scale", "base": "base", "x": "f"}

    def layer(residual, fn, scale, base, x):
        u, (post, comb) = tk.mhc_pre(
            residual,
            fn,
            scale,
            base,
            mhc_mult=residual.shape[-2],
            post_mult_value=2.0,
            sinkhorn_repeat=repeat,
        )
        return {"aggregate": u, "combine": tk.mhc_post(x, residual, post, comb)}

    inputs = {k: g[v] for k, v in names.items()}
    upstream = {k: g[f"d_{k}"] for k in ("aggregate", "combine")}
    results, _, grads = differentiate(layer, inputs, upstream)
    for name, value in results.items():
        assert_golden(case, name, value, g[name], 1e-5, ulps=1)
    for name, at in names.items():
        if name == "residual":  # its parts were rounded and added in bf16
            assert_golden(case, "d_x", grads[name], g["d_x"], 2.0**-7)
        elif name == "x":
            assert_golden(case, "d_f", grads[name], g["d_f"], 1e-5, ulps=1)
        else:
            assert_golden(case, f"d_{at}", grads[name], g[f"d_{at}"], 1e-4)
    with torch.no_grad():
        _, (post, comb) = tk.mhc_pre(
            *(g[k] for k in ("x", "fn", "scale", "base")),
            mhc_mult=g["x"].shape[-2],
            post_mult_value=2.0,
            sinkhorn_repeat=repeat,
        )
    assert_golden(case, "post", post.squeeze(-1), g["post"], 1e-4)
    assert_golden(case, "comb", comb, g["comb"], 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_golden_head(case):
    g = golden("mhc_deepseek_open")[case]
    names = {"residual": "x", "fn": "head_fn", "scale": "head_scale", "base": "head_base"}
    n = g["x"].shape[-2]
    results, _, grads = differentiate(
        lambda **a: {"head": tk.mhc_head(**a, mhc_mult=n)},
        {k: g[v] for k, v in names.items()},
        {"head": g["d_head"]},
    )
    assert_golden(case, "head", results["head"], g["head"], 1e-5, ulps=1)
    assert_golden(case, "d_x_head", grads["residual"], g["d_x_head"], 2.0**-7)
    for name in ("fn", "scale", "base"):
        assert_golden(case, f"d_head_{name}", grads[name], g[f"d_head_{name}"], 1e-4)


@pytest.fixture(scope="module")
def references():
    """TileKernels' own plain PyTorch of the parts, from its sources."""
    peer = next(p for p in PEERS if p.drop_in == "tile_kernels")
    root = root_of(peer)
    if root is None:
        pytest.skip(
            f"{peer.package}: neither installed nor below a folder of WEFT_TEST_PEERS: its references do not run"
        )
    spec = importlib.util.spec_from_file_location("tile_kernels_references", root / "tile_kernels" / "torch" / "mhc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_references(references):
    """Calls of the original with its own arguments, bf16 residuals and fp32 coefficients."""
    n, c, lead = 4, 256, (2, 3)
    t = as_dtypes(draw(18, **layer_shapes(lead, n, c, True), x=(*lead, c)), torch.float32)
    residual, x = t["residual"].bfloat16(), t["x"].bfloat16()
    mixes = tk.mhc_pre_norm_fn(residual, t["fn"], t["norm_weight"], 1e-6)
    split = (mixes, t["scale"], t["base"], n, 2.0, 1e-6)
    pre_mix, post_mix, logits = tk.mhc_pre_split_mixes(*split)
    comb = tk.sinkhorn_normalize(logits, 10, 1e-6)
    head = (mixes[..., :n], t["scale"][:1], t["base"][:n], 1e-6)
    r = references
    gates = zip((pre_mix, post_mix, logits), r.mhc_pre_split_mixes_ref(*split), strict=True)
    few = 16  # roundings of a sigmoid and what is round it, or of a sum over streams
    pairs = {  # results, and how many roundings a chain has
        "norm_fn": (mixes, r.mhc_pre_norm_fn_ref(residual, t["fn"], t["norm_weight"], 1e-6), n * c + few),
        **{f"split {k}": (*pair, few) for k, pair in enumerate(gates)},
        "sinkhorn": (comb, r.sinkhorn_normalize_ref(logits, 10, 1e-6), 4 * n * 10 + few),
        "apply_mix": (tk.mhc_pre_apply_mix(residual, pre_mix), r.mhc_pre_apply_mix_ref(residual, pre_mix), few),
        "post": (tk.mhc_post_fwd(x, residual, post_mix, comb), r.mhc_post_ref(x, residual, post_mix, comb), few),
        "head": (tk.mhc_head_compute_mix(*head), r.mhc_head_compute_mix_ref(*head), few),
        "expand": (tk.expand_to_mhc(x, n), r.expand_to_mhc_ref(x, n), 0),
    }
    for name, (got, want, roundings) in pairs.items():
        assert got.dtype == want.dtype, name
        # Both are rounded: twice the roundings of one chain, and two stores.
        oracle.assert_close(name, got, want, 2 * roundings, stores=2)


# ---- torch.compile -----------------------------------------------------------------------------------------


def test_compile():
    inputs = as_dtypes(draw(11, **layer_shapes((5,), 4, 16)), torch.float32)

    def layer_of(residual, **parameters):
        u, (post, comb) = tk.mhc_pre(residual, **parameters)
        return {"y": tk.mhc_post(torch.tanh(u), residual, post, comb)}

    check_compiled(layer_of, inputs)


# ---- misuse ------------------------------------------------------------------------------------------------

X, FN, SCALE, BASE = torch.zeros(3, 4, 8), torch.zeros(24, 32), torch.zeros(3), torch.zeros(24)
F, POST, COMB = torch.zeros(3, 8), torch.zeros(3, 4, 1), torch.zeros(3, 4, 4)


def recompute(pre=2, f=1, post=1, comb=1, u=2, x=1):
    lists = [[POST] * pre, [F] * f, [POST] * post, [COMB] * comb, [F.clone()] * u, [X.clone()] * x]
    tk.mhc_multilayer_recompute(X, *lists)


MISUSE = {
    "mhc_mult": (lambda: tk.mhc_pre(X, FN, SCALE, BASE, mhc_mult=2), ValueError, "mhc_mult: expected 4, the streams"),
    "fn": (lambda: tk.mhc_pre(X, FN[:20], SCALE, BASE), ValueError, r"fn: expected shape \(24, 32\)"),
    "scale": (lambda: tk.mhc_pre(X, FN, BASE, BASE), ValueError, "scale: expected shape"),
    "base": (lambda: tk.mhc_pre(X, FN, SCALE, SCALE), ValueError, "base: expected shape"),
    "gain": (lambda: tk.mhc_pre(X, FN, SCALE, BASE, norm_weight=BASE), ValueError, "norm_weight: expected shape"),
    "repeat": (lambda: tk.mhc_pre(X, FN, SCALE, BASE, sinkhorn_repeat=0), ValueError, "iter"),
    "not a tensor": (lambda: tk.mhc_pre(None, FN, SCALE, BASE), TypeError, "residual: expected a tensor"),
    "post mix": (lambda: tk.mhc_post(F, X, POST.squeeze(-1), COMB), ValueError, "post_layer_mix: expected shape"),
    "comb mix": (lambda: tk.mhc_post(F, X, POST, POST), ValueError, "comb_res_mix: expected shape"),
    "out": (lambda: tk.mhc_post(F, X, POST, COMB, F), ValueError, "out: expected shape"),
    "out's dtype": (
        lambda: tk.mhc_post(F, X, POST, COMB, X.half()),
        ValueError,
        "out: expected contiguous torch.float32",
    ),
    "head's fn": (lambda: tk.mhc_head(X, FN[:5], SCALE[:1], BASE[:4]), ValueError, "fn: expected shape"),
    "head's scale": (lambda: tk.mhc_head(X, FN[:4], SCALE, BASE[:4]), ValueError, "scale: expected 1 elements"),
    "expand's streams": (lambda: tk.expand_to_mhc(F, 0), ValueError, "stream"),
    "square": (lambda: tk.sinkhorn_normalize(POST), ValueError, "x: expected shape"),
    "no layers": (lambda: recompute(pre=0, f=0, post=0, comb=0, u=0, x=0), ValueError, "at least one pre_mix"),
    "too many outputs": (lambda: recompute(f=3), ValueError, "got 2 and 3"),
    "norm's fn": (lambda: tk.mhc_pre_norm_fn(X, FN[:, 1:], None, 0.0), ValueError, "mhc_fn: expected shape"),
    "norm's gain": (lambda: tk.mhc_pre_norm_fn(X, FN, BASE, 0.0), ValueError, "mhc_norm_weight: expected shape"),
    "mixes": (lambda: tk.mhc_pre_split_mixes(X, SCALE, BASE, 4, 1.0, 0.0), ValueError, "input_mixes: expected shape"),
    "mix": (lambda: tk.mhc_pre_apply_mix(X, X), ValueError, r"mix: expected shape \(3, 4, 1\)"),
    "mix's out": (lambda: tk.mhc_pre_apply_mix(X, POST, X), ValueError, "out: expected shape"),
    "head's base": (lambda: tk.mhc_head_compute_mix(F, SCALE[:1], SCALE, 0.0), ValueError, "mhc_base: expected shape"),
    "d_o": (lambda: tk.mhc_post_bwd(F, X, POST, COMB, F), ValueError, "d_o: expected shape"),
    "big fuse's base": (
        lambda: tk.mhc_pre_big_fuse(X, FN, SCALE, SCALE, 0.0, 0.0, 0.0, 1.0, 3),
        ValueError,
        "mhc_pre_big_fuse: mhc_base: expected shape",
    ),
    "a short list": (lambda: recompute(comb=0), ValueError, r"len\(comb_mix_list\): expected 1"),
}


@pytest.mark.parametrize("call, error, words", MISUSE.values(), ids=MISUSE)
def test_misuse(call, error, words):
    with pytest.raises(error, match=words):
        call()
