#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/gpt_mhc.py with its parameters, gradients and optimizer state sharded by FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/gpt_mhc_fsdp2.py [arguments of gpt_mhc.py]

NCCL where every process has a GPU, gloo on CPUs elsewhere. Sub-layers compute in bf16; the streams and the parameters
of the connections stay fp32, which costs little: a connection is small, and weft computes its gates in fp32 anyway."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from gpt_mhc import arguments, make, read, sample
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


def train(args: argparse.Namespace, device: torch.device, rank: int, world: int) -> None:
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    torch.manual_seed(1)  # the same on all ranks: FSDP2 keeps each rank's part of the values that are there
    model = make(args).to(device)
    narrow = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in model.stack.layers:
        fully_shard(layer.sublayer, mesh=mesh, mp_policy=narrow)
        fully_shard(layer, mesh=mesh)  # the rest of the layer: its connection
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text, generator = read(args), torch.Generator().manual_seed(1 + rank)  # every rank has batches of its own
    begin = time.monotonic()
    for step in range(1, args.steps + 1):
        x, y = (t.to(device) for t in sample(text, args, generator))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0 or step == args.steps:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}  loss {mean.item():.4f}  {time.monotonic() - begin:.1f} s", flush=True)


def main() -> None:
    args = arguments().parse_args()
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    train(args, device, rank, world)
    # By now the model is gone. A model that outlives its group can abort the process on its way out.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
