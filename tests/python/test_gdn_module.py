# SPDX-License-Identifier: Apache-2.0
"""GatedDeltaFront, the module around gdn_pre: parameters, the gate without a copy, compilers, main_grad."""

import gdn_oracle as oracle
import pytest
import torch
import torch._dynamo
import weft.torch as wt
from compare import same
from gdn_support import HEADS, everything, front, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# ---- parameters --------------------------------------------------------------------------------------------------


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


# ---- the gate without a copy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 5), (7,)])
def test_gate_as_a_view(lead, device):
    module, looking = front(device), front(device, gate="view")
    proj = rows(*lead, device=device)
    same(everything(looking, proj), everything(module, proj), "view and copy")
    leaf = proj.detach().requires_grad_()
    gate = looking(leaf).gate
    assert gate.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    with torch.no_grad():
        assert looking(proj).gate.untyped_storage().data_ptr() == proj.untyped_storage().data_ptr()


def test_gate_of_its_own(device):
    """z that is no part of a row goes past the operator."""
    looking = front(device, gate="view")
    six = [t.contiguous().requires_grad_() for t in oracle.split(rows(2, 5, device=device), HEADS)]
    qkv = torch.cat([t.flatten(2) for t in six[:3]], -1).detach().requires_grad_()
    for parts in (six, (qkv, None, None, *six[3:])):
        out = looking(wt.GdnSections(*parts))
        assert out.gate is parts[3]
    out.value.sum().backward()
    assert six[3].grad is None and qkv.grad is not None


def test_no_gate(device):
    module, silent = front(device), front(device, gate="none")
    proj = rows(2, 5, device=device)
    out = silent(proj)
    assert out.gate is None
    want = module(proj)
    for k in (0, 1, 2, 4, 5):
        same(out[k], want[k], f"result {k}")
    leaf = proj.detach().requires_grad_()
    silent(leaf).value.sum().backward()
    assert not leaf.grad[..., HEADS.channels :].any()


# ---- compilers and checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["copy", "view", "none"])
def test_compiles_in_one_graph(gate, device):
    module = front(device, gate=gate)
    proj = rows(2, 6, device=device)
    state = torch.randn(2, HEADS.channels, 3, device=device)
    want = everything(module, proj, state=state, final_state=True)
    got = everything(torch_compiled(module), proj, state=state, final_state=True)
    same(got, want, "compiled")


def torch_compiled(module):
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled.parameters = module.parameters
    return compiled


def test_dynamic_tokens(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    module = front(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for tokens in (7, 12, 5):
        proj = rows(tokens, device=device)
        cu = torch.tensor([0, 2, tokens], device=device)
        torch._dynamo.mark_dynamic(proj, 0)
        same(compiled(proj, cu)[:6], module(proj, cu)[:6], f"{tokens} tokens")
    assert counter.frame_count == 1


def test_export(device):
    module = front(device).eval()
    proj = rows(2, 6, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(module, (proj,), dynamic_shapes=({1: tokens},))
    assert "weft.gdn_pre.default" in {str(node.target) for node in program.graph.nodes}
    longer = rows(2, 9, device=device)
    same(program.module()(longer)[:6], module(longer)[:6], "exported")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gate", ["copy", "view"])
def test_checkpoint(reentrant, gate, device):
    module = front(device, gate=gate)
    proj = rows(2, 6, device=device)

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
def test_main_grad(flat, gate, device):
    """Gradients of parameters are added to main_grad in fp32; autograd gets none of them."""
    module = front(device, dtype=torch.bfloat16, gate_dtype=torch.bfloat16, main_grad=True, gate=gate)
    if flat:
        module.conv_weight = nn.Parameter(module.conv_weight.detach().unsqueeze(1))
    wide = front(device, gate=gate)
    with torch.no_grad():
        for p, w in zip(module.parameters(), sorted_like(module, wide), strict=True):
            w.copy_(p.reshape(w.shape))
    proj = rows(2, 9, device=device, dtype=torch.bfloat16)

    def backward(m):
        leaf = proj.detach().requires_grad_()
        out = m(leaf)
        torch.manual_seed(3)
        torch.autograd.backward(out[:6], [torch.randn_like(t) for t in out[:6]])
        return leaf.grad

    want = backward(wide)
    start = {}
    for name, p in module.named_parameters():
        p.main_grad = torch.randn(p.shape, device=device)
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


def test_main_grad_is_optional(device):
    """A parameter without one gets its gradient from autograd."""
    module, plain = front(device, main_grad=True), front(device)
    proj = rows(2, 5, device=device)
    module.a_log.main_grad = torch.zeros_like(module.a_log)
    for m in (module, plain):
        out = m(proj)
        sum(t.sum() for t in out[:6]).backward()
    assert module.a_log.grad is None
    same(module.a_log.main_grad, plain.a_log.grad, "d_a_log")
    same(module.conv_weight.grad, plain.conv_weight.grad, "d_weight")
