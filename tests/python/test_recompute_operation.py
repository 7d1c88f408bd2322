# SPDX-License-Identifier: Apache-2.0
"""Recompute without stored outputs: one operation, and the random numbers it draws."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from recompute_support import agree, gradients, leaf, managed, nbytes, plain
from torch import nn
from weft.torch import (
    CheckpointWithoutOutput,
    CheckpointWithoutOutputManager,
    bypass_recompute,
    recompute,
    register_rng_tracker,
    rng,
    storage,
)

pytestmark = pytest.mark.usefixtures("way")


# ---- one operation -----------------------------------------------------------------------------------------


def discarded(fn, *args, after=lambda y: y.square().sum(), **kwargs):
    op = CheckpointWithoutOutput(**kwargs)
    y = op.checkpoint(fn, *args)
    loss = after(y)
    op.discard_output_and_register_recompute(loss)
    return y, loss


def test_views_of_an_output_come_back_too(device):
    x = leaf(4, 8, device=device)

    def network(y):
        return (y[1:3].t().contiguous().square().sum() + y.view(2, 16)[1].exp().sum()) * y.sum()

    want = gradients(lambda: network(x.tanh()), x)
    agree(gradients(lambda: discarded(torch.tanh, x, after=network)[1], x), want)


def test_versions_stay(device):
    y, loss = discarded(torch.tanh, leaf(4, 8, device=device))
    version = y._version
    loss.backward()
    assert y._version == version
    torch.testing.assert_close(y.detach(), torch.tanh(leaf(4, 8, device=device)).detach(), atol=0, rtol=0)


def test_memory_is_moved_not_copied(device):
    where = []

    def fn(t):
        y = t * 2
        where.append(y.data_ptr())
        return y

    y, loss = discarded(fn, leaf(1 << 12, device=device))
    loss.backward()
    assert (y.data_ptr() == where[1]) == storage.CAN_MOVE


def test_functions_that_save_their_output(device):
    # sigmoid, softmax and exp keep their result for backward, and that result is what moves
    x = leaf(4, 8, device=device)

    def fn(t):
        a = t.sigmoid()
        return a, a.softmax(-1).view(8, 4), t.exp()[1:]

    def after(outputs):
        return sum(o.square().sum() for o in outputs)

    want = gradients(lambda: after(fn(x)), x)
    agree(gradients(lambda: discarded(fn, x, after=after)[1], x), want)


def test_layout_may_differ_in_the_second_run(device):
    x = leaf(4, 8, device=device)
    want = gradients(lambda: x.tanh().square().sum(), x)

    def fn(t):
        y = t.tanh()
        return y.t().contiguous().t() if torch.is_grad_enabled() else y

    agree(gradients(lambda: discarded(fn, x)[1], x), want)


def test_shape_may_not_differ():
    _, loss = discarded(lambda t: t.tanh() if torch.is_grad_enabled() else t.tanh()[1:], leaf(4))
    with pytest.raises(RuntimeError, match=r"\[3\].*\[4\]"):
        loss.backward()


def test_parameters_get_gradients(device):
    norm = nn.LayerNorm(8, device=device)
    for x in (leaf(4, 8, device=device), leaf(4, 8, device=device).detach()):
        want = gradients(lambda x=x: norm(x).square().sum(), norm.weight, norm.bias)
        agree(gradients(lambda x=x: discarded(norm, x)[1], norm.weight, norm.bias), want)


def test_arguments_that_are_no_tensors(device):
    x, b = leaf(4, 8, device=device), torch.ones(8, device=device)

    def fn(scale, t, bias, none, *, p=2):
        assert none is None
        return scale * t.tanh() + bias * p

    want = gradients(lambda: fn(3.0, x, b, None).square().sum(), x)
    agree(gradients(lambda: discarded(fn, 3.0, x, b, None)[1], x), want)
    assert b.grad is None


def test_a_tensor_in_a_container_is_refused():
    x = leaf(3)
    for args in ((x, (x, 1)), (x, {"x": [x]})):
        with pytest.raises(TypeError, match="container"):
            CheckpointWithoutOutput().checkpoint(lambda t, rest: t * 2, *args)


def test_outputs_that_need_no_gradient(device):
    x = leaf(4, 8, device=device)

    def fn(t):
        return [t.tanh(), t.argmax(-1), torch.ones_like(t.detach()), "words"]

    def after(outputs):
        y, index, ones, words = outputs
        assert words == "words" and not index.is_floating_point()
        return (y.gather(1, index.unsqueeze(1)) * ones).square().sum()

    want = gradients(lambda: after(fn(x)), x)
    agree(gradients(lambda: discarded(fn, x, after=after)[1], x), want)


def test_an_output_that_is_not_used(device):
    x = leaf(4, 8, device=device)
    want = gradients(lambda: x.tanh().square().sum(), x)
    fn, after = lambda t: (t.tanh(), t.sin()), lambda outputs: outputs[0].square().sum()
    agree(gradients(lambda: discarded(fn, x, after=after)[1], x), want)


def test_aliases_of_an_argument():
    x = leaf(4, 8)
    with pytest.raises(ValueError, match="retain_input_tensors"):
        CheckpointWithoutOutput().checkpoint(lambda t: t[1:], x)

    def fn(t):
        return t, t.view(8, 4), t.tanh()

    def network(outputs):
        return sum(o.square().sum() for o in outputs)

    want = gradients(lambda: network(fn(x)), x)

    def build():
        outputs, loss = discarded(fn, x, after=network, retain_input_tensors=True)
        assert [nbytes(o) for o in outputs] == [128, 128, 0]
        return loss

    agree(gradients(build, x), want)


def test_no_tokens(device):
    x, w = leaf(0, 8, device=device), leaf(8, device=device)
    _, loss = discarded(lambda t, w: t * w, x, w)
    loss.backward()
    assert x.grad.shape == (0, 8) and torch.equal(w.grad, torch.zeros_like(w))


def test_detached_uses_only(device):
    # Nothing but the manager leads to the operation: its output is read, but gets no gradient.
    x, w = leaf(4, 8, device=device), leaf(4, 8, device=device, seed=1)
    want = gradients(lambda: (x.tanh().detach() * w).square().sum(), w)

    def build():
        manager = CheckpointWithoutOutputManager()
        loss = (managed(manager)(torch.tanh, x).detach() * w).square().sum()
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        return loss

    agree(gradients(build, w), want)


def test_a_retained_graph_can_be_walked_twice(device):
    x = leaf(4, 8, device=device)
    want = gradients(lambda: x.tanh().square().sum(), x)
    _, loss = discarded(torch.tanh, x)
    x.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    agree([x.grad], [2 * want[0]])


def test_an_operation_that_is_never_emptied(device):
    x, manager = leaf(4, 8, device=device), CheckpointWithoutOutputManager()
    want = gradients(lambda: x.tanh().square().sum(), x)
    agree(gradients(lambda: managed(manager)(torch.tanh, x).square().sum(), x), want)


@pytest.mark.parametrize("traverse", ["grad", "inputs"])
def test_only_plain_backward(traverse):
    x = leaf(4, 8)
    for after in (lambda y: y.square().sum(), lambda y: y.sum()):
        _, loss = discarded(torch.tanh, x, after=after)
        with pytest.raises(RuntimeError, match=r"expected \.backward\(\)"):
            if traverse == "grad":
                torch.autograd.grad(loss, x)
            else:
                loss.backward(inputs=[x])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_no_second_derivative():
    _, loss = discarded(torch.tanh, leaf(4, 8))
    with pytest.raises(RuntimeError, match="second derivative"):
        loss.backward(create_graph=True)


def test_backward_before_the_second_run():
    op, x = CheckpointWithoutOutput(), leaf(4, 8)
    y = op.checkpoint(torch.tanh, x)
    loss, elsewhere = y.sum(), y.square().sum()
    op.discard_output_and_register_recompute(elsewhere)
    with pytest.raises(RuntimeError, match="still empty"):
        loss.backward()


def test_a_write_to_an_output_is_noticed():
    op = CheckpointWithoutOutput()
    y = op.checkpoint(torch.tanh, leaf(4, 8))
    loss = y.mul_(2).sum()
    with pytest.raises(RuntimeError, match="in place"):
        op.discard_output_and_register_recompute(loss)


def test_states_of_an_operation():
    op, x = CheckpointWithoutOutput(), leaf(3)
    for act in (op.discard_output, op.recompute):
        with pytest.raises(RuntimeError, match="has not run"):
            act()
    op.checkpoint(torch.sin, x)
    with pytest.raises(RuntimeError, match="has its outputs"):
        op.recompute()
    with pytest.raises(RuntimeError, match="expected an object that has not run"):
        op.checkpoint(torch.sin, x)
    with pytest.raises(NotImplementedError, match="fp8"):
        CheckpointWithoutOutput(fp8=True)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, bypass_recompute])
def test_where_nothing_is_recorded(context):
    manager, op, x = CheckpointWithoutOutputManager(), CheckpointWithoutOutput(), leaf(3)
    with context():
        y = op.checkpoint(torch.sin, x)
        managed(manager)(torch.sin, x)
        op.discard_output_and_register_recompute(y)
        manager.discard_all_outputs_and_register_unified_recompute(y)
    assert nbytes(y) > 0 and manager.checkpoints == []
    assert y.requires_grad == (context is bypass_recompute)


def test_a_compiled_graph_plans_its_own_memory():
    x = leaf(4, 8)

    def network(x):
        manager = CheckpointWithoutOutputManager()
        loss = managed(manager)(torch.tanh, x).square().sum()
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        return loss

    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    agree(gradients(lambda: compiled(x), x), gradients(lambda: network(x), x))


def test_a_dropped_graph_is_freed_at_once():
    gc.disable()
    try:
        for backward in (False, True):
            x, manager = leaf(3).clone(), CheckpointWithoutOutputManager()
            y = managed(manager)(torch.exp, x)
            loss = (y * y).sum()
            manager.discard_all_outputs_and_register_unified_recompute(loss)
            if backward:
                loss.backward()
            gone = [weakref.ref(t) for t in (x, y, manager)]
            del x, y, loss, manager
            assert all(r() is None for r in gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("ambient", [False, True])
def test_autocast_is_that_of_forward(device, ambient):
    x, linear, seen = leaf(4, 8, device=device), nn.Linear(8, 8, device=device), []

    def fn(t):
        y = linear(t)
        seen.append(y.dtype)
        return y

    def build(run, discard):
        with torch.autocast(device.type, torch.bfloat16):
            y = linear(run(fn, x))  # the same weight: autocast keeps its copy of it
        loss = y.float().square().sum()
        discard(loss)
        return loss

    def recomputed():
        op = CheckpointWithoutOutput()
        return build(op.checkpoint, op.discard_output_and_register_recompute)

    leaves = [x, linear.weight, linear.bias]
    with torch.autocast(device.type, torch.float16, enabled=ambient):
        want = gradients(lambda: build(plain, lambda loss: None), *leaves)
        got = gradients(recomputed, *leaves)
    assert seen == [torch.bfloat16] * 3
    agree(got, want, atol=0.06)  # plain autocast adds the weight's two gradients in bf16


# ---- random numbers ----------------------------------------------------------------------------------------


class Named:
    """A tracker of named states, as frameworks for tensor parallelism have one."""

    def __init__(self, live):
        make = torch.Generator().manual_seed
        self.states = {"model": make(11) if live else make(11).get_state()}

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = dict(states)

    def rand(self, shape):
        state = self.states["model"]
        if isinstance(state, torch.Generator):
            return torch.rand(shape, generator=state)
        g = torch.Generator()
        g.set_state(state)
        out = torch.rand(shape, generator=g)
        self.states["model"] = g.get_state()
        return out


@pytest.mark.parametrize("live", [False, True], ids=["tensors", "generators"])
def test_named_states_are_replayed(monkeypatch, live):
    monkeypatch.setattr(rng, "_trackers", [])
    tracker, seen = Named(live), []
    handle = tracker.states["model"]
    register_rng_tracker(tracker)
    register_rng_tracker(tracker)
    assert rng._trackers == [tracker]

    def fn(t):
        seen.append((tracker.rand(t.shape), torch.rand(t.shape)))
        return t * seen[-1][0] * seen[-1][1]

    _, loss = discarded(fn, leaf(64))
    between = tracker.rand(4), torch.rand(4)
    loss.backward(retain_graph=True)
    after = tracker.rand(4)
    loss.backward()
    for draw in seen[1:]:
        agree(draw, seen[0], atol=0)
    fresh = Named(live)
    agree([fresh.rand(64), fresh.rand(4), fresh.rand(4)], [seen[0][0], between[0], after], atol=0)
    assert not live or tracker.states["model"] is handle

    _, loss = discarded(fn, leaf(64))
    tracker.states["other"] = tracker.states["model"]
    with pytest.raises(RuntimeError, match="other"):
        loss.backward()


def test_random_state_of_a_quiet_operation_is_left_alone(monkeypatch):
    monkeypatch.setattr(rng.RandomState, "again", lambda self: pytest.fail("nothing was drawn"))
    x = leaf(4, 8)
    agree(gradients(lambda: discarded(torch.tanh, x)[1], x), gradients(lambda: x.tanh().square().sum(), x))


def test_draws_during_capture_are_refused(monkeypatch):
    capturing = [True]
    for module in (rng, recompute):
        monkeypatch.setattr(module, "capturing", lambda: capturing[0])
    x, mask = leaf(4, 8), torch.ones(4, 8)
    for fn in (lambda t: F.dropout(t, 0.3), lambda t: t * torch.rand(8), torch.rand_like):
        with pytest.raises(RuntimeError, match="draw outside"):
            CheckpointWithoutOutput().checkpoint(fn, x)
    _, loss = discarded(lambda t, m: F.dropout(t, 0.0) * m, x, mask)  # what was drawn outside is an argument
    torch.autograd.grad(loss, x)  # a capture may walk the graph as it likes

    capturing[0] = False
    _, loss = discarded(lambda t: F.dropout(t, 0.3), x)
    capturing[0] = True
    with pytest.raises(RuntimeError, match="before a CUDA graph capture"):
        loss.backward()
