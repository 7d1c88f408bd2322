# SPDX-License-Identifier: Apache-2.0
"""The model of weft/model.h as plain PyTorch, with the names of its checkpoints, and the text windows of `weft train`."""

import json
import math
import struct

import numpy
import torch
import torch.nn.functional as F
from torch import nn

NORM_EPS, MASK = 1e-6, (1 << 64) - 1
CHUNK = 64  # tokens of the delta rule that are computed together


def rmsnorm(x, weight, eps=NORM_EPS):
    if x.dtype != torch.float32:  # one operator, fp32 inside
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def sinkhorn(logits, iterations=20, eps=1e-6):
    a = torch.softmax(logits, -1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


class Connection(nn.Module):
    """One site's coefficients: pre, post [.., n] and res [.., n, n], with out[o] = sum_i res[i, o] x[i]."""

    def __init__(self, kind, channels, streams):
        super().__init__()
        n = streams
        self.kind, self.n = kind, n
        self.phi = nn.Parameter(torch.empty(*((n + 2, channels) if kind == "hc" else (n * (n + 2), n * channels))))
        self.alpha, self.beta = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(n * (n + 2)))

    def forward(self, x):
        n, alpha, beta = self.n, self.alpha, self.beta
        if self.kind == "hc":
            z = torch.tanh((x @ self.phi.T).float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6))
            pre, post = alpha[0] * z[..., 0] + beta[:n], alpha[1] * z[..., 1] + beta[n : 2 * n]
            return pre, post, alpha[2] * z[..., 2:] + beta[2 * n :].view(n, n)
        rms_eps = 1e-20 if self.kind == "mhc_single_pass" else 1e-6
        flat = x.flatten(-2)
        z = (flat @ self.phi.T).float() * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + rms_eps)
        pre = torch.sigmoid(alpha[0] * z[..., :n] + beta[:n]) + 1e-6
        post = 2 * torch.sigmoid(alpha[1] * z[..., n : 2 * n] + beta[n : 2 * n])
        return pre, post, sinkhorn((alpha[2] * z[..., 2 * n :] + beta[2 * n :]).unflatten(-1, (n, n)))


class Norm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x):
        return rmsnorm(x, self.weight)


class Attention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, channels, bias=False)

    def run(self, v):
        b, t, c = v.shape
        d = c // self.heads
        q, k, x = self.qkv(v).view(b, t, 3, self.heads, d).permute(2, 0, 3, 1, 4)
        at = v.device
        angle = torch.arange(t, device=at)[:, None] * 10000.0 ** (-torch.arange(d // 2, device=at) / (d // 2))
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        def turn(y):
            y0, y1 = y[..., : d // 2], y[..., d // 2 :]
            return torch.cat([y0 * cos - y1 * sin, y1 * cos + y0 * sin], -1)

        o = F.scaled_dot_product_attention(turn(q), turn(k), x, is_causal=True)
        return self.out(o.transpose(1, 2).reshape(b, t, c))


def delta_rule(q, k, v, beta, g):
    """S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q, in fp32. q, k, v [B, H, T, D]; beta, g [B, H, T]."""
    state, outputs = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for at in range(0, q.shape[2], CHUNK):
        qc, kc, vc, bc, gc = (x[:, :, at : at + CHUNK] for x in (q, k, v, beta, g))
        total = gc.cumsum(-1)
        lower = torch.ones(gc.shape[-1], gc.shape[-1], dtype=torch.bool, device=q.device).tril()
        decay = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf))
        seen = torch.exp(total)[..., None]
        change = bc[..., None] * (vc - seen * (kc @ state))
        mixed = (bc[..., None] * (kc @ kc.transpose(-1, -2)) * decay).tril(-1)
        change = torch.linalg.solve_triangular(mixed, change, upper=False, unitriangular=True)
        outputs.append(seen * (qc @ state) + (qc @ kc.transpose(-1, -2) * decay) @ change)
        left = torch.exp(total[..., -1:] - total)[..., None]
        state = seen[..., -1:, :] * state + (left * kc).transpose(-1, -2) @ change
    return torch.cat(outputs, 2)


class Taps(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(self, x):
        """[B, T, C], each channel with its own taps over the past."""
        width = self.weight.shape[1]
        weight = self.weight[:, None].to(x.dtype)
        return F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight, groups=x.shape[-1]).transpose(1, 2)


class DeltaNet(nn.Module):
    def __init__(self, channels, heads, key_heads, width):
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, channels // heads
        self.sections = [key_heads * self.dim] * 2 + [channels] * 2 + [heads] * 2
        self.proj = nn.Linear(channels, sum(self.sections), bias=False)
        self.conv = Taps(sum(self.sections[:3]), width)
        self.a_log, self.dt_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.gated_norm, self.out = Norm(self.dim), nn.Linear(channels, channels, bias=False)

    def run(self, v):
        q, k, x, z, b, a = self.proj(v).split(self.sections, -1)
        q, k, x = F.silu(self.conv(torch.cat([q, k, x], -1)).float()).split(self.sections[:3], -1)
        q, k, x, z = (y.unflatten(-1, (-1, self.dim)).transpose(1, 2).float() for y in (q, k, x, z))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(self.heads // self.key_heads, 1) for y in (q * self.dim**-0.5, k))
        beta = torch.sigmoid(b.float()).transpose(1, 2)
        g = (-torch.exp(self.a_log) * F.softplus(a.float() + self.dt_bias)).transpose(1, 2)
        o = self.gated_norm(delta_rule(q, k, x, beta, g)) * F.silu(z)
        return self.out(o.transpose(1, 2).flatten(-2).to(v.dtype))


class MLP(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.gate_up, self.down = nn.Linear(channels, 2 * hidden, bias=False), nn.Linear(hidden, channels, bias=False)

    def run(self, v):
        gate, up = self.gate_up(v).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class GPT(nn.Module):
    def __init__(
        self, kind, layers, channels, heads, hidden, streams, vocab=256, mixer="attention", key_heads=0, conv_width=0
    ):
        super().__init__()
        self.kind, self.streams = kind, streams
        self.embed, self.head = nn.Embedding(vocab, channels), nn.Linear(channels, vocab, bias=False)
        self.norm, self.layers = Norm(channels), nn.ModuleList()
        for i in range(layers):
            attends = mixer == "attention" or (mixer == "hybrid" and i % 4 == 3)
            site = (
                Attention(channels, heads)
                if attends
                else DeltaNet(channels, heads, key_heads or heads // 2, conv_width or 4)
            )
            layer = nn.ModuleDict({"attention" if attends else "gdn": site, "mlp": MLP(channels, hidden)})
            for site in layer.values():
                site.norm = Norm(channels)
                if kind != "residual":
                    site.connection = Connection(kind, channels, streams)
            self.layers.append(layer)

    def forward(self, tokens, dtype=torch.float32):
        """Streams are of `dtype`; coefficients are fp32."""
        x = self.embed(tokens).to(dtype)
        sites = [site for layer in self.layers for site in layer.values()]
        if self.kind == "residual":
            for site in sites:
                x = x + site.run(site.norm(x))
            return self.head(self.norm(x))
        x = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1])
        mix = F.one_hot(torch.zeros(1, dtype=torch.long, device=x.device), self.streams).float()
        for site in sites:
            pre, post, res = site.connection(x)
            mix, feed = pre, mix if self.kind == "mhc_single_pass" else pre
            f = site.run(site.norm((feed.unsqueeze(-1) * x).sum(-2).to(dtype)))
            x = (post.unsqueeze(-1) * f.unsqueeze(-2) + mixed(res, x)).to(dtype)
        z = (mix.unsqueeze(-1) * x).sum(-2) if self.kind == "mhc_single_pass" else x.mean(-2)
        return self.head(self.norm(z.to(dtype)))


def mixed(res, x):
    """out[o] = sum_i res[i, o] x[i]; in 16 bits the sum is written out, since a product of matrices that small is slow."""
    if x.dtype == torch.float32:
        return res.transpose(-1, -2) @ x
    return sum(res[..., i, :, None] * x[..., i, None, :].float() for i in range(x.shape[-2]))


def load_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    return {
        name: torch.from_numpy(
            numpy.frombuffer(data[8 + size + t["data_offsets"][0] : 8 + size + t["data_offsets"][1]], numpy.float32)
            .reshape(t["shape"])
            .copy()
        )
        for name, t in header.items()
    }


def random_bits(seed, index):
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


class Windows:
    """The windows of cli/train/corpus.c, from one file."""

    def __init__(self, path, context, seed):
        self.bytes = numpy.frombuffer(path.read_bytes(), numpy.uint8)
        self.window = context + 1
        self.block = max(min(len(self.bytes) // 20, 65536), self.window)
        blocks = len(self.bytes) // self.block
        self.blocks, self.seed = blocks - (blocks + 9) // 10, seed
        for i, c in enumerate(b"train"):
            self.seed = random_bits(self.seed ^ c, i)

    def batch(self, step, sequences):
        rows = []
        for s in range(sequences):
            draw = random_bits(self.seed, step * sequences + s)
            index = (draw >> 32) % self.blocks
            begin = (index + index // 9 + 1) * self.block + (draw & 0xFFFFFFFF) % (self.block - self.window + 1)
            rows.append(self.bytes[begin : begin + self.window])
        rows = torch.from_numpy(numpy.stack(rows).astype(numpy.int64))
        return rows[:, :-1], rows[:, 1:]


class Trainer:
    """`weft train` with its default options. Parameters are fp32; where `dtype` is not, streams and products are of it."""

    def __init__(
        self,
        model,
        windows,
        steps,
        batch,
        rate=1e-3,
        rate_end=1e-4,
        decay=0.1,
        clip=1.0,
        device="cpu",
        dtype=torch.float32,
        compiled=False,
    ):
        model = model.to(device)
        self.run = torch.compile(model) if compiled else model
        self.device, self.dtype = torch.device(device), dtype
        self.model, self.windows, self.steps, self.batch = model, windows, steps, batch
        self.rate, self.rate_end, self.clip, self.step = rate, rate_end, clip, 0
        plain = ("embed.weight", "head.weight", "conv.weight")  # the ends of names that are not decayed
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.endswith(plain)]
        known = {id(p) for p in matrices}
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": [p for p in model.parameters() if id(p) not in known], "weight_decay": 0.0},
        ]
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, **fused)

    def advance(self):
        tokens, targets = (rows.to(self.device) for rows in self.windows.batch(self.step, self.batch))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = F.cross_entropy(self.run(tokens, self.dtype).flatten(0, 1).float(), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.limit_gradients()
        warmup = min(self.steps // 10, 100)
        if self.step < warmup:
            rate = self.rate * (self.step + 1) / warmup
        else:
            part = (self.step - warmup) / (self.steps - warmup)
            rate = self.rate_end + (self.rate - self.rate_end) * 0.5 * (1 + math.cos(math.pi * part))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def limit_gradients(self):
        if self.device.type == "cuda":  # without a number that the host waits for
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
            return
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in self.model.parameters()))
        if norm > self.clip:
            for p in self.model.parameters():
                p.grad.mul_((self.clip / norm).float())
