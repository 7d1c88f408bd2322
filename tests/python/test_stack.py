# SPDX-License-Identifier: Apache-2.0
"""A stack joins its layers: the operators it calls, results and gradients against layer by layer, what keeps layers
apart. The streams that are kept for backward are in test_stack_memory.py.

Results have the same bits joined and layer by layer. Gradients have them for fp32 streams on the CPU: a gradient of
streams that is handed from operator to operator is fp32 then, and the sums have the same order. With 16-bit streams
the operator between two layers does not round it, so only what comes before the first such operator has the same bits:
the parameters of the last layer. On a GPU the fused operator's sums may have another order."""

from collections import Counter

import pytest
import torch
import weft.torch as wt
from compare import same
from stack_support import KINDS, C, L, Mlp, N, calls_of, close, moved, stack, step
from torch import nn
from torch.nn.modules import module as torch_module
from weft.torch.unmerged import Entry


def pair_of(device, layers=L, dtype=torch.float32, **options):
    """A stack layer by layer and the same stack joined."""
    return tuple(moved(stack(device, layers, **options, join=join)).to(dtype) for join in (False, True))


# ---- joined and layer by layer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 1, 2, 5])
def test_operators_of_a_pass(layers, device):
    apart, joined = pair_of(device, layers)
    x = torch.randn(3, C, device=device)
    assert calls_of(apart, x) == Counter(expand=1, pre=layers, post=layers, contract=1)
    least = min(layers, 1)
    assert calls_of(joined, x) == Counter(expand=1 - least, boundary=layers, post=least, contract=1)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_joined_is_layer_by_layer(kind, layers, device):
    apart, joined = pair_of(device, layers, **KINDS[kind])
    assert joined.joins() == [None] * (layers - 1) and apart.joins() == ["join=False"] * (layers - 1)
    x = torch.randn(2, 3, C, device=device)
    want, got = step(apart, x), step(joined, x)
    same(got[0], want[0], "result")
    close(got[1:], want[1:], "gradients")
    assert all(g.abs().max() > 0 for g in got[1:])
    same(joined.eval()(x), apart.eval()(x), "in eval mode")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["dropout and bias", "shifted"])
@pytest.mark.parametrize("first_mix", ["uniform", "identity"])
def test_joined_in_16_bits(first_mix, kind, dtype, device):
    apart, joined = pair_of(device, dtype=dtype, first_mix=first_mix, **KINDS[kind])
    x = torch.randn(2, 3, C, device=device, dtype=dtype)
    want, got = step(apart, x), step(joined, x)
    same(got[0], want[0], "result")
    last = len(list(joined.layers[-1].parameters()))
    if device.type == "cpu":
        same(got[-last:], want[-last:], "parameters of the last layer")
    # Layer by layer rounds the streams' gradient once more in each of L-1 places, by a unit of its elements. What comes
    # after a place may double that (post is up to 2), and its own roundings then fall otherwise, by as much again: four
    # units of the largest element for each place.
    unit = torch.finfo(dtype).eps / 2
    names = ["x", *(name for name, _ in joined.named_parameters())]
    for name, g, w in zip(names, got[1:], want[1:], strict=True):
        # The gradient of alpha is a sum over all tokens. With the identity its terms cancel, so its size says nothing of theirs.
        if first_mix == "identity" and name.endswith(".alpha"):
            continue
        assert (g.float() - w.float()).abs().max() <= 4 * (L - 1) * unit * w.float().abs().max()


def test_joined_in_float64():
    """On the reference, which has a function for each operator, sums differ by roundoff."""
    apart, joined = pair_of("cpu", dtype=torch.float64)
    x = torch.randn(3, C, dtype=torch.float64)
    want, got = step(apart, x), step(joined, x)
    same(got[0], want[0], "result")
    for g, w in zip(got[1:], want[1:], strict=True):
        assert (g - w).abs().max() <= 64 * 2**-53 * w.abs().max()


def test_joined_main_grad(device):
    """The same sums as in .grad, added to what is there."""
    x = torch.randn(5, C, device=device)
    want = step(moved(stack(device, contract="learned")), x)
    for options in ({}, {"rebuild": True}, {"recompute": 2}):
        model = moved(stack(device, contract="learned", main_grad=True, **options))
        names = {n for n, _ in model.named_parameters() if "sublayer" not in n}
        for name, p in model.named_parameters():
            if name in names:
                p.main_grad = torch.zeros_like(p)
        _, d_x, *grads = step(model, x)
        close([d_x], want[1:2], "input")
        for (name, p), grad, w in zip(model.named_parameters(), grads, want[2:], strict=True):
            assert (grad is None) == (name in names)
            close([p.main_grad if grad is None else grad], [w], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_under_autocast(dtype, device):
    apart, joined = pair_of(device, dropout=0.3, pair=True, contract=None)
    x = torch.randn(3, C, device=device, dtype=dtype)
    results = []
    for model in (apart, joined, moved(stack(device, dropout=0.3, pair=True, contract=None, rebuild=True))):
        torch.manual_seed(3)
        with torch.autocast(device.type, torch.bfloat16):
            results.append(model(x))
        results[-1].float().square().sum().backward()
    same(results[1:], results[:1] * 2, "streams")


def test_arguments_reach_joined_sublayers(device):
    apart, joined = pair_of(device)
    x = torch.randn(3, C, device=device)
    same(joined(x, gain=0.5), apart(x, 0.5), "positional and keyword")


def test_frozen_layers(device):
    """Gradients of some parameters only, and none of the input."""
    x, results = torch.randn(3, C, device=device), []
    for options in ({"join": False}, {}, {"rebuild": True}, {"recompute": 2}):
        model = moved(stack(device, **options))
        for p in model.layers[1].parameters():
            p.requires_grad_(False)
        model(x).square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.requires_grad])
    for got in results[1:]:
        close(got, results[0], "gradients")


# ---- shifted ---------------------------------------------------------------------------------------------------------


def by_hand(model, x):
    """The shifted form, written out: a site's pre is used by the next one, and by the exit."""
    x = model.expand(x)
    used = torch.eye(N, device=x.device)[0].expand(x.shape[:-1]).contiguous()
    for layer in model.layers:
        site = layer.connection
        h, ms = wt.project(x, site.phi)
        pre, post, res = wt.coef(h, ms, site.alpha, site.beta, site.numerics)
        f = layer.sublayer(wt.rmsnorm(wt.aggregate(x, used), site.sub_weight, site.sub_eps))
        x, used = wt.post(x, f, post, res, numerics=site.numerics), pre
    return wt.aggregate(x, used)


def test_shifted_by_hand(device):
    apart, joined = pair_of(device, shifted=True, contract="pre")
    x = torch.randn(3, C, device=device)
    want = by_hand(joined, x)
    same(joined(x), want, "joined")
    same(apart(x), want, "layer by layer")
    assert not torch.equal(want, moved(stack(device, contract="mean"))(x))


@pytest.mark.parametrize("join", [True, False])
def test_shifted_stages(join, device):
    """Two halves that hand on (streams, pre) are the whole."""
    options = {"shifted": True, "join": join}
    whole = moved(stack(device, layers=4, contract="pre", **options))
    first = stack(device, layers=2, contract=None, **options)
    second = stack(device, layers=2, expand=False, contract="pre", **options)
    first.layers.load_state_dict(nn.ModuleList(whole.layers[:2]).state_dict())
    second.layers.load_state_dict(nn.ModuleList(whole.layers[2:]).state_dict())
    x = torch.randn(3, C, device=device)
    same(second(first(x)), whole(x), "two stages")


# ---- what keeps layers apart -----------------------------------------------------------------------------------------


class Doubling(wt.HyperConnectionLayer):
    def forward(self, x, **own):
        return 2 * super().forward(x, **own)


class Merging(wt.HyperConnection):
    def merge(self, x, f, coef, bias=None, *, dropout=0.0):
        return 2 * super().merge(x, f, coef, bias, dropout=dropout)


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **own):
        return 2 * self.layer(x, **own)


def twice(output):
    return tuple(map(twice, output)) if isinstance(output, tuple) else 2 * output


def subclass(model):
    model.layers[2].__class__ = Doubling


def merge(model):
    model.layers[2].connection.__class__ = Merging


def wrapper(model):
    model.layers[2] = Wrapped(model.layers[2])


def own_forward(model):
    forward = model.layers[2].forward
    model.layers[2].forward = lambda x, **own: 2 * forward(x, **own)


def hook(model):
    model.layers[2].register_forward_hook(lambda module, args, output: twice(output))


def hook_in_place(model):
    model.layers[2].register_forward_hook(lambda module, args, output: output.mul_(2))


def pre_hook(model):
    model.layers[2].register_forward_pre_hook(lambda module, args: twice(args))


def backward_hook(model):
    model.layers[2].register_full_backward_hook(lambda module, grads, upstream: twice(grads))


def site_hook(model):
    def change(module, args, coef):
        return coef._replace(u=2 * coef.u)

    model.layers[2].connection.register_forward_hook(change)


def site_pre_hook(model):
    model.layers[2].connection.register_forward_pre_hook(lambda module, args: (twice(args[0]), *args[1:]))


def numerics(model):
    site = model.layers[2].connection
    site.numerics = site.numerics._replace(sinkhorn_iters=2, apply="out_in")


WHOLE = [None, "layer 2 {}", "layer 2 {}", None]
APART = {
    subclass: (WHOLE, "has a forward of its own"),
    own_forward: (WHOLE, "has a forward of its own"),
    wrapper: (WHOLE, "is Wrapped, not HyperConnectionLayer"),
    hook: (WHOLE, "has hooks"),
    hook_in_place: (WHOLE, "has hooks"),
    pre_hook: (WHOLE, "has hooks"),
    backward_hook: (WHOLE, "has hooks"),
    site_hook: ([None, "connection of layer 2 {}", None, None], "has hooks"),
    site_pre_hook: ([None, "connection of layer 2 {}", None, None], "has hooks"),
    merge: ([None, None, "connection of layer 2 {}", None], "has a merge of its own"),
    numerics: ([None, "layer 2 {} 1", "layer 3 {} 2", None], "has other numerics than layer"),
}


OPTIONS = {"keep": {}, "rebuild": {"rebuild": True}, "groups of 2": {"recompute": 2}, "one group": {"recompute": L}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("change", APART, ids=lambda f: f.__name__)
def test_layers_that_stay_apart(change, options, device):
    """Whatever was put on a layer has its effect, and its neighbours are joined where they can be."""
    joins, reason = APART[change]
    apart, joined = moved(stack(device, join=False)), moved(stack(device, **options))
    x = torch.randn(3, C, device=device)
    before = step(joined, x)
    for model in (apart, joined):
        change(model)
    assert joined.joins() == [j and j.format(reason) for j in joins]
    want, got = step(apart, x), step(joined, x)
    same(got[0], want[0], "result")
    close(got[1:], want[1:], "gradients")
    assert not torch.equal(got[1], before[1]), "the change had no effect"


def test_a_hook_that_gives_another_pre_in(device):
    """Of a shifted layer; a group of recompute must not rebuild u with the stack's own."""
    found = []
    for options in ({}, {"recompute": 2}):
        model = moved(stack(device, shifted=True, join=False, **options))
        model.layers[2].connection.register_forward_pre_hook(lambda module, args: (args[0], 0.5 * args[1], *args[2:]))
        torch.manual_seed(3)
        found.append(step(model, torch.randn(3, C, device=device)))
    same(found[1][0], found[0][0], "result")
    close(found[1][1:], found[0][1:], "gradients")


def test_other_shapes_stay_apart():
    model = stack(layers=3)
    model.layers[1] = wt.HyperConnectionLayer(Mlp(), C, N + 1)
    assert model.joins() == [
        "layer 1 has other streams or channels than layer 0",
        "layer 2 has other streams or channels than layer 1",
    ]


def test_layers_that_are_compiled_by_themselves():
    model, x = moved(stack(layers=3)), torch.randn(3, C)
    want = model(x)
    model.layers[1].compile(backend="aot_eager", fullgraph=True)
    assert model.joins() == ["layer 1 is compiled by itself"] * 2
    same(model(x), want, "result")


def test_hooks_for_all_modules():
    """They see every layer."""
    model, x, seen = stack(), torch.randn(3, C), []
    handle = torch_module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        assert model.joins() == ["there are hooks for all modules"] * (L - 1)
        model(x)
    finally:
        handle.remove()
    assert all(any(layer is m for m in seen) for layer in model.layers)
    assert model.joins() == [None] * (L - 1)


def test_hooks_on_sublayers_do_not_matter(device):
    model, inputs = stack(device), []
    for layer in model.layers:
        layer.sublayer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(torch.randn(3, C, device=device))
    assert model.joins() == [None] * (L - 1) and len(inputs) == L


# ---- the entry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (2,), (3, 1, 2), (0,)])
def test_streams_of_an_entry(lead, device):
    """They lie in memory like those of `expand`, and have its bits."""
    model, x = stack(device, layers=1, contract=None), torch.randn(*lead, C, device=device)
    site, begin = model.layers[0].connection, Entry.of(x, N)
    (coef, streams), want = begin.follow(site, None), wt.expand(x, N)
    same(streams, want, "streams")
    assert streams.is_contiguous() and want.is_contiguous()
    same(list(coef), list(site(want)), "what stands in front of the first layer")


def test_an_entry_adds_nothing(device):
    """What is not finite in one place of the input stays there: zeros are not multiplied with it."""
    x = torch.randn(4, C, device=device)
    x[1, 2], x[2, 3] = torch.inf, torch.nan
    _, streams = Entry.of(x, N).follow(stack(device, layers=1).layers[0].connection, None)
    same(streams.nan_to_num(7.0, 8.0), wt.expand(x, N).nan_to_num(7.0, 8.0), "streams")


def change_entry_hook(model):
    model.expand.register_forward_hook(lambda module, args, output: 2 * output)
    return "the entry has hooks"


def change_entry(model):
    class Doubling(wt.Expand):
        def forward(self, u):
            return 2 * super().forward(u)

    model.expand = Doubling(N)
    return "the entry has a forward of its own"


def change_first_layer(model):
    model.layers[0].register_forward_pre_hook(lambda module, args: twice(args))
    return "layer 0 has hooks"


def change_first_site(model):
    model.layers[0].connection.register_forward_pre_hook(lambda module, args: (twice(args[0]), *args[1:]))
    return "connection of layer 0 has hooks"


@pytest.mark.parametrize("change", [change_entry_hook, change_entry, change_first_layer, change_first_site])
def test_an_entry_that_stays_apart(change, device):
    apart, joined = pair_of(device)
    assert joined.joins_entry() is None and apart.joins_entry() == "join=False"
    x = torch.randn(3, C, device=device)
    before = joined(x)
    change(apart)
    assert joined.joins_entry() is None
    assert change(joined) == joined.joins_entry()
    want, got = step(apart, x), step(joined, x)
    same(got[0], want[0], "result")
    close(got[1:], want[1:], "gradients")
    assert not torch.equal(got[0], before), "the change had no effect"


def test_stacks_without_an_entry():
    assert stack(expand=False).joins_entry() == "expand=False"
    assert stack(layers=0).joins_entry() == "there are no layers"
