# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in PyTorch beyond what every operator is asked (test_ops.py, test_library.py, test_compile.py): the
promises about bits, states and decoding, boundaries of sequences, accuracy, main_grad, compilers, misuse."""

import cases
import gdn_oracle as oracle
import pytest
import torch
import torch._dynamo
import weft.torch as wt
from compare import same
from conftest import needs_gpu
from torch import nn
from torch.utils.checkpoint import checkpoint

HEADS = wt.GdnHeads(2, 4, 8, 16)
PASSES = ("gdn_pre", "gdn_pre_step")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def place(device) -> torch.device:
    """A device with kernels for gdn_pre."""
    for name in PASSES:
        if not cases.on(name, device):
            pytest.skip(f"{name}: no kernels for a GPU")
    return device


def front(device="cpu", heads=HEADS, width=4, bias=True, dtype=torch.float32, **options) -> wt.GatedDeltaFront:
    torch.manual_seed(7)
    module = wt.GatedDeltaFront(heads, width, bias=bias, device=device, dtype=dtype, **options)
    with torch.no_grad():
        module.dt_bias.normal_()
    return module


def rows(*lead, device="cpu", dtype=torch.float32, heads=HEADS) -> torch.Tensor:
    return torch.randn(*lead, heads.columns).to(device, dtype)


def everything(module, proj, **arguments) -> list:
    """Results and gradients: of the projection, of the state where there is one, of the parameters."""
    leaves = [proj.detach().requires_grad_()]
    state = arguments.pop("state", None)
    if state is not None:
        leaves.append(state.detach().requires_grad_())
        arguments["state"] = leaves[1]
    out = [t for t in module(leaves[0], **arguments) if t is not None]
    torch.manual_seed(3)
    upstream = [torch.randn(t.shape, device=t.device, dtype=torch.float32).to(t.dtype) for t in out]
    return [*out, *torch.autograd.grad(out, [*leaves, *module.parameters()], upstream)]


# ---- promises, to the bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_and_packed(dtype, place):
    module = front(place)
    proj = rows(3, 37, device=place, dtype=dtype)
    dense = everything(module, proj)
    for index in (torch.int32, torch.int64):
        cu = torch.arange(4, device=place, dtype=index) * 37
        packed = everything(module, proj.flatten(0, 1), cu_seqlens=cu)
        batched = everything(module, proj.flatten(0, 1)[None], cu_seqlens=cu)
        for k, (d, p, b) in enumerate(zip(dense, packed, batched, strict=True)):
            parameter = k > 6
            same(p, d if parameter else d.flatten(0, 1), f"packed {k}")
            same(b, d if parameter else d.flatten(0, 1)[None], f"packed with a batch of one {k}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_orders(dtype, place):
    """[S, B, columns] memory as a view; results are contiguous, the gradient is laid out like the projection."""
    module = front(place)
    proj = rows(3, 11, device=place, dtype=dtype)
    plain = everything(module, proj)
    swapped = proj.transpose(0, 1).contiguous().transpose(0, 1)
    other = everything(module, swapped)
    same(other, plain, "memory (S, B, columns)")
    assert other[6].stride() == swapped.stride() and plain[6].is_contiguous()
    assert all(t.is_contiguous() for t in other[:6])


def test_sections_and_rows(place):
    """Six tensors, a few that hold several sections, or one row: the same bits; gradients with the parts' layout."""
    module = front(place)
    proj = rows(2, 9, device=place)
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
def test_pieces_of_a_sequence(slots, place):
    """With the state carried from one piece to the next, however short they are."""
    module = front(place)
    proj = rows(2, 23, device=place)
    start = torch.randn(2, HEADS.channels, slots, device=place)
    whole = module(proj, state=start, final_state=True)
    pieces, state = [], start
    for length in (1, 2, 4, 1, 0, 15):
        at = sum(p.value.shape[1] for p in pieces)
        pieces.append(module(proj[:, at : at + length], state=state, final_state=True))
        state = pieces[-1].final_state
    for k in range(6):
        same(torch.cat([p[k] for p in pieces], 1), whole[k], f"result {k}")
    same(state, whole.final_state, "the state after the last piece")


def test_gradient_through_the_state(place):
    """Two pieces, with the state between them part of the graph, have the gradients of the whole."""
    module = front(place).double() if place.type == "cpu" else front(place)
    dtype = module.conv_weight.dtype
    proj = rows(2, 9, device=place, dtype=dtype).requires_grad_()
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


def test_other_sequences_do_not_matter(place):
    module = front(place)
    a, b, c = (rows(n, device=place) for n in (5, 8, 3))

    def of_b(before, after):
        leaf = b.detach().requires_grad_()
        cu = torch.tensor([0, len(before), len(before) + 8, len(before) + 8 + len(after)], device=place)
        out = module(torch.cat([before, leaf, after]), cu_seqlens=cu)
        own = [t[len(before) : len(before) + 8] for t in out[:6]]
        torch.manual_seed(3)
        return [*own, *torch.autograd.grad(own, leaf, [torch.randn_like(t) for t in own])]

    same(of_b(a, c), of_b(c[:0], a[:1]), "among others")


# ---- boundaries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_nothing_leaks(width, place):
    """Gradients and results of one sequence know nothing of the others, exactly, whatever their lengths."""
    module = front(place, width=width)
    lengths = [0, 1, 0, width, max(1, width - 1), 2, 17, 0]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=place, dtype=torch.int32)
    total = int(cu[-1])
    proj = rows(total + 2, device=place).requires_grad_()  # two tokens of nobody
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
    kept = torch.ones(total, dtype=torch.bool, device=place)
    kept[int(cu[4]) : int(cu[5])] = False
    for got, want in zip(module(poison, cu_seqlens=cu)[:6], out[:6], strict=True):
        same(got[:total][kept], want[:total][kept], "NaN stays in its sequence")


def test_infinity_stays_in_its_window(place):
    module = front(place, width=3)
    proj = rows(1, 12, device=place)
    clean = module(proj)
    spoiled = proj.clone()
    spoiled[0, 5, :4] = torch.inf
    for got, want in zip(module(spoiled)[:6], clean[:6], strict=True):
        same(got[:, :5], want[:, :5], "before")
        same(got[:, 8:], want[:, 8:], "after")


def test_tokens_of_nobody_have_no_gradient(place):
    """Nor do they have a part in those of parameters."""
    module = front(place)
    proj = rows(9, device=place)
    cu = torch.tensor([0, 4, 6], device=place)
    got = everything(module, proj, cu_seqlens=cu)
    with torch.no_grad():
        other = proj.clone()
        other[6:] = 1e30
    spoiled = everything(module, other, cu_seqlens=cu)
    same(spoiled, got, "whatever lies behind the last offset")
    assert not got[6][6:].any()


# ---- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_have_the_bits_of_the_whole(dtype, tokens, place):
    module = front(place)
    proj = rows(3, 12, device=place, dtype=dtype)
    whole = module(proj)
    cache = torch.randn(7, HEADS.channels, 3, device=place).to(dtype)
    slots = torch.tensor([4, 0, 6], device=place)
    cache[slots] = 0
    before = cache.clone()
    pointer = cache.data_ptr()
    steps = [module.step(proj[:, t : t + tokens], cache, slots) for t in range(0, 12, tokens)]
    for k in range(6):
        same(torch.cat([s[k] for s in steps], 1), whole[k].detach(), f"result {k}")
    final = module(proj, final_state=True).final_state
    same(cache[slots], final.detach(), "the states")
    others = [1, 2, 3, 5]
    same(cache[others], before[others], "other rows")
    assert cache.data_ptr() == pointer


def test_padding_requests(place):
    """Index -1: zero results, no state touched; the other requests have their bits."""
    module = front(place)
    proj = rows(4, 1, device=place)
    cache = torch.randn(5, HEADS.channels, 3, device=place)
    alone = cache.clone()
    slots = torch.tensor([2, -1, 0, -1], device=place, dtype=torch.int32)
    before = cache.clone()
    got = module.step(proj, cache, slots)
    for t in got[:6]:
        assert not t[[1, 3]].any()
    same(cache[[1, 3, 4]], before[[1, 3, 4]], "rows of nobody")
    want = module.step(proj[[0, 2]], alone, slots[[0, 2]])
    for k in range(6):
        same(got[k][[0, 2]], want[k], f"result {k}")
    same(cache, alone, "states")


def test_steps_of_different_lengths(place):
    """Requests with 0 to 3 new tokens each, in one row with cu_seqlens."""
    module = front(place)
    lengths = (2, 0, 3, 1)
    proj = rows(sum(lengths), device=place)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=place)
    cache = torch.randn(4, HEADS.channels, 5, device=place)
    want = module(proj, cu_seqlens=cu, state=cache.clone(), final_state=True)
    got = module.step(proj, cache, cu_seqlens=cu)
    same(got[:6], [t.detach() for t in want[:6]], "results")
    same(cache, want.final_state.detach(), "states")


def test_a_step_is_seen_by_autograd(place):
    """It writes its argument: the version moves on, and a graph that kept the old contents says so."""
    module = front(place)
    cache = module.new_state(2)
    held = nn.Parameter(torch.ones_like(cache))
    product = held * cache
    version = cache._version
    module.step(rows(2, 1, device=place), cache)
    assert cache._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_step_has_no_gradient(place):
    module = front(place)
    parameters = (module.conv_weight, module.a_log, module.dt_bias, module.conv_bias)
    with pytest.raises(NotImplementedError, match="gdn_pre_step: it has no gradient: call it under torch.no_grad()"):
        wt.gdn_pre_step(rows(2, 1, device=place), *parameters, state=module.new_state(2), heads=HEADS)


def test_step_in_inference_mode(place):
    module = front(place)
    proj = rows(2, 1, device=place)
    cache, other = module.new_state(2), module.new_state(2)
    want = module.step(proj, other)
    with torch.inference_mode():
        same(module.step(proj.clone(), cache.clone())[:6], want[:6], "inference mode")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_step_compiles(backend, place):
    """In one graph, cache updated in place."""
    module = front(place)
    proj = rows(2, 3, device=place)
    slots = torch.tensor([1, -1], device=place)
    caches = [torch.randn(3, HEADS.channels, 3, generator=torch.Generator().manual_seed(5)).to(place) for _ in range(2)]
    want = module.step(proj, caches[0], slots)
    got = torch.compile(module.step, fullgraph=True, backend=backend)(proj, caches[1], slots)
    same(got[:6], want[:6], "results")
    same(caches[1], caches[0], "caches")


@needs_gpu
def test_step_in_a_cuda_graph():
    device = torch.device("cuda", 0)
    if not cases.on("gdn_pre_step", device):
        pytest.skip("gdn_pre_step: no kernels for a GPU")
    module = front(device)
    proj, slots = rows(3, 1, device=device), torch.tensor([2, -1, 0], device=device)
    cache, other = (torch.zeros(4, HEADS.channels, 3, device=device) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module.step(proj, cache.clone(), slots)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.step(proj, cache, slots)
    for _ in range(3):
        proj.normal_()
        graph.replay()
        same([t.clone() for t in out[:6]], module.step(proj, other, slots)[:6], "replay")
        same(cache, other, "states")


# ---- the gate without a copy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 5), (7,)])
def test_gate_as_a_view(lead, place):
    module, looking = front(place), front(place, gate="view")
    proj = rows(*lead, device=place)
    same(everything(looking, proj), everything(module, proj), "view and copy")
    leaf = proj.detach().requires_grad_()
    gate = looking(leaf).gate
    assert gate.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    with torch.no_grad():
        assert looking(proj).gate.untyped_storage().data_ptr() == proj.untyped_storage().data_ptr()


def test_gate_of_its_own(place):
    """z that is no part of a row goes past the operator."""
    looking = front(place, gate="view")
    six = [t.contiguous().requires_grad_() for t in oracle.split(rows(2, 5, device=place), HEADS)]
    qkv = torch.cat([t.flatten(2) for t in six[:3]], -1).detach().requires_grad_()
    for parts in (six, (qkv, None, None, *six[3:])):
        out = looking(wt.GdnSections(*parts))
        assert out.gate is parts[3]
    out.value.sum().backward()
    assert six[3].grad is None and qkv.grad is not None


def test_no_gate(place):
    module, silent = front(place), front(place, gate="none")
    proj = rows(2, 5, device=place)
    out = silent(proj)
    assert out.gate is None
    want = module(proj)
    for k in (0, 1, 2, 4, 5):
        same(out[k], want[k], f"result {k}")
    leaf = proj.detach().requires_grad_()
    silent(leaf).value.sum().backward()
    assert not leaf.grad[..., HEADS.channels :].any()


@pytest.mark.parametrize("gate", ["copy", "view", "none"])
def test_compiles_in_one_graph(gate, place):
    module = front(place, gate=gate)
    proj = rows(2, 6, device=place)
    state = torch.randn(2, HEADS.channels, 3, device=place)
    want = everything(module, proj, state=state, final_state=True)
    got = everything(torch_compiled(module), proj, state=state, final_state=True)
    same(got, want, "compiled")


def torch_compiled(module):
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled.parameters = module.parameters
    return compiled


def test_dynamic_tokens(place):
    from torch._dynamo.testing import CompileCounterWithBackend

    module = front(place)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for tokens in (7, 12, 5):
        proj = rows(tokens, device=place)
        cu = torch.tensor([0, 2, tokens], device=place)
        torch._dynamo.mark_dynamic(proj, 0)
        same(compiled(proj, cu)[:6], module(proj, cu)[:6], f"{tokens} tokens")
    assert counter.frame_count == 1


def test_export(place):
    module = front(place).eval()
    proj = rows(2, 6, device=place)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(module, (proj,), dynamic_shapes=({1: tokens},))
    assert "weft.gdn_pre.default" in {str(node.target) for node in program.graph.nodes}
    longer = rows(2, 9, device=place)
    same(program.module()(longer)[:6], module(longer)[:6], "exported")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gate", ["copy", "view"])
def test_checkpoint(reentrant, gate, place):
    module = front(place, gate=gate)
    proj = rows(2, 6, device=place)

    def run(function):
        leaf = proj.detach().requires_grad_()
        module.zero_grad()
        out = function(leaf)
        loss = sum((t.float() * k).square().sum() for k, t in enumerate(out[:6], 1))
        loss.backward()
        return [leaf.grad, *(p.grad for p in module.parameters())]

    def again(leaf):
        return checkpoint(lambda p: tuple(module(p)[:6]), leaf, use_reentrant=reentrant)

    same(run(again), run(module), "checkpointed")


# ---- main_grad ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["copy", "view"])
@pytest.mark.parametrize("flat", [False, True], ids=["[C, W]", "[C, 1, W]"])
def test_main_grad(flat, gate, place):
    """Gradients of parameters are added to main_grad in fp32; autograd gets none of them."""
    module = front(place, dtype=torch.bfloat16, gate_dtype=torch.bfloat16, main_grad=True, gate=gate)
    if flat:
        module.conv_weight = nn.Parameter(module.conv_weight.detach().unsqueeze(1))
    wide = front(place, gate=gate)
    with torch.no_grad():
        for p, w in zip(module.parameters(), sorted_like(module, wide), strict=True):
            w.copy_(p.reshape(w.shape))
    proj = rows(2, 9, device=place, dtype=torch.bfloat16)

    def backward(m):
        leaf = proj.detach().requires_grad_()
        out = m(leaf)
        torch.manual_seed(3)
        torch.autograd.backward(out[:6], [torch.randn_like(t) for t in out[:6]])
        return leaf.grad

    want = backward(wide)
    start = {}
    for name, p in module.named_parameters():
        p.main_grad = torch.randn(p.shape, device=place)
        p.grad_added_to_main_grad = False
        start[name] = p.main_grad.clone()
    same(backward(module), want, "gradient of the projection")
    for (name, p), w in zip(module.named_parameters(), sorted_like(module, wide), strict=True):
        assert p.grad_added_to_main_grad
        # One rounding of the sum beside the gradient's own.
        expected = start[name].double() + w.grad.reshape(p.shape).double()
        assert (p.main_grad.double() - expected).abs().max() <= 2 * 2**-24 * expected.abs().max() + 2**-24 * float(
            w.grad.abs().max()
        )


def sorted_like(module, other) -> list:
    by_name = dict(other.named_parameters())
    return [by_name[name] for name, _ in module.named_parameters()]


def test_main_grad_is_optional(place):
    """A parameter without one gets its gradient from autograd."""
    module, plain = front(place, main_grad=True), front(place)
    proj = rows(2, 5, device=place)
    module.a_log.main_grad = torch.zeros_like(module.a_log)
    for m in (module, plain):
        out = m(proj)
        sum(t.sum() for t in out[:6]).backward()
    assert module.a_log.grad is None
    same(module.a_log.main_grad, plain.a_log.grad, "d_a_log")
    same(module.conv_weight.grad, plain.conv_weight.grad, "d_weight")


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
def test_accuracy(heads, width, bias, options, dtype, place):
    """Against float64 on the same values: results within an ulp, gradients within the roundings of their store."""
    module = front(place, heads, width, bias, options=options, beta_dtype=torch.float32)
    lengths = [*torch.randint(1, 60, (4,)).tolist(), 0, 1]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=place)
    proj = rows(sum(lengths), device=place, dtype=dtype, heads=heads)
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
def test_parameter_gradients_are_sums_of_exact_terms(dtype, place):
    """|error| <= 2^-20 of the sum of the terms' magnitudes, over two thousand tokens. The terms are the gradients of
    parameters that every token has by itself."""
    heads = wt.GdnHeads(1, 2, 16, 16)
    module = front(place, heads)
    steps = 2048
    proj = rows(1, steps, device=place, dtype=dtype, heads=heads)
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
        torch.randn(1, *t.shape, device=place, dtype=torch.float32).to(kind)[0].double().cpu()
        for t, kind in zip(results, dtypes, strict=True)
    ]
    used = [(r, u) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    terms = torch.autograd.grad([r for r, _ in used], list(own.values()), [u for _, u in used])
    for name, grad, term in zip(own, got, terms, strict=True):
        error = (grad.double().cpu() - term.sum(0)).abs()
        assert (error <= 2.0**-20 * term.abs().sum(0)).all(), name


def test_beta_of_large_arguments_has_a_gradient(place):
    """bf16 beta is 1 there; its gradient comes from b."""
    module = front(place)
    proj = rows(1, 4, device=place, dtype=torch.bfloat16)
    first = HEADS.channels + HEADS.value_heads * HEADS.value_dim
    proj[..., first : first + HEADS.value_heads] = 8.0
    leaf = proj.requires_grad_()
    beta = module(leaf).beta
    assert (beta == 1).all()
    beta.sum().backward()
    want = torch.tensor(8.0, dtype=torch.float64).sigmoid() * torch.tensor(-8.0, dtype=torch.float64).sigmoid()
    got = leaf.grad[..., first : first + HEADS.value_heads].double().cpu()
    assert ((got - want).abs() <= 2.0**-8 * want).all()


def test_a_decay_of_nothing(place):
    """a_log = -inf: g = 0 and no gradient, no NaN."""
    module = front(place)
    with torch.no_grad():
        module.a_log[1] = -torch.inf
    got = everything(module, rows(1, 4, device=place))
    assert (got[5][..., 1] == 0).all()
    assert all(torch.isfinite(t).all() for t in got)


# ---- the rule ----------------------------------------------------------------------------------------------------


def test_rule_in_pieces(device):
    if not cases.on("gdn_rule", device):
        pytest.skip("gdn_rule: no kernels for a GPU")
    out = front(device)(rows(2, 13, device=device))
    whole, final = wt.gdn_rule(out.query, out.key, out.value, out.beta, out.g, final_state=True)
    state, parts = None, []
    for span in (slice(0, 1), slice(1, 5), slice(5, 13)):
        o, state = wt.gdn_rule(*(t[:, span] for t in (*out[:3], out.beta, out.g)), state=state, final_state=True)
        parts.append(o)
    same(torch.cat(parts, 1), whole, "pieces")
    same(state, final, "state")


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_rule_in_chunks_is_the_same_function(chunk):
    """The reference backend computes it either way; float64, 13 tokens: a few hundred roundings."""
    tensors = [t.double() for t in front()(rows(2, 13))[:6]]
    arguments = (*tensors[:3], tensors[4], tensors[5])
    want, got = wt.gdn_rule(*arguments)[0], wt.gdn_rule(*arguments, chunk=chunk)[0]
    assert (got - want).abs().max() <= 1000 * 2**-53 * want.abs().max()


def test_rule_takes_key_heads(device):
    """Query and key with their own heads, or repeated: the same bits."""
    if not cases.on("gdn_rule", device):
        pytest.skip("gdn_rule: no kernels for a GPU")
    few, many = front(device, repeat=False), front(device)
    proj = rows(2, 9, device=device)
    results = []
    for module in (few, many):
        leaf = proj.detach().requires_grad_()
        out = module(leaf)
        o, _ = wt.gdn_rule(out.query, out.key, out.value, out.beta, out.g)
        torch.manual_seed(3)
        results.append([o, *torch.autograd.grad(o, leaf, torch.randn_like(o))])
    same(results[0][0], results[1][0], "o")
    a, b = results[0][1], results[1][1]
    assert (a - b).abs().max() <= 16 * 2**-24 * b.abs().max()  # heads of a group are summed in another place


# ---- the module --------------------------------------------------------------------------------------------------


def test_module_parameters():
    module = wt.GatedDeltaFront(HEADS, 3, bias=True, dtype=torch.bfloat16)
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in module.named_parameters()}
    assert shapes == {
        "conv_weight": ((HEADS.channels, 3), torch.bfloat16),
        "conv_bias": ((HEADS.channels,), torch.bfloat16),
        "a_log": ((4,), torch.float32),
        "dt_bias": ((4,), torch.float32),
    }
    assert wt.GatedDeltaFront(HEADS).conv_bias is None
    assert HEADS.channels == 2 * 2 * 8 + 4 * 16 and HEADS.columns == HEADS.channels + 4 * 16 + 2 * 4
    step = torch.nn.functional.softplus(module.dt_bias)
    assert ((step >= 0.99e-3) & (step <= 0.101)).all()
    decay = module.a_log.exp()
    assert ((decay >= 0.99) & (decay <= 16.1)).all()
    assert "key_heads=2, value_heads=4" in repr(module)


def test_meta_device():
    with torch.device("meta"):
        module = wt.GatedDeltaFront(HEADS)
        out = module(torch.empty(2, 5, HEADS.columns))
    assert out.query.shape == (2, 5, 4, 8) and out.query.is_meta
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.isfinite(module(rows(2, 5)).value).all()


def test_state_dtype_and_slots(place):
    """fp32 states beside bf16 rows keep what they are given."""
    module = front(place)
    proj = rows(1, 2, device=place, dtype=torch.bfloat16)
    state = torch.randn(1, HEADS.channels, 5, device=place)
    final = module(proj, state=state, final_state=True).final_state
    assert final.dtype == torch.float32
    same(final[..., :3], state[..., 2:], "older slots slide")
    same(final[..., 3:].mT, proj[..., : HEADS.channels].float(), "new ones are the rows")
    one_tap = front(place, width=1)
    assert one_tap(proj, final_state=True).final_state.shape == (1, HEADS.channels, 0)
    given = wt.gdn_pre(proj, one_tap.conv_weight, one_tap.a_log, heads=HEADS, final_state=True, history=2).final_state
    same(given.mT, proj[..., : HEADS.channels], "as many slots as asked for")


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
