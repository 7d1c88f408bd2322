# SPDX-License-Identifier: Apache-2.0
"""The front of Megatron's GatedDeltaNet over weft, as functions. Most tests run with weft and with the plain PyTorch of
use_native(True)."""

from types import SimpleNamespace

import gdn_oracle as oracle
import pytest
import torch
import weft.torch as wt
from compare import check
from megatron_support import dtypes
from weft.compat import megatron

pytestmark = pytest.mark.usefixtures("native")

SIZES = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6}
HEADS = wt.GdnHeads(*SIZES.values())
FUNCTIONS = [
    "native_pre_gated_delta_rule",
    "fused_streamed_pre_gated_delta_rule",
    "fused_mega_pre_gated_delta_rule",
]


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
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, l2norm, dtype, device):
    function = getattr(megatron, name)
    check(
        lambda **t: function(**t, **SIZES, use_qk_l2norm=l2norm),
        expression(l2norm),
        tensors(device, dtype, bias=l2norm),
    )


@dtypes
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_packed(name, index, dtype, device):
    """Empty sequences, one token, and tokens behind the last offset."""
    cu = torch.tensor([0, 0, 1, 4, 4, 10], dtype=index, device=device)
    function = getattr(megatron, name)
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
    if name == "native_pre_gated_delta_rule":
        with pytest.raises(NotImplementedError, match=f"{name}: cp_group: expected one rank in plain PyTorch"):
            function(**given, **SIZES, cp_group=SimpleNamespace(size=lambda: 2))
    function(**given, **SIZES, cp_group=SimpleNamespace(size=lambda: 1))
