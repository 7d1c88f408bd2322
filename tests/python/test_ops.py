# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of every function against plain torch expressions (oracle.py), in the bounds of compare.py."""

import inspect

import cases
import oracle
import pytest
import torch
import weft
import weft.torch as wt
from cases import DTYPES, short
from compare import check, grads_of, same, tuple_of
from weft.torch import functional as F
from weft.torch import gdn
from weft.torch.numerics import SINKHORN_RULES

VARIANTS = {
    "one stream": {"n": 1},
    "two streams, one token": {"n": 2, "c": 8, "lead": ()},
    "three streams, odd C": {"n": 3, "c": 7, "lead": (5,)},
    "four streams": {"n": 4, "c": 32},
    "eight streams, odd C": {"n": 8, "c": 17, "lead": (3,)},
    "one channel": {"n": 4, "c": 1},
    "no tokens": {"n": 4, "lead": (2, 0)},
    "(C, n) memory": {"n": 4, "c": 9, "swapped": True},
    "flat weights": {"n": 3, "c": 6, "flat": True},
    "no optionals": {"n": 4, "c": 6, "optional": False},
    "no residual mix": {"n": 4, "c": 32, "mixed": False},
    "no residual mix, two streams, (C, n) memory": {"n": 2, "c": 32, "swapped": True, "mixed": False},
    "no residual mix, twelve streams, (C, n) memory": {"n": 12, "c": 9, "swapped": True, "mixed": False},
    "16-bit parameters": {"n": 2, "c": 6, "param_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", cases.CASES)
def test_results_and_gradients(name, dtype, variant, device):
    if dtype == torch.float64 and "param_dtype" in VARIANTS[variant]:
        pytest.skip("the reference takes float64 throughout")
    case = cases.make(name, dtype=dtype, device=device, **VARIANTS[variant])
    check(case.function, case.expression, case.tensors, coarse=case.coarse)


def test_every_function_has_a_case():
    functions = {
        k
        for module in (F, gdn)
        for k, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and k[0] != "_"
    }
    tested = {name for name in functions if any(f"{case}_".startswith(f"{name}_") for case in cases.CASES)}
    assert functions - tested == {"draw_step", "replay", "gdn_pre_step", "gdn_rule_step"}, (
        "these have tests of their own"
    )


@pytest.mark.parametrize("preset", weft.presets())
@pytest.mark.parametrize("name", ["coef", "post", "pre_norm", "boundary_norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=short)
def test_presets(name, preset, dtype, device):
    case = cases.make(name, dtype=dtype, device=device, numerics=preset, lead=(3,))
    check(case.function, case.expression, case.tensors)


def test_presets_differ_where_they_should():
    """Otherwise a preset that is ignored would pass."""
    assert len({wt.Numerics.preset(name) for name in weft.presets()}) == len(weft.presets())
    for name in weft.presets():
        assert wt.Numerics.preset(name).packed() == F.pack(name) == F.pack(wt.Numerics.preset(name))


@pytest.mark.parametrize("iters", [1, 20])
@pytest.mark.parametrize("rule", SINKHORN_RULES)
@pytest.mark.parametrize("name", ["sinkhorn", "coef"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=short)
def test_sinkhorn_rules(name, rule, iters, dtype, device):
    """With an eps that is large enough for the rules to part."""
    numerics = cases.SHORT._replace(sinkhorn=rule, sinkhorn_eps=0.05, sinkhorn_iters=iters)
    for n in (2, 4, 5):
        case = cases.make(name, n=n, dtype=dtype, device=device, numerics=numerics)
        check(case.function, case.expression, case.tensors)


def test_sinkhorn_rules_differ():
    logits = 2 * torch.randn(3, 4, 4)
    numerics = cases.SHORT._replace(sinkhorn_eps=0.6, sinkhorn_iters=2)
    results = [wt.sinkhorn(logits, numerics._replace(sinkhorn=rule)) for rule in SINKHORN_RULES]
    for k, a in enumerate(results):
        for b in results[k + 1 :]:
            assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["inside", "outside"])
def test_every_field_of_numerics_counts(kind, device):
    numerics = wt.Numerics(0.3, kind, 0.2, 1.7, "add", 0.1, 3, "out_in")
    for name in ("coef", "boundary"):
        case = cases.make(name, device=device, numerics=numerics)
        check(case.function, case.expression, case.tensors)


@pytest.mark.parametrize("kind", ["inside", "outside"])
def test_head_eps_kinds(kind, device):
    case = cases.make("head", device=device)
    options = {"rms_eps": 0.4, "rms_eps_kind": kind, "pre_eps": 0.1}
    check(lambda **t: F.head(**t, **options), lambda **t: oracle.head(**t, **options), case.tensors)


@pytest.mark.parametrize("name", cases.CASES)
def test_partial_requires_grad(name, device):
    """Gradients that nobody wants change nothing about the others, and are not computed into anything."""
    case = cases.make(name, device=device)
    floating = [k for k, t in case.tensors.items() if t is not None]

    def gradients(wrt):
        leaves = {k: t.detach().requires_grad_() if k in wrt else t for k, t in case.tensors.items()}
        outputs = tuple_of(case.function(**leaves))
        torch.manual_seed(5)
        upstream = tuple(torch.randn_like(t) for t in outputs)
        return dict(zip(wrt, grads_of(outputs, upstream, [leaves[k] for k in wrt]), strict=True))

    together = gradients(floating)
    for one in floating:
        check(case.function, case.expression, case.tensors, wrt=[one], coarse=case.coarse)
        if device.type == "cpu":  # on CUDA a composite may take another path for fewer gradients
            same(gradients([one])[one], together[one], f"d_{one} alone")


@pytest.mark.parametrize("name", ["project", "scale", "coef", "pre", "pre_norm", "boundary", "boundary_shifted"])
def test_one_result_in_the_loss(name, device):
    """The gradients of all other results are absent and count as zero."""
    case = cases.make(name, device=device)
    count = len(tuple_of(case.function(**case.tensors)))
    for k in range(count):
        check(
            lambda _k=k, **t: tuple_of(case.function(**t))[_k],
            lambda _k=k, **t: tuple_of(case.expression(**t))[_k],
            case.tensors,
            coarse=case.coarse,
        )


@pytest.mark.parametrize("name", cases.CASES)
def test_upstream_gradients_of_any_layout(name, device):
    """Expanded and transposed gradients, as sums and views leave them."""
    case = cases.make(name, device=device)
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
    wrt = [t for t in leaves.values() if t is not None]
    outputs = tuple_of(case.function(**leaves))
    for odd in (
        [torch.ones((), device=device).expand(t.shape) for t in outputs],
        [torch.randn(t.shape[::-1], device=device).permute(*reversed(range(t.dim()))) for t in outputs],
        [torch.randn(*t.shape, 2, device=device)[..., 1] for t in outputs],
    ):
        got, want = (
            torch.autograd.grad(outputs, wrt, [c(g) for g in odd], retain_graph=True)
            for c in (lambda g: g, torch.Tensor.contiguous)
        )
        same(got, want, name)


@pytest.mark.parametrize("name", [k for k, f in cases.CASES.items() if k not in ("expand", "rmsnorm", "sinkhorn")])
def test_swapped_memory(name, device):
    """(C, n) memory as a view: results and gradients shaped like x are laid out like x, and have the same values."""
    case = cases.make(name, c=16, device=device)
    if "x" not in case.tensors:
        pytest.skip("no streams")
    swapped = {**case.tensors, "x": case.tensors["x"].mT.contiguous().mT}
    results = []
    for tensors in (case.tensors, swapped):
        leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in tensors.items()}
        outputs = tuple_of(case.function(**leaves))
        torch.manual_seed(5)
        upstream = [torch.randn(t.shape, device=device) for t in outputs]
        grads = torch.autograd.grad(outputs, [t for t in leaves.values() if t is not None], upstream)
        for t in (*outputs, *grads):
            if t.shape == leaves["x"].shape:
                assert t.stride() == leaves["x"].stride()
        results.append((*outputs, *grads))
    if device.type == "cpu":  # on CUDA a sum over channels may have other bits in another layout
        same(results[1], results[0], name)


@pytest.mark.parametrize("name", cases.CASES)
def test_gradcheck(name):
    case = cases.make(name, n=2, c=3, lead=(2,), dtype=torch.float64)
    names = [k for k, t in case.tensors.items() if t is not None]
    leaves = [case.tensors[k].detach().requires_grad_() for k in names]
    absent = {k: None for k, t in case.tensors.items() if t is None}
    assert torch.autograd.gradcheck(
        lambda *args: tuple_of(case.function(**dict(zip(names, args, strict=True)), **absent)), leaves
    )


def test_tf32_is_a_permission(device):
    """Factors of 11 bits at the worst, for whoever makes use of it."""
    case = cases.make("project", c=32, device=device)
    names = ("x", "phi", "norm_weight")
    check(
        lambda **t: F.project(**t, precision="tf32"),
        case.expression,
        case.tensors,
        coarse=names,
        coarse_unit=2.0**-11 if device.type == "cuda" else 2.0**-24,
    )


# ---- dropout -----------------------------------------------------------------------------------------------------


def test_drawn_steps_follow_the_generator(device):
    x = torch.randn(2, 4, 6, device=device)
    torch.manual_seed(3)
    first, second = wt.draw_step(x), wt.draw_step(x)
    torch.manual_seed(3)
    assert torch.equal(first, wt.draw_step(x))
    assert first.dtype == torch.int64 and first.shape == (1,) and first.device == x.device
    assert not torch.equal(first, second)


def test_dropout_is_drawn_unless_given(device):
    case = cases.make("post", n=4, c=64, lead=(50,), device=device)

    def call(**options):
        return F.post(**case.tensors, numerics=cases.SHORT, **options)

    plain = call()
    torch.manual_seed(3)
    drawn, again = call(dropout=0.3), call(dropout=0.3)
    torch.manual_seed(3)
    same(call(dropout=0.3), drawn, "the same generator state")
    torch.manual_seed(3)
    same(call(dropout=0.3, dropout_step=wt.draw_step(plain)), drawn, "the step drawn by hand")
    assert not torch.equal(drawn, again) and not torch.equal(drawn, plain)
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    same(call(dropout=0.3, training=False), plain, "training=False")
    same(call(dropout=0.0), plain, "p = 0")
    now = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    assert torch.equal(now, state), "a call without dropout drew a step"


def test_shards_share_a_step(device):
    """token_base: two halves of a sequence draw what the whole one does."""
    case = cases.make("post", lead=(10,), device=device)
    step = torch.tensor([42], device=device)
    options = {"numerics": cases.SHORT, "dropout": 0.3, "dropout_step": step}
    whole = F.post(**case.tensors, **options)
    for part, base in ((slice(0, 4), 0), (slice(4, 10), 4)):
        tensors = {k: t if k == "bias" else t[part] for k, t in case.tensors.items()}
        same(F.post(**tensors, **options, token_base=base), whole[part], f"tokens from {base}")


# ---- replay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("sub_norm", [False, True])
def test_replay_has_the_bits_of_the_chain(dtype, swapped, sub_norm, device):
    m = cases.Maker(4, 12, (2, 3), dtype, device, swapped=swapped)
    x, layers, chain = m.streams(), [], []
    stream = x
    for k in range(3):
        layer = wt.ReplayLayer(
            pre=m.per_token(4),
            f=m.row(),
            post=m.per_token(4),
            res=m.per_token(4, 4),
            bias=m.param(12) if k else None,
            sub_weight=m.gain(12) if sub_norm else None,
            sub_norm=sub_norm,
            sub_eps=1e-4,
            want_u=k != 1,
            want_y=k != 0,
            dropout=0.3 if k == 2 else 0.0,
            dropout_step=torch.tensor([11], device=device) if k == 2 else None,
            token_base=5,
        )
        u = F.aggregate(stream, layer.pre)
        u = F.rmsnorm(u, layer.sub_weight, layer.sub_eps) if sub_norm else u
        dropout = {"dropout": layer.dropout, "dropout_step": layer.dropout_step, "token_base": 5}
        stream = F.post(stream, layer.f, layer.post, layer.res, layer.bias, numerics="liger", **dropout)
        chain.append((u if layer.want_u else None, stream if layer.want_y else None))
        layers.append(layer)
    got = wt.replay(x, layers, "liger")
    same(got, chain, "replay")
    assert all(y is None or y.stride() == x.stride() for _, y in got)


def test_replay_of_nothing(device):
    with pytest.raises(ValueError, match="mhc_replay_fwd: num_layers: expected 1 to 4096, got 0"):
        wt.replay(torch.randn(2, 4, 6, device=device), [], "liger")


@pytest.mark.parametrize("name", ["pre", "pre_norm", "boundary", "boundary_norm", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_a_token_alone_has_the_bits_it_has_among_others(name, dtype, device):
    """However its dimensions are written: a dimension of one has any stride."""
    tokens = 5
    case = cases.make(name, dtype=dtype, device=device, n=4, c=256, lead=(tokens,))
    among = tuple_of(case.function(**case.tensors))

    def of_first(lead):
        return {
            k: t[0].expand(*lead, *t.shape[1:]) if t is not None and t.shape[0] == tokens else t
            for k, t in case.tensors.items()
        }

    for lead in ((), (1,), (1, 1)):
        alone = tuple_of(case.function(**of_first(lead)))
        for i, (one, all_of_them) in enumerate(zip(alone, among, strict=True)):
            same(one, all_of_them[0].expand(one.shape), f"result {i}, leading dimensions {lead}")
