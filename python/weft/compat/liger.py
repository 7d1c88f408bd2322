# SPDX-License-Identifier: Apache-2.0
"""Liger-Kernel's mHC functions and module (liger_kernel.ops.mhc, liger_kernel.transformers.mhc) over weft.

Conventions: x is (..., n, C); phi is (n*C, 2n + n*n), the transpose of what others have; h_res[o, i] is what output
stream o takes of input stream i; eps inside the root; Sinkhorn starts with a softmax plus eps. Coefficients are
fp32. n is 1 to 32 and need not be a power of two, and a CPU is enough.

allow_fp32 is ignored: fp32 activations are served, at fp32, in any case. (Liger raises for them where it is False.)

The functions are single operators, as Liger's are: liger_mhc_coeffs reads x once, liger_mhc_pre again, and nothing here is
the fused kernels of weft.torch.pre and weft.torch.boundary."""

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import Numerics
from weft.torch import functional as weft

__all__ = [
    "LigerMHC",
    "liger_mhc_coeffs",
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
    op = "liger_mhc_coeffs"
    require.tensor(op, "x", x, 2)
    n, channels = x.shape[-2:]
    gates = n * n + 2 * n
    require.shape(op, "phi", phi, (n * channels, gates))
    require.shape(op, "b", b, (gates,))
    for name, alpha in (("alpha_pre", alpha_pre), ("alpha_post", alpha_post), ("alpha_res", alpha_res)):
        require.numel(op, name, alpha, 1)
    numerics = _NUMERICS._replace(
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        post_mult=post_mult,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_iters=tmax,
    )
    rows = phi.t().unflatten(1, (n, channels))
    alpha = torch.cat([alpha_pre.reshape(1), alpha_post.reshape(1), alpha_res.reshape(1)])
    h, ms = weft.project(x, rows)
    return weft.coef(h, ms, alpha, b, numerics)


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
        h_pre, h_post, h_res = liger_mhc_coeffs(
            x,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )
        u = liger_mhc_pre(x, h_pre)
        # The layer works in its own dtype, the streams keep theirs.
        dtype = next((p.dtype for p in self.layer.parameters()), u.dtype)
        return liger_mhc_post_res(x, self.layer(u.to(dtype)), h_post, h_res)

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"
