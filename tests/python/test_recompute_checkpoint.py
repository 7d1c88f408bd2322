# SPDX-License-Identifier: Apache-2.0
"""Recompute inside torch.utils.checkpoint, and checkpoints inside recompute: results and gradients have the bits of the
same model without them. A checkpoint that is not reentrant runs forward again and takes the tensors which that run
saves, so nothing may wait there for a gradient to be rebuilt."""

import gc
from functools import partial

import pytest
import torch
from compare import same
from recompute_support import managed
from stack_support import KINDS, C, stack, step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from weft.torch import CheckpointWithoutOutput, CheckpointWithoutOutputManager, rmsnorm

MODES = {
    "groups of 1": {"recompute": 1},
    "groups of 2": {"recompute": 2},
    "one group": {"recompute": 7},
    "layer by layer": {"recompute": 2, "join": False},
    "rebuild": {"rebuild": True},
}


def early(stop):
    def run(function, *args, **kwargs):
        with set_checkpoint_early_stop(stop):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    return run


WAYS = {"reentrant": partial(checkpoint, use_reentrant=True), "early stop": early(True), "to the end": early(False)}
NOT_REENTRANT = ["early stop", "to the end"]


@pytest.fixture
def x(device):
    return torch.randn(3, 4, C, device=device)


class Through(nn.Module):
    """A model by way of a function that runs it."""

    def __init__(self, model, function):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x):
        return self.function(x)


def check(model, x, function, what="checkpointed") -> None:
    """function(x), which runs the model, gives what the model gives."""
    want = step(model, x)
    assert all(g.abs().sum() > 0 for g in want[:2])
    same(step(Through(model, function), x), want, what)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dropout and bias", "norm weight", "shifted"])
def test_a_stack_in_a_checkpoint(kind, mode, way, x, device):
    """Masks of dropout, the sub-layers' own too, are drawn again from the restored generator."""
    model = stack(device, **KINDS[kind], **MODES[mode])
    check(model, x, partial(WAYS[way], model))
    plain = stack(device, **KINDS[kind], join=MODES[mode].get("join", True))
    same(step(model, x), step(plain, x), "the model without recompute")


@pytest.mark.parametrize("way", WAYS)
def test_without_the_random_state(way, x, device):
    model = stack(device, recompute=2)
    check(model, x, partial(WAYS[way], model, preserve_rng_state=False))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(mode, way, x, device):
    model = stack(device, dropout=0.3, **MODES[mode])

    def run(function):
        def cast(x):
            with torch.autocast(device.type, torch.bfloat16):
                return function(x)

        return cast

    forward = model.forward
    model.forward = run(forward)
    plain = step(model, x)
    model.forward = forward
    assert not torch.equal(plain[0], step(model, x)[0])  # autocast has an effect
    model.forward = run(partial(WAYS[way], forward))
    same(step(model, x), plain, "checkpointed")


@pytest.mark.parametrize("inner", WAYS)
@pytest.mark.parametrize("outer", NOT_REENTRANT)
def test_nested_checkpoints(outer, inner, x, device):
    """Two stacks, each in a checkpoint of its own, both in one."""
    model = nn.Sequential(*(stack(device, layers=4, dropout=0.3, recompute=2) for _ in range(2)))

    def halves(x):
        for half in model:
            x = WAYS[inner](half, x)
        return x

    check(model, x, partial(WAYS[outer], halves))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outer", [None, *NOT_REENTRANT])
@pytest.mark.parametrize("mode", MODES)
def test_sublayers_in_checkpoints(mode, outer, way, x, device):
    pair = way != "reentrant"  # which cannot return a parameter
    model = stack(device, dropout=0.3, pair=pair, **MODES[mode])
    want = step(model, x)
    for layer in model.layers:
        layer.sublayer.forward = partial(WAYS[way], layer.sublayer.forward)
    same(step(model, x), want, "sub-layers")
    if outer:
        check(model, x, partial(WAYS[outer], model), "sub-layers and the stack")


@pytest.mark.parametrize("chosen", [(1, 2), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_layers_in_checkpoints(mode, chosen, x, device):
    """Such a layer is called as a module, and told of the group that it is in."""
    model = stack(device, dropout=0.3, **MODES[mode])
    want = step(model, x)
    for k in chosen:
        model.layers[k] = checkpoint_wrapper(model.layers[k])
    assert sum(reason is not None for reason in model.joins()) >= len(chosen) - 1
    same(step(model, x), want, "layers")


def test_a_selective_checkpoint(x, device):
    """The outputs of weft's operators are kept, and handed out when forward runs again."""
    model, kept = stack(device, dropout=0.3, recompute=2), []

    def policy(context, op, *args, **kwargs):
        if op.namespace == "weft":
            kept.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    check(model, x, partial(checkpoint, model, use_reentrant=False, context_fn=contexts))
    assert kept


@pytest.mark.parametrize("way", NOT_REENTRANT)
def test_a_retained_graph(way, x, device):
    model = stack(device, dropout=0.3, recompute=2)

    def twice(run):
        leaf = x.detach().requires_grad_()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        y = run(leaf)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    same(twice(partial(WAYS[way], model)), twice(model), "two passes through one graph")


def outputs_of(model) -> list[StorageWeakRef]:
    """Is filled with the memory of the sub-layers' outputs when the model runs."""
    memory = []
    for layer in model.layers:
        layer.sublayer.register_forward_hook(
            lambda module, args, out: memory.append(StorageWeakRef(out.untyped_storage()))
        )
    return memory


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_keeps_its_input_only(way, x, device):
    """Between the passes: the sub-layers' outputs, which recompute alone keeps, are gone too."""
    model = stack(device, recompute=2)
    outputs = outputs_of(model)
    y = WAYS[way](model, x.requires_grad_())
    gc.collect()
    assert [ref.expired() for ref in outputs] == [True] * len(model.layers)
    y.sum().backward()


def test_offloading_keeps_copies_only(x, device):
    """Where hooks keep copies for backward, nothing of the stack waits for it beside them."""
    model = stack(device, recompute=2)
    want = step(model, x)
    outputs = outputs_of(model)

    def offloaded(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = model(x)
        gc.collect()
        assert [ref.expired() for ref in outputs] == [True] * len(model.layers)
        return y

    same(step(Through(model, offloaded), x), want, "offloaded")


# ---- operations that run twice ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two operations of a group and what follows them."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(C, C, device=device) for _ in range(2))
        self.drop = nn.Dropout(0.3)

    def forward(self, x, run=lambda fn, *args: fn(*args)):
        for layer in self.layers:
            u = run(rmsnorm, x)
            x = x + layer(run(lambda u: self.drop(u.tanh()), u))
        return x


@pytest.mark.parametrize("way", WAYS)
def test_a_manager_in_a_checkpoint(way, x, device):
    model = Block(device)

    def grouped(x):
        manager = CheckpointWithoutOutputManager()
        y = model(x, managed(manager))
        manager.discard_all_outputs_and_register_unified_recompute(y)
        return y

    check(model, x, grouped, "a group")
    check(model, x, partial(WAYS[way], grouped), "a group in a checkpoint")


@pytest.mark.parametrize("way", NOT_REENTRANT)
def test_a_manager_round_a_checkpoint(way, x, device):
    """The group began before the checkpoint and ends after it."""
    model = nn.Sequential(*(Block(device) for _ in range(3)))

    def through(x):
        manager = CheckpointWithoutOutputManager()
        for k, block in enumerate(model):
            x = WAYS[way](block, x, managed(manager)) if k == 1 else block(x, managed(manager))
        assert len(manager.checkpoints) == 8
        manager.discard_all_outputs_and_register_unified_recompute(x)
        return x

    check(model, x, through)


@pytest.mark.parametrize("way", WAYS)
def test_an_operation_in_a_checkpoint(way, x, device):
    layer = nn.Linear(C, C, device=device)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return layer(x.tanh()).sin()

    def once(x):
        operation = CheckpointWithoutOutput()
        y = layer(operation.checkpoint(torch.tanh, x)).sin()
        operation.discard_output_and_register_recompute(y)
        return y

    check(Plain(), x, partial(WAYS[way], once))
