# SPDX-License-Identifier: Apache-2.0
"""DeepSeek TileKernels' mHC functions (tile_kernels.modeling.mhc) over weft.

Conventions: a residual is (..., n, C), k = i*C + c in fn; comb_mix[i, o] is what output stream o takes of input
stream i; eps inside the root; pre = sigmoid + pre_eps; Sinkhorn starts with a softmax plus eps. The defaults are
TileKernels' (post_mult_value 1, 10 iterations), which are not those of DeepSeek-V4 (2 and 20). A post_mix has a
trailing axis of size 1. Activations may be bf16, fp16 or fp32, n is 1 to 32, C any.

n_splits is ignored: sums have an order that depends on the shape only.
On a GPU mhc_pre and mhc_head are fused kernels over the residual, forward and backward, where weft.torch.pre
is (docs/python.md): bf16, n 2 or 4, C a multiple of 8 up to 7168 (n = 4) or 14336 (n = 2), code for compute capability
9.0. Everything else takes a chain of kernels; fp32 and fp16 are slower by more than their bytes.
Gradients of a residual meet in autograd, each rounded by itself as in the original; weft.torch.GradX adds them
in fp32. norm_weight counts in inference as it does in training, and mhc_head can be trained."""

from itertools import zip_longest

import torch
from torch import Tensor

from weft.compat import _require as require
from weft.torch import Numerics
from weft.torch import functional as weft

__all__ = [
    "expand_to_mhc",
    "mhc_head",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_pre",
    "sinkhorn_normalize",
]

_NUMERICS = Numerics.preset("deepseek_v4")


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """residual (..., n, C) -> the sub-layer's input (..., C) and (post_mix (..., n, 1), comb_mix (..., n, n)) for
    mhc_post. weft.torch.pre, in training and in inference."""
    op = "mhc_pre"
    n, width = _residual(op, residual, mhc_mult)
    require.shape(op, "fn", fn, (n * (n + 2), width))
    require.shape(op, "scale", scale, (3,))
    require.shape(op, "base", base, (n * (n + 2),))
    if norm_weight is not None:
        require.shape(op, "norm_weight", norm_weight, (width,))
    numerics = _NUMERICS._replace(
        rms_eps=norm_eps,
        pre_eps=pre_eps,
        post_mult=post_mult_value,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_iters=sinkhorn_repeat,
    )
    out = weft.pre(residual, fn, scale, base, norm_weight, numerics=numerics)
    return out.u, (out.post.unsqueeze(-1), out.res)


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """x (..., C), residual (..., n, C), post_layer_mix (..., n, 1), comb_res_mix (..., n, n) -> the next residual,
    in out where that is given (by a copy; out must not overlap residual)."""
    op = "mhc_post"
    n, _ = _residual(op, residual)
    lead = residual.shape[:-2]
    require.shape(op, "x", x, (*lead, residual.shape[-1]))
    require.shape(op, "post_layer_mix", post_layer_mix, (*lead, n, 1))
    require.shape(op, "comb_res_mix", comb_res_mix, (*lead, n, n))
    y = weft.post(residual, x, post_layer_mix.squeeze(-1), comb_res_mix, numerics=_NUMERICS)
    return _store(op, "out", out, y)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> Tensor:
    """The learned exit: residual (..., n, C) -> (..., C). fn is (n, n*C); of one with n*(n+2) rows, as a layer has
    it, the first n count. scale has one element."""
    op = "mhc_head"
    n, width = _residual(op, residual, mhc_mult)
    require.tensor(op, "fn", fn, 1)
    if tuple(fn.shape) not in ((n, width), (n * (n + 2), width)):
        want = f"{(n, width)} or {(n * (n + 2), width)}"
        raise ValueError(f"{op}: fn: expected shape {want}, got {tuple(fn.shape)}")
    require.numel(op, "scale", scale, 1)
    require.shape(op, "base", base, (n,))
    if norm_weight is not None:
        require.shape(op, "norm_weight", norm_weight, (width,))
    return weft.head(residual, fn[:n], scale.reshape(1), base, norm_weight, rms_eps=norm_eps, pre_eps=pre_eps)


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """(..., C) -> (..., n, C): hidden in every stream, in out where that is given (by a copy)."""
    require.tensor("expand_to_mhc", "hidden", hidden, 1)
    return _store("expand_to_mhc", "out", out, weft.expand(hidden, mhc_mult))


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Logits (..., n, n) -> a matrix whose columns sum to one, in the logits' dtype."""
    op = "sinkhorn_normalize"
    require.tensor(op, "x", x, 2)
    require.shape(op, "x", x, (*x.shape[:-1], x.shape[-2]))
    return weft.sinkhorn(x, _NUMERICS._replace(sinkhorn_iters=repeat, sinkhorn_eps=eps)).to(x.dtype)


@torch.no_grad()
def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    """Refills layer_input_list (L tensors) and residual_list (L or L - 1) from the first residual and what was kept
    of every layer, bit for bit as mhc_pre's aggregate and mhc_post had them. Forward only. All layers are computed in
    one pass and then copied to where they are wanted."""
    op = "mhc_multilayer_recompute"
    n, channels = _residual(op, initial_residual)[0], initial_residual.shape[-1]
    lead = initial_residual.shape[:-2]
    layers, posts = len(pre_mix_list), len(layer_output_list)
    if layers < 1 or posts not in (layers, layers - 1):
        want = "at least one pre_mix, and as many layer outputs or one fewer"
        raise ValueError(f"{op}: pre_mix_list, layer_output_list: expected {want}, got {layers} and {posts}")
    tensors = {
        "pre_mix_list": (pre_mix_list, layers, (*lead, n, 1)),
        "layer_output_list": (layer_output_list, posts, (*lead, channels)),
        "post_mix_list": (post_mix_list, posts, (*lead, n, 1)),
        "comb_mix_list": (comb_mix_list, posts, (*lead, n, n)),
        "layer_input_list": (layer_input_list, layers, (*lead, channels)),
        "residual_list": (residual_list, posts, (*lead, n, channels)),
    }
    for name, (values, count, shape) in tensors.items():
        require.equal(op, f"len({name})", len(values), count, "one per layer")
        for i, value in enumerate(values):
            require.shape(op, f"{name}[{i}]", value, shape)
    kept = [
        weft.ReplayLayer(pre=pre.squeeze(-1), f=f, post=None if post is None else post.squeeze(-1), res=comb)
        for pre, f, post, comb in zip_longest(pre_mix_list, layer_output_list, post_mix_list, comb_mix_list)
    ]
    for i, (u, y) in enumerate(weft.replay(initial_residual, kept, _NUMERICS)):
        layer_input_list[i].copy_(u)
        if i < posts:
            residual_list[i].copy_(y)


def _residual(op: str, residual: Tensor, mhc_mult: int | None = None) -> tuple[int, int]:
    """Streams, and streams times channels."""
    require.tensor(op, "residual", residual, 2)
    n, channels = residual.shape[-2:]
    if mhc_mult is not None:
        require.equal(op, "mhc_mult", mhc_mult, n, "the streams of residual")
    return n, n * channels


def _store(op: str, name: str, out: Tensor | None, value: Tensor) -> Tensor:
    if out is None:
        return value
    require.shape(op, name, out, value.shape)
    if out.dtype != value.dtype or out.device != value.device or out.requires_grad:
        want = f"{value.dtype} on {value.device} outside of autograd"
        got = f"{out.dtype} on {out.device}, requires_grad {out.requires_grad}"
        raise ValueError(f"{op}: {name}: expected {want}, got {got}")
    return out.detach().copy_(value)
