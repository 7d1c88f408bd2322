# SPDX-License-Identifier: Apache-2.0
"""Recompute in layers and stacks: with a manager and Megatron's module, and in weft's own stack. A test with a number
has the behaviour of that number in tests/python/behaviours.md. Those that capture CUDA graphs need a GPU."""

import re
from pathlib import Path

import pytest
import torch
from conftest import needs_gpu
from cuda_support import captured
from megatron_support import config
from recompute_support import Meter, agree, gradients, leaf, managed, nbytes
from torch import nn
from weft.compat.megatron import HyperConnectionModule
from weft.torch import (
    CheckpointWithoutOutputManager,
    HyperConnectionLayer,
    HyperConnectionStack,
    aggregate,
    build_mhc_recompute_layer_plan,
    draw_step,
    finalize_mhc_recompute_layer,
    post,
)

S, B, N, C, ITERATIONS = 8, 2, 4, 64, 5


def site(device="cpu", seed=0):
    torch.manual_seed(seed)
    module = HyperConnectionModule(config(N, C, ITERATIONS), layer_number=1).to(device)
    nn.init.normal_(module.bias, std=0.5)  # streams that differ, and a mix that is not uniform
    return module


def streams(device="cpu", seed=1):
    return leaf(S, B, N * C, device=device, seed=seed)


def close(manager, hook):
    if manager is not None:
        assert manager.checkpoints
        manager.discard_all_outputs_and_register_unified_recompute(hook)


def both(build, *leaves, atol=1e-5):
    """build(manager) gives the same gradients with a manager and without."""
    want = gradients(lambda: build(None), *leaves)
    got = gradients(lambda: build(CheckpointWithoutOutputManager()), *leaves)
    assert all(g.abs().sum() > 0 for g in got)
    agree(got, want, atol)


def test_the_table_has_every_numbered_test():
    here = Path(__file__).parent
    named = re.findall(r"`(test_\d+_\w+)`", (here / "behaviours.md").read_text())
    files = [(here / name).read_text() for name in ("test_recompute.py", "test_recompute_layers.py")]
    assert sorted(named) == sorted(re.findall(r"^def (test_\d+_\w+)", "\n".join(files), re.M))


# ---- behaviours 1 to 5 and 12: the module ------------------------------------------------------------------


def test_1_forward_normal_vs_checkpoint_correctness(device):
    module, hidden, residual = site(device), streams(device), streams(device, seed=2)

    def build(manager):
        u, h_res, h_post = module(hidden, mhc_recompute_manager=manager)
        y = module.fused_h_res_h_post_bda(h_res, residual, h_post, (u, None), 0.0, True, True, manager)
        loss = y.square().mean()
        close(manager, loss)
        return loss

    both(build, hidden, residual, *module.parameters())


def test_2_apply_h_post_with_checkpoint(device):
    module, f = site(device), leaf(S, B, C, device=device)
    h_post, bias = leaf(S, B, N, device=device, seed=2), torch.ones(C, device=device)

    def build(manager):
        y, y_bias = module.apply_h_post((f, bias), h_post, manager)
        loss = (y * y + y_bias * y_bias).sum()
        close(manager, loss)
        assert manager is None or nbytes(y) == nbytes(y_bias) == 0
        return loss

    both(build, f, h_post)
    assert bias.grad is None


def test_3_forward_with_manager_parameter(device):
    module, hidden = site(device), streams(device)

    def build(manager):
        u, h_res, h_post = module(hidden, mhc_recompute_manager=manager)
        loss = u.square().mean() + h_res.square().mean() + h_post.square().mean()
        close(manager, loss)
        assert manager is None or (nbytes(u) == 0 and nbytes(h_res) > 0 and nbytes(h_post) > 0)
        return loss

    both(build, hidden, *module.parameters())


def through(modules, hidden, residual, manager, last=None):
    for i, module in enumerate(modules):
        u, h_res, h_post = module(hidden, mhc_recompute_manager=manager)
        keep = i == last
        hidden = module.fused_h_res_h_post_bda(
            h_res, residual, h_post, (u.tanh(), None), 0.0, True, True, None if keep else manager
        )
        residual = hidden
    return hidden


def test_4_multiple_hyper_connections_in_chain(device):
    modules = [site(device, seed) for seed in range(3)]
    hidden, residual = streams(device), streams(device, seed=2)

    def build(manager):
        loss = through(modules, hidden, residual, manager).square().mean()
        close(manager, loss)
        return loss

    both(build, hidden, residual, atol=1e-4)


def test_5_partial_checkpoint_last_layer_not_checkpointed(device):
    modules = [site(device, seed) for seed in range(3)]
    hidden = streams(device)

    def build(manager):
        out = through(modules, hidden, hidden, manager, last=2)
        close(manager, out)
        assert nbytes(out) > 0
        return out.square().mean()

    both(build, hidden)


def test_12_zero_iterations_are_rejected():
    with pytest.raises(ValueError, match="mhc_sinkhorn_iterations"):
        HyperConnectionModule(config(N, C, 0), layer_number=1)


# ---- behaviours 28 to 30: a transformer layer with a manager -----------------------------------------------


class Linear(nn.Module):
    """nn.Linear with its weight in the order of the product. That one saves a transposed view, which torch's offloading
    lays out anew, and on a GPU another layout of a factor means another kernel and another order of its sums."""

    def __init__(self, inputs, outputs, device="cpu"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, device=device))
        self.bias = nn.Parameter(torch.zeros(outputs, device=device))
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x):
        return x @ self.weight + self.bias


class Layer(nn.Module):
    """A transformer layer in n streams, written as Megatron's is: what can be computed again goes to the manager."""

    def __init__(self, device="cpu", seed=0):
        super().__init__()
        self.connections = nn.ModuleList([site(device, seed + i) for i in range(2)])
        self.norms = nn.ModuleList([nn.RMSNorm(C, eps=1e-6, device=device) for _ in range(2)])
        self.subs = nn.ModuleList([Linear(C, C, device) for _ in range(2)])

    def forward(self, x, manager=None, dropout=0.0):
        for i, (connection, norm, sub) in enumerate(zip(self.connections, self.norms, self.subs, strict=True)):
            u, h_res, h_post = connection(x, mhc_recompute_manager=manager)
            v = norm(u) if manager is None else managed(manager)(norm, u)
            keep = manager is None or (i == 1 and manager.is_last_layer_in_recompute_block)
            f = sub(v).tanh()
            x = connection.fused_h_res_h_post_bda(
                h_res, x, h_post, (f, sub.bias), dropout, True, True, None if keep else manager
            )
        return x


def layers_through(layers, x, manager, last, dropout=0.0):
    for i, layer in enumerate(layers):
        if manager is not None:
            manager.is_last_layer_in_recompute_block = i == last
        x = layer(x, manager, dropout)
    return x


def test_28_forward_with_hyper_connection_recompute(device):
    layer, x = Layer(device), streams(device)

    def build(manager):
        out = layers_through([layer], x, manager, last=0)
        assert out.shape == (S, B, N * C)
        close(manager, out)
        assert nbytes(out) > 0 and (manager is None or len(manager.checkpoints) == 5)
        return out.square().mean()

    both(build, x, *layer.parameters())
    assert x.grad.shape == x.shape


def test_29_intermediate_layer_with_recompute(device):
    layer, x = Layer(device), streams(device)

    def build(manager):
        out = layers_through([layer], x, manager, last=None)
        loss = out.square().mean()
        close(manager, loss)
        assert manager is None or (len(manager.checkpoints) == 6 and nbytes(out) == 0)
        return loss

    both(build, x, *layer.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_30_multiple_layers_chain_with_recompute(device, dropout):
    layers, x = [Layer(device, seed) for seed in range(3)], streams(device)

    def build(manager):
        torch.manual_seed(9)
        out = layers_through(layers, x, manager, last=2, dropout=dropout)
        close(manager, out)
        return out.square().mean()

    both(build, x, *(p for layer in layers for p in layer.parameters()))


def test_merge_with_a_step_from_outside(device):
    # The step of the dropout is an argument, so nothing is drawn inside the operation that runs twice.
    x, pre, f = leaf(6, N, C, device=device), leaf(6, N, device=device, seed=1), leaf(6, C, device=device, seed=2)
    h_post, h_res = leaf(6, N, device=device, seed=3), leaf(6, N, N, device=device, seed=4)

    def build(manager):
        run = managed(manager) if manager else lambda fn, *args: fn(*args)
        torch.manual_seed(3)
        u = run(aggregate, x, pre)

        def merge(x, f, h_post, h_res, step):
            return post(x, f, h_post, h_res, numerics="megatron_main", dropout=0.3, dropout_step=step)

        y = run(merge, x, f * u.tanh(), h_post, h_res, draw_step(x))
        loss = (y * y).sum()
        close(manager, loss)
        assert manager is None or all(c._operation.random is None for c in manager.checkpoints)
        return loss

    both(build, x, pre, f, h_post, h_res, atol=1e-4)


# ---- behaviours 26, 27, 33, 41, 42: weft's stack -----------------------------------------------------------


def mlp(device, c=C):
    return nn.Sequential(Linear(c, 2 * c, device), nn.GELU(), Linear(2 * c, c, device))


def stack(device="cpu", layers=4, c=C, **options):
    torch.manual_seed(0)
    return HyperConnectionStack([mlp(device, c) for _ in range(2 * layers)], c, N, device=device, **options)


def test_26_recompute_enablement_initialized():
    assert stack(layers=1).recompute is None
    model = stack(layers=1, recompute=2)
    assert model.recompute == 2
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="recompute"):
            stack(layers=1, recompute=wrong)
    x = leaf(S, B, C)
    sizes = []
    for layer in model.layers:
        layer.sublayer.register_forward_pre_hook(lambda _, args: sizes.append(args[0].untyped_storage()))
    model(x)
    assert [s.nbytes() for s in sizes] == [0, 0]  # in training the inputs of sub-layers are gone after forward
    sizes.clear()
    model.eval()(x)
    assert all(s.nbytes() > 0 for s in sizes)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_27_block_forward_input_expand_output_contract(device, dropout):
    x = leaf(S, B, C, device=device)
    results = []
    for recompute in (None, 2, 3):
        model = stack(device, recompute=recompute, dropout=dropout)
        torch.manual_seed(5)
        x.grad = None
        y = model(x)
        assert y.shape == x.shape
        y.square().sum().backward()
        assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for got in results[1:]:
        agree(got, results[0], atol=0)


def peak_of(step, leaves):
    """Bytes at the peak of step(), without those of leaves and their gradients."""
    step()  # after which the gradients are there
    if leaves[0].is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with Meter(but=[*leaves, *(t.grad for t in leaves)]) as meter:
        step()
    return meter.peak


def test_33_recompute_reduces_peak_memory(device):
    # Eight layers in groups of two: weft's stack, and layers with managers.
    s, b, c, layers = 64 if device.type == "cuda" else 16, 4, 128, 8
    x, peaks = leaf(s, b, c, device=device), []
    for recompute in (None, 4):
        model = stack(device, layers=layers, c=c, recompute=recompute)
        peaks.append(peak_of(lambda model=model: model(x).sum().backward(), [x, *model.parameters()]))
    assert peaks[1] < peaks[0]

    blocks, hidden = nn.ModuleList([Layer(device, seed) for seed in range(layers)]), leaf(s, b, N * C, device=device)

    def step(use):
        managers, ends = build_mhc_recompute_layer_plan(layers, 2, use)
        y = hidden
        for layer, manager, end in zip(blocks, managers, ends, strict=True):
            if manager is not None:
                manager.is_last_layer_in_recompute_block = end
            y = layer(y, manager)
            finalize_mhc_recompute_layer(manager, y, end)
        y.sum().backward()

    leaves = [hidden, *blocks.parameters()]
    assert peak_of(lambda: step(True), leaves) < peak_of(lambda: step(False), leaves)


def offloading(device):
    """What is saved goes to the host; on the CPU, where it lies there already, to a copy."""
    if device.type == "cuda":
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().contiguous().clone(), lambda t: t)


@pytest.mark.parametrize("recompute", [None, 2])
def test_41_forward_backward_with_offloading(device, recompute):
    x, model = leaf(S, B, C, device=device), stack(device, recompute=recompute)
    with offloading(device):
        y = model(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


@pytest.mark.parametrize("recompute", [None, 2])
def test_42_offloading_numerical_equivalence(device, recompute):
    x, model = leaf(S, B, C, device=device), stack(device, recompute=recompute)
    leaves = [x, *model.parameters()]
    want = gradients(lambda: model(x).square().sum(), *leaves)
    with offloading(device):
        agree(gradients(lambda: model(x).square().sum(), *leaves), want, atol=0)

    layer, hidden = Layer(device), streams(device)

    def build():
        manager = CheckpointWithoutOutputManager()
        out = layers_through([layer], hidden, manager, last=0)
        close(manager, out)
        return out.square().mean()

    leaves = [hidden, *layer.parameters()]
    want = gradients(build, *leaves)
    with offloading(device):
        agree(gradients(build, *leaves), want, atol=0)


def test_no_tokens(device):
    model = stack(device, layers=2, recompute=2)
    x = leaf(0, B, C, device=device)
    model(x).sum().backward()
    assert x.grad.shape == x.shape and model.layers[0].connection.phi.grad is not None
    layer, hidden, manager = Layer(device), leaf(0, B, N * C, device=device), CheckpointWithoutOutputManager()
    out = layers_through([layer], hidden, manager, last=0)
    close(manager, out)
    out.sum().backward()
    assert hidden.grad.shape == hidden.shape and layer.connections[0].mapping_proj.weight.grad is not None


# ---- behaviours 36 to 38: CUDA graphs ----------------------------------------------------------------------


@needs_gpu
def test_36_forward_through_cuda_graph_capture_path():
    layer = HyperConnectionLayer(mlp("cuda"), C, N, device="cuda").eval()
    x = torch.randn(S, B, N, C, device="cuda")
    with torch.no_grad():
        graph, y = captured(lambda: layer(x))
        graph.replay()
        assert y.shape == (S, B, N, C)
        agree([y], [layer(x)], atol=0)


def check_captured_training(model, x, run):
    """run() is a forward and backward of model on x that returns the output; captured, it equals itself in eager."""
    leaves = [x, *model.parameters()]

    def step():
        for t in leaves:
            t.grad = None
        return run().detach()

    graph, output = captured(step)
    grads = [t.grad for t in leaves]  # of the capture: every replay writes them
    for seed in (11, 12, 13):
        fresh = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
        with torch.no_grad():
            x.copy_(fresh)
        graph.replay()
        got = [output.clone(), *(g.clone() for g in grads)]
        want = [step(), *(t.grad for t in leaves)]
        assert all(g.abs().sum() > 0 for g in got)
        agree(got, want, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("recompute", [None, 2])
def test_37_cuda_graph_fwd_bwd_with_hyper_connection(recompute):
    model, x = stack("cuda", layers=2, recompute=recompute), leaf(S, B, C, device="cuda")

    def run():
        y = model(x)
        y.square().mean().backward()
        return y

    check_captured_training(model, x, run)


@needs_gpu
@pytest.mark.usefixtures("way")
def test_38_cuda_graph_fwd_bwd_with_hyper_connection_and_recompute():
    layers, x = nn.ModuleList([Layer("cuda", seed) for seed in range(2)]), streams("cuda")

    def run():
        manager = CheckpointWithoutOutputManager()
        y = layers_through(layers, x, manager, last=1)
        close(manager, y)
        y.square().mean().backward()
        return y

    check_captured_training(layers, x, run)


@needs_gpu
def test_dropout_in_a_captured_stack():
    # Masks differ from replay to replay, and each is the same in the forward and the recompute of one step.
    x = leaf(S, B, C, device="cuda")
    model = stack("cuda", layers=2, recompute=2, dropout=0.3)

    def run():
        x.grad = None
        y = model(x)
        y.sum().backward()
        return y.detach()

    graph, y = captured(run)
    grad, seen = x.grad, []
    for _ in range(3):
        graph.replay()
        seen.append((y.clone(), grad.clone()))
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][1], seen[2][1])
