# SPDX-License-Identifier: Apache-2.0
"""Two processes with half a batch each have the gradients of one process with the whole batch: DDP and FSDP2 on gloo.

What may differ is the order of sums. A parameter's gradient is a mean over the tokens of the batch: one process sums
them all in one go, two sum their halves and add. Each sum of T terms is off by at most T units of the sum of their
magnitudes, and two halves of random sign differ from the whole by a few units of its largest element: 64 units of fp32
(2^-24) of the largest gradient of that parameter are allowed."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import weft.torch as wt
from compare import same
from torch import nn

C, N, HEADS, VOCAB, TOKENS, BATCH, WORLD = 16, 4, 2, 32, 8, 4, 2
STACKS = {"plain": {}, "recompute": {"recompute": 2}, "rebuild": {"rebuild": True}}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, u):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(u).chunk(3, -1))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, u):
        return self.down(torch.nn.functional.gelu(self.up(u)))


class Gpt(nn.Module):
    """Embedding, two blocks of attention and MLP in four residual streams, learned contraction, logits."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCAB, C)
        subs = [Attention(), Mlp(), Attention(), Mlp()]
        # From the identity a gradient of alpha is the rest of terms that cancel, and a bound by its own size says nothing.
        options = {"contract": "learned", "alpha_init": 0.3, "first_mix": "uniform", **options}
        self.stack = wt.HyperConnectionStack(subs, C, N, **options)
        self.logits = nn.Linear(C, VOCAB, bias=False)

    def forward(self, tokens):
        return self.logits(self.stack(self.embed(tokens)))


def batch() -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(9))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def wrap_ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def shard(model, parts):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_fsdp_layers(model):
    """Each by itself, so that they are not joined."""
    return shard(model, model.stack.layers)


def wrap_fsdp_sublayers(model):
    """Layers are joined, since their connections are sharded with the model."""
    return shard(model, [layer.sublayer for layer in model.stack.layers])


JOINED = {wrap_ddp: True, wrap_fsdp_layers: False, wrap_fsdp_sublayers: True}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def training_step(model, wrapped, tokens) -> tuple:
    """Logits, gradients, and the logits after a step of the optimizer."""
    logits, loss = loss_of(wrapped, tokens)
    loss.backward()
    grads = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after, _ = loss_of(wrapped, tokens)
    return logits.detach(), grads, after.detach()


def work(rank: int, wrap, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    try:
        for name, options in STACKS.items():
            model = Gpt(**options)
            wrapped = wrap(model)
            assert all((reason is None) == JOINED[wrap] for reason in model.stack.joins())
            result = training_step(model, wrapped, batch().chunk(WORLD)[rank])
            torch.save(result, f"{folder}/{name}-{rank}.pt")
            del model, result
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # the results are stored; gloo's threads can abort a process that leaves the usual way


@functools.cache
def single_process():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = Gpt()
        return training_step(model, model, batch())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("wrap", JOINED, ids=lambda wrap: wrap.__name__.removeprefix("wrap_"))
def test_two_processes(wrap, tmp_path):
    """Without and with recompute or rebuild, in one pair of processes: to start one takes longer than the step."""
    mp.spawn(work, (wrap, str(tmp_path)), nprocs=WORLD)
    logits, want, after = single_process()
    for name in STACKS:
        ranks = [torch.load(tmp_path / f"{name}-{k}.pt") for k in range(WORLD)]
        for k, (part, grads, updated) in enumerate(ranks):
            close_to(part, logits.chunk(WORLD)[k], "logits")
            assert grads.keys() == want.keys()
            for param, gradient in grads.items():
                assert gradient.abs().max() > 0, param
                close_to(gradient, want[param], param)
            close_to(updated, after.chunk(WORLD)[k], "logits after a step")
        same(list(ranks[1][1].values()), list(ranks[0][1].values()), "both processes")


def close_to(got, want, what: str) -> None:
    difference = (got - want).abs().max()
    assert difference <= 64 * 2**-24 * want.abs().max(), f"{what}: off by {difference:.3g} of {want.abs().max():.3g}"
