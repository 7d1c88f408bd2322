# SPDX-License-Identifier: Apache-2.0
"""The operators of mHC and RMSNorm, registered with PyTorch as torch.ops.weft.* (register.py)."""

from __future__ import annotations

from torch import Tensor

from .register import Operator, operator

operator("mhc_project", "x, phi, norm_weight, int precision")
operator("mhc_coef")
operator("mhc_scale", binds={"d_logits": "d_res"})
operator("mhc_sinkhorn")
operator("mhc_aggregate")
operator("mhc_post", "x, f, post, res, bias, step, numerics, p, token_base")
operator("mhc_expand", "u, int streams", forward_only=("streams",))
operator("mhc_head", "x, phi, alpha, beta, norm_weight, rms_eps, rms_eps_kind, pre_eps, int precision")
operator("rmsnorm")

# ---- contract: what x was like is kept, not x --------------------------------------------------------------------


def _layout_of(x: Tensor, kind: int) -> tuple:
    return x.shape[-2], kind, x.stride(-1) > x.stride(-2)


def _laid_out(d_u: Tensor, streams: int, kind: int, swapped: bool) -> Tensor:
    """Like x, which is not there any more: (n, C), or (C, n) where `swapped`."""
    if swapped:
        return d_u.new_empty((*d_u.shape, streams)).transpose(-1, -2)
    return d_u.new_empty((*d_u.shape[:-1], streams, d_u.shape[-1]))


operator(
    "mhc_contract",
    gradient="d_u, int streams, kind, bool swapped",
    keeps=_layout_of,
    gradient_outputs=_laid_out,
)

# ---- pre, and boundary: post of one sub-layer and pre of the next ------------------------------------------------


def without_gain(gradient: Operator, results: tuple, args: tuple, add: int) -> tuple:
    """For a backward pass in which the sub-layer's input is not part of the loss: the same without its norm's gain. The
    library refuses a gain without a gradient that comes through it."""
    if args[gradient.place["d_u"]] is not None:
        return args
    want = list(args[gradient.place["want"]])
    gain = gradient.results.index("d_sub_weight")
    if want[gain] and not add >> gain & 1:
        results[gain].zero_()
    want[gain] = False
    return gradient.replaced(args, sub_weight=None, want=want)


# The sub-layer's input is the aggregate itself, or its RMSNorm.
INPUT = {"v": "u", "d_v": "d_u"}
WHICH = {"u": "not sub_norm", "v": "sub_norm"}
RENAMED = {"d_pre_out": "d_pre", "d_post_out": "d_post", "d_res_out": "d_res"}
BOUNDARY_TENSORS = "x, f, post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in, step"
BOUNDARY_SCALARS = "numerics, bool sub_norm, sub_eps, p, token_base, int precision"
BOUNDARY = {
    "results": "y, u, pre_out, post_out, res_out, h, ms",
    "binds": INPUT | RENAMED,
    "where": WHICH,
    "not_parameters": ("bias",),  # it belongs to the sub-layer before
}

operator(
    "mhc_pre",
    "x, phi, alpha, beta, norm_weight, sub_weight, pre_in, numerics, bool sub_norm, sub_eps, int precision",
    results="u, pre, post, res, h, ms",
    binds=INPUT,
    where=WHICH,
    needs=("d_u",),
    complete=without_gain,
)
operator("mhc_boundary", f"{BOUNDARY_TENSORS}, {BOUNDARY_SCALARS}", **BOUNDARY, needs=("d_u",), complete=without_gain)
