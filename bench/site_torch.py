#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What one mHC site costs through PyTorch, as its callers use it: forward and backward of a chain of sites with nothing
between them, divided by their number.

    bench/site_torch.py [--channels 4096 --streams 4 --batch 4 --length 8192 --sites 4] [--kinds weft,transformer_engine] [--json]

A site is the merge of one sub-layer and everything in front of the next; the sub-layer is the identity and has no norm. Kinds
are those of bench/step_torch.py. On a GPU forward, and forward with backward, are captured as CUDA graphs, so that the host
has no part in them; backward is the difference. Percent of the copy bandwidth of the same run are for the elements that the
unfused calls move per token, each tensor of streams counted once a call: (3n + 2) C forward, 28 C bytes in bf16 with n = 4, and
(6n + 3) C backward, 54 C bytes. A joined stack (`weft`) moves fewer, so it may pass 100. Agreement of the kinds is checked by
bench/step_torch.py."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from step_torch import DROP_INS, WEFT, DropIn, spread, stack_of  # noqa: E402

KINDS = (*WEFT, *DROP_INS)


class Chain:
    """Sites of one kind, from streams to streams."""

    def __init__(self, kind, args, device):
        options = {"numerics": DROP_INS[kind], "join": False} if kind in DROP_INS else WEFT[kind]
        with torch.device(device):
            subs = [nn.Identity() for _ in range(args.sites)]
            stack = stack_of(subs, args, norm=False, expand=False, contract=None, **options)
        self.module = stack = spread(stack, device)
        self.run, lay_out = stack, torch.Tensor.contiguous
        if kind in DROP_INS:
            self.module = DropIn(stack, kind)
            self.run, lay_out = self.module.chain, self.module.sites[0].lay_out
        shape = (args.batch, args.length, args.streams, args.channels)
        streams = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
        self.x = lay_out(streams).requires_grad_()
        self.upstream = torch.randn_like(self.x)

    def forward(self):
        return self.run(self.x)

    def both(self):
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None
        self.run(self.x).backward(self.upstream)


def timed(run, device, repeats):
    """Median, in us."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def replayed(run, device):
    """The same as a CUDA graph."""
    if device.type != "cuda":
        run()
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth(args, device):
    """Bytes read and written per us by a copy of one tensor of streams."""
    elements = args.batch * args.length * args.streams * args.channels
    source = torch.zeros(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 4 * elements / timed(replayed(lambda: target.copy_(source), device), device, args.repeats)


def measure(kind, args, device, bandwidth):
    chain = Chain(kind, args, device)
    forward = timed(replayed(chain.forward, device), device, args.repeats) / args.sites
    backward = timed(replayed(chain.both, device), device, args.repeats) / args.sites - forward
    row = args.batch * args.length * args.channels  # C per token
    n = args.streams
    least = {"forward": 2 * row * (3 * n + 2), "backward": 2 * row * (6 * n + 3)}
    return {
        "bench": "site_torch",
        "kind": kind,
        "channels": args.channels,
        "streams": n,
        "tokens": args.batch * args.length,
        "sites": args.sites,
        "forward_us": round(forward, 1),
        "backward_us": round(backward, 1),
        "forward_percent": round(100 * least["forward"] / forward / bandwidth, 1),
        "backward_percent": round(100 * least["backward"] / backward / bandwidth, 1),
        "copy_gbs": round(bandwidth / 1e3, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def table(rows):
    lines = ["| kind | forward us | backward us | forward, % of copy | backward, % of copy |", "|---|---|---|---|---|"]
    for r in rows:
        figures = (r[k] for k in ("forward_us", "backward_us", "forward_percent", "backward_percent"))
        lines.append(f"| {r['kind']} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kinds", default="weft,weft_layers,transformer_engine,megatron,tile_kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"--kinds: expected {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(args, device)
    rows = [measure(kind, args, device, bandwidth) for kind in kinds]
    print("\n".join(map(json.dumps, rows)) if args.json else table(rows))


if __name__ == "__main__":
    main()
