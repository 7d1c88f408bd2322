# SPDX-License-Identifier: Apache-2.0
"""DeepSeek TileKernels' mHC functions (tile_kernels.modeling.mhc and its ops), computed by weft.

Conventions: a residual is (..., n, C), k = i*C + c in fn; comb_mix[i, o] is what output stream o takes of input
stream i; eps inside the root; pre = sigmoid + pre_eps; Sinkhorn starts with a softmax plus eps. The defaults are
TileKernels' (post_mult_value 1, 10 iterations), which are not those of DeepSeek-V4 (2 and 20). A post_mix has a
trailing axis of size 1. Activations may be bf16, fp16 or fp32, n is 1 to 32, C any.

n_splits is ignored: sums have an order that depends on the shape only. So is fuse_grad_acc: no gradient is left on a
storage for another function to find.
On a GPU mhc_pre, mhc_pre_big_fuse and mhc_head are fused kernels over the residual, forward and backward, where
weft.torch.pre is (the PyTorch guide): bf16 or fp16, n 2 or 4, C a multiple of 8, forward up to 7168 (n = 4) or 14336
(n = 2), code for compute capability 9.0. Everything else takes a chain of kernels; fp32 is slower by more than its bytes.
Gradients of a residual are summed in place, in its dtype (the PyTorch guide, "Gradients of the streams"); weft.torch.GradX sums
them in fp32. Gradients of parameters go into main_grad where these have one. norm_weight counts in inference as it does in
training, and mhc_head can be trained."""

from itertools import zip_longest

import torch
from torch import Tensor

from weft.compat import _into
from weft.compat import _require as require
from weft.torch import Numerics
from weft.torch import functional as weft
from weft.torch.grads import any_takes_part, deposit, lend
from weft.torch.numerics import pack

__all__ = [
    "expand_from_embedding",
    "expand_to_mhc",
    "mhc_head",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
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
    _residual("mhc_pre", residual, mhc_mult)
    return _pre(
        ("mhc_pre", "fn", "scale", "base"),
        (residual, fn, scale, base, norm_weight),
        rms_eps=norm_eps,
        pre_eps=pre_eps,
        post_mult=post_mult_value,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_iters=sinkhorn_repeat,
    )


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """x (..., C), residual (..., n, C), post_layer_mix (..., n, 1), comb_res_mix (..., n, n) -> the next residual,
    in out where that is given. out must not overlap the residual, or be the residual itself in a call without
    gradients."""
    return _post("mhc_post", x, residual, post_layer_mix, comb_res_mix, out)


@torch.no_grad()
def mhc_post_fwd(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """mhc_post without gradients."""
    return _post("mhc_post_fwd", x, residual, post_layer_mix, comb_res_mix, out)


@torch.no_grad()
def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, residual, post_layer_mix and comb_res_mix from that of mhc_post's result, in one pass."""
    op = "mhc_post_bwd"
    post = _merge(op, x, residual, post_layer_mix, comb_res_mix)
    require.shape(op, "d_o", d_o, residual.shape)
    want = [True, True, True, True, False]
    d_residual, d_x, d_post, d_comb, _ = torch.ops.weft.mhc_post_bwd.default(
        residual, x, post, comb_res_mix, None, None, d_o.contiguous(), pack(_NUMERICS), 0.0, 0, want
    )
    return d_x, d_residual, d_post.unsqueeze(-1), d_comb


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
    rows, factor = lend(fn, lambda t: t[:n]), lend(scale, lambda t: t.reshape(1))
    options = {"rms_eps": norm_eps, "pre_eps": pre_eps, "main_grad": any_takes_part(rows, factor, base, norm_weight)}
    return weft.head(residual, rows, factor, base, norm_weight, **options)


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """(..., C) -> (..., n, C): hidden in every stream, in out where that is given."""
    op = "expand_to_mhc"
    require.tensor(op, "hidden", hidden, 1)
    if out is None:
        return weft.expand(hidden, mhc_mult)
    _into.same_memory(op, out, hidden, (*hidden.shape[:-1], mhc_mult, hidden.shape[-1]))
    return _into.write("mhc_expand", (hidden, mhc_mult), out)


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """The entry of a model: (..., C) -> (..., n, C)."""
    require.tensor("expand_from_embedding", "x", x, 1)
    return weft.expand(x, mhc_mult)


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Logits (..., n, n) -> a matrix whose columns sum to one, in the logits' dtype."""
    op = "sinkhorn_normalize"
    require.tensor(op, "x", x, 2)
    require.shape(op, "x", x, (*x.shape[:-1], x.shape[-2]))
    return weft.sinkhorn(x, _NUMERICS._replace(sinkhorn_iters=repeat, sinkhorn_eps=eps)).to(x.dtype)


# ---- the parts of mhc_pre ----------------------------------------------------------------------------------


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """mhc_pre in one call, weft.torch.pre: post_mix (..., n, 1), comb_mix (..., n, n) and the sub-layer's input
    (..., C). TileKernels has it for inference; it has gradients here."""
    u, (post, comb) = _pre(
        ("mhc_pre_big_fuse", "fn", "mhc_scale", "mhc_base"),
        (residual, fn, mhc_scale, mhc_base, None),
        rms_eps=rms_eps,
        pre_eps=mhc_pre_eps,
        post_mult=mhc_post_mult_value,
        sinkhorn_eps=mhc_sinkhorn_eps,
        sinkhorn_iters=sinkhorn_repeat,
    )
    return post, comb, u


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> Tensor:
    """The projection of the normalised residual: (..., n, C) and mhc_fn (R, n*C) -> (..., R) in fp32."""
    op = "mhc_pre_norm_fn"
    _, width = _residual(op, residual)
    require.tensor(op, "mhc_fn", mhc_fn, 1)
    require.shape(op, "mhc_fn", mhc_fn, (mhc_fn.shape[0], width))
    if mhc_norm_weight is not None:
        require.shape(op, "mhc_norm_weight", mhc_norm_weight, (width,))
    h, ms = weft.project(residual, mhc_fn, mhc_norm_weight, main_grad=any_takes_part(mhc_fn, mhc_norm_weight))
    return h * torch.rsqrt(ms + mhc_norm_eps).unsqueeze(-1)


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What mhc_pre_norm_fn returned, (..., n*(n+2)) -> the gates (..., n, 1) and (..., n, 1), and the logits of the
    residual mix (..., n, n)."""
    op = "mhc_pre_split_mixes"
    require.tensor(op, "input_mixes", input_mixes, 1)
    rows = mhc_mult * (mhc_mult + 2)
    require.shape(op, "input_mixes", input_mixes, (*input_mixes.shape[:-1], rows))
    require.shape(op, "mhc_scale", mhc_scale, (3,))
    require.shape(op, "mhc_base", mhc_base, (rows,))
    # The mixes are normalised: their mean square is 1, without an eps.
    ms = input_mixes.new_ones(input_mixes.shape[:-1])
    numerics = _NUMERICS._replace(rms_eps=0.0, pre_eps=mhc_pre_eps, post_mult=mhc_post_mult_value)
    main_grad = any_takes_part(mhc_scale, mhc_base)
    pre, post, logits = weft.scale(input_mixes, ms, mhc_scale, mhc_base, numerics, main_grad=main_grad)
    return pre.unsqueeze(-1), post.unsqueeze(-1), logits


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_i mix[i] x[i]: x (..., n, C), mix (..., n, 1) -> (..., C) in x's dtype, in out where that is given."""
    op = "mhc_pre_apply_mix"
    require.tensor(op, "x", x, 2)
    require.shape(op, "mix", mix, (*x.shape[:-1], 1))
    if out is None:
        return weft.aggregate(x, mix.squeeze(-1))
    _into.same_memory(op, out, x, (*x.shape[:-2], x.shape[-1]))
    return _into.write("mhc_aggregate", (x, mix.squeeze(-1)), out)


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """The gates of mhc_head from its projection (..., n). A few numbers a token, in plain PyTorch."""
    op = "mhc_head_compute_mix"
    require.tensor(op, "input_mix", input_mix, 1)
    require.numel(op, "mhc_scale", mhc_scale, 1)
    require.shape(op, "mhc_base", mhc_base, input_mix.shape[-1:])
    return torch.sigmoid(input_mix * deposit(mhc_scale) + deposit(mhc_base)) + mhc_pre_eps


# ---- recompute ---------------------------------------------------------------------------------------------


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
    of every layer, bit for bit as mhc_pre's aggregate and mhc_post had them. Forward only, in one pass."""
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
    for name, lists in (("layer_input_list", layer_input_list), ("residual_list", residual_list)):
        for i, out in enumerate(lists):
            if out.dtype != initial_residual.dtype or not out.is_contiguous():
                want = f"contiguous {initial_residual.dtype}"
                raise ValueError(f"{op}: {name}[{i}]: expected {want}, got {out.dtype}, strides {out.stride()}")
    results = list(zip_longest((u.detach() for u in layer_input_list), (y.detach() for y in residual_list)))
    weft._replay_into(initial_residual, kept, _NUMERICS, results)


# ---- arguments ---------------------------------------------------------------------------------------------


def _residual(op: str, residual: Tensor, mhc_mult: int | None = None) -> tuple[int, int]:
    """Streams, and streams times channels."""
    require.tensor(op, "residual", residual, 2)
    n, channels = residual.shape[-2:]
    if mhc_mult is not None:
        require.equal(op, "mhc_mult", mhc_mult, n, "the streams of residual")
    return n, n * channels


def _pre(names: tuple[str, ...], tensors: tuple, **constants) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """weft.torch.pre; names are those of the operator and of fn, scale and base in errors."""
    op, fn_name, scale_name, base_name = names
    residual, fn, scale, base, norm_weight = tensors
    n, width = _residual(op, residual)
    require.shape(op, fn_name, fn, (n * (n + 2), width))
    require.shape(op, scale_name, scale, (3,))
    require.shape(op, base_name, base, (n * (n + 2),))
    if norm_weight is not None:
        require.shape(op, "norm_weight", norm_weight, (width,))
    main_grad = any_takes_part(fn, scale, base, norm_weight)
    numerics = _NUMERICS._replace(**constants)
    out = weft.pre(residual, fn, scale, base, norm_weight, numerics=numerics, main_grad=main_grad)
    return out.u, (out.post.unsqueeze(-1), out.res)


def _merge(op: str, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """post_layer_mix as weft takes it, after a look at all four."""
    n, _ = _residual(op, residual)
    lead = residual.shape[:-2]
    require.shape(op, "x", x, (*lead, residual.shape[-1]))
    require.shape(op, "post_layer_mix", post_layer_mix, (*lead, n, 1))
    require.shape(op, "comb_res_mix", comb_res_mix, (*lead, n, n))
    return post_layer_mix.squeeze(-1)


def _post(
    op: str, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None
) -> Tensor:
    post = _merge(op, x, residual, post_layer_mix, comb_res_mix)
    if out is None:
        return weft.post(residual, x, post, comb_res_mix, numerics=_NUMERICS)
    _into.same_memory(op, out, residual, residual.shape)
    f = weft._as_streams(residual, x)
    return _into.write("mhc_post", (residual, f, post, comb_res_mix, None, None, pack(_NUMERICS), 0.0, 0), out)
