# SPDX-License-Identifier: Apache-2.0
"""The operators of weft as plain PyTorch, the way one writes them without a library, and data for them: what
bench/compare_torch.py compares weft with.

Arguments and results are in weft's order and have weft's dtypes. Everything is computed in fp32 and rounded
once, where a result is stored."""

import math
from dataclasses import dataclass, field

import torch
import weft_ctypes as weft

ACTIVATIONS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
REPLAY_LAYERS = 4
EPS = 1e-6  # of rmsnorm and of the head


class Expressions:
    """The operators for some numerics. `sums`: streams are mixed by products and sums, not by bmm."""

    def __init__(self, numerics, streams, sums):
        self.n, self.sums = streams, sums
        self.rms_eps, self.rms_eps_kind = numerics.rms_eps, numerics.rms_eps_kind
        self.pre_eps, self.post_mult, self.apply = numerics.pre_eps, numerics.post_mult, numerics.apply
        self.rule, self.eps, self.iterations = (
            numerics.sinkhorn,
            numerics.sinkhorn_eps,
            numerics.sinkhorn_iters,
        )

    def project(self, x, phi):
        return self._project(x.float(), phi)

    def _project(self, xf, phi):
        rows = xf.flatten(1)
        return rows @ phi.flatten(1).T, rows.square().mean(-1)

    def _inverse(self, ms):
        if self.rms_eps_kind == weft.EPS_INSIDE:
            return torch.rsqrt(ms + self.rms_eps).unsqueeze(-1)
        return (1 / (ms.sqrt() + self.rms_eps)).unsqueeze(-1)

    def scale(self, h, ms, alpha, beta):
        n = self.n
        h_pre, h_post, h_res = (h * self._inverse(ms)).split([n, n, n * n], -1)
        pre = torch.sigmoid(alpha[0] * h_pre + beta[:n]) + self.pre_eps
        post = self.post_mult * torch.sigmoid(alpha[1] * h_post + beta[n : 2 * n])
        return pre, post, (alpha[2] * h_res + beta[2 * n :]).view(-1, n, n)

    def sinkhorn(self, logits):
        rule, eps, iterations = self.rule, self.eps, self.iterations
        if rule == weft.SINKHORN_LOG:
            g = torch.zeros_like(logits[:, :1])
            for _ in range(iterations):
                f = -torch.logsumexp(logits + g, -1, keepdim=True)
                g = -torch.logsumexp(logits + f, -2, keepdim=True)
            return torch.exp(logits + f + g)
        if rule == weft.SINKHORN_SOFTMAX_EPS:
            a = torch.softmax(logits, -1) + eps
            a = a / (a.sum(-2, keepdim=True) + eps)
            axes = (-1, -2) * (iterations - 1)
        else:
            a = torch.exp(logits - logits.amax(-1, keepdim=True))
            axes = (-1, -2) * iterations
        for axis in axes:
            total = a.sum(axis, keepdim=True)
            a = a / (total.clamp(min=eps) if rule == weft.SINKHORN_CLAMP else total + eps)
        return a

    def coef(self, h, ms, alpha, beta):
        pre, post, logits = self.scale(h, ms, alpha, beta)
        return pre, post, self.sinkhorn(logits)

    def aggregate(self, x, pre):
        return self._aggregate(x.float(), pre).to(x.dtype)

    def _aggregate(self, xf, pre):
        if self.sums:
            return (pre.unsqueeze(-1) * xf).sum(1)
        return torch.bmm(pre.unsqueeze(1), xf).squeeze(1)

    def post(self, x, f, post, res):
        xf, by_output = x.float(), res if self.apply == weft.APPLY_OUT_IN else res.transpose(1, 2)
        mixed = (by_output.unsqueeze(-1) * xf.unsqueeze(1)).sum(2) if self.sums else torch.bmm(by_output, xf)
        return (post.unsqueeze(-1) * f.unsqueeze(1) + mixed).to(x.dtype)

    def expand(self, u):
        return u.unsqueeze(1).expand(-1, self.n, -1).contiguous()

    def contract(self, x):
        return x.mean(1)

    def head(self, x, phi, alpha, beta):
        xf = x.float()
        h, ms = self._project(xf, phi)
        gate = torch.sigmoid(alpha * h * torch.rsqrt(ms + EPS).unsqueeze(-1) + beta) + EPS
        return self._aggregate(xf, gate).to(x.dtype), h, ms

    def pre(self, x, phi, alpha, beta):
        xf = x.float()
        h, ms = self._project(xf, phi)
        pre, post, res = self.coef(h, ms, alpha, beta)
        return h, ms, pre, post, res, self._aggregate(xf, pre).to(x.dtype)

    def boundary(self, x, f, post, res, phi, alpha, beta):
        y = self.post(x, f, post, res)
        return y, *self.pre(y, phi, alpha, beta)

    def replay(self, x, *layers):
        results = []
        for pre, f, post, res in zip(*[iter(layers)] * 4, strict=True):
            results.append(self.aggregate(x, pre))
            x = self.post(x, f, post, res)
            results.append(x)
        return tuple(results)

    def rmsnorm(self, u, weight):
        uf = u.float()
        return (uf * torch.rsqrt(uf.square().mean(-1, keepdim=True) + EPS) * weight).to(u.dtype)


@dataclass
class Case:
    """One operator of weft, its data, and by the same names the expression's arguments and results."""

    op: str
    inputs: dict  # differentiable, all of them, and in the order of the expression's arguments
    outputs: tuple
    scalars: dict = field(default_factory=dict)
    copies: str = ""  # the pass that only moves data
    narrow: str = ""  # the pass where torch rounds to 16 bits half-way and weft does not
    passes: tuple = ("fwd", "bwd")
    function: object = None  # the expression, where it is not one of Expressions

    @property
    def expression(self):
        return self.op.removeprefix("mhc_")


def replay_case(x, post, res, scalars):
    tokens, n, channels = x.shape
    inputs, outputs = {"x": x}, []
    for i in range(REPLAY_LAYERS):
        f = torch.randn(tokens, channels, dtype=x.dtype)
        of_layer = {"pre": torch.rand(tokens, n), "f": f, "post": post.roll(i, 0), "res": res.roll(i, 0)}
        inputs.update({f"{name}{i}": tensor for name, tensor in of_layer.items()})
        outputs += [f"u{i}", f"y{i}"]
    return Case("mhc_replay", inputs, tuple(outputs), scalars, passes=("fwd",))


def make_cases(tokens, channels, n, dtype, numerics):
    torch.manual_seed(1)
    gates = 2 * n + n * n
    x = torch.randn(tokens, n, channels, dtype=dtype)
    u = torch.randn(tokens, channels, dtype=dtype)
    phi = torch.randn(gates, n, channels) / math.sqrt(n * channels)
    alpha, beta = torch.tensor([0.9, 1.1, 0.8]), 0.3 * torch.randn(gates)
    h, ms, logits = torch.randn(tokens, gates), 0.5 + torch.rand(tokens), torch.randn(tokens, n, n)
    pre, post = 0.1 + torch.rand(tokens, n), 2 * torch.rand(tokens, n)
    res = Expressions(numerics, n, sums=False).sinkhorn(logits)

    site = {"phi": phi, "alpha": alpha, "beta": beta}
    head = {"phi": phi[:n].clone(), "alpha": alpha[:1].clone(), "beta": beta[:n].clone()}
    gate = {"h": h, "ms": ms, "alpha": alpha, "beta": beta}
    mix = {"x": x, "f": u, "post": post, "res": res}
    rules = {"numerics": numerics}
    boundary = ("y", "h", "ms", "pre_out", "post_out", "res_out", "u")
    return [
        Case("mhc_project", {"x": x, "phi": phi}, ("h", "ms")),
        Case("mhc_scale", gate, ("pre", "post", "logits"), rules),
        Case("mhc_sinkhorn", {"logits": logits}, ("res",), rules),
        Case("mhc_coef", gate, ("pre", "post", "res"), rules),
        Case("mhc_aggregate", {"x": x, "pre": pre}, ("u",)),
        Case("mhc_post", mix, ("y",), rules),
        Case("mhc_expand", {"u": u}, ("x",), copies="fwd"),
        Case("mhc_contract", {"x": x}, ("u",), {"kind": weft.CONTRACT_MEAN}, copies="bwd"),
        Case("mhc_head", {"x": x, **head}, ("u", "h", "ms"), {"rms_eps": EPS, "pre_eps": EPS}),
        Case("mhc_pre", {"x": x, **site}, ("h", "ms", "pre", "post", "res", "u"), rules),
        Case("mhc_boundary", {**mix, **site}, boundary, rules, narrow="bwd"),
        replay_case(x, post, res, rules),
        Case("rmsnorm", {"u": u, "weight": 0.5 + torch.rand(channels)}, ("v",), {"eps": EPS}),
    ]
