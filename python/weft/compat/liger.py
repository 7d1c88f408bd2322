# SPDX-License-Identifier: Apache-2.0
"""Liger-Kernel's mHC functions and module (liger_kernel.ops.mhc, liger_kernel.transformers.mhc), computed by weft.

Conventions: x is (..., n, C); phi is (n*C, 2n + n*n), the transpose of what others have; h_res[o, i] is what output
stream o takes of input stream i; eps inside the root; Sinkhorn starts with a softmax plus eps. Coefficients are
fp32. n is 1 to 32 and need not be a power of two, and a CPU is enough.

Activations of 32 bits, and of 64 on the reference backend, need allow_fp32=True, as in Liger. They are computed at that
precision. Gradients of parameters go into main_grad where these have one, and those of x are summed in place (the PyTorch guide).

liger_mhc_forward, and LigerMHC, which calls it, have weft.torch.pre before the layer and read x once there and once
in the merge. liger_mhc_coeffs, liger_mhc_pre and liger_mhc_post_res are single operators, as Liger's are: the first
two read x once each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import Numerics
from weft.torch import functional as weft
from weft.torch.grads import any_takes_part, deposit, lend

__all__ = [
    "LigerMHC",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
]

_NUMERICS = Numerics.preset("liger")


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., n, C) -> h_pre (..., n), h_post (..., n), h_res (..., n, n)."""
    args, numerics = _site(
        "liger_mhc_coeffs",
        (x, phi, b, alpha_pre, alpha_post, alpha_res),
        allow_fp32,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        post_mult=post_mult,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_iters=tmax,
    )
    rows, alpha, beta = args
    h, ms = weft.project(x, rows, main_grad=any_takes_part(rows))
    return weft.coef(h, ms, alpha, beta, numerics, main_grad=any_takes_part(beta))


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """sum_i h_pre[i] x[i]: x (..., n, C), h_pre (..., n) -> (..., C)."""
    require.tensor("liger_mhc_pre", "x", x, 2)
    require.shape("liger_mhc_pre", "h_pre", h_pre, x.shape[:-1])
    return weft.aggregate(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """h_post[o] f_out + sum_i h_res[o, i] x[i]: f_out (..., C) -> (..., n, C). An f_out of another dtype is
    converted to x's."""
    op = "liger_mhc_post_res"
    require.tensor(op, "x", x, 2)
    lead, (n, channels) = x.shape[:-2], x.shape[-2:]
    require.shape(op, "f_out", f_out, (*lead, channels))
    require.shape(op, "h_post", h_post, (*lead, n))
    require.shape(op, "h_res", h_res, (*lead, n, n))
    return weft.post(x, f_out.to(x.dtype), h_post, h_res, numerics=_NUMERICS)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """liger_mhc_post_res and, where return_x_in asks for it, liger_mhc_pre after it in a pair."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """x (..., n, C) around layer (..., C) -> (..., C); with return_coeffs also (h_pre, h_post, h_res). The layer works in
    the dtype of its parameters, the streams keep theirs."""
    args, numerics = _site(
        "liger_mhc_forward",
        (x, phi, b, alpha_pre, alpha_post, alpha_res),
        allow_fp32,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        post_mult=post_mult,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_iters=tmax,
    )
    coef = weft.pre(x, *args, numerics=numerics, main_grad=any_takes_part(*args))
    parameters = layer.parameters() if hasattr(layer, "parameters") else iter(())
    dtype = next((p.dtype for p in parameters), coef.u.dtype)
    y = liger_mhc_post_res(x, layer(coef.u.to(dtype)), coef.post, coef.res)
    return (y, coef[1:]) if return_coeffs else y


class LigerMHC(nn.Module):
    """Streams (..., hc, c) around a layer (..., c) -> (..., c). Parameters and their initial values are Liger's, so
    the gates are open from the start (alpha 1); weft.torch.HyperConnectionLayer starts as a plain residual."""

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ):
        super().__init__()
        self.layer, self.hc, self.c, self.allow_fp32 = layer, int(hc), int(c), bool(allow_fp32)
        if self.hc < 1 or self.c < 1 or int(tmax) < 1:
            raise ValueError(f"LigerMHC: hc, c, tmax: expected at least 1, got {hc}, {c}, {tmax}")
        self.tmax, self.rms_eps, self.pre_eps = int(tmax), float(rms_eps), float(pre_eps)
        self.sinkhorn_eps, self.post_mult = float(sinkhorn_eps), float(post_mult)
        gates = self.hc * self.hc + 2 * self.hc
        device = next((t.device for t in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
        phi = torch.randn(self.hc * self.c, gates, dtype=phi_dtype, device=device) * 0.02
        self.phi = nn.Parameter(phi)
        self.b = nn.Parameter(torch.zeros(gates, device=device))
        self.alpha_pre = nn.Parameter(torch.ones((), device=device))
        self.alpha_post = nn.Parameter(torch.ones((), device=device))
        self.alpha_res = nn.Parameter(torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        require.tensor("LigerMHC", "x", x, 2)
        require.shape("LigerMHC", "x", x, (*x.shape[:-2], self.hc, self.c))
        return liger_mhc_forward(
            x,
            self.layer,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


def _site(op: str, tensors: tuple, allow_fp32: bool, **constants) -> tuple[tuple[Tensor, Tensor, Tensor], Numerics]:
    """phi, alpha and beta as weft takes them, after a look at x (..., n, C) and Liger's parameters, and the numerics."""
    x, phi, b, *alphas = tensors
    require.tensor(op, "x", x, 2)
    if x.dtype in (torch.float32, torch.float64) and not allow_fp32:
        raise ValueError(f"{op}: x: expected torch.bfloat16 or torch.float16 without allow_fp32, got {x.dtype}")
    n, channels = x.shape[-2:]
    gates = n * n + 2 * n
    require.shape(op, "phi", phi, (n * channels, gates))
    require.shape(op, "b", b, (gates,))
    for name, alpha in zip(("alpha_pre", "alpha_post", "alpha_res"), alphas, strict=True):
        require.numel(op, name, alpha, 1)
    rows = lend(phi, lambda t: t.t().unflatten(1, (n, channels)))
    alpha = torch.cat([deposit(alpha).reshape(1) for alpha in alphas])
    return (rows, alpha, b), _NUMERICS._replace(**constants)
