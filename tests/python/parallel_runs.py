#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs of examples/gpt_mhc_parallel.py, and how far two of them may be apart.

    tests/python/parallel_runs.py      # the 50 steps again: writes tests/python/parallel_golden.json

Several processes compute what one computes, with sums in another order: products over parts of their terms, and
gradients over parts of the tokens. Two orders of K fp32 terms of random sign differ like a random walk, by about
u sqrt(K/3) of the sum's typical size, u = 2^-24: each order makes an error of u sqrt(K/6), because the k-th partial sum, of
size sqrt(k), is rounded by up to u, evenly. Training amplifies that, and AdamW more than in proportion, so how far is
measured, in one process: every sub-layer's output and the gradient that comes back to it are disturbed at random by
u sqrt(K/3) of a token's root mean square, K the terms of the longest product, and every parameter's gradient by
u sqrt(T/3) of its own, T the tokens of a step. A step's bound is four times the largest change of this or an earlier step
in the disturbed runs, and what is printed rounds."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "gpt_mhc_parallel.py"
GOLDEN = Path(__file__).with_name("parallel_golden.json")
ARGUMENTS = ["--text", "LICENSE", "--context", "32"]
SEEDS = (1, 2, 3)
U = 2.0**-24
# Figures end with the seventh digit. A loss is a sum of eight fp32 numbers, up to 8 in all: the order of that sum is not
# amplified by anything, and each of two runs rounds at most eight times by half of 8 u.
PRINTED = 1e-7 + 8 * 8 * U

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ALONE = ["--tp", "1", "--pp", "1"]


def figures(command: list[str], timeout: float = 600) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    path = os.pathsep.join([str(ROOT / "python"), *sys.path]) if __name__ == "__main__" else os.pathsep.join(sys.path)
    # On the CPU wherever this runs: the golden values are the CPU's, and four processes want four GPUs.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    # PyTorch's gloo groups abort at exit now and then, after all work is done.
    if run.returncode != 0 and "terminate called without an active exception" not in run.stderr:
        raise RuntimeError(run.stderr[-3000:])
    found = re.findall(r"^step \d+  loss (\S+)  norm (\S+)", run.stdout, re.MULTILINE)
    return [(float(loss), float(norm)) for loss, norm in found]


def several(processes: int, arguments: list[str]) -> list[tuple[float, float]]:
    return figures([*TORCHRUN, str(processes), str(EXAMPLE), *arguments], 3600)


def one(arguments: list[str]) -> list[tuple[float, float]]:
    return figures([sys.executable, str(EXAMPLE), *ALONE, *arguments], 3600)


def disturbed(seed: int, arguments: list[str]) -> list[tuple[float, float]]:
    return figures([sys.executable, __file__, "disturb", str(seed), *ALONE, *arguments], 3600)


def bounds(plain, runs) -> list[tuple[float, float]]:
    """For every step how far loss and norm may be off."""
    largest, found = [0.0, 0.0], []
    for step, figures_of_one in enumerate(plain):
        for which, value in enumerate(figures_of_one):
            apart = max(abs(run[step][which] - value) for run in runs)
            largest[which] = max(largest[which], apart)
        found.append(tuple(4 * x + PRINTED for x in largest))
    return found


def worst(got, want, allowed) -> float:
    """The largest difference by its bound; infinite where a figure is missing or not finite."""
    if len(got) != len(want) or not got:
        return math.inf
    shares = [
        abs(a - b) / c for x, y, z in zip(got, want, allowed, strict=True) for a, b, c in zip(x, y, z, strict=True)
    ]
    return max(shares) if all(math.isfinite(x) for x in shares) else math.inf


def disturb(seed: int) -> None:
    """The example in this process, with noise as above."""
    module = importlib.util.spec_from_file_location("gpt_mhc_parallel", EXAMPLE)
    example = importlib.util.module_from_spec(module)
    module.loader.exec_module(example)
    generator = torch.Generator().manual_seed(seed)

    def noisy(t, terms: int, size):
        return t + U * math.sqrt(terms / 3) * size * torch.randn(t.shape, generator=generator)

    def of_tokens(t, terms: int):
        return noisy(t, terms, t.detach().square().mean(-1, keepdim=True).sqrt())

    class Disturbed(example.Pipeline):
        def __init__(self, args, device):
            super().__init__(args, device)
            self.terms = 4 * args.channels
            stacks = (self.stage.stack, self.stage.next.stack)
            for layer in (layer for stack in stacks for layer in stack.layers):
                layer.sublayer.register_forward_hook(self.after)

        def after(self, module, inputs, output):
            output.register_hook(lambda gradient: of_tokens(gradient, self.terms))
            return of_tokens(output, self.terms)

        def gradients(self, text):
            loss = super().gradients(text)
            for p in self.stage.parameters():
                p.grad.copy_(noisy(p.grad, self.args.batch * self.args.context, p.grad.square().mean().sqrt()))
            return loss

    example.Pipeline = Disturbed
    example.main()


def main() -> None:
    plain = one(ARGUMENTS)
    four = several(4, ARGUMENTS)
    allowed = bounds(plain, [disturbed(seed, ARGUMENTS) for seed in SEEDS])
    print(f"{len(four)} steps, largest difference by its bound {worst(four, plain, allowed):.3f}")
    made = {
        "command": " ".join(["torchrun --nproc-per-node 4", str(EXAMPLE.relative_to(ROOT)), *ARGUMENTS]),
        "torch": torch.__version__,
        "columns": ["loss", "gradient norm"],
        "four_processes": four,
        "one_process": plain,
        "bounds": [[float(f"{x:.3g}") for x in row] for row in allowed],
    }
    text = json.dumps(made, indent=1)
    GOLDEN.write_text(re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2]", text) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["disturb"]:
        del sys.argv[1]
        disturb(int(sys.argv.pop(1)))
    else:
        main()
