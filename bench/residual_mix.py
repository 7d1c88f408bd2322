#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far the residual mix of a trained model is from the uniform matrix, whose entries are all 1/n.

    bench/residual_mix.py --from DIR/step-00000200 --text FILE [--sequences 16]

The checkpoint of `weft train` (mhc or mhc_single_pass, without biases, default preset) runs in PyTorch over windows of the text.
Printed over all sites and tokens: the largest and the mean |res[i, o] - 1/n|, and the second largest singular value of the
product of all residual maps. That product is 1/n everywhere where it is 0, as with a uniform mix at any site: what tells one
stream from another is then lost on the way, and the product's row and column sums are 1 whatever the model has learnt."""

import argparse
import json
import struct
from pathlib import Path

import numpy
import torch
from gpt_torch import GPT, load_safetensors


def options_of(path):
    data = path.read_bytes()
    meta = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    return {key.removeprefix("option."): value for key, value in meta.items() if key.startswith("option.")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="folder", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=16)
    args = parser.parse_args()
    file = args.folder / "model.safetensors"
    o = options_of(file)
    kind, channels, context = o["residual"], int(o["channels"]), int(o["context"])
    if kind not in ("mhc", "mhc_single_pass"):
        parser.error(f"{file}: --residual {kind} has no doubly stochastic mix")
    streams = int(o["streams"]) or 4
    hidden = int(o["hidden"]) or (channels * 8 // 3 + 63) // 64 * 64
    model = GPT(kind, int(o["layers"]), channels, int(o["heads"]), hidden, streams)
    model.load_state_dict(load_safetensors(file))
    mixes = []
    for layer in model.layers:
        for site in layer.values():
            site.connection.register_forward_hook(lambda module, inputs, output: mixes.append(output[2].double()))
    text = numpy.frombuffer(args.text.read_bytes(), numpy.uint8)
    begins = numpy.linspace(0, len(text) - context, args.sequences).astype(int)
    with torch.no_grad():
        model(torch.from_numpy(numpy.stack([text[b : b + context] for b in begins]).astype(numpy.int64)))
    off = [(mix - 1 / streams).abs() for mix in mixes]
    product = torch.eye(streams, dtype=torch.double)
    for mix in mixes:
        product = mix.transpose(-1, -2) @ product
    second = torch.linalg.svdvals(product)[..., 1]
    print(
        f"{kind}, {len(mixes)} sites, {args.sequences * context} tokens: |res - 1/{streams}| largest "
        f"{max(x.max().item() for x in off):.3g}, mean {sum(x.mean().item() for x in off) / len(off):.3g}; "
        f"second singular value of the product: largest {second.max().item():.3g}"
    )


if __name__ == "__main__":
    main()
