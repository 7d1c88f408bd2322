# SPDX-License-Identifier: Apache-2.0
"""Tests with several processes on gloo."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(work, world: int, folder, *arguments) -> list:
    """What work(rank, world, *arguments) returns on each of `world` processes."""
    mp.spawn(_work, (work, world, str(folder), arguments), nprocs=world)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(world)]


def _work(rank: int, work, world: int, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    torch.save(work(rank, world, *arguments), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # the results are stored; gloo's threads can abort a process that leaves the usual way
