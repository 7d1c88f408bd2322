# SPDX-License-Identifier: Apache-2.0
"""gdn_pre beyond what every operator is asked (test_ops.py, test_library.py, test_compile.py): the promises about bits
and states, boundaries of sequences, accuracy, misuse."""

import gdn_oracle as oracle
import pytest
import torch
import weft.torch as wt
from compare import same
from gdn_support import HEADS, everything, front, rows

# ---- promises, to the bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_and_packed(dtype, device):
    module = front(device)
    proj = rows(3, 37, device=device, dtype=dtype)
    dense = everything(module, proj)
    for index in (torch.int32, torch.int64):
        cu = torch.arange(4, device=device, dtype=index) * 37
        packed = everything(module, proj.flatten(0, 1), cu_seqlens=cu)
        batched = everything(module, proj.flatten(0, 1)[None], cu_seqlens=cu)
        for k, (d, p, b) in enumerate(zip(dense, packed, batched, strict=True)):
            parameter = k > 6
            same(p, d if parameter else d.flatten(0, 1), f"packed {k}")
            same(b, d if parameter else d.flatten(0, 1)[None], f"packed with a batch of one {k}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_orders(dtype, device):
    """[S, B, columns] memory as a view; results are contiguous, the gradient is laid out like the projection."""
    module = front(device)
    proj = rows(3, 11, device=device, dtype=dtype)
    plain = everything(module, proj)
    swapped = proj.transpose(0, 1).contiguous().transpose(0, 1)
    other = everything(module, swapped)
    same(other, plain, "memory (S, B, columns)")
    assert other[6].stride() == swapped.stride() and plain[6].is_contiguous()
    assert all(t.is_contiguous() for t in other[:6])


def test_sections_and_rows(device):
    """Six tensors, a few that hold several sections, or one row: the same bits; gradients with the parts' layout."""
    module = front(device)
    proj = rows(2, 9, device=device)
    whole = everything(module, proj)
    six = oracle.split(proj, HEADS)
    channels = HEADS.channels
    own = [t.contiguous() for t in six]
    parts = {
        "six views": six,
        "six tensors": own,
        "qkv, z, b, a": (proj[..., :channels].contiguous(), None, None, *own[3:]),
        "qk, vz, ba": (
            torch.cat([t.flatten(2) for t in six[:2]], -1),
            None,
            torch.cat([t.flatten(2) for t in six[2:4]], -1),
            None,
            torch.cat(six[4:], -1),
            None,
        ),
    }
    for name, given in parts.items():
        leaves = [None if t is None else t.detach().requires_grad_() for t in given]
        out = module(wt.GdnSections(*leaves))[:6]
        same(out, whole[:6], name)
        torch.manual_seed(3)
        upstream = [torch.randn_like(t) for t in out]
        wrt = [t for t in leaves if t is not None]
        grads = torch.autograd.grad(out, wrt, upstream)
        same(torch.cat([g.flatten(2) for g in grads], -1), whole[6], f"gradient of {name}")
        assert all(g.shape == t.shape for g, t in zip(grads, wrt, strict=True))


@pytest.mark.parametrize("slots", [3, 4, 6])
def test_pieces_of_a_sequence(slots, device):
    """With the state carried from one piece to the next, however short they are."""
    module = front(device)
    proj = rows(2, 23, device=device)
    start = torch.randn(2, HEADS.channels, slots, device=device)
    whole = module(proj, state=start, final_state=True)
    pieces, state = [], start
    for length in (1, 2, 4, 1, 0, 15):
        at = sum(p.value.shape[1] for p in pieces)
        pieces.append(module(proj[:, at : at + length], state=state, final_state=True))
        state = pieces[-1].final_state
    for k in range(6):
        same(torch.cat([p[k] for p in pieces], 1), whole[k], f"result {k}")
    same(state, whole.final_state, "the state after the last piece")


def test_state_dtype_and_slots(device):
    """fp32 states beside bf16 rows keep what they are given."""
    module = front(device)
    proj = rows(1, 2, device=device, dtype=torch.bfloat16)
    state = torch.randn(1, HEADS.channels, 5, device=device)
    final = module(proj, state=state, final_state=True).final_state
    assert final.dtype == torch.float32
    same(final[..., :3], state[..., 2:], "older slots slide")
    same(final[..., 3:].mT, proj[..., : HEADS.channels].float(), "new ones are the rows")
    one_tap = front(device, width=1)
    assert one_tap(proj, final_state=True).final_state.shape == (1, HEADS.channels, 0)
    given = wt.gdn_pre(proj, one_tap.conv_weight, one_tap.a_log, heads=HEADS, final_state=True, history=2).final_state
    same(given.mT, proj[..., : HEADS.channels], "as many slots as asked for")


def test_gradient_through_the_state(device):
    """Two pieces, with the state between them part of the graph, have the gradients of the whole."""
    module = front(device).double() if device.type == "cpu" else front(device)
    dtype = module.conv_weight.dtype
    proj = rows(2, 9, device=device, dtype=dtype).requires_grad_()
    whole = module(proj)
    first = module(proj[:, :4], final_state=True)
    second = module(proj[:, 4:], state=first.final_state)
    torch.manual_seed(3)
    upstream = [torch.randn_like(t) for t in whole[:6]]
    wrt = [proj, *module.parameters()]
    want = torch.autograd.grad(whole[:6], wrt, upstream)
    halves = [t for pair in zip(first[:6], second[:6], strict=True) for t in pair]
    got = torch.autograd.grad(halves, wrt, [t for u in upstream for t in (u[:, :4], u[:, 4:])])
    # A sum over 18 tokens in two parts: a few roundings of terms that are no larger than the largest result.
    unit = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() <= 64 * unit * w.abs().max()


def test_other_sequences_do_not_matter(device):
    module = front(device)
    a, b, c = (rows(n, device=device) for n in (5, 8, 3))

    def of_b(before, after):
        leaf = b.detach().requires_grad_()
        cu = torch.tensor([0, len(before), len(before) + 8, len(before) + 8 + len(after)], device=device)
        out = module(torch.cat([before, leaf, after]), cu_seqlens=cu)
        own = [t[len(before) : len(before) + 8] for t in out[:6]]
        torch.manual_seed(3)
        return [*own, *torch.autograd.grad(own, leaf, [torch.randn_like(t) for t in own])]

    same(of_b(a, c), of_b(c[:0], a[:1]), "among others")


# ---- boundaries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_nothing_leaks(width, device):
    """Gradients and results of one sequence know nothing of the others, exactly, whatever their lengths."""
    module = front(device, width=width)
    lengths = [0, 1, 0, width, max(1, width - 1), 2, 17, 0]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device, dtype=torch.int32)
    total = int(cu[-1])
    proj = rows(total + 2, device=device).requires_grad_()  # two tokens of nobody
    out = module(proj, cu_seqlens=cu)
    for t in out[:6]:
        assert not t[total:].any(), "tokens past the last offset are zero"
    for n, length in enumerate(lengths):
        first = int(cu[n])
        own = [t[first : first + length] for t in out[:6]]
        (grad,) = torch.autograd.grad(own, proj, [torch.randn_like(t) for t in own], retain_graph=True)
        assert not grad[:first].any() and not grad[first + length :].any()
        assert not length or grad[first : first + length].any()
    poison = proj.detach().clone()
    poison[int(cu[4]) : int(cu[5])] = torch.nan
    kept = torch.ones(total, dtype=torch.bool, device=device)
    kept[int(cu[4]) : int(cu[5])] = False
    for got, want in zip(module(poison, cu_seqlens=cu)[:6], out[:6], strict=True):
        same(got[:total][kept], want[:total][kept], "NaN stays in its sequence")


def test_infinity_stays_in_its_window(device):
    module = front(device, width=3)
    proj = rows(1, 12, device=device)
    clean = module(proj)
    spoiled = proj.clone()
    spoiled[0, 5, :4] = torch.inf
    for got, want in zip(module(spoiled)[:6], clean[:6], strict=True):
        same(got[:, :5], want[:, :5], "before")
        same(got[:, 8:], want[:, 8:], "after")


def test_tokens_of_nobody_have_no_gradient(device):
    """Nor do they have a part in those of parameters."""
    module = front(device)
    proj = rows(9, device=device)
    cu = torch.tensor([0, 4, 6], device=device)
    got = everything(module, proj, cu_seqlens=cu)
    with torch.no_grad():
        other = proj.clone()
        other[6:] = 1e30
    spoiled = everything(module, other, cu_seqlens=cu)
    same(spoiled, got, "whatever lies behind the last offset")
    assert not got[6][6:].any()


# ---- accuracy ----------------------------------------------------------------------------------------------------


ACCURACY = [
    (wt.GdnHeads(1, 1, 32, 32), 1, True, wt.GdnOptions()),
    (wt.GdnHeads(2, 4, 64, 32), 2, False, wt.GdnOptions(activation="linear")),
    (wt.GdnHeads(1, 3, 128, 64), 3, True, wt.GdnOptions(l2norm=False)),
    (wt.GdnHeads(2, 8, 128, 128), 4, False, wt.GdnOptions()),
    (wt.GdnHeads(1, 8, 256, 32), 4, True, wt.GdnOptions(beta_scale=2.0)),
    (wt.GdnHeads(1, 2, 32, 512), 4, True, wt.GdnOptions(q_scale=0.25)),
    (wt.GdnHeads(3, 3, 5, 7), 4, True, wt.GdnOptions()),
]


def relative_rms(got, want) -> float:
    return float((got.double().cpu() - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, width, bias, options", ACCURACY)
def test_accuracy(heads, width, bias, options, dtype, device):
    """Against float64 on the same values: results within an ulp, gradients within the roundings of their store."""
    module = front(device, heads, width, bias, options=options, beta_dtype=torch.float32)
    lengths = [*torch.randint(1, 60, (4,)).tolist(), 0, 1]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    proj = rows(sum(lengths), device=device, dtype=dtype, heads=heads)
    got = everything(module, proj, cu_seqlens=cu)

    def expression(p, cu_seqlens):
        parameters = [wide[name] for name in ("conv_weight", "a_log", "dt_bias")]
        results = oracle.gdn_pre(
            *oracle.split(p[None], heads), *parameters, wide.get("conv_bias"), cu_seqlens=cu_seqlens, options=options
        )
        return tuple(t.squeeze(0) for t in results)

    wide = {n: p.detach().double().cpu().requires_grad_() for n, p in module.named_parameters()}
    leaf = proj.detach().double().cpu().requires_grad_()
    exact = expression(leaf, cu.cpu())
    torch.manual_seed(3)
    upstream = [torch.randn(t.shape, device=t.device, dtype=torch.float32).to(t.dtype).double().cpu() for t in got[:6]]
    d_proj, *_ = torch.autograd.grad(exact, [leaf, *wide.values()], upstream, allow_unused=True)

    unit = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for k in range(3):
        value, want = got[k].detach().double().cpu(), exact[k].detach()
        ulp = unit * torch.exp2(want.abs().clamp_min(1e-300).log2().floor())
        error = (value - want).abs() / ulp
        large = want.abs() >= 2.0**-20 * want.abs().amax(-1, keepdim=True)
        if dtype == torch.float32:  # ulps of fp32 arithmetic itself: the sums have roundings of their own
            assert relative_rms(got[k].detach(), want) <= 1e-6
            continue
        if dtype == torch.float16:
            large &= want.abs() >= 2.0**-14
        assert (error[large] <= 1).double().mean() >= 0.999 and (error[large] <= 2).all()
        assert relative_rms(got[k].detach(), want) <= (1.8e-3 if dtype == torch.bfloat16 else 2.5e-4)
    same(got[3].detach(), oracle.split(proj[None], heads)[3].squeeze(0).contiguous(), "gate")
    assert ((got[4].detach().double().cpu() - exact[4]).abs() <= 1e-6 * exact[4].abs()).all()
    assert ((got[5].detach().double().cpu() - exact[5]).abs() <= 2e-6 * exact[5].abs()).all()
    assert relative_rms(got[6], d_proj) <= {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 5e-6}[dtype]
    same(everything(module, proj, cu_seqlens=cu), got, "again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameter_gradients_are_sums_of_exact_terms(dtype, device):
    """|error| <= 2^-20 of the sum of the terms' magnitudes, over two thousand tokens. The terms are the gradients of
    parameters that every token has by itself."""
    heads = wt.GdnHeads(1, 2, 16, 16)
    module = front(device, heads)
    steps = 2048
    proj = rows(1, steps, device=device, dtype=dtype, heads=heads)
    got = everything(module, proj)[7:]
    own = {
        name: p.detach().double().cpu().expand(steps, *p.shape).clone().requires_grad_()
        for name, p in module.named_parameters()
    }
    q, k, v, z, b, a = (t[0] for t in oracle.split(proj.double().cpu(), heads))
    x = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1)
    x = torch.cat([x.new_zeros(3, x.shape[1]), x])
    u = own["conv_bias"] + sum(x[j : j + steps] * own["conv_weight"][:, :, j] for j in range(4))
    y = u * u.sigmoid()
    unit = [t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (y[:, :16], y[:, 16:32])]
    query, key = (t[:, None].expand(steps, 2, 16) for t in unit)
    value = y[:, 32:].unflatten(-1, (2, 16))
    g = -own["a_log"].exp() * torch.nn.functional.softplus(a + own["dt_bias"], threshold=100)
    results = (query, key, value, z, b.sigmoid(), g)
    torch.manual_seed(3)
    dtypes = [dtype] * 5 + [torch.float32]
    upstream = [
        torch.randn(1, *t.shape, device=device, dtype=torch.float32).to(kind)[0].double().cpu()
        for t, kind in zip(results, dtypes, strict=True)
    ]
    used = [(r, u) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    terms = torch.autograd.grad([r for r, _ in used], list(own.values()), [u for _, u in used])
    for name, grad, term in zip(own, got, terms, strict=True):
        error = (grad.double().cpu() - term.sum(0)).abs()
        assert (error <= 2.0**-20 * term.abs().sum(0)).all(), name


def test_beta_of_large_arguments_has_a_gradient(device):
    """bf16 beta is 1 there; its gradient comes from b."""
    module = front(device)
    proj = rows(1, 4, device=device, dtype=torch.bfloat16)
    first = HEADS.channels + HEADS.value_heads * HEADS.value_dim
    proj[..., first : first + HEADS.value_heads] = 8.0
    leaf = proj.requires_grad_()
    beta = module(leaf).beta
    assert (beta == 1).all()
    beta.sum().backward()
    want = torch.tensor(8.0, dtype=torch.float64).sigmoid() * torch.tensor(-8.0, dtype=torch.float64).sigmoid()
    got = leaf.grad[..., first : first + HEADS.value_heads].double().cpu()
    assert ((got - want).abs() <= 2.0**-8 * want).all()


def test_a_decay_of_nothing(device):
    """a_log = -inf: g = 0 and no gradient, no NaN."""
    module = front(device)
    with torch.no_grad():
        module.a_log[1] = -torch.inf
    got = everything(module, rows(1, 4, device=device))
    assert (got[5][..., 1] == 0).all()
    assert all(torch.isfinite(t).all() for t in got)


# ---- misuse ------------------------------------------------------------------------------------------------------


def test_misuse():
    module = front()
    proj = rows(2, 5)
    cu = torch.tensor([0, 5])
    bad = {
        "gdn_pre_fwd: cu_seqlens: expected": lambda: module(proj, cu_seqlens=cu),
        "gdn_pre_fwd: q: expected 168 columns, got 167": lambda: module(proj[..., :-1].contiguous()),
        r"gdn_pre: proj: expected rows \[B, S, columns\] or \[T, columns\], got \[5\]": lambda: module(torch.randn(5)),
        "gdn_pre: heads: expected .* beside rows, got None": lambda: wt.gdn_pre(proj, module.conv_weight, module.a_log),
        "gdn_pre: heads: expected them beside parts": lambda: wt.gdn_pre(
            wt.GdnSections(proj), module.conv_weight, module.a_log
        ),
        "gdn_pre: gate: expected one of copy, view, none, got 'no'": lambda: front(gate="no")(proj),
        "gdn_pre: gate: expected a section z to look at, got none": lambda: front(gate="view")(
            wt.GdnSections(*oracle.split(proj, HEADS)[:3], None, *oracle.split(proj, HEADS)[4:])
        ),
        "options: activation: expected one of silu, linear, got 'tanh'": lambda: front(
            options=wt.GdnOptions(activation="tanh")
        ),
        "gdn_pre: beta_dtype: expected torch.float32 or torch.float32, got": lambda: front(beta_dtype=torch.float16)(
            proj
        ),
        "GatedDeltaFront: heads: expected": lambda: front(heads=wt.GdnHeads(2, 3, 8, 8)),
        "gdn_pre_fwd: state: ": lambda: module(proj, state=torch.randn(2, HEADS.channels, 2)),
        r"gdn_pre_fwd: cu_seqlens\[2\]: expected 3 to 5, got 2": lambda: module(
            proj[0], cu_seqlens=torch.tensor([0, 3, 2, 5])
        ),
        "gdn_pre_step: state_index": lambda: module.step(proj, module.new_state(2), torch.tensor([0, 2])),
        "gdn_pre_fwd: options.beta_scale": lambda: front(options=wt.GdnOptions(beta_scale=0.0))(proj),
        "gdn_rule: head_map: expected one of interleaved, tiled": lambda: wt.gdn_rule(
            *module(proj)[:3], *module(proj)[4:6], head_map="other"
        ),
    }
    for message, call in bad.items():
        with pytest.raises(ValueError, match=message):
            call()
