# SPDX-License-Identifier: Apache-2.0
"""weft.compat.fla: against plain expressions in float64 with the bounds of compare.py, states, decoding, misuse."""

import cases
import gdn_oracle
import pytest
import torch
import torch.nn.functional as TF
from compare import DRAWS, PATH, UNIT, Noise, check, close, move, same
from compat_oracle import dtypes_but_f16 as dtypes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from weft.compat import fla

# ---- the rule --------------------------------------------------------------------------------------------------------

H, HV, K, V = 2, 4, 8, 6


def rule_inputs(device, dtype, b=2, t=9, sequences=None) -> dict:
    """g below zero, beta between 0 and 1."""
    full = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "q": torch.randn(b, t, H, K).to(device, dtype),
        "k": torch.randn(b, t, H, K).to(device, dtype),
        "v": torch.randn(b, t, HV, V).to(device, dtype),
        "g": -torch.rand(b, t, HV).to(device, full),
        "beta": torch.rand(b, t, HV).to(device, dtype),
        "initial_state": torch.randn(sequences or b, HV, K, V).to(device, full),
    }


def unit(t):
    return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rule(q, k, v, g, beta, initial_state=None, *, normalize=False, cu_seqlens=None, scale=None):
    if normalize:
        q, k = unit(q), unit(k)
    return gdn_oracle.gdn_rule(q, k, v, beta, g, initial_state, scale=scale, cu_seqlens=cu_seqlens)


@dtypes
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_rule(name, normalize, dtype, device):
    cases.need("gdn_rule", device)
    inputs = rule_inputs(device, dtype)
    if not normalize:
        inputs["k"] = unit(inputs["k"])  # long keys make the rule unstable
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalize, "scale": 0.3}
    # Unit query and key are rounded to their dtype on their way into the rule.
    rounded = {"coarse": ("q", "k"), "coarse_unit": 2.0**-8} if normalize and dtype == torch.bfloat16 else {}
    check(
        lambda **t: getattr(fla, name)(**t, **settings),
        lambda **t: rule(**t, normalize=normalize, scale=0.3),
        inputs,
        **rounded,
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rule_packed(index, device):
    """Empty sequences and one token; fla's other lists of offsets mean nothing."""
    cases.need("gdn_rule", device)
    cu = torch.tensor([0, 0, 1, 4, 9], dtype=index, device=device)
    inputs = rule_inputs(device, torch.float32, b=1, sequences=4)

    def function(**t):
        settings = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        return fla.chunk_gated_delta_rule(**t, **settings, cu_seqlens=cu, cu_seqlens_cpu=cu.cpu(), chunk_size=64)

    check(function, lambda **t: rule(**t, normalize=True, cu_seqlens=cu.cpu()), inputs)


def test_rule_makes_gates_itself(device):
    """Raw gates: the decay of fused_gdn_gate, and a beta between 0 and 1, or 2."""
    cases.need("gdn_rule", device)
    inputs = rule_inputs(device, torch.float32)
    inputs |= {"g": torch.randn(2, 9, HV, device=device), "beta": torch.randn(2, 9, HV, device=device)}
    inputs |= {"A_log": torch.randn(HV, device=device), "dt_bias": torch.randn(HV, device=device)}

    for name, twice in (("chunk_gated_delta_rule", False), ("fused_recurrent_gated_delta_rule", True)):

        def function(name=name, twice=twice, **t):
            flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": twice}
            return getattr(fla, name)(**t, **flags, use_qk_l2norm_in_kernel=True)[0]

        def expression(q, k, v, g, beta, initial_state, A_log, dt_bias, twice=twice):
            raw = g + dt_bias
            g = -A_log.exp() * (raw.clamp_min(0) + torch.log1p(torch.exp(-raw.abs())))
            beta = (2 if twice else 1) * beta.sigmoid()
            return rule(q, k, v, g, beta, initial_state, normalize=True)[0]

        check(function, expression, inputs)


def test_rule_with_what_may_be_left_out(device):
    cases.need("gdn_rule", device)
    t = rule_inputs(device, torch.float32)
    q, k, v, g = t["q"], unit(t["k"]), t["v"], t["g"]
    o, none = fla.chunk_gated_delta_rule(q, k, v, g, t["beta"])
    assert none is None
    same(fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=t["beta"])[0], o, "one function")
    zeros, ones = torch.zeros_like(g), torch.ones_like(g)
    plain, _ = fla.fused_recurrent_gated_delta_rule(q, k, v)
    same(plain, fla.chunk_gated_delta_rule(q, k, v, zeros, ones)[0], "without g and beta")
    same(fla.chunk_gated_delta_rule(q, k, v, g.bfloat16(), t["beta"])[0],
         fla.chunk_gated_delta_rule(q, k, v, g.bfloat16().float(), t["beta"])[0], "g of 16 bits")  # fmt: skip


@pytest.mark.parametrize("older", [False, True])
def test_state_v_first(older, device):
    cases.need("gdn_rule", device)
    t = rule_inputs(device, torch.float32)
    t["k"] = unit(t["k"])
    o, state = fla.chunk_gated_delta_rule(**t, output_final_state=True)
    turned = {**t, "initial_state": t["initial_state"].mT.contiguous()}
    name = "transpose_state_layout" if older else "state_v_first"
    for function in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        again, after = function(**turned, output_final_state=True, **{name: True})
        same(again, o, "o")
        same(after, state.mT.contiguous(), "state")
        assert after.is_contiguous()


def test_rule_token_by_token(device):
    """Prefill and decode: the states carry the sequence on, to the bit."""
    cases.need("gdn_rule", device)
    t = rule_inputs(device, torch.float32)
    whole, final = fla.chunk_gated_delta_rule(**t, output_final_state=True, use_qk_l2norm_in_kernel=True)
    state = t.pop("initial_state")
    for i in range(9):
        token = {name: value[:, i : i + 1] for name, value in t.items()}
        o, state = fla.fused_recurrent_gated_delta_rule(
            **token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        same(o, whole[:, i : i + 1], f"token {i}")
    same(state, final, "state")


@pytest.mark.parametrize("steps", [1, 70])
def test_rule_of_transformers(steps):
    """Hugging Face's own functions for the rule, of the package, called as its layers call them."""
    modeling = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next",
        reason="transformers is not installed: not compared with it",
    )
    t = rule_inputs("cpu", torch.float32, t=steps)
    q, k, v, g, beta, state = t.values()
    repeated = (q.repeat_interleave(2, 2), k.repeat_interleave(2, 2))
    settings = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    exact = rule(*(x.double() for x in t.values()), normalize=True)
    unit = UNIT[torch.float32]
    with Noise(unit):
        moved = [rule(*(move(x.double(), unit) for x in t.values()), normalize=True) for _ in range(DRAWS)]
    for theirs, ours in (
        (modeling.torch_chunk_gated_delta_rule, fla.chunk_gated_delta_rule),
        (modeling.torch_recurrent_gated_delta_rule, fla.fused_recurrent_gated_delta_rule),
    ):
        want = theirs(*repeated, v, g=g, beta=beta, **settings)
        got = ours(*repeated, v, g=g, beta=beta, **settings, cu_seqlens=None, max_length_q=None, use_cache=True)
        for i, e in enumerate(exact):
            noise = max(float((m[i] - e).abs().max()) for m in moved)
            for result, whose in ((got[i], "weft"), (want[i], "transformers")):
                close(result, e, PATH * noise, f"{whose}: result {i}")


def test_misuse_of_the_rule():
    t = rule_inputs("cpu", torch.float32)
    chunk, recurrent = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
    bad = [
        (NotImplementedError, "cp_context: expected None", lambda: chunk(**t, cp_context=object())),
        (NotImplementedError, "gk: expected None", lambda: recurrent(**t, gk=t["v"])),
        (NotImplementedError, "gv: expected None", lambda: recurrent(**t, gv=t["v"])),
        (ValueError, "A_log: expected a tensor", lambda: chunk(**t, use_gate_in_kernel=True)),
        (ValueError, "allow_neg_eigval: expected False", lambda: chunk(**t, allow_neg_eigval=True)),
        (ValueError, "transpose_state_layout: expected None",
         lambda: chunk(**t, state_v_first=True, transpose_state_layout=True)),
        (TypeError, "head_first: expected an argument", lambda: chunk(**t, head_first=True)),
        (TypeError, "colour: expected an argument", lambda: recurrent(**t, colour=1)),
        (TypeError, "beta: expected a tensor", lambda: chunk(**{**t, "beta": None})),
        (ValueError, "gdn_rule.*beta", lambda: chunk(**{**t, "beta": t["v"]})),
        (ValueError, "gdn_rule.*state", lambda: chunk(**{**t, "initial_state": t["initial_state"][:1]})),
        (ValueError, "FusedRMSNormGated: activation: expected one of", lambda: fla.FusedRMSNormGated(8, activation="relu")),
        (ValueError, "FusedRMSNormGated: x: expected shape", lambda: fla.FusedRMSNormGated(8)(torch.ones(2, 7), torch.ones(2, 7))),
        (ValueError, "FusedRMSNormGated: g: expected shape", lambda: fla.FusedRMSNormGated(8)(torch.ones(2, 8), torch.ones(2, 1))),
    ]  # fmt: skip
    for error, message, call in bad:
        with pytest.raises(error, match=message):
            call()


# ---- short convolution -----------------------------------------------------------------------------------------------


def convolution(x, weight, bias=None, state=None, residual=None, *, activation="silu", lengths=None):
    """torch's own convolution, sequence by sequence; states are the last W rows."""
    width = weight.shape[1]
    pieces = x[0].split(lengths) if lengths is not None else list(x)
    outs, finals = [], []
    for n, piece in enumerate(pieces):
        before = piece.new_zeros(width, piece.shape[1]) if state is None else state[n].T
        rows = torch.cat([before, piece])
        if len(piece):
            u = TF.conv1d(rows[1:].T[None], weight[:, None], bias, groups=weight.shape[0])[0].T
        else:
            u = piece * weight[:, 0]
        outs.append(TF.silu(u) if activation else u)
        finals.append(rows[len(rows) - width :].T)
    y = torch.cat(outs)[None] if lengths is not None else torch.stack(outs)
    return y if residual is None else y + residual, torch.stack(finals)


@dtypes
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("channels, width", [(48, 4), (128, 3), (7, 2), (11, 1)])
def test_causal_conv1d(channels, width, activation, dtype, device):
    full = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {
        "x": torch.randn(2, 9, channels).to(device, dtype),
        "weight": torch.randn(channels, width).to(device, full),
        "bias": torch.randn(channels).to(device, full),
        "state": torch.randn(2, channels, width).to(device, dtype),
    }

    def function(x, weight, bias, state):
        return fla.causal_conv1d(x, weight, bias, None, state, True, activation)

    def expression(x, weight, bias, state):
        return convolution(x, weight, bias, state, activation=activation)

    check(function, expression, tensors)


@dtypes
def test_packed(dtype, device):
    """Lengths below the width, and an empty sequence."""
    lengths = [1, 3, 0, 8, 2]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    tensors = {
        "x": torch.randn(1, sum(lengths), 24).to(device, dtype),
        "weight": torch.randn(24, 4).to(device, dtype),
        "state": torch.randn(len(lengths), 24, 4).to(device, dtype),
    }

    def function(x, weight, state):
        return fla.causal_conv1d(
            x, weight, initial_state=state, output_final_state=True, activation="silu", cu_seqlens=cu
        )

    def expression(x, weight, state):
        return convolution(x, weight, state=state, lengths=lengths)

    check(function, expression, tensors)


def test_without_a_state(device):
    """No state in front is a state of zeros; none is returned unless asked for."""
    x, weight = torch.randn(2, 6, 16, device=device), torch.randn(16, 4, device=device)
    y, none = fla.causal_conv1d(x, weight)
    assert none is None
    zeros = x.new_zeros(2, 16, 4)
    same(fla.causal_conv1d(x, weight, initial_state=zeros)[0], y, "zeros")
    _, state = fla.causal_conv1d(x, weight, output_final_state=True)
    same(state, x[:, 2:].mT.contiguous(), "the last rows")


def test_residual_and_heads(device):
    """Trailing dimensions of x count as one; the residual is added behind the activation."""
    x, weight = torch.randn(2, 6, 4, 8, device=device), torch.randn(32, 4, device=device)
    flat, _ = fla.causal_conv1d(x.flatten(2), weight, activation="silu")
    y, _ = fla.causal_conv1d(x, weight, residual=x, activation="silu")
    same(y, flat.view(x.shape) + x, "with a residual")


def test_strided_rows(device):
    """x as a slice of wider rows, its gradient and that of y with strides."""
    rows = torch.randn(3, 7, 64, device=device)
    weight = torch.randn(32, 4, device=device)
    results = []
    for x in (rows[..., 16:48], rows[..., 16:48].contiguous()):
        x = x.detach().requires_grad_()
        y, _ = fla.causal_conv1d(x, weight, activation="silu")
        upstream = torch.randn(7, 3, 32, generator=torch.Generator().manual_seed(1)).to(device).transpose(0, 1)
        results.append([y, *torch.autograd.grad(y, x, upstream)])
    same(results[0], results[1], "strided")


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (5,)])
def test_update(shape, device):
    """Token by token: the bits of the whole sequence, the cache in place."""
    weight, bias = torch.randn(16, 4, device=device), torch.randn(16, device=device)
    x = torch.randn(5, 7, 16, device=device)
    whole, final = fla.causal_conv1d(x, weight, bias, output_final_state=True, activation="silu")
    cache = x.new_zeros(5, 16, 4)
    pointer = cache.data_ptr()
    for t in range(7):
        y, returned = fla.causal_conv1d_update(x[:, t].reshape(*shape, 16), cache, None, weight, bias, "silu")
        assert returned is cache and cache.data_ptr() == pointer
        same(y.view(5, 16), whole[:, t], f"token {t}")
    same(cache, final, "cache")
    residual = torch.randn(5, 16, device=device)
    plain, _ = fla.causal_conv1d_update(x[:, 0], cache.clone(), None, weight)
    added, _ = fla.causal_conv1d_update(x[:, 0], cache.clone(), residual, weight)
    same(added, plain + residual, "residual")


class Made(TorchDispatchMode):
    """The largest tensor with memory of its own that an operator has returned, and whether one read from the device."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self):
        super().__init__()
        self.largest, self.reads = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.reads |= func in self.READS
        if not any(r.alias_info is not None for r in func._schema.returns):
            found = result if isinstance(result, (tuple, list)) else (result,)
            numbers = [t.numel() for t in found if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self.largest = max([self.largest, *numbers])  # a workspace has bytes
        return result


@pytest.mark.parametrize("channels", [3, 4, 7, 11, 24, 384, 8192])
def test_update_makes_no_copy(channels, device):
    """Neither of the state nor of the weight, which has as many numbers as one state; and the host reads nothing."""
    weight, bias = torch.randn(channels, 4, device=device), torch.randn(channels, device=device)
    module = fla.ShortConvolution(channels, 4, bias=True, device=device)
    x, cu = torch.randn(3, 1, channels, device=device), torch.tensor([0, 1, 2, 3], device=device)
    cache = torch.randn(3, channels, 4, device=device)
    calls = [
        lambda: fla.causal_conv1d_update(x, cache, None, weight, bias, "silu"),
        lambda: module(x, cache=cache),
        lambda: module(x.transpose(0, 1), cache=cache, cu_seqlens=cu, output_final_state=True),
    ]
    with torch.no_grad():
        for call in calls:
            with Made() as made:
                call()
            assert made.largest == x.numel() and not made.reads


def test_packed_tokens_of_any_lengths(device):
    """As many tokens as sequences, but not one each: what a full call gives, and the cache in place."""
    module = fla.ShortConvolution(24, 4, device=device)
    x, cu = torch.randn(1, 4, 24, device=device), torch.tensor([0, 2, 2, 3, 4], device=device)
    before = torch.randn(4, 24, 4, device=device)
    whole, after = module(x, cache=before, cu_seqlens=cu, output_final_state=True)
    cache = before.clone()
    with torch.no_grad():
        y, returned = module(x, cache=cache, cu_seqlens=cu, output_final_state=True)
    same(y, whole.detach(), "tokens")
    same(cache, after.detach(), "states")
    assert returned is cache


def test_short_convolution(device):
    """Parameters of nn.Conv1d; dense, masked, packed, with a cache."""
    torch.manual_seed(0)
    module = fla.ShortConvolution(24, 4, bias=True, device=device)
    assert {k: tuple(p.shape) for k, p in module.named_parameters()} == {"weight": (24, 1, 4), "bias": (24,)}
    assert module.state_size == 96 and "silu" in repr(module)
    plain = nn.Conv1d(24, 24, 4, groups=24, padding=3, device=device)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 9, 24, device=device)
    y, state = module(x)
    want = TF.silu(plain(x.mT)[..., :9]).mT
    assert state is None and (y - want).abs().max() <= 16 * 2**-24 * want.abs().max()
    mask = torch.ones(2, 9, device=device)
    mask[0, :3] = 0
    before = x.clone()
    same(module(x, mask=mask)[0], module(x * mask.unsqueeze(-1))[0], "masked")
    same(x, before, "the mask does not write")
    packed, _ = module(x.reshape(1, 18, 24), cu_seqlens=torch.tensor([0, 9, 18], device=device))
    same(packed.view(2, 9, 24), y, "packed")
    with torch.no_grad():
        _, cache = module(x[:, :8], output_final_state=True)
        held = cache.clone()
        last, returned = module(x[:, 8:], cache=cache, output_final_state=True)
        same(last, y[:, 8:].detach(), "one more token")
        assert returned is cache and not torch.equal(cache, held)
        again, none = module(x[:, 8:], cache=held.clone())
        same(again, last, "without asking for the state")
        assert none is None
        packed, _ = module(x[:, 8:].transpose(0, 1), cache=held, cu_seqlens=torch.tensor([0, 1, 2], device=device))
        same(packed.transpose(0, 1), last, "one token each, packed")
    with torch.no_grad():
        first, fresh = module(x[:, :1], output_final_state=True)
        same(first, y[:, :1].detach(), "the first token without a cache")
        assert fresh.shape == (2, 24, 4)
    with torch.enable_grad():
        held = cache.clone()
        module(x[:, :1], cache=cache, output_final_state=True)
        same(cache, held, "with autograd the cache stays")


@dtypes
@pytest.mark.parametrize("shape", [(3, 5, 60), (4, 128), (2, 2, 2, 7), (2, 1)])
def test_l2norm(shape, dtype, device):
    tensors = {"x": torch.randn(shape).to(device, dtype)}

    def expression(x):
        return x / (x.square().sum(-1, keepdim=True) + 0.01).sqrt()

    check(lambda x: fla.l2norm(x, 0.01), expression, tensors)
    same(fla.L2Norm(0.01)(tensors["x"]), fla.l2_norm(tensors["x"], 0.01), "module")


def test_l2norm_near_zero(device):
    """eps is inside the root: a row of zeros stays zero, with a finite gradient; tiny rows are not of unit length."""
    x = torch.zeros(2, 128, device=device)
    x[1] = 1e-4
    x.requires_grad_()
    y = fla.l2norm(x)
    y.sum().backward()
    assert not y[0].any() and torch.isfinite(x.grad).all()
    # A zero row: the gradient is 1/sqrt(eps).
    assert (x.grad[0] - 1000).abs().max() <= 1000 * 8 * 2**-24
    norm = (128 * 1e-8 / (128 * 1e-8 + 1e-6)) ** 0.5
    assert abs(float(y[1].detach().norm()) - norm) <= 1e-5


def test_l2norm_output_dtype(device):
    x = torch.randn(3, 64, device=device)
    assert fla.l2norm(x, output_dtype=torch.bfloat16).dtype == torch.bfloat16
    same(fla.l2norm(x, output_dtype=torch.bfloat16), fla.l2norm(x).bfloat16(), "narrower")
    same(fla.l2norm(x.bfloat16(), output_dtype=torch.float32), fla.l2norm(x.bfloat16().float()), "wider")


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate(with_bias, dtype, device):
    full = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {
        "g": (4 * torch.randn(2, 5, 6)).to(device, dtype),
        "A_log": torch.randn(6).to(device, full),
        "dt_bias": torch.randn(6).to(device, full) if with_bias else None,
    }

    def expression(g, A_log, dt_bias):
        raw = g if dt_bias is None else g + dt_bias
        return -A_log.exp() * (raw.clamp_min(0) + torch.log1p(torch.exp(-raw.abs())))

    check(lambda **t: fla.fused_gdn_gate(**t, output_dtype=full), expression, tensors)


def test_gate_of_any_leading_dimensions(device):
    g, a_log = torch.randn(3, 2, 5, 4, device=device), torch.randn(1, 1, 4, 1, device=device)
    out = fla.fused_gdn_gate(g, a_log)
    assert out.shape == g.shape
    same(out[1, 0], fla.fused_gdn_gate(g[1, 0], a_log.flatten()), "any leading dimensions")
    assert fla.fused_gdn_gate(g, a_log, output_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_compiles(device):
    torch.manual_seed(0)
    module = fla.ShortConvolution(32, 4, device=device)
    x = torch.randn(2, 6, 32, device=device)

    def function(x):
        y, _ = module(x)
        return fla.l2norm(y.unflatten(2, (4, 8))), fla.fused_gdn_gate(y[..., :4], module.weight[:4, 0, 0])

    leaves = [x.detach().requires_grad_() for _ in range(2)]
    results = []
    for leaf, f in zip(leaves, (function, torch.compile(function, fullgraph=True, backend="aot_eager")), strict=True):
        out = f(leaf)
        torch.manual_seed(3)
        results.append([*out, *torch.autograd.grad(out, [leaf, module.weight], [torch.randn_like(t) for t in out])])
    same(results[1], results[0], "compiled")


def test_misuse():
    x, weight = torch.randn(2, 6, 16), torch.randn(16, 4)
    bad = {
        "causal_conv1d: activation: expected None, silu or swish, got 'gelu'": lambda: fla.causal_conv1d(
            x, weight, activation="gelu"
        ),
        r"causal_conv1d: weight: expected \(D, W\), got \(16, 1, 4\)": lambda: fla.causal_conv1d(x, weight[:, None]),
        r"causal_conv1d: x: expected shape \(2, 6, 15\)": lambda: fla.causal_conv1d(x, weight[:15]),
        "causal_conv1d: bias: expected shape": lambda: fla.causal_conv1d(x, weight, torch.randn(15)),
        r"causal_conv1d: initial_state: expected shape \(2, 16, 4\)": lambda: fla.causal_conv1d(
            x, weight, initial_state=torch.randn(2, 16, 3)
        ),
        "causal_conv1d: residual: expected shape": lambda: fla.causal_conv1d(x, weight, residual=x[:1]),
        "cu_seqlens": lambda: fla.causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 6])),
        "causal_conv1d_update: x: expected 32 elements": lambda: fla.causal_conv1d_update(
            x, torch.zeros(2, 16, 4), None, weight
        ),
        "causal_conv1d_update: cache: expected shape": lambda: fla.causal_conv1d_update(
            x[:, :1], torch.zeros(2, 16, 3), None, weight
        ),
        "ShortConvolution: activation": lambda: fla.ShortConvolution(16, 4, activation="relu"),
        "ShortConvolution: mask: expected None beside cu_seqlens": lambda: fla.ShortConvolution(16, 4)(
            x[:1], mask=torch.ones(1, 6), cu_seqlens=torch.tensor([0, 6])
        ),
        "fused_gdn_gate: A_log: expected 16 elements": lambda: fla.fused_gdn_gate(x, torch.zeros(4)),
        "fused_gdn_gate: dt_bias: expected 16 elements": lambda: fla.fused_gdn_gate(x, torch.zeros(16), torch.zeros(4)),
    }
    for message, call in bad.items():
        with pytest.raises(ValueError, match=message):
            call()
    for message, call in {
        "weight: ": lambda: fla.causal_conv1d(x),
        "cp_context: ": lambda: fla.causal_conv1d(x, weight, cp_context=object()),
        "seq_idx: ": lambda: fla.causal_conv1d(x, weight, seq_idx=torch.zeros(2, 6)),
    }.items():
        with pytest.raises(NotImplementedError, match=f"causal_conv1d: {message}"):
            call()
    with pytest.raises(NotImplementedError, match="causal_conv1d_update: x: expected at least 3 channels"):
        fla.causal_conv1d_update(x[:, 0, :2], torch.zeros(2, 2, 4), None, weight[:2])
    for call in (lambda: fla.causal_conv1d(x, weight, layout=1), lambda: fla.ShortConvolution(16, 4, layout=1)):
        with pytest.raises(TypeError, match="layout: expected an argument that weft knows"):
            call()
    with pytest.raises(ValueError, match=r"ShortConvolution: cache: expected shape \(2, 16, 4\)"), torch.no_grad():
        fla.ShortConvolution(16, 4)(x[:, :1], cache=torch.zeros(3, 16, 4))


# ---- decoding ----------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_decoding_takes_the_step(final, v_first, dtype, device, monkeypatch):
    """A few tokens without autograd: the operator for decoding, with the results of the rule and the initial state as it was."""
    cases.need("gdn_rule_step", device)
    inputs = rule_inputs(device, dtype, t=2)
    inputs["k"] = unit(inputs["k"])
    if v_first:
        inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    settings = {"output_final_state": final, "state_v_first": v_first}
    before, calls = inputs["initial_state"].clone(), []
    step = fla.gdn_rule_step
    monkeypatch.setattr(fla, "gdn_rule_step", lambda *a, **k: calls.append(k["update"]) or step(*a, **k))
    monkeypatch.setattr(fla, "_STEP_ON", ("cpu", "cuda"))
    o, state = fla.fused_recurrent_gated_delta_rule(**inputs, **settings)
    assert calls == [final] and (state is not None) == final
    same(inputs["initial_state"], before, "initial state")
    if device == "cpu":
        monkeypatch.setattr(fla, "_STEP_ON", ())
        want, last = fla.fused_recurrent_gated_delta_rule(**inputs, **settings)
        same(o, want, "o")
        if final:
            same(state, last, "final state")
    inputs["v"].requires_grad_()
    if device == "cpu":
        fla.fused_recurrent_gated_delta_rule(**inputs, **settings)[0].sum().backward()
        assert len(calls) == 1 and inputs["v"].grad is not None


# ---- gated norm --------------------------------------------------------------------------------------------


def gated(x, g, weight=None, activation="swish", eps=1e-5):
    return gdn_oracle.gdn_norm(x, g, weight, eps, "sigmoid" if activation == "sigmoid" else "silu")


@dtypes
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (7, 8), (2, 2, 2, 2, 8), (8,), (1, 4100, 8), (2, 0, 8)])
def test_gated_norm(shape, activation, dtype, device):
    module = fla.FusedRMSNormGated(8, activation=activation, device=device, dtype=dtype)
    inputs = {"x": torch.randn(shape), "g": torch.randn(shape), "weight": 1 + 0.2 * torch.randn(8)}
    inputs = {k: t.to(device, dtype) for k, t in inputs.items()}

    def call(x, g, weight):
        return torch.func.functional_call(module, {"weight": weight}, (x, g))

    check(call, lambda x, g, weight: gated(x, g, weight, activation), inputs)


def test_gated_norm_with_a_residual(device):
    x, g, residual = (torch.randn(2, 5, 8, device=device, dtype=torch.bfloat16) for _ in range(3))
    module = fla.FusedRMSNormGated(8, device=device)
    y, total = module(x, g, residual.float(), prenorm=True)
    want = x.float() + residual.float()
    assert y.dtype == torch.bfloat16
    same(total, want, "x + residual")
    exact = gated(want.double(), g.double(), module.weight.double())
    assert ((y - exact).abs() <= 2**-8 * exact.abs() + 1e-30).all()
    assert module(x, g, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    same(module(x, g, prenorm=True)[1], x, "x")
    plain = fla.FusedRMSNormGated(8, elementwise_affine=False, device=device)
    same(plain(x, g), module(x, g), "without a weight")
    assert repr(plain) == "FusedRMSNormGated(8, elementwise_affine=False, eps=1e-05, activation=swish)"


def test_gated_norm_of_hugging_face():
    """The norm of a Qwen3-Next layer: its weight is loaded, its results and gradients come out."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs, ours = modeling.Qwen3NextRMSNormGated(16, eps=1e-6), fla.FusedRMSNormGated(16, eps=1e-6)
    torch.nn.init.normal_(theirs.weight, 1, 0.3)
    ours.load_state_dict(theirs.state_dict())
    x, g = (torch.randn(6, 3, 16, requires_grad=True) for _ in range(2))
    d_y = torch.randn(6, 3, 16)
    want = [theirs(x, g), *torch.autograd.grad(theirs(x, g), (x, g, theirs.weight), d_y)]
    got = [ours(x, g), *torch.autograd.grad(ours(x, g), (x, g, ours.weight), d_y)]
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
