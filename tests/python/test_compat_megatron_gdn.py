# SPDX-License-Identifier: Apache-2.0
"""The front of Megatron's GatedDeltaNet over weft: the functions that pre_gated_delta_rule_impl chooses between, and
the methods for a class beside Megatron's. Most tests run with weft and with the plain PyTorch of use_native(True)."""

from types import SimpleNamespace

import gdn_oracle as oracle
import pytest
import torch
import weft.torch as wt
from compare import check, same
from megatron_support import dtypes
from torch import nn
from weft.compat import fla, megatron

pytestmark = pytest.mark.usefixtures("native")

SIZES = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6}
HEADS = wt.GdnHeads(*SIZES.values())
IMPLEMENTATIONS = ["unfused", "streamed", "mega"]


def tensors(device, dtype, s=9, b=2, width=4, bias=True) -> dict:
    full = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "qkvzba": torch.randn(s, b, HEADS.columns).to(device, dtype),
        "conv1d_weight": (0.5 * torch.randn(HEADS.channels, 1, width)).to(device, full),
        "conv1d_bias": torch.randn(HEADS.channels).to(device, full) if bias else None,
        "A_log": torch.randn(4).to(device, full),
        "dt_bias": torch.randn(4).to(device, full),
    }


def expression(l2norm=True, cu_seqlens=None):
    def function(qkvzba, conv1d_weight, conv1d_bias, A_log, dt_bias):
        sections = oracle.split(qkvzba.transpose(0, 1), HEADS)
        options = wt.GdnOptions(l2norm=l2norm)
        return oracle.gdn_pre(
            *sections, conv1d_weight, A_log, dt_bias, conv1d_bias, cu_seqlens=cu_seqlens, options=options
        )

    return function


@dtypes
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_functions(impl, l2norm, dtype, device):
    function = megatron.pre_gated_delta_rule(impl)
    check(
        lambda **t: function(**t, **SIZES, use_qk_l2norm=l2norm),
        expression(l2norm),
        tensors(device, dtype, bias=l2norm),
    )


@dtypes
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_packed(impl, index, dtype, device):
    """Empty sequences, one token, and tokens behind the last offset."""
    cu = torch.tensor([0, 0, 1, 4, 4, 10], dtype=index, device=device)
    function = megatron.pre_gated_delta_rule(impl)
    check(
        lambda **t: function(**t, **SIZES, cu_seqlens=cu, seq_idx=None),
        expression(cu_seqlens=cu),
        tensors(device, dtype, s=12, b=1),
    )


def test_results_are_contiguous(device):
    out = megatron.fused_mega_pre_gated_delta_rule(*tensors(device, torch.bfloat16).values(), **SIZES)
    assert [tuple(t.shape) for t in out] == [(2, 9, 4, 8)] * 2 + [(2, 9, 4, 6)] * 2 + [(2, 9, 4)] * 2
    assert all(t.is_contiguous() for t in out)
    assert [t.dtype for t in out] == [torch.bfloat16] * 5 + [torch.float32]


def test_gradient_is_laid_out_like_the_projection(device, native):
    if native:
        pytest.skip("plain PyTorch promises no layout")
    given = tensors(device, torch.float32)
    rows = given.pop("qkvzba").requires_grad_()
    out = megatron.fused_mega_pre_gated_delta_rule(rows, **given, **SIZES)
    (grad,) = torch.autograd.grad(out, rows, [torch.ones_like(t) for t in out])
    assert grad.stride() == rows.stride()


class GatedDeltaNet(nn.Module):
    """What Megatron's class has that the methods look at."""

    def __init__(self, impl=None, cp_size=1, rank=0, bias=False, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace() if impl is None else SimpleNamespace(pre_gated_delta_rule_impl=impl)
        self.num_key_heads, self.num_value_heads = SIZES["num_key_heads"], SIZES["num_value_heads"]
        self.key_head_dim, self.value_head_dim = SIZES["key_head_dim"], SIZES["value_head_dim"]
        self.tp_size, self.cp_size, self.use_qk_l2norm = 1, cp_size, True
        self.pg_collection = SimpleNamespace(cp=SimpleNamespace(rank=lambda: rank))
        self.conv1d = nn.Conv1d(HEADS.channels, HEADS.channels, 4, groups=HEADS.channels, bias=bias, device=device)
        self.A_log = nn.Parameter(torch.randn(4, device=device))
        self.dt_bias = nn.Parameter(torch.randn(4, device=device))


class Fused(megatron.PreGatedDeltaRule, GatedDeltaNet):
    pass


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("impl", [None, *IMPLEMENTATIONS])
def test_module(impl, bias, device):
    """The projection at once, or its convolution first and then the rest: the same function."""
    module = Fused(impl, bias=bias, device=device)
    rows = torch.randn(9, 2, HEADS.columns, device=device)
    query, key, value, gate, beta, g = module.pre_gated_delta_rule(rows)
    qkv, z, b, a = rows.transpose(0, 1).split([HEADS.channels, 24, 4, 4], -1)
    weight = module.conv1d.weight.squeeze(1)
    qkv, _ = fla.causal_conv1d(qkv, weight, module.conv1d.bias, activation="silu")
    inputs = module._prepare_input_for_gated_delta_rule(
        qkv, z.unflatten(2, (4, 6)), module.A_log, module.dt_bias, 2, 9, b, a
    )
    assert set(inputs) == {"q", "k", "v", "g", "beta", "gate"}
    # One more rounding, of what the convolution stores; the norm has a factor of up to 1.
    for got, want in ((inputs["q"], query), (inputs["k"], key), (inputs["v"], value), (inputs["g"], g)):
        assert (got - want).abs().max() <= 16 * 2**-24 * want.abs().max()
    same(inputs["gate"], gate, "gate")
    assert (inputs["beta"] - beta).abs().max() <= 4 * 2**-24


def test_context_parallel_shares(device, native):
    """By heads: a rank has its share of every section, parameters included. weft has the same bits for it."""
    whole = Fused(device=device)
    rows = torch.randn(7, 1, HEADS.columns, device=device)
    want = whole.pre_gated_delta_rule(rows)
    sections = rows.split([16, 16, 24, 24, 4, 4], -1)
    for rank in range(2):
        part = Fused(cp_size=2, rank=rank, device=device)
        mine = torch.cat([s.chunk(2, -1)[rank] for s in sections], -1)
        got = part.pre_gated_delta_rule(mine)
        for g, w in zip(got, want, strict=True):
            w = w[:, :, 2 * rank : 2 * rank + 2].contiguous()
            if native:  # torch's sums over a row depend on where the row lies
                assert (g - w).abs().max() <= 16 * 2**-24 * w.abs().max()
            else:
                same(g, w, f"rank {rank}")


@pytest.mark.parametrize("name", ["fused_mega_pre_gated_delta_rule", "native_pre_gated_delta_rule"])
def test_misuse(name):
    given = tensors("cpu", torch.float32)
    function = getattr(megatron, name)
    columns, channels = HEADS.columns, HEADS.channels
    for message, change in (
        (rf"qkvzba: expected \(s, b, {columns}\), got", {"qkvzba": given["qkvzba"][..., 1:]}),
        (rf"conv1d_weight: expected \({channels}, 1, W\), got", {"conv1d_weight": given["conv1d_weight"][1:]}),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            function(**{**given, **change}, **SIZES)
    with pytest.raises(ValueError, match="impl: expected one of unfused, streamed, mega, got 'fast'"):
        megatron.pre_gated_delta_rule("fast")
    with pytest.raises(NotImplementedError, match=f"{name}: cp_group: expected one rank"):
        function(**given, **SIZES, cp_group=SimpleNamespace(size=lambda: 2))
    function(**given, **SIZES, cp_group=SimpleNamespace(size=lambda: 1))
