# SPDX-License-Identifier: Apache-2.0
"""weft.compat.megatron with managers of recompute: the module, and the bias-dropout-add that takes one too."""

import pytest
import torch
from compat_oracle import as_dtypes, assert_close, check, differentiate, draw
from megatron_support import make
from torch import nn
from weft.compat import megatron
from weft.torch import CheckpointWithoutOutputManager

pytestmark = pytest.mark.usefixtures("native")

# ---- the module --------------------------------------------------------------------------------------------


def stack(modules, x, managers, p=0.0):
    """The modules one after the other; managers: (manager, whether its group ends here) of every module."""
    discarded = []
    for module, (manager, ends) in zip(modules, managers, strict=True):
        u, res, post = module(x, mhc_recompute_manager=manager)
        f = torch.tanh(u)
        # The last merge of a group stays: others read it before the group is replayed.
        y = module.fused_h_res_h_post_bda(
            res, x, post, (f, module.f_bias), p, True, True, manager=None if ends else manager
        )
        if manager is not None:
            discarded += [u] if ends else [u, y]
            if ends:
                manager.discard_all_outputs_and_register_unified_recompute(y)
        x = y
    return x, discarded


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
@pytest.mark.parametrize("groups", [(3,), (1, 2), (2, 1)], ids=str)
def test_recompute_changes_nothing(groups, p):
    c, n = 16, 4
    modules = [make(n, c, 5, seed=i) for i in range(3)]
    for i, module in enumerate(modules):
        module.f_bias = nn.Parameter(torch.randn(c, generator=torch.Generator().manual_seed(i)))
    x = draw(17, x=(8, 2, n * c))["x"].float()
    d_y = torch.randn(8, 2, n * c, generator=torch.Generator().manual_seed(7))
    plan = []
    for size in groups:
        manager = CheckpointWithoutOutputManager()
        plan += [(manager, i == size - 1) for i in range(size)]
    runs = []
    for managers in ([(None, True)] * 3, plan):
        leaf = x.clone().requires_grad_()
        for module in modules:
            module.zero_grad()
        torch.manual_seed(11)
        y, discarded = stack(modules, leaf, managers, p)
        assert all(t.untyped_storage().nbytes() == 0 for t in discarded)
        assert len(discarded) == (0 if managers is not plan else 3 + 3 - len(groups))
        y.backward(d_y)
        grads = [q.grad.clone() for module in modules for q in module.parameters()]
        runs.append([y.detach().clone(), leaf.grad, *grads])
    names = ["y", "d_x", *(f"{i}.{k}" for i, m in enumerate(modules) for k, _ in m.named_parameters())]
    for name, plain, managed in zip(names, *runs, strict=True):
        assert plain.isfinite().all() and plain.abs().max() > 0, name
        assert_close(name, managed, plain, 256)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_apply_h_post_with_a_manager(biased):
    module, manager = make(4, 16), CheckpointWithoutOutputManager()
    inputs = as_dtypes(draw(18, f=(8, 2, 16), h_post=(8, 2, 4)), torch.float32)
    bias = torch.randn(16) if biased else None  # a bias without gradient is fine

    def call(f, h_post, manager):
        expanded, expanded_bias = module.apply_h_post((f, bias), h_post, manager)
        y = torch.tanh(expanded if expanded_bias is None else expanded + expanded_bias)
        if manager is not None:
            assert len(manager.checkpoints) == 1 + biased
            manager.discard_all_outputs_and_register_unified_recompute(y)
            assert expanded.untyped_storage().nbytes() == 0
        return {"y": y}

    plain, upstream, d_plain = differentiate(lambda **a: call(**a, manager=None), inputs)
    managed, _, d_managed = differentiate(lambda **a: call(**a, manager=manager), inputs, upstream)
    assert torch.equal(plain["y"], managed["y"])
    for name, value in d_plain.items():
        assert_close(name, d_managed[name], value, 16)


# ---- bias, dropout, add ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bias_dropout_add(fused, biased, dtype):
    inputs = as_dtypes(draw(19, x=(5, 2, 16), residual=(5, 2, 16), **({"bias": (16,)} if biased else {})), dtype)
    for training, p in ((True, 0.0), (False, 0.4)):
        function = megatron.get_bias_dropout_add(training, fused)
        check(
            lambda x, residual, bias=None: {"y": function((x, bias), residual, p)},  # noqa: B023
            lambda x, residual, bias=0.0: {"y": x + bias + residual},
            inputs,
            64,
            {"y": 2 + biased},
        )
    if not biased:  # a tensor alone is a pair without a bias
        x, residual = inputs["x"], inputs["residual"]
        assert torch.equal(function(x, residual, 0.0), function((x, None), residual, 0.0))


def test_bias_dropout_add_drops():
    x, residual = torch.ones(64, 64), torch.zeros(64, 64)
    y = megatron.get_bias_dropout_add(True, False)((x, None), residual, 0.25)
    kept = y != 0
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / 0.75)) and abs(kept.float().mean().item() - 0.75) < 0.03


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("managers", [1, 2])
@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
def test_bias_dropout_add_with_managers(fused, biased, managers, p):
    """Two operations, in one group or in two chained ones, replay to the gradients of the plain run."""
    shapes = {"x": (5, 2, 16), "residual": (5, 2, 16), **({"bias": (16,)} if biased else {})}
    inputs = as_dtypes(draw(20, **shapes), torch.float32)

    def run(x, residual, bias=None, *, groups):
        torch.manual_seed(5)
        discarded = []
        first, second = groups[0], groups[-1]
        a = megatron.get_bias_dropout_add(True, fused, first)((torch.tanh(x), bias), residual, p)
        b = torch.sin(a)
        if first is not second:
            first.discard_all_outputs_and_register_unified_recompute(b)
        c = megatron.get_bias_dropout_add(True, fused, second)((torch.tanh(b), bias), b, p)
        y = torch.sin(c)
        if second is not None:
            discarded = [a, c]
            second.discard_all_outputs_and_register_unified_recompute(y)
        assert all(t.untyped_storage().nbytes() == 0 for t in discarded)
        return {"y": y}

    made = [CheckpointWithoutOutputManager() for _ in range(managers)]
    plain, upstream, d_plain = differentiate(lambda **a: run(**a, groups=[None]), inputs)
    managed, _, d_managed = differentiate(lambda **a: run(**a, groups=made), inputs, upstream)
    assert [len(m.checkpoints) for m in made] == [2 // managers] * managers
    assert torch.equal(plain["y"], managed["y"])
    for name, value in d_plain.items():
        assert value.abs().max() > 0
        assert_close(f"d_{name}", d_managed[name], value, 16)
