#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What mHC costs in a training step: forward and backward of a slice of a GPT with a plain residual, with weft, and
with the same mathematics in PyTorch under torch.compile.

    bench/step_torch.py [--channels 4096 --layers 3 ...] [--kinds plain,weft,native] [--json] [--plot FILE.svg]

A slice is a stack of pre-norm attention and SwiGLU sub-layers without embedding or loss: heads of 128, causal
scaled_dot_product_attention, an MLP of width floor(8C/384)*128, RMSNorm, no biases, bf16 weights and streams, fp32 phi.
Everything but the hyper-connections is the same code, eager, in all kinds. A step is one forward pass and one backward
pass from a fixed random gradient into a gradient of the input and of all parameters. Times are medians over --repeats
steps between CUDA events; the kinds take turns. With --graph a step is captured as a CUDA graph and replayed, so that
the host has no part in it. Peak memory is what PyTorch's allocator had at most during a step outside a graph, counting
weights and gradients. Before timing, outputs and input gradients of the kinds are compared.

Kinds: plain; weft, a stack whose layers are joined (mhc_boundary); weft_layers, layer by layer (mhc_pre, mhc_post);
weft_rebuild, joined with every second stream tensor made again; weft_recompute, joined with groups of two sub-layers
rebuilt; transformer_engine, megatron and tile_kernels, layer by layer through weft's drop-ins, in their layouts and with their
numerics; native. With --compile every kind goes through torch.compile as a whole, and the table has the seconds of the first
step; that is the first compilation of a process for the first kind only, so give one kind for such a figure.

Without options the two slices of docs/performance.md are measured, 16384 tokens each, which needs a GPU with 40 GB."""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.sax.saxutils import escape

import torch
import torch.nn.functional as F
from torch import nn

try:
    import weft.torch as wt
except ImportError:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    import weft.torch as wt
from weft.compat import megatron, tile_kernels, transformer_engine

SLICES = ((4096, 3), (2048, 4))
HEAD, EPS = 128, 1e-6
WEFT = {
    "weft": {},
    "weft_layers": {"join": False},
    "weft_rebuild": {"rebuild": True},
    "weft_recompute": {"recompute": 2},
}
DROP_INS = {
    "transformer_engine": "transformer_engine",
    "megatron": "megatron_main",
    "tile_kernels": "deepseek_v4",
}  # numerics
KINDS = ("plain", *WEFT, *DROP_INS, "native")


# ---- sub-layers: the same for every kind -------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.heads = max(1, channels // HEAD)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)

    def forward(self, u):
        batch, length, channels = u.shape
        q, k, v = self.qkv(u).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, channels))


class SwiGLU(nn.Module):
    def __init__(self, channels):
        super().__init__()
        width = max(HEAD, 8 * channels // 384 * 128)
        self.up = nn.Linear(channels, 2 * width, bias=False)
        self.down = nn.Linear(width, channels, bias=False)

    def forward(self, u):
        gate, up = self.up(u).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def sublayers(channels, layers):
    return [make(channels) for _ in range(layers) for make in (Attention, SwiGLU)]


# ---- the kinds -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self, subs, channels):
        super().__init__()
        self.subs = nn.ModuleList(subs)
        self.norms = nn.ModuleList(nn.RMSNorm(channels, eps=EPS) for _ in subs)

    def forward(self, x):
        for norm, sub in zip(self.norms, self.subs, strict=True):
            x = x + sub(norm(x))
        return x


def native_pre(x, phi, alpha, beta, n):
    """The part in front of a sub-layer, deepseek_v4's numerics, as one writes it in PyTorch: fp32 inside."""
    rows = x.flatten(-2).float()
    h = rows @ phi.T * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
    h_pre, h_post, h_res = h.split([n, n, n * n], -1)
    pre = torch.sigmoid(alpha[0] * h_pre + beta[:n]) + 1e-6
    post = 2 * torch.sigmoid(alpha[1] * h_post + beta[n : 2 * n])
    a = torch.softmax((alpha[2] * h_res + beta[2 * n :]).unflatten(-1, (n, n)), -1) + 1e-6
    a = a / (a.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        a = a / (a.sum(-1, keepdim=True) + 1e-6)
        a = a / (a.sum(-2, keepdim=True) + 1e-6)
    u = (pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)
    return u, post, a


def native_post(x, f, post, res):
    mixed = (res.unsqueeze(-1) * x.float().unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * f.float().unsqueeze(-2) + mixed).to(x.dtype)


class Native(nn.Module):
    def __init__(self, subs, channels, streams, compiled):
        super().__init__()
        self.subs = nn.ModuleList(subs)
        self.norms = nn.ModuleList(nn.RMSNorm(channels, eps=EPS) for _ in subs)
        self.sites = nn.ModuleList(wt.HyperConnection(channels, streams) for _ in subs)
        self.streams = streams
        self.pre = torch.compile(native_pre, fullgraph=True) if compiled else native_pre
        self.post = torch.compile(native_post, fullgraph=True) if compiled else native_post

    def forward(self, x):
        x = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]).contiguous()
        for site, norm, sub in zip(self.sites, self.norms, self.subs, strict=True):
            u, post, res = self.pre(x, site.phi, site.alpha, site.beta, self.streams)
            x = self.post(x, sub(norm(u)), post, res)
        return x.mean(-2)


class TransformerEngineSite(nn.Module):
    """Streams are the last axis: (s, b, C, n)."""

    def __init__(self, site):
        super().__init__()
        n, channels = site.streams, site.channels
        self.n, self.alpha, self.beta = n, site.alpha, site.beta
        self.phi = nn.Parameter(site.phi.detach().view(-1, n, channels).transpose(1, 2).flatten(1))

    def lay_out(self, x):
        return x.transpose(-1, -2).contiguous()

    def pre(self, x):
        u, *coef = transformer_engine.mhc_generate_mix_and_aggregate(x, self.phi, self.alpha, self.beta)
        return u, coef

    def post(self, x, f, coef):
        return transformer_engine.mhc_fused_expand_combine(f, None, coef[0], x, coef[1], self.n)

    def leave(self, x):
        return x.mean(-1)


class TileKernelsSite(nn.Module):
    def __init__(self, site):
        super().__init__()
        self.n, self.phi, self.alpha, self.beta = site.streams, site.phi, site.alpha, site.beta

    def lay_out(self, x):
        return x.contiguous()

    def pre(self, x):
        options = {"mhc_mult": self.n, "post_mult_value": 2.0, "sinkhorn_repeat": 20}
        return tile_kernels.mhc_pre(x, self.phi, self.alpha, self.beta, **options)

    def post(self, x, f, coef):
        return tile_kernels.mhc_post(f, x, *coef)

    def leave(self, x):
        return x.mean(-2)


class MegatronSite(nn.Module):
    """HyperConnectionModule of branch main: [s, b, n*C]."""

    def __init__(self, site):
        super().__init__()
        self.n = site.streams
        config = SimpleNamespace(
            mhc_num_residual_streams=site.streams,
            hidden_size=site.channels,
            mhc_sinkhorn_iterations=20,
            mhc_init_gating_factor=1.0,
            params_dtype=torch.float32,
            sequence_parallel=False,
            perform_initialization=True,
        )
        self.module = megatron.HyperConnectionModule(config, 1).to(site.phi.device)
        self.module.mapping_proj.weight = nn.Parameter(site.phi.detach())
        self.module.bias = nn.Parameter(site.beta.detach())

    def lay_out(self, x):
        return x.flatten(-2).contiguous()

    def pre(self, x):
        u, res, post = self.module(x)
        return u, (res, post)

    def post(self, x, f, coef):
        res, post = coef
        return self.module.fused_h_res_h_post_bda(res, x, post, (f, None), 0.0, True, True)

    def leave(self, x):
        return x.unflatten(-1, (self.n, -1)).mean(-2)


SITES = {"transformer_engine": TransformerEngineSite, "megatron": MegatronSite, "tile_kernels": TileKernelsSite}


class DropIn(nn.Module):
    """Layer by layer, as users of the library that a drop-in stands for call it."""

    def __init__(self, stack, kind):
        super().__init__()
        self.subs = nn.ModuleList(layer.sublayer for layer in stack.layers)
        sites = [layer.connection for layer in stack.layers]
        self.norms = nn.ModuleList(norm_of(site) for site in sites)
        self.sites = nn.ModuleList(SITES[kind](site) for site in sites)

    def chain(self, x):
        """From streams to streams, as the drop-in has them."""
        for site, norm, sub in zip(self.sites, self.norms, self.subs, strict=True):
            u, coef = site.pre(x)
            x = site.post(x, sub(norm(u)), coef)
        return x

    def forward(self, x):
        site = self.sites[0]
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], site.n, x.shape[-1])
        return site.leave(self.chain(site.lay_out(streams)))


def norm_of(site):
    if site.sub_weight is None:
        return nn.Identity()
    return nn.RMSNorm(site.channels, eps=EPS, device=site.phi.device, dtype=torch.bfloat16)  # a gain of 1, as in spread


def stack_of(subs, args, **options):
    return wt.HyperConnectionStack(subs, args.channels, args.streams, sub_eps=EPS, **options)


def spread(model, device):
    """Coefficients that differ from token to token, the same in every kind."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    for module in model.modules():
        if isinstance(module, wt.HyperConnection):
            module.phi.data = torch.randn(module.phi.shape, generator=generator).to(device) / module.phi.shape[1] ** 0.5
            module.alpha.data = torch.ones(3, device=device)
            module.beta.data = torch.zeros(module.phi.shape[0], device=device)
            if module.sub_weight is not None:
                module.sub_weight.data = torch.ones(module.channels, device=device)
    return model


def build(kind, args, device, dtype):
    """The model of a kind, and for a drop-in weft's own stack with the same parameters and numerics, which must agree."""
    torch.manual_seed(0)
    with torch.device(device):
        subs = sublayers(args.channels, args.layers)
        if kind == "plain":
            model = Plain(subs, args.channels)
        elif kind == "native":
            model = Native(subs, args.channels, args.streams, not (args.no_compile or args.compile))
        elif kind in DROP_INS:
            model = stack_of(subs, args, numerics=DROP_INS[kind], join=False)
        else:
            model = stack_of(subs, args, **WEFT[kind])
    spread(model.to(dtype), device)
    return (DropIn(copy.deepcopy(model), kind), model) if kind in DROP_INS else (model, None)


# ---- measuring -------------------------------------------------------------------------------------------------------


class Step:
    def __init__(self, kind, args, device, dtype):
        self.kind, self.device = kind, device
        self.model, self.twin = build(kind, args, device, dtype)
        if args.compile:
            self.model = torch.compile(self.model)
        generator = torch.Generator().manual_seed(1)
        shape = (args.batch, args.length, args.channels)
        self.x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        self.grad = torch.randn(shape, generator=generator).to(device, dtype)
        self.times, self.graph, self.first_s = [], None, None

    def run(self, model=None):
        model = self.model if model is None else model
        self.x.grad = None
        model.zero_grad(set_to_none=True)
        y = model(self.x)
        y.backward(self.grad)
        return y.detach()  # nodes that live on belong to this stream, and a capture on another one cannot join it

    def capture(self):
        """From here on the step that is timed is a replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def timed(self):
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.run()
            return 1e3 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run() if self.graph is None else self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def peak(self):
        """GiB during a step, weights and gradients included; only this model's, since the others hold memory too."""
        if self.device.type != "cuda":
            return None
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        mine = sum(p.numel() * p.element_size() for p in self.model.parameters()) + 2 * self.x.numel() * 2
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before + mine) / 2**30


def distance(a, b):
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm()).item()


def expect_close(got, want, kind, other):
    errors = [distance(a, b) for a, b in zip(got, want, strict=True)]
    if not all(e < 0.03 for e in errors):  # bf16 through the whole stack; NaN fails
        raise SystemExit(f"{kind} and {other} differ: output {errors[0]:.2e}, input gradient {errors[1]:.2e}")


def warm_up(steps):
    """The runs that compile, and correctness."""
    results = {}
    for step in steps:
        start = time.perf_counter()
        y = step.run()
        float(y.sum())  # the GPU has finished
        step.first_s = time.perf_counter() - start
        for _ in range(2):
            y = step.run()
        result = (y.clone(), step.x.grad.clone())
        if step.twin is not None:
            y = step.run(step.twin)
            expect_close(result, (y, step.x.grad), step.kind, "the stack with its numerics")
            step.twin = None
        elif step.kind != "plain":
            results[step.kind] = result
    first, *others = results or [None]
    for kind in others:
        expect_close(results[kind], results[first], kind, first)


def measure(args, device):
    dtype = torch.bfloat16
    steps = [Step(kind, args, device, dtype) for kind in args.kinds]
    warm_up(steps)
    peaks = [step.peak() for step in steps]
    if args.graph:
        for step in steps:
            step.capture()
            step.timed()
    for _ in range(args.repeats):
        for step in steps:
            step.times.append(step.timed())
    rows = []
    plain = next((statistics.median(s.times) for s in steps if s.kind == "plain"), None)
    for step, peak in zip(steps, peaks, strict=True):
        ms = statistics.median(step.times)
        rows.append(
            {
                "bench": "step_torch",
                "kind": step.kind,
                "graph": args.graph,
                "compiled": args.compile,
                "first_s": round(step.first_s, 1),
                "channels": args.channels,
                "layers": args.layers,
                "streams": args.streams,
                "tokens": args.batch * args.length,
                "ms": round(ms, 3),
                "ms_min": round(min(step.times), 3),
                "overhead": None if plain is None else round(ms / plain - 1, 4),
                "peak_gib": None if peak is None else round(peak, 2),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
            }
        )
    return rows


# ---- showing ---------------------------------------------------------------------------------------------------------


def table(rows):
    lines = ["| slice | kind | ms | overhead | peak GiB | first step, s |", "|---|---|---|---|---|---|"]
    for r in rows:
        over = "" if r["overhead"] is None else f"{100 * r['overhead']:+.1f}%"
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
        which = f"| C {r['channels']}, {r['layers']} layers | {r['kind']}"
        lines.append(f"{which} | {r['ms']:.1f} | {over} | {peak} | {r['first_s']} |")
    return "\n".join(lines)


def plot(rows, path):
    """Bars of step times, one group a slice."""
    colours = {
        "plain": "#9aa5b1",
        "weft": "#7fb685",
        "weft_layers": "#8fc1c9",
        "weft_rebuild": "#9fc77e",
        "weft_recompute": "#b9cf7e",
        "transformer_engine": "#8d99c9",
        "megatron": "#a99bd1",
        "tile_kernels": "#c39bc9",
        "native": "#e29578",
    }
    height, width = 60 + 26 * len(rows), 720
    most = max(r["ms"] for r in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12" fill="#1c2833">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(rows[0]["device"])}: a training step,'
        f" milliseconds, {rows[0]['tokens']} tokens</text>",
    ]
    for i, r in enumerate(rows):
        y = 40 + 26 * i
        over = "" if not r["overhead"] else f" ({100 * r['overhead']:+.1f}%)"
        peak = "" if r["peak_gib"] is None else f", {r['peak_gib']:.1f} GiB"
        parts += [
            f'<text x="12" y="{y + 14}">C {r["channels"]} {escape(r["kind"])}</text>',
            f'<rect x="170" y="{y}" width="{330 * r["ms"] / most:.1f}" height="20" fill="{colours[r["kind"]]}"/>',
            f'<text x="{176 + 330 * r["ms"] / most:.1f}" y="{y + 14}">{r["ms"]:.1f}{over}{peak}</text>',
        ]
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs of the steps")
    parser.add_argument("--compile", action="store_true", help="torch.compile of every kind as a whole")
    parser.add_argument("--no-compile", action="store_true", help="native code eager")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot")
    args = parser.parse_args()
    args.kinds = args.kinds.split(",")
    unknown = set(args.kinds) - set(KINDS)
    if unknown:
        parser.error(f"--kinds: expected {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    if args.graph and not args.device.startswith("cuda"):
        parser.error(f"--graph: expected a GPU, got --device {args.device}")
    if args.compile and args.no_compile:
        parser.error("--compile: expected without --no-compile, got both")
    slices = SLICES if args.channels is None else ((args.channels, args.layers or 2),)
    rows = []
    for args.channels, args.layers in slices:
        rows += measure(args, torch.device(args.device))
    if args.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(table(rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
