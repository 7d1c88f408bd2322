# SPDX-License-Identifier: Apache-2.0
"""The operators of weft as plain PyTorch, the way one writes them without a library, and data for them: what
bench/compare_torch.py compares weft with.

Arguments and results are those of weft.torch. Everything is computed in fp32 and rounded once, where a result is
stored."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import weft.torch as wt

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
        if self.rms_eps_kind == "inside":
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
        if rule == "log":
            g = torch.zeros_like(logits[:, :1])
            for _ in range(iterations):
                f = -torch.logsumexp(logits + g, -1, keepdim=True)
                g = -torch.logsumexp(logits + f, -2, keepdim=True)
            return torch.exp(logits + f + g)
        if rule == "softmax_eps":
            a = torch.softmax(logits, -1) + eps
            a = a / (a.sum(-2, keepdim=True) + eps)
            axes = (-1, -2) * (iterations - 1)
        else:
            a = torch.exp(logits - logits.amax(-1, keepdim=True))
            axes = (-1, -2) * iterations
        for axis in axes:
            total = a.sum(axis, keepdim=True)
            a = a / (total.clamp(min=eps) if rule == "clamp" else total + eps)
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
        xf, by_output = x.float(), res if self.apply == "out_in" else res.transpose(1, 2)
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
        return self._aggregate(xf, gate).to(x.dtype)

    def pre(self, x, phi, alpha, beta):
        xf = x.float()
        h, ms = self._project(xf, phi)
        pre, post, res = self.coef(h, ms, alpha, beta)
        return self._aggregate(xf, pre).to(x.dtype), pre, post, res

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
    """One operator: its data, weft's function of them and the expression."""

    op: str
    inputs: dict  # differentiable, all of them, and in the order of the arguments of both
    outputs: tuple
    weft: Callable
    copies: str = ""  # the pass that only moves data
    narrow: str = ""  # the pass where torch rounds to 16 bits half-way and weft does not
    passes: tuple = ("fwd", "bwd")
    function: Callable | None = None  # the expression, where it is not one of Expressions

    @property
    def expression(self):
        return self.op.removeprefix("mhc_")


def replay_case(x, post, res, numerics):
    tokens, n, channels = x.shape
    inputs, outputs = {"x": x}, []
    for i in range(REPLAY_LAYERS):
        f = torch.randn(tokens, channels, dtype=x.dtype)
        of_layer = {"pre": torch.rand(tokens, n), "f": f, "post": post.roll(i, 0), "res": res.roll(i, 0)}
        inputs.update({f"{name}{i}": tensor for name, tensor in of_layer.items()})
        outputs += [f"u{i}", f"y{i}"]

    def replay(x, *tensors):
        layers = [wt.ReplayLayer(*of_layer) for of_layer in zip(*[iter(tensors)] * 4, strict=True)]
        return tuple(t for pair in wt.replay(x, layers, numerics) for t in pair)

    return Case("mhc_replay", inputs, tuple(outputs), replay, passes=("fwd",))


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

    def ruled(function):
        """The function with these numerics."""
        return lambda *tensors: function(*tensors, numerics=numerics)

    coefficients = ("u", "pre", "post", "res")
    return [
        Case("mhc_project", {"x": x, "phi": phi}, ("h", "ms"), wt.project),
        Case("mhc_scale", gate, ("pre", "post", "logits"), ruled(wt.scale)),
        Case("mhc_sinkhorn", {"logits": logits}, ("res",), ruled(wt.sinkhorn)),
        Case("mhc_coef", gate, ("pre", "post", "res"), ruled(wt.coef)),
        Case("mhc_aggregate", {"x": x, "pre": pre}, ("u",), wt.aggregate),
        Case("mhc_post", mix, ("y",), ruled(wt.post)),
        Case("mhc_expand", {"u": u}, ("x",), lambda u: wt.expand(u, n), copies="fwd"),
        Case("mhc_contract", {"x": x}, ("u",), wt.contract, copies="bwd"),
        Case("mhc_head", {"x": x, **head}, ("u",), lambda *t: wt.head(*t, rms_eps=EPS, pre_eps=EPS)),
        Case("mhc_pre", {"x": x, **site}, coefficients, ruled(wt.pre)),
        Case("mhc_boundary", {**mix, **site}, ("y", *coefficients), ruled(wt.boundary), narrow="bwd"),
        replay_case(x, post, res, numerics),
        Case("rmsnorm", {"u": u, "weight": 0.5 + torch.rand(channels)}, ("v",), lambda *t: wt.rmsnorm(*t, eps=EPS)),
    ]
