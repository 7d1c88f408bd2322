#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The hyper-connections of DeepSeek-V4, as Hugging Face transformers has them, eager and under torch.compile, and the
same model after weft.hf.apply.

    bench/hf_torch.py [--channels 4096 --layers 4 --batch 4 --steps 4096] [--kinds eager,compiled_layers,weft] [--json]

A slice is the model's own class with random weights, without embedding and loss: it runs from embeddings to the final
norm, through its own loop. Attention and MLP are replaced by a gain for each channel, so that what remains is the
hyper-connections, the norms, and one pass over a sub-layer's input. bf16 streams, fp32 parameters of sites, head and
norms, as the model keeps them. compiled_layers is torch.compile on each layer, one graph for all of them; compiled is the
model as one graph, which takes the compiler minutes at four layers.

A pass is timed by itself: forward with autograd's graph, then backward from a fixed random gradient into a gradient of the
input and of all parameters. Times are medians over --repeats; the kinds take turns. peak_gib: the most memory of a pass on
a GPU, above what lay there before it. Before that, outputs and input gradients of the kinds are compared. Made for a GPU;
without one it takes a small size."""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import nn

try:
    import weft.hf
except ImportError:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    import weft.hf

KINDS = ("eager", "compiled", "compiled_layers", "weft")
TOLERANCE = 3e-2  # of bf16: norm of the difference by the norm


class Gain(nn.Module):
    """In the place of attention, which returns a pair, and of the MLP."""

    def __init__(self, channels, pair):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))
        self.pair = pair

    def forward(self, v, **kwargs):
        f = v * self.weight
        return (f, None) if self.pair else f


def slice_of(channels, layers):
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

    small = {"vocab_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
    small |= {"num_attention_heads": 1, "head_dim": 16, "q_lora_rank": 8, "o_groups": 1, "o_lora_rank": 8}
    small |= {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None, "partial_rotary_factor": 0.5}
    kinds = {"layer_types": ["sliding_attention"] * layers, "mlp_layer_types": ["moe"] * layers}
    config = DeepseekV4Config(hidden_size=channels, num_hidden_layers=layers, **small, **kinds)
    model = DeepseekV4Model(config)
    for layer in model.layers:
        layer.self_attn, layer.mlp = Gain(channels, True), Gain(channels, False)
    for name, parameter in model.named_parameters():
        if "hc" not in name and "norm" not in name:
            parameter.data = parameter.data.bfloat16()
    return model


def passes(model, device):
    """One pass of each: what they return, seconds, and GiB."""
    cuda = device.type == "cuda"

    def clock():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(x, gradient):
        model.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        began = clock()
        y = model(inputs_embeds=x, attention_mask={"sliding_attention": None}, use_cache=False).last_hidden_state
        middle = clock()
        y.backward(gradient)
        end = clock()
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        return y.detach(), x.grad, middle - began, end - middle, peak / 2**30

    return run


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def make(kind, model):
    model = copy.deepcopy(model)
    if kind == "weft":
        print(weft.hf.apply(model), file=sys.stderr)
    if kind == "compiled_layers":
        for layer in model.layers:
            layer.compile()
    return torch.compile(model) if kind == "compiled" else model


def timed(runs, x, gradient, repeats):
    """What every kind's passes take: rows of seconds forward, seconds backward, GiB."""
    times = {kind: [] for kind in runs}
    for _ in range(repeats):
        for kind, run in runs.items():
            times[kind].append(run(x, gradient)[2:])
    return times


def main():
    gpu = torch.cuda.is_available() and weft.info()["cuda"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--channels", type=int, default=4096 if gpu else 256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4096 if gpu else 128)
    parser.add_argument("--repeats", type=int, default=20 if gpu else 5)
    parser.add_argument("--kinds", default="eager,compiled_layers,weft")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"--kinds: expected some of {', '.join(KINDS)}, got {kind}")
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = slice_of(options.channels, options.layers).to(device).train()
    runs = {kind: passes(make(kind, model), device) for kind in kinds}
    shape = (options.batch, options.steps, options.channels)
    x, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    first = None
    for kind, run in runs.items():  # also what warms up
        y, d_x, *_ = run(x, gradient)
        first = first or (y, d_x)
        far = max(distance(y, first[0]), distance(d_x, first[1]))
        if not far <= TOLERANCE:
            sys.exit(f"{kind}: expected the results of {kinds[0]} within {TOLERANCE}, got {far:.1e}")
    times = timed(runs, x, gradient, options.repeats)
    for kind in kinds:
        forward, backward, peak = (statistics.median(column) for column in zip(*times[kind], strict=True))
        row = {"kind": kind, "forward_ms": round(1e3 * forward, 3), "backward_ms": round(1e3 * backward, 3)}
        where = {"tokens": options.batch * options.steps, "channels": options.channels, "layers": options.layers}
        if options.json:
            if device.type == "cuda":
                row["peak_gib"] = round(peak, 2)
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            print(json.dumps(row | where | {"device": name} | versions))
        else:
            memory = f"   peak {peak:6.2f} GiB" if device.type == "cuda" else ""
            print(f"{kind:10} forward {1e3 * forward:9.3f} ms   backward {1e3 * backward:9.3f} ms{memory}")


if __name__ == "__main__":
    main()
