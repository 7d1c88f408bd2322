# SPDX-License-Identifier: Apache-2.0
"""Every operator as a plain torch expression, differentiable by autograd, in whatever dtype its inputs have. The tests
evaluate them in float64 on the CPU. Written from docs/reference/math.md, not from the library's code."""

import numpy as np
import torch
import weft.torch as wt


def numerics_of(value):
    return wt.Numerics.preset(value) if isinstance(value, str) else value


def snap(value, stored):
    """`value` as it was stored in 16 bits, with the gradient of `value`. Which way a tie is rounded hangs on the last
    bit of fp32, so the stored number is the library's, and is checked where it is a result itself."""
    return value if stored is None else value + (stored.to(value) - value).detach()


def project(x, phi, norm_weight=None):
    n, c = x.shape[-2:]
    weight = phi.reshape(-1, n, c)
    if norm_weight is not None:
        weight = weight * norm_weight.reshape(n, c)
    return torch.einsum("...ic,ric->...r", x, weight), (x * x).mean((-2, -1))


def inverse_root(ms, eps, kind):
    return (ms + eps).rsqrt() if kind == "inside" else 1 / (ms.sqrt() + eps)


def scale(h, ms, alpha, beta, numerics):
    num = numerics_of(numerics)
    mixed = alpha.shape[0] == 3
    n = round((h.shape[-1] + 1) ** 0.5) - 1 if mixed else h.shape[-1] // 2
    groups = torch.tensor([0] * n + [1] * n + [2] * n * n * mixed)
    z = alpha[groups] * h * inverse_root(ms, num.rms_eps, num.rms_eps_kind)[..., None] + beta
    pre, post, logits = z.split([n, n, n * n * mixed], -1)
    post = num.post_mult * post.sigmoid() + num.post_eps
    return pre.sigmoid() + num.pre_eps, post, logits.unflatten(-1, (n, n)) if mixed else None


def divide(m, dim, rule, eps):
    s = m.sum(dim, keepdim=True)
    if rule == "clamp":
        return m / s.clamp_min(eps)
    if rule == "threshold":
        kept = s > eps
        return torch.where(kept, m / torch.where(kept, s, 1), 0)
    return m / (s + eps)


def sinkhorn(logits, numerics):
    num = numerics_of(numerics)
    rule, eps, rounds = num.sinkhorn, num.sinkhorn_eps, num.sinkhorn_iters
    if rule == "log":
        g = torch.zeros_like(logits[..., :1, :])
        for _ in range(rounds):
            f = -torch.logsumexp(logits + g, -1, keepdim=True)
            g = -torch.logsumexp(logits + f, -2, keepdim=True)
        return (f + logits + g).exp()
    if rule == "softmax_eps":
        m = divide(logits.softmax(-1) + eps, -2, rule, eps)
        rounds -= 1
    elif rule == "threshold":
        m = logits.exp()
    else:
        m = (logits - logits.amax(-1, keepdim=True)).exp()
    for _ in range(rounds):
        m = divide(divide(m, -1, rule, eps), -2, rule, eps)
    return m


def coef(h, ms, alpha, beta, numerics):
    pre, post, logits = scale(h, ms, alpha, beta, numerics)
    return pre, post, None if logits is None else sinkhorn(logits, numerics)


def aggregate(x, pre):
    return (pre[..., None] * x).sum(-2)


def post(x, f, post, res=None, bias=None, *, numerics, factors=None):
    branch = post[..., None] * (f if bias is None else f + bias)[..., None, :]
    if factors is not None:
        branch = branch * factors.to(branch)
    if res is None:
        return branch + x
    mix = res.mT if numerics_of(numerics).apply == "in_out" else res
    return branch + mix @ x


def rmsnorm(u, weight=None, eps=1e-6):
    v = u * ((u * u).mean(-1, keepdim=True) + eps).rsqrt()
    return v if weight is None else v * weight


def head(x, phi, alpha, beta, norm_weight=None, *, rms_eps, rms_eps_kind, pre_eps):
    h, ms = project(x, phi, norm_weight)
    z = alpha * h * inverse_root(ms, rms_eps, rms_eps_kind)[..., None] + beta
    return aggregate(x, z.sigmoid() + pre_eps)


def pre(x, phi, alpha, beta, norm_weight=None, sub_weight=None, pre_in=None, *, numerics, sub_norm, sub_eps, stored_u):
    coefs = coef(*project(x, phi, norm_weight), alpha, beta, numerics)
    u = aggregate(x, coefs[0] if pre_in is None else pre_in)
    return rmsnorm(snap(u, stored_u), sub_weight, sub_eps) if sub_norm else u, *coefs


def dropout_factors(step: int, tokens: int, streams: int, channels: int, p: float, token_base: int = 0):
    """The factor of every element, 0 or 1/(1-p): section [D1] of docs/reference/math.md with seed 0 and site 0."""

    def philox(counter, key):
        c, k = [np.asarray(w, np.uint64) for w in counter], [np.uint64(w) for w in key]
        low = np.uint64(0xFFFFFFFF)
        for _ in range(10):
            a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            shift = np.uint64(32)
            c = [(b >> shift) ^ c[1] ^ k[0], b & low, (a >> shift) ^ c[3] ^ k[1], a & low]
            k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
        return c

    def halves(value):
        value = np.asarray(value, np.uint64)
        return value & np.uint64(0xFFFFFFFF), value >> np.uint64(32)

    key = [int(w) for w in philox((0, 0, *halves(step & (2**64 - 1))), (0, 0))[:2]]
    token = (np.arange(tokens) + token_base)[:, None]
    element = np.arange(streams * channels)[None, :]
    words = philox((*halves(token), *halves(element // 4)), key)
    shape = (tokens, streams * channels)
    drawn = np.choose(np.broadcast_to(element % 4, shape), [np.broadcast_to(w, shape) for w in words])
    factors = np.where(drawn >= np.uint64(int(p * 2**32)), 1 / (1 - p), 0.0)
    return torch.from_numpy(factors).view(tokens, streams, channels)
