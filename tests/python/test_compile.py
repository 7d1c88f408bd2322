# SPDX-License-Identifier: Apache-2.0
"""weft inside torch.compile, torch.export, checkpointing, autocast, CUDA graphs and saved-tensor hooks."""

import cases
import pytest
import torch
import torch._dynamo
import weft.torch as wt
from compare import same, tuple_of
from conftest import needs_gpu
from cuda_support import captured
from torch import nn
from torch.utils.checkpoint import checkpoint
from weft.torch import joins

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

C, N = 16, 4


class Mlp(nn.Module):
    def __init__(self, device="cpu", dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C, device=device), nn.Linear(2 * C, C, device=device)
        self.drop = nn.Dropout(dropout)

    def forward(self, u):
        return self.drop(self.down(torch.nn.functional.gelu(self.up(u))))


def model(device, layers=2, dropout=0.0, **options) -> nn.Module:
    torch.manual_seed(7)
    subs = [Mlp(device, dropout) for _ in range(layers)]
    return wt.HyperConnectionStack(subs, C, N, dropout=dropout, alpha_init=0.3, device=device, **options)


def step(function, params, x, seed=11) -> list:
    """Result and gradients of one training step, from a known state of the generator."""
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y = function(x)
    torch.manual_seed(99)
    grads = torch.autograd.grad(y, [x, *params], torch.randn_like(y), allow_unused=True)
    return [y, *grads]


# ---- torch.compile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.CASES)
def test_every_function_compiles(name, device):
    """In one graph, with gradients, and with the bits of eager mode."""
    case = cases.make(name, device=device)
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
    wrt = [t for t in leaves.values() if t is not None]
    compiled = torch.compile(lambda **t: tuple_of(case.function(**t)), fullgraph=True, backend="aot_eager")
    eager, traced = tuple_of(case.function(**leaves)), compiled(**leaves)
    same(traced, eager, name)
    upstream = [torch.randn_like(t) for t in eager]
    same(torch.autograd.grad(traced, wrt, upstream), torch.autograd.grad(eager, wrt, upstream), f"gradients of {name}")


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_stack_compiles(backend, rebuild, device):
    stack = model(device, layers=3, rebuild=rebuild)
    x = torch.randn(2, 5, C, device=device)
    compiled = torch.compile(stack, fullgraph=True, backend=backend)
    got, want = (step(f, stack.parameters(), x) for f in (compiled, stack))
    if backend == "aot_eager":
        same(got, want, "stack")
        return
    # Inductor writes GELU and the sums of gradients anew, in another order: fp32 roundoff of terms of the size of the
    # largest, over the few dozen operations of three layers.
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() <= 64 * 2**-24 * w.abs().max()


def test_inductor_does_not_meet_an_operator_unprepared(device, monkeypatch):
    """Before PyTorch 2.13 it would format its arguments, which takes minutes for a stack (weft/torch/inductor.py)."""
    from torch._inductor import config, graph, lowering

    met, make_fallback = [], graph.make_fallback
    monkeypatch.setattr(graph, "make_fallback", lambda op, *a, **k: (met.append(op), make_fallback(op, *a, **k)))
    for op in [op for op in lowering.lowerings if getattr(op, "namespace", None) == "weft"]:
        lowering.lowerings.pop(op)
    torch._dynamo.reset()
    torch.manual_seed(0)
    # A graph that is found in a cache is not lowered.
    with torch.device(device), config.patch(force_disable_caches=True):
        stack = torch.compile(wt.HyperConnectionStack([torch.nn.Linear(64, 64) for _ in range(4)], 64, 4))
        stack(torch.randn(2, 8, 64)).sum().backward()
    used = {op.name() for op in lowering.lowerings if getattr(op, "namespace", None) == "weft"}
    assert {"weft::mhc_boundary", "weft::mhc_boundary_bwd"} <= used
    assert not [op for op in met if op.namespace == "weft"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_stack_keeps_fewer_streams(backend, device):
    """With rebuild=True x_0, x_2 and x_4 of six layers are made again in the backward graph too."""
    counts = []
    for rebuild in (False, True):
        torch._dynamo.reset()
        stack, kept = model(device, layers=6, rebuild=rebuild), []

        def pack(t, kept=kept):
            whole = t.untyped_storage().nbytes() >= t.nbytes  # the entry's zeros are not
            kept.extend([t] if t.shape[-2:] == (N, C) and whole else [])
            return t

        compiled = torch.compile(stack, fullgraph=True, backend=backend)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            compiled(torch.randn(2, 5, C, device=device, requires_grad=True))
        counts.append(len({t.data_ptr() for t in kept}))
    assert counts == [6, 3]


def test_main_grad_falls_back_in_a_graph(device, monkeypatch):
    """A compiled graph returns its gradients, and those of the streams are summed by autograd."""
    stack = model(device, main_grad=True, expand=False)
    plain = model(device, expand=False)
    for p in stack.parameters():
        p.main_grad = torch.zeros_like(p)
    x = torch.randn(3, N, C, device=device)
    got = step(torch.compile(stack, fullgraph=True, backend="aot_eager"), stack.parameters(), x)
    monkeypatch.setattr(joins, "heir_of", lambda ctx: None)
    same(got, step(plain, plain.parameters(), x), "gradients returned")
    assert all(not p.main_grad.any() for p in stack.parameters())


def test_dropout_in_a_graph(device):
    """The step is drawn inside the graph: a new mask with each call, the same one for the same generator state."""
    stack = model(device, layers=1, dropout=0.3)
    x = torch.randn(6, C, device=device)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    first, second = step(compiled, stack.parameters(), x, seed=1), step(compiled, stack.parameters(), x, seed=2)
    same(step(compiled, stack.parameters(), x, seed=1), first, "the same seed")
    assert not torch.equal(first[0], second[0])


def test_dynamic_tokens(device):
    """One graph for any number of tokens."""
    from torch._dynamo.testing import CompileCounterWithBackend

    stack = model(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(stack, fullgraph=True, backend=counter)
    for tokens in (7, 12, 3):
        x = torch.randn(2, tokens, C, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        same(compiled(x), stack(x), f"{tokens} tokens")
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["pre_norm", "boundary_shifted", "head", "post_dropout", "project", "contract_mean"])
def test_dynamic_tokens_with_gradients(name, device):
    def run(function, case):
        leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
        for k, t in leaves.items():
            if t is not None and t.shape[:1] == (lead,) and k not in ("phi", "alpha", "beta"):
                torch._dynamo.maybe_mark_dynamic(t, 0)
        outputs = tuple_of(function(**leaves))
        torch.manual_seed(3)
        upstream = [torch.randn_like(t) for t in outputs]
        return [*outputs, *torch.autograd.grad(outputs, [t for t in leaves.values() if t is not None], upstream)]

    compiled = None
    for lead in (11, 9, 30):
        case = cases.make(name, lead=(lead,), device=device)
        compiled = compiled or torch.compile(case.function, fullgraph=True, backend="aot_eager", dynamic=True)
        same(run(compiled, case), run(case.function, case), f"{name} of {lead} tokens")


def test_grad_x_is_refused_in_a_graph(device):
    x = torch.randn(3, N, C, device=device, requires_grad=True)
    pre = torch.rand(3, N, device=device)

    def function(x):
        return wt.aggregate(x, pre, grad_x=wt.GradX())

    with pytest.raises(Exception, match="GradX: it is for eager mode; leave grad_x out under torch.compile"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(x)


# ---- torch.export --------------------------------------------------------------------------------------------------


def test_export(device):
    stack = model(device).eval()
    x = torch.randn(2, 6, C, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(stack, (x,), dynamic_shapes=({1: tokens},))
    names = {str(node.target) for node in program.graph.nodes}
    assert {f"weft.mhc_{op}.default" for op in ("boundary", "post", "contract")} <= names
    for count in (6, 9):
        x = torch.randn(2, count, C, device=device)
        same(program.module()(x), stack(x), f"{count} tokens")


def test_export_saves_and_loads(tmp_path):
    stack = model("cpu").eval()
    x = torch.randn(2, 6, C)
    torch.export.save(torch.export.export(stack, (x,)), tmp_path / "stack.pt2")
    same(torch.export.load(tmp_path / "stack.pt2").module()(x), stack(x), "loaded program")


# ---- checkpointing, offloading, autocast ---------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, dropout, device):
    """Bitwise, dropout's masks included: the step is drawn again from the restored generator."""
    stack = model(device, dropout=dropout, join=False)
    x = torch.randn(3, 4, C, device=device)

    def checkpointed(x):
        x = stack.expand(x)
        for layer in stack.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return stack.contract(x)

    want = step(stack, list(stack.parameters()), x)
    same(step_backward(checkpointed, stack, x), want, "checkpointed")
    if dropout:
        assert not torch.equal(want[0], step(stack, list(stack.parameters()), x, seed=12)[0])


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_a_stack(reentrant, rebuild, device):
    stack = model(device, layers=4, dropout=0.3, rebuild=rebuild)
    x = torch.randn(3, 4, C, device=device)
    want = step(stack, list(stack.parameters()), x)
    same(step_backward(lambda x: checkpoint(stack, x, use_reentrant=reentrant), stack, x), want, "checkpointed")


def step_backward(function, module, x) -> list:
    """As `step`, by backward(): a reentrant checkpoint knows no torch.autograd.grad."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    torch.manual_seed(11)
    y = function(x)
    torch.manual_seed(99)
    y.backward(torch.randn_like(y))
    return [y, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("rebuild", [False, True])
def test_save_on_cpu(rebuild, device):
    """Saved tensors that come back as other tensors."""
    stack = model(device, layers=3, dropout=0.3, rebuild=rebuild)
    x = torch.randn(3, C, device=device)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return stack(x)

    same(step(offloaded, stack.parameters(), x), step(stack, stack.parameters(), x), "offloaded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, device):
    """Sub-layers run in bfloat16, the streams keep their dtype, coefficients and parameters are fp32."""
    stack = model(device, contract=None)
    seen = []
    stack.layers[0].sublayer.up.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    x = torch.randn(3, C, device=device, dtype=dtype, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = stack(x)
    assert seen == [(dtype, torch.bfloat16)]
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert x.grad.dtype == dtype
    for name, p in stack.named_parameters():
        assert p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all(), name
    site = stack.layers[0].connection
    with torch.autocast(device.type, torch.bfloat16):
        same(site(stack.expand(x)), model(device).layers[0].connection(stack.expand(x)), "autocast leaves weft alone")


def test_mixed_dtypes_outside_autocast_are_refused(device):
    case = cases.make("post", device=device)
    with pytest.raises(ValueError, match="mhc_post_fwd: f: "):
        wt.post(**{**case.tensors, "f": case.tensors["f"].bfloat16()}, numerics="liger")


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


GRAPHS = {
    "joined": {},
    "dropout": {"dropout": 0.3},
    "rebuild": {"rebuild": True},
    "recompute": {"recompute": 2},
    "layer by layer": {"join": False},
    "shifted": {"shifted": True, "contract": "pre"},
    "learned": {"contract": "learned", "dropout": 0.3, "rebuild": True},
}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GRAPHS)
def test_cuda_graph_of_a_training_step(kind, dtype):
    """Replays have eager's bits, for an input that is written between them too; with dropout each has a mask of its
    own. Four layers, so that there are two of whatever a stack does in pairs."""
    device = torch.device("cuda", 0)
    stack = model(device, layers=4, **GRAPHS[kind]).to(dtype)
    x = torch.randn(5, C, device=device, dtype=dtype)

    def run():
        stack.zero_grad(set_to_none=True)
        y = stack(x)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in stack.parameters())]

    graph, result = captured(run)
    replays = []
    for again in (x.clone(), x.clone(), torch.randn_like(x)):
        x.copy_(again)
        graph.replay()
        replays.append([t.clone() for t in result])
    if stack.layers[0].dropout:
        assert not torch.equal(replays[0][0], replays[1][0]), "two replays with the same mask"
        assert all(torch.isfinite(t).all() for t in replays[2])
        return
    same(replays[1], replays[0], "second replay")
    assert not torch.equal(replays[2][0], replays[1][0]), "a replay that does not read its input"
    same(replays[2], run(), "replay and eager")
