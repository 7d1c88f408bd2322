# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's mHC functions (transformer_engine.pytorch.triton.mhc), computed by weft.

Conventions: streams are the last axis, x is (s, b, C, n); phi is (2n + n*n, C*n) with k = c*n + i; H_res is
applied as x @ H_res; Sinkhorn in log space; the eps of the RMS norm is 2^-23, inside the root; H_pre is a
sigmoid and H_post twice a sigmoid. TransformerEngine wants n = 4; here n is 1 to 32, and N = 2n + n*n.

Speed on a GPU: mhc_generate_mix_and_aggregate is weft.torch.pre on memory of the order (..., C, n). The PyTorch guide, "The fused
kernels on a GPU", says when its forward and its backward are a fused kernel over the streams; for backward x and the
gradient of the result are both bfloat16 or both float16, n is 2 or 4 and C a multiple of 8. The other functions are a
kernel or a few each.

Arguments without a meaning of their own in weft:
    use_tf32        a permission to round the factors of an fp32 projection; False forbids it
    use_split_k     ignored: sums have an order that depends on the shape only
    recompute_hist  ignored: backward always recomputes the iterations and stores none of them

Gradients of phi, alpha, beta and norm_weight go into main_grad where these have one (the PyTorch guide); that of the bias in
mhc_fused_expand_combine, which belongs to the sub-layer, goes to autograd.

Gradients of x are summed in place, in its dtype, between mhc_generate_mix_and_aggregate and mhc_fused_expand_combine of one x
(the PyTorch guide, "Gradients of the streams"); mhc_fused_projection has a view of x, whose gradient autograd adds. Or there is
fused_grad_x_acc_buffer: an fp32 tensor of x.numel() elements, uninitialised, given to projection (or
mhc_generate_mix_and_aggregate), aggregate and expand_combine of one x. Backward sums the three gradients of x
in it; x gets the sum, rounded once, in memory of its own. Order of the calls: the projection opens the buffer
for its x, expand_combine closes it, so one buffer can serve one layer after the other. A buffer with
another x, or without its projection, is an error and not a wrong gradient."""

import math
import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.compat import _require as require
from weft.torch import GradX, Numerics
from weft.torch import functional as weft
from weft.torch.grads import any_takes_part, lend
from weft.torch.joins import view_of

__all__ = [
    "ENFORCE_DETERMINISTIC",
    "mhc_fused_aggregate",
    "mhc_fused_expand_combine",
    "mhc_fused_projection",
    "mhc_fused_scale",
    "mhc_fused_sinkhorn",
    "mhc_generate_mix_and_aggregate",
]

# Sums have one order each, whatever NVTE_ALLOW_NONDETERMINISTIC_ALGO says.
ENFORCE_DETERMINISTIC = True
_NUMERICS = Numerics.preset("transformer_engine")
_H_COLUMNS = 32  # H is stored in whole multiples of this, as TransformerEngine's kernels want it


def mhc_generate_mix_and_aggregate(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None = None,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
    use_split_k: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """All that comes before a sub-layer: its input (s, b, C), and H_post (s, b, n) and H_res (s, b, n, n) in fp32.
    Without a buffer this is weft.torch.pre: on a CPU x is read once per tile of tokens, on a GPU once by a fused kernel where
    there is one. With a buffer it is projection, coefficients and aggregate one after the other."""
    op = "mhc_generate_mix_and_aggregate"
    streams = _streams(op, x)
    n = streams.shape[-2]
    rows = _phi(op, phi, n, streams.shape[-1])
    gain = _gain(op, norm_weight, n, streams.shape[-1])
    require.shape(op, "alpha", alpha, (3,))
    require.numel(op, "beta", beta, rows.shape[0])
    biases = lend(beta, _flat)
    if fused_grad_x_acc_buffer is None:
        options = {"precision": _precision(use_tf32), "main_grad": any_takes_part(rows, alpha, biases, gain)}
        out = weft.pre(streams, rows, alpha, biases, gain, numerics=_NUMERICS, **options)
        return out.u, out.post, out.res
    grad_x = _open_buffer(op, x, fused_grad_x_acc_buffer)
    tokens = streams.flatten(0, -3)
    h, ms = _project(tokens, rows, gain, use_tf32, grad_x)
    pre, post, res = weft.coef(h, ms, alpha, biases, _NUMERICS, main_grad=any_takes_part(alpha, biases))
    u = weft.aggregate(tokens, pre, grad_x=grad_x)
    lead = x.shape[:-2]
    return u.view(x.shape[:-1]), post.view(*lead, n), res.view(*lead, n, n)


def mhc_fused_projection(
    x: Tensor,
    phi: Tensor,
    use_tf32: bool = True,
    norm_weight: Tensor | None = None,
    fused_grad_x_acc_buffer: Tensor | None = None,
    use_split_k: bool = False,
) -> tuple[Tensor, Tensor]:
    """x (M, C*n) -> H (M, 32) in fp32, of which the columns from N on are zero, and the mean squares (M,).
    Where N is larger than 32, H has the next multiple of 32 columns."""
    op = "mhc_fused_projection"
    require.tensor(op, "x", x)
    require.tensor(op, "phi", phi)
    if x.ndim != 2 or phi.ndim != 2:
        got = f"{tuple(x.shape)} and {tuple(phi.shape)}"
        raise ValueError(f"{op}: x, phi: expected (M, K) and (N, K), got {got}")
    n = require.streams_of_rows(op, "phi", phi.shape[0])
    if x.shape[1] % n:
        raise ValueError(f"{op}: x: expected a multiple of {n} columns, one per stream, got {x.shape[1]}")
    channels = x.shape[1] // n
    rows = _phi(op, phi, n, channels)
    gain = _gain(op, norm_weight, n, channels)
    grad_x = None
    if fused_grad_x_acc_buffer is not None:
        grad_x = _open_buffer(op, x, fused_grad_x_acc_buffer)
    streams = view_of(x, x.unflatten(1, (channels, n)).transpose(1, 2))
    h, ms = _project(streams, rows, gain, use_tf32, grad_x)
    return F.pad(h, (0, -h.shape[1] % _H_COLUMNS)), ms


def mhc_fused_scale(H: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """H (M, 32 or more), ms (M,) -> H_pre (M, n), H_post (M, n) and the logits of H_res (M, n*n), in H's dtype.
    Columns of H from N on are not looked at."""
    op = "mhc_fused_scale"
    require.tensor(op, "H", H)
    require.tensor(op, "ms", ms)
    gates = 2 * n + n * n
    if n < 1 or H.ndim != 2 or H.shape[1] < gates:
        raise ValueError(f"{op}: H: expected (M, {gates} or more) for n = {n}, got {tuple(H.shape)}")
    require.shape(op, "ms", ms, H.shape[:1])
    require.shape(op, "alpha", alpha, (3,))
    require.numel(op, "beta", beta, gates)
    full = require.full(H)
    biases = lend(beta, _flat)
    main_grad = any_takes_part(alpha, biases)
    pre, post, logits = weft.scale(H[:, :gates].to(full), ms.to(full), alpha, biases, _NUMERICS, main_grad=main_grad)
    return pre.to(H.dtype), post.to(H.dtype), logits.flatten(1).to(H.dtype)


def mhc_fused_sinkhorn(H_res: Tensor, n: int = 4, recompute_hist: bool = True, iters: int = 20) -> Tensor:
    """Logits (..., n, n) -> H_res (..., n, n), in the logits' dtype."""
    op = "mhc_fused_sinkhorn"
    require.tensor(op, "H_res", H_res, 2)
    require.shape(op, "H_res", H_res, (*H_res.shape[:-2], n, n))
    res = weft.sinkhorn(H_res, _NUMERICS._replace(sinkhorn_iters=iters))
    return res.to(H_res.dtype)


def mhc_fused_aggregate(
    x: Tensor,
    H_pre: Tensor,
    n: int,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
) -> Tensor:
    """x (s, b, C, n), H_pre (s, b, n) or (s*b, n) -> (s, b, C). use_tf32: the sums are fp32 either way."""
    op = "mhc_fused_aggregate"
    streams = _streams(op, x, n)
    pre = _per_token(op, "H_pre", H_pre, x, (n,))
    if fused_grad_x_acc_buffer is None:
        return weft.aggregate(streams, pre)
    grad_x = _opened_buffer(op, x, fused_grad_x_acc_buffer)
    u = weft.aggregate(streams.flatten(0, -3), pre.flatten(0, -2), grad_x=grad_x)
    return u.view(x.shape[:-1])


def mhc_fused_expand_combine(
    f: Tensor,
    bias: Tensor | None,
    H_post: Tensor,
    x: Tensor,
    H_res: Tensor,
    n: int,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
) -> Tensor:
    """(f [+ bias]) H_post + x @ H_res: f (s, b, C), x (s, b, C, n) -> (s, b, C, n). H_post is (s, b, n) or
    (s*b, n), H_res (s, b, n, n). use_tf32: the sums are fp32 either way."""
    op = "mhc_fused_expand_combine"
    streams = _streams(op, x, n)
    require.shape(op, "f", f, x.shape[:-1])
    if bias is not None:
        require.shape(op, "bias", bias, x.shape[-2:-1])
    post = _per_token(op, "H_post", H_post, x, (n,))
    res = _per_token(op, "H_res", H_res, x, (n, n))
    if fused_grad_x_acc_buffer is None:
        return weft.post(streams, f, post, res, bias, numerics=_NUMERICS).transpose(-1, -2)
    grad_x = _opened_buffer(op, x, fused_grad_x_acc_buffer, close=True)
    y = weft.post(
        streams.flatten(0, -3),
        f.flatten(0, -2),
        post.flatten(0, -2),
        res.flatten(0, -3),
        bias,
        numerics=_NUMERICS,
        grad_x=grad_x,
    )
    return y.transpose(-1, -2).view(x.shape)


# ---- arguments ---------------------------------------------------------------------------------------------


def _precision(use_tf32: bool) -> str:
    return "tf32" if use_tf32 else "full"


def _streams(op: str, x: Tensor, n: int | None = None) -> Tensor:
    """x (..., C, n) as the (..., n, C) that weft takes: a view."""
    require.tensor(op, "x", x, 3)
    if n is not None:
        require.equal(op, "n", n, x.shape[-1], "the last axis of x")
    return view_of(x, x.transpose(-1, -2))


def _phi(op: str, phi: Tensor, n: int, channels: int) -> Tensor:
    require.shape(op, "phi", phi, (2 * n + n * n, channels * n))
    return lend(phi, lambda t: t.unflatten(1, (channels, n)).transpose(1, 2))


def _gain(op: str, norm_weight: Tensor | None, n: int, channels: int) -> Tensor | None:
    if norm_weight is None:
        return None
    require.shape(op, "norm_weight", norm_weight, (channels * n,))
    return lend(norm_weight, lambda t: t.view(channels, n).t())


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1)


def _project(streams: Tensor, rows: Tensor, gain: Tensor | None, use_tf32: bool, grad_x: GradX | None) -> tuple:
    options = {"precision": _precision(use_tf32), "main_grad": any_takes_part(rows, gain)}
    return weft.project(streams, rows, gain, grad_x=grad_x, **options)


def _per_token(op: str, name: str, value: Tensor, x: Tensor, tail: tuple[int, ...]) -> Tensor:
    """Coefficients of x's tokens; one token axis instead of x's is fine, mhc_fused_scale returns that."""
    require.tensor(op, name, value)
    lead = tuple(x.shape[:-2])
    want, flat = (*lead, *tail), (math.prod(lead), *tail)
    if tuple(value.shape) not in (want, flat):
        raise ValueError(f"{op}: {name}: expected shape {want} or {flat}, got {tuple(value.shape)}")
    return value.view(want)


# ---- the shared buffer -------------------------------------------------------------------------------------
# TransformerEngine hands one raw buffer to three calls; weft has an object for that. The table finds the object of a
# buffer between the projection, which makes it, and the combine, which is the last. The graph keeps the object alive,
# not the table: a forward pass that is given up keeps nothing.


class _Opened(GradX):
    def __init__(self, buffer: Tensor, x: Tensor):
        super().__init__(buffer=buffer)
        self.of = x.data_ptr()


_opened: weakref.WeakValueDictionary[tuple[torch.device, int], _Opened] = weakref.WeakValueDictionary()


def _key(op: str, x: Tensor, buffer: Tensor) -> tuple[torch.device, int]:
    name = "fused_grad_x_acc_buffer"
    require.numel(op, name, buffer, x.numel())
    if buffer.dtype != require.full(x) or buffer.device != x.device or not buffer.is_contiguous():
        want = f"contiguous {require.full(x)} on {x.device}"
        got = f"{buffer.dtype} on {buffer.device} with strides {buffer.stride()}"
        raise ValueError(f"{op}: {name}: expected {want}, got {got}")
    if buffer.requires_grad:
        raise ValueError(f"{op}: {name}: expected a tensor outside of autograd, got one that requires grad")
    return buffer.device, buffer.data_ptr()


def _open_buffer(op: str, x: Tensor, buffer: Tensor) -> GradX | None:
    key = _key(op, x, buffer)
    _opened.pop(key, None)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    _opened[key] = grad_x = _Opened(buffer, x)
    return grad_x


def _opened_buffer(op: str, x: Tensor, buffer: Tensor, close: bool = False) -> GradX | None:
    key = _key(op, x, buffer)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    grad_x = _opened.get(key)
    if grad_x is None or grad_x.of != x.data_ptr():
        got = "one that no projection has opened" if grad_x is None else "one that was opened for another x"
        raise RuntimeError(
            f"{op}: fused_grad_x_acc_buffer: expected the buffer that the projection of this x was given, got {got}"
        )
    if close:
        del _opened[key]
    return grad_x
