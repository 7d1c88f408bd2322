# SPDX-License-Identifier: Apache-2.0
"""Recompute without stored outputs: operations under a manager, groups of layers. A test with a number has the
behaviour of that number in tests/python/behaviours.md; here they need nothing but PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from recompute_support import agree, gradients, leaf, managed, nbytes, plain
from weft.torch import (
    CheckpointWithoutOutput,
    CheckpointWithoutOutputManager,
    RecomputePhase,
    best_group,
    build_mhc_recompute_layer_plan,
    finalize_mhc_recompute_layer,
    stream_bytes,
)

pytestmark = pytest.mark.usefixtures("way")


# ---- behaviours 14 to 25 -----------------------------------------------------------------------------------


def test_14_auto_register(device):
    x, manager = leaf(4, 8, device=device), CheckpointWithoutOutputManager()
    first = CheckpointWithoutOutput(ckpt_manager=manager)
    second = CheckpointWithoutOutput(ckpt_manager=manager)
    y = first.checkpoint(torch.sin, x)
    z = second.checkpoint(torch.exp, y)
    assert manager.checkpoints == [first, second]
    loss = z.square().sum()
    manager.discard_all_outputs_and_register_unified_recompute(loss)
    loss.backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_15_discard_is_noop_with_manager(device):
    x = leaf(4, 8, device=device)
    want = gradients(lambda: torch.sin(x).square().sum(), x)

    def build():
        manager = CheckpointWithoutOutputManager()
        op = CheckpointWithoutOutput(ckpt_manager=manager)
        y = op.checkpoint(torch.sin, x)
        loss = y.square().sum()
        op.discard_output_and_register_recompute(loss)
        assert nbytes(y) == 4 * 8 * 4
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        assert nbytes(y) == 0
        return loss

    agree(gradients(build, x), want)


def test_16_backward_compat_without_manager(device):
    x = leaf(4, 8, device=device)
    want = gradients(lambda: torch.sin(x).square().sum(), x)

    def build():
        op = CheckpointWithoutOutput()
        y = op.checkpoint(torch.sin, x)
        loss = y.square().sum()
        op.discard_output_and_register_recompute(loss)
        assert nbytes(y) == 0 and y.shape == (4, 8)
        return loss

    agree(gradients(build, x), want)


def test_17_error_handling():
    manager = CheckpointWithoutOutputManager()
    with pytest.raises(TypeError, match="CheckpointWithoutOutput"):
        manager.add_checkpoint(object())
    with pytest.raises(ValueError, match="has not run"):
        manager.add_checkpoint(CheckpointWithoutOutput())
    assert manager.checkpoints == []


def chain(run, x, p=0.0):
    a = run(lambda t: F.dropout(torch.tanh(t), p), x)
    b = run(lambda t: F.dropout(t * t.exp(), p), a)
    c = run(lambda t, u: F.dropout(torch.sigmoid(t) * u, p), b, a)
    return a, b, c


def check_chain(device, p):
    x = leaf(16, 8, device=device)
    torch.manual_seed(7)
    want = gradients(lambda: chain(plain, x, p)[-1].square().sum(), x)
    ambient = torch.rand(3, device=device)

    def build():
        manager = CheckpointWithoutOutputManager()
        outputs = chain(managed(manager), x, p)
        loss = outputs[-1].square().sum()
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        assert [nbytes(t) for t in outputs] == [0, 0, 0]
        return loss

    torch.manual_seed(7)
    agree(gradients(build, x), want)
    assert torch.equal(torch.rand(3, device=device), ambient)  # the second run has left no trace


def test_18_basic_sequential_chain(device):
    check_chain(device, 0.0)


def test_19_sequential_chain_with_dropout(device):
    check_chain(device, 0.3)


def test_20_multiple_outputs(device):
    x = leaf(4, 8, device=device)

    def network(run):
        a, b = run(lambda t: (t.sin(), t.cos() * 2), x)
        return a, b, run(lambda t, u: t * u.exp(), a, b)

    want = gradients(lambda: network(plain)[-1].square().sum(), x)

    def build():
        manager = CheckpointWithoutOutputManager()
        outputs = network(managed(manager))
        loss = outputs[-1].square().sum()
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        assert [nbytes(t) for t in outputs] == [0, 0, 0]
        return loss

    agree(gradients(build, x), want)


def test_21_partial_checkpoint(device):
    x, w = leaf(4, 8, device=device), leaf(8, 8, device=device, seed=1)

    def network(run):
        a = run(torch.tanh, x)
        b = a @ w
        return a, b, run(torch.sigmoid, b)

    want = gradients(lambda: network(plain)[-1].square().sum(), x, w)

    def build():
        manager = CheckpointWithoutOutputManager()
        a, b, c = network(managed(manager))
        loss = c.square().sum()
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        assert nbytes(a) == nbytes(c) == 0 and nbytes(b) == 4 * 8 * 4
        return loss

    agree(gradients(build, x, w), want)


def test_22_partial_checkpoint_with_tuple_output(device):
    n, c = 4, 8
    x, w = leaf(6, n, c, device=device), leaf(2 * n + n * n, n * c, device=device, seed=1)

    def maps(t, w):  # three outputs in one storage
        pre, post, res = (t.flatten(1) @ w.T).sigmoid().split([n, n, n * n], -1)
        return pre, post, res.unflatten(-1, (n, n))

    def network(run):
        pre, post, res = run(maps, x, w)
        u = (pre.unsqueeze(-1) * x).sum(1)
        mixed = run(torch.bmm, res, x)
        branch = run(lambda f, p: p.unsqueeze(-1) * f.unsqueeze(1), u.tanh(), post)
        return (pre, post, res, mixed, branch), u, mixed + branch

    want = gradients(lambda: network(plain)[-1].square().sum(), x, w)

    def build():
        manager = CheckpointWithoutOutputManager()
        emptied, u, out = network(managed(manager))
        loss = out.square().sum()
        manager.discard_all_outputs_and_register_unified_recompute(loss)
        assert [nbytes(t) for t in emptied] == [0] * 5 and nbytes(u) > 0 and nbytes(out) > 0
        return loss

    agree(gradients(build, x, w), want)


def test_23_recompute_plan_no_layer_num():
    managers, ends = build_mhc_recompute_layer_plan(4, None, True)
    assert ends == [False, False, False, True]
    assert isinstance(managers[0], CheckpointWithoutOutputManager) and all(m is managers[0] for m in managers)


def test_24_recompute_plan_with_layer_num():
    managers, ends = build_mhc_recompute_layer_plan(4, 2, True)
    assert ends == [False, True, False, True]
    assert managers[0] is managers[1] and managers[2] is managers[3] and managers[1] is not managers[2]


def test_25_recompute_plan_disabled():
    assert build_mhc_recompute_layer_plan(4, 2, False) == ([None] * 4, [False] * 4)


# ---- groups ------------------------------------------------------------------------------------------------


def test_plan_of_odd_sizes():
    managers, ends = build_mhc_recompute_layer_plan(5, 2, True)
    assert ends == [False, True, False, True, True] and len({id(m) for m in managers}) == 3
    assert build_mhc_recompute_layer_plan(0, 2, True) == build_mhc_recompute_layer_plan(0, None, True) == ([], [])
    assert build_mhc_recompute_layer_plan(3, 8, True)[1] == [False, False, True]
    again, _ = build_mhc_recompute_layer_plan(5, 2, True)
    assert not {id(m) for m in managers} & {id(m) for m in again}  # every pass has its own


@pytest.mark.parametrize("group", [0, -1, True, 2.0, "2"])
def test_plan_refuses(group):
    with pytest.raises(ValueError, match="mhc_recompute_layer_num"):
        build_mhc_recompute_layer_plan(4, group, True)


def test_finalize_acts_at_group_ends_only():
    x, manager = leaf(3), CheckpointWithoutOutputManager()
    y = managed(manager)(torch.sin, x)
    out = y * 2
    finalize_mhc_recompute_layer(None, out, True)
    finalize_mhc_recompute_layer(manager, out, False)
    assert nbytes(y) > 0
    finalize_mhc_recompute_layer(manager, out, True)
    assert nbytes(y) == 0


def test_stream_bytes_has_the_published_numbers():
    for layers, group, none, grouped in [
        (8, 2, 100, 40),
        (24, 3, 292, 68),
        (32, 4, 388, 80),
        (8, None, 100, 100),
    ]:
        got = stream_bytes(1, 1, 4, layers, group, element_size=1)
        assert (got.none, got.grouped) == (none, grouped)
    got = stream_bytes(10, 3, 4, 8, 2, learned_contract=True, microbatches=3)
    unit = 10 * 3 * 2
    assert got == (3 * 100 * unit, (3 * 16 + 24) * unit, 3 * 20 * unit)


@pytest.mark.parametrize("norm_out", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_best_group_is_a_minimum(streams, norm_out):
    for layers in (1, 2, 7, 8, 24, 61):
        cost = [-(-layers // k) * streams + 2 * k * (streams + 1 + norm_out) for k in range(1, layers + 1)]
        assert best_group(layers, streams, norm_out) == cost.index(min(cost)) + 1
    with pytest.raises(ValueError, match="layers"):
        best_group(0, streams)


# ---- the manager -------------------------------------------------------------------------------------------


def test_manager_is_idempotent(device):
    x, runs = leaf(4, 8, device=device), []

    def fn(t):
        runs.append(1)
        return t.tanh()

    want = gradients(lambda: x.tanh().exp().sum(), x)
    x.grad = None
    manager = CheckpointWithoutOutputManager()
    y = managed(manager)(fn, x)
    loss = y.exp().sum()
    with pytest.raises(RuntimeError, match="discarded"):
        manager.recompute_now()
    with pytest.raises(RuntimeError, match="discarded"):
        manager.recompute_until(RecomputePhase.BEFORE_ATTN_BWD)
    manager.discard_all_outputs()
    manager.discard_all_outputs()
    assert nbytes(y) == 0
    with pytest.raises(RuntimeError, match="open"):
        managed(manager)(torch.sin, x)
    manager.recompute_until(RecomputePhase.BEFORE_COMBINE_BWD)
    manager.recompute_until(RecomputePhase.BEFORE_ATTN_BWD)
    manager.recompute_now()
    assert len(runs) == 2
    torch.testing.assert_close(y.detach(), x.detach().tanh(), atol=0, rtol=0)
    loss.backward()
    assert len(runs) == 2
    agree([x.grad], want)


def test_manager_knows_one_phase():
    manager, op = CheckpointWithoutOutputManager(), CheckpointWithoutOutput()
    op.checkpoint(torch.sin, leaf(3))
    for phase in (RecomputePhase.BEFORE_ATTN_BWD, 7):
        with pytest.raises(NotImplementedError, match="phase"):
            manager.add_checkpoint(op, phase)
    manager.add_checkpoint(op, RecomputePhase.BEFORE_COMBINE_BWD)
    manager.discard_all_outputs()
    with pytest.raises(ValueError, match="7"):
        manager.recompute_until(7)


def stack(x, layers, group, log=None, use=True):
    managers, ends = build_mhc_recompute_layer_plan(layers, group, use)
    for i in range(layers):
        run = managed(managers[i]) if use else plain

        def fn(t, i=i):
            if log is not None:
                log.append(i)
            return F.dropout(t.tanh() + i, 0.3)  # one use of t: gradients are summed in the same order

        y = run(fn, x)
        x = y.exp().clamp(max=3) + x
        finalize_mhc_recompute_layer(managers[i], x, ends[i])
    return x


def test_groups_run_again_in_reverse_and_forward_inside(device):
    x, log = leaf(4, 8, device=device), []
    stack(x, 5, 2, log).sum().backward()
    assert log == [0, 1, 2, 3, 4, 4, 2, 3, 0, 1]


@pytest.mark.parametrize("group", [1, 2, 3, 7, None])
def test_groups_are_bitwise_equal_to_none(device, group):
    x = leaf(16, 8, device=device)
    torch.manual_seed(3)
    want = gradients(lambda: stack(x, 7, group, use=False).sum(), x)
    torch.manual_seed(3)
    agree(gradients(lambda: stack(x, 7, group).sum(), x), want, atol=0)


def test_passes_in_flight_are_independent(device):
    xs = [leaf(16, 8, device=device, seed=s) for s in range(3)]
    torch.manual_seed(3)
    want = [gradients(lambda x=x: stack(x, 4, 2, use=False).sum(), x)[0] for x in xs]
    for x in xs:
        x.grad = None
    torch.manual_seed(3)
    losses = [stack(x, 4, 2).sum() for x in xs]
    for i in (1, 2, 0):
        losses[i].backward()
    agree([x.grad for x in xs], want, atol=0)


def test_saved_tensors_may_be_offloaded(device):
    x, moves = leaf(16, 8, device=device), []
    torch.manual_seed(3)
    want = gradients(lambda: stack(x, 4, 2, use=False).sum(), x)
    torch.manual_seed(3)
    with torch.autograd.graph.save_on_cpu():
        agree(gradients(lambda: stack(x, 4, 2).sum(), x), want, atol=0)

    def pack(t):
        moves.append(t.shape)
        return t.detach().clone()

    op = CheckpointWithoutOutput()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = op.checkpoint(torch.tanh, x)
    assert moves == [x.shape]
    loss = y.square().sum()
    op.discard_output_and_register_recompute(loss)
    x.grad = None
    loss.backward()
    agree([x.grad], gradients(lambda: x.tanh().square().sum(), x))
