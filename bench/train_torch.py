#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`weft train` beside the same model in eager PyTorch: loss curves step by step, and tokens per second.

    bench/train_torch.py [--weft build/weft] [--residual mhc] [--mixer hybrid] [--steps 50] [--speed]
    bench/train_torch.py --device cuda --compile --speed --layers 12 --channels 768 --heads 12 --context 1024 --batch 16

Both begin from the first values that weft saves and see the same windows of the same text (this repository's documents).
In fp32 curves must agree within 1e-4 in every step: exit status 1 where they do not. With --speed both are timed in turns,
on the CPU with the same number of threads, by the median step.

On a GPU both compute in bf16 from fp32 parameters by default (PyTorch: autocast, flash attention, the fused AdamW, and with
--compile the whole model under torch.compile), and each rounds where it likes: losses must agree within 2e-2, a few times
what bf16's 2^-9 makes of a loss of 5. 77: there is no PyTorch."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import torch
    from gpt_torch import GPT, Trainer, Windows, load_safetensors
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("residual", "hc", "mhc", "mhc_single_pass")
MIXERS = ("attention", "gdn", "hybrid")
CASES = [*((kind, "attention") for kind in KINDS), ("residual", "gdn"), ("mhc", "hybrid")]
TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}  # of losses


def layers_of(args, mixer):
    return max(args.layers, 4) if mixer == "hybrid" else args.layers


def run_weft(args, kind, mixer, text, out, steps):
    command = [
        args.weft,
        "train",
        "--quiet",
        "--data",
        text,
        "--out",
        out,
        "--residual",
        kind,
        "--mixer",
        mixer,
        "--steps",
        str(steps),
        "--backend",
        args.device,
        "--dtype",
        args.dtype,
        "--threads",
        str(args.threads),
        "--layers",
        str(layers_of(args, mixer)),
        "--channels",
        str(args.channels),
        "--heads",
        str(args.heads),
        "--context",
        str(args.context),
        "--batch",
        str(args.batch),
        "--val-every",
        "0",
        "--gain-every",
        "0",
    ]
    subprocess.run([str(c) for c in command], check=True, env={**os.environ, "OMP_WAIT_POLICY": args.wait})
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "step" in line]


def make_torch(args, kind, mixer, first, text, steps):
    hidden = (args.channels * 8 // 3 + 63) // 64 * 64
    model = GPT(kind, layers_of(args, mixer), args.channels, args.heads, hidden, 4, mixer=mixer)
    model.load_state_dict(load_safetensors(first / "step-00000000/model.safetensors"))
    windows = Windows(text, args.context, 1)
    options = {"device": args.device, "dtype": DTYPES[args.dtype], "compiled": args.compile}
    return Trainer(model, windows, steps, args.batch, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weft", default=ROOT / "build/weft")
    parser.add_argument("--residual", choices=KINDS, action="append")
    parser.add_argument("--mixer", choices=MIXERS, action="append", help="a hybrid has at least 4 layers")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of activations; default: f32 on the CPU, bf16 on a GPU")
    parser.add_argument("--compile", action="store_true", help="PyTorch's model under torch.compile")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", default="passive", help="OMP_WAIT_POLICY of weft")
    for name, default in (
        ("threads", 2),
        ("layers", 4),
        ("channels", 128),
        ("heads", 4),
        ("context", 128),
        ("batch", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.dtype = args.dtype or ("f32" if args.device == "cpu" else "bf16")
    torch.set_num_threads(args.threads)
    cases = CASES
    if args.residual or args.mixer:
        cases = [(kind, mixer) for mixer in args.mixer or MIXERS[:1] for kind in args.residual or KINDS]
    failed = False
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        text = work / "text.txt"
        text.write_bytes(b"".join(p.read_bytes() for p in sorted(ROOT.glob("docs/**/*.md")) + [ROOT / "README.md"]))
        for kind, mixer in cases:
            name = kind if mixer == "attention" else f"{kind}, {mixer}"
            first = work / f"{kind}-{mixer}-first"
            run_weft(args, kind, mixer, text, first, 0)
            lines = run_weft(args, kind, mixer, text, work / f"{kind}-{mixer}-run", args.steps)
            trainer = make_torch(args, kind, mixer, first, text, args.steps)
            off = [(abs(line["loss"] - trainer.advance()), line["step"]) for line in lines]
            failed |= not all(difference <= TOLERANCE[args.dtype] for difference, _ in off)  # max would lose a NaN
            worst, at = max(off, key=lambda pair: (pair[0] != pair[0], pair[0]))
            print(
                f"{name:16} {args.steps} steps, losses {lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}; "
                f"largest difference {worst:.2e} at step {at}"
            )
            if not args.speed:
                continue
            ours, theirs, tokens = [], [], args.batch * args.context
            for turn in range(args.rounds):
                lines = run_weft(args, kind, mixer, text, work / f"{kind}-{mixer}-{turn}", 20)
                ours += [line["seconds"] for line in lines[2:]]
                for step in range(20):
                    start = time.perf_counter()
                    trainer.advance()  # its loss is a number of the host, so the step has ended
                    if step >= 2:
                        theirs.append(time.perf_counter() - start)
            a, b = tokens / statistics.median(ours), tokens / statistics.median(theirs)
            way = "compiled" if args.compile else "eager"
            ms = f"{1e3 * tokens / a:.2f} and {1e3 * tokens / b:.2f} ms a step"
            print(f"{'':16} weft {a:.0f} tokens/s, {way} PyTorch {b:.0f}: {a / b:.2f} times; {ms}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
