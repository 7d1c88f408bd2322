#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GPT with mHC over several processes: tensor parallel, sequence parallel and pipeline parallel (1F1B).

    torchrun --standalone --nproc-per-node 4 examples/gpt_mhc_parallel.py [--tp 2] [--pp 2] [--steps 50] [--text FILE]
    examples/gpt_mhc_parallel.py --tp 1 --pp 1     # the same training in one process

NCCL where every process has a GPU, gloo on CPUs elsewhere. Without --text the model learns its own source.

Between sub-layers a rank of a tensor parallel group has whole streams [B, S / tp, n, C] of its part of the tokens, so
the sites of mHC need no communication. Their parameters are the same on all ranks of the group, and each rank has the
gradient of its own tokens: sum_gradients adds these up, once a step. Stages of the pipeline hand on the streams. One
more depth predicts the token after the next one (multi-token prediction): it reads the streams of the last stage,
before they are contracted, through a Head of its own."""

import argparse
import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import weft.torch as wt
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.dim = channels // heads
        self.qkv, self.out = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Query, key and value of a head are neighbours, so that a rank's rows of qkv are whole heads.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.dim)).transpose(1, 2).unbind(3)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.up, self.down = (
            nn.Linear(channels, 4 * channels, bias=False),
            nn.Linear(4 * channels, channels, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def blocks(args: argparse.Namespace, first: int, count: int, **options) -> wt.HyperConnectionStack:
    """Layers `first` to `first + count` of the network: attention and MLP, two sites each. Each layer begins with a seed
    of its own, so its first values are the same whichever stage has it."""
    sublayers = []
    for layer in range(first, first + count):
        torch.manual_seed(args.seed + layer)
        sublayers += [Attention(args.channels, args.heads), MLP(args.channels)]
    numerics = wt.Numerics.preset("deepseek_v4")._replace(sinkhorn_iters=args.sinkhorn)
    options |= {"numerics": numerics, "first_site": 2 * first, "recompute": 2 * args.recompute or None}
    stack = wt.HyperConnectionStack(sublayers, args.channels, args.streams, **options)
    for site, layer in enumerate(stack.layers, 2 * first):
        torch.manual_seed(args.seed + 1000 + site)
        layer.connection.reset_parameters()
    return stack


class NextDepth(nn.Module):
    """What predicts one token further: the trunk's streams through a head of its own, beside the token that the trunk
    is asked for, and one more layer."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        torch.manual_seed(args.seed + 2000)
        self.head = wt.Head(args.channels, args.streams)
        self.norms = nn.ModuleList([nn.RMSNorm(args.channels), nn.RMSNorm(args.channels)])
        self.join = nn.Linear(2 * args.channels, args.channels, bias=False)
        self.stack = blocks(args, args.layers, 1, contract="learned")

    def forward(self, streams: Tensor, token: Tensor) -> Tensor:
        both = self.norms[0](self.head(streams)), self.norms[1](token)
        return self.stack(self.join(torch.cat(both, -1)))


class Stage(nn.Module):
    """One stage of the pipeline: streams to streams. The first one begins with text, and the last one has the loss."""

    def __init__(self, args: argparse.Namespace, stage: int, stages: int, part: int, parts: int):
        super().__init__()
        self.args, self.part, self.parts = args, part, parts
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first or self.is_last:  # the next depth reads tokens too, by the same embedding
            torch.manual_seed(args.seed + 3000)
            self.tokens = nn.Embedding(VOCABULARY, args.channels)
        if self.is_first:
            self.places = nn.Parameter(torch.randn(args.context, args.channels))
        count = args.layers // stages
        self.stack = blocks(args, stage * count, count, expand=self.is_first, contract=None)
        if self.is_last:
            torch.manual_seed(args.seed + 4000)
            self.head, self.norm = wt.Head(args.channels, args.streams), nn.RMSNorm(args.channels)
            self.next = NextDepth(args)
            self.logits = nn.Linear(args.channels, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From text [B, context + 2], or from streams [B, S, n, C]; S is this rank's part of the context."""
        if self.is_first:
            places = self.places.chunk(self.parts)[self.part]
            x = (self.tokens(x[:, :-2]) + places).to(self.args.dtype)
        return self.stack(x)

    def loss(self, streams: Tensor, text: Tensor) -> Tensor:
        """The loss of a micro-batch as a part of the step's."""
        token = self.tokens(text[:, 1:-1]).to(self.args.dtype)
        now, later = self.head(streams), self.next(streams, token)
        loss = self.entropy(now, text[:, 1:-1]) + self.args.next_weight * self.entropy(later, text[:, 2:])
        return loss / self.args.micro_batches

    def entropy(self, u: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(self.norm(u)).float()  # over several ranks a DTensor: each has a part of the vocabulary
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss


def shard(stage: Stage, mesh: dist.DeviceMesh) -> None:
    """Linear layers and the embedding over a tensor parallel group. Their inputs and outputs are parts of the sequence,
    dimension 1. Everything else stays as it is, the same on all ranks: sites, heads, norms, positions."""
    into = partial(ColwiseParallel, input_layouts=Shard(1))  # gathers the tokens
    back = partial(RowwiseParallel, output_layouts=Shard(1))  # sums, and keeps this rank's tokens
    layers = ["stack.layers.*.sublayer"] + ["next.stack.layers.*.sublayer"] * stage.is_last
    for at in layers:
        attention, mlp = {f"{at}.qkv": into(), f"{at}.out": back()}, {f"{at}.up": into(), f"{at}.down": back()}
        parallelize_module(stage, mesh, attention | mlp)
    if stage.is_first or stage.is_last:
        tokens = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(stage, mesh, {"tokens": tokens})
    if stage.is_last:
        logits = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(stage, mesh, {"logits": logits})


class Pipeline:
    """This rank's place in the mesh [pp, tp], and one step of training in it."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.mesh = dist.device_mesh.init_device_mesh(device.type, (args.pp, args.tp), mesh_dim_names=("pp", "tp"))
        self.tp, self.pp = self.mesh["tp"], self.mesh["pp"]
        stage, part = self.pp.get_local_rank(), self.tp.get_local_rank()
        self.stage = Stage(args, stage, args.pp, part, args.tp).to(device)
        if args.tp > 1:
            shard(self.stage, self.tp)
        self.replicated = [p for p in self.stage.parameters() if not isinstance(p, DTensor)]
        # The embedding is in the first and in the last stage; both begin with the same values.
        ends = [[int(self.mesh.mesh[0, t]), int(self.mesh.mesh[-1, t])] for t in range(args.tp)]
        self.ends = dist.new_subgroups_by_enumeration(ends)[0] if args.pp > 1 else None
        if args.pp > 1:
            size = args.batch // args.micro_batches
            text = torch.empty(size, args.context + 2, dtype=torch.long, device=device)
            shape = (size, args.context // args.tp, args.streams, args.channels)
            streams = torch.empty(shape, dtype=args.dtype, device=device, requires_grad=True)
            over = {"input_args": text if self.stage.is_first else streams, "output_args": streams}
            whole = PipelineStage(self.stage, stage, args.pp, device, **over, group=self.pp.get_group())
            loss = self.stage.loss if self.stage.is_last else lambda *_: None
            self.schedule = Schedule1F1B(whole, args.micro_batches, loss_fn=loss, scale_grads=False)

    def gradients(self, text: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. The result is the loss, on all ranks of the last stage."""
        losses: list[Tensor] = []
        with loss_parallel() if self.args.tp > 1 else nullcontext():
            if self.args.pp > 1:
                own = (text,) if self.stage.is_first else ()
                target = {"target": text, "losses": losses} if self.stage.is_last else {}
                self.schedule.step(*own, **target, return_outputs=False)
            else:
                for part in text.chunk(self.args.micro_batches):
                    losses.append(self.stage.loss(self.stage(part), part))
                    losses[-1].backward()
        if self.args.tp > 1:
            wt.sum_gradients(self.replicated, self.tp.get_group())
        if self.ends is not None and (self.stage.is_first or self.stage.is_last):
            wt.sum_gradients([self.stage.tokens.weight], self.ends)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def sum_of_squares(self) -> Tensor:
        """Of all gradients. What several ranks have alike counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, p in self.stage.named_parameters():
            once = isinstance(p, DTensor) or self.stage.part == 0
            if once and (name != "tokens.weight" or self.stage.is_first):
                own = p.grad
                if isinstance(p, DTensor):  # the gradient may come in another placement than its parameter has
                    own = own.redistribute(placements=p.placements).to_local()
                total += own.double().square().sum()
        return total

    def figures(self, loss: Tensor) -> tuple[float, float]:
        """Loss and norm of the gradient, the same on all ranks."""
        of_one = self.stage.is_last and self.stage.part == 0
        both = torch.stack([loss.double() * of_one, self.sum_of_squares()])
        dist.all_reduce(both)
        return both[0].item(), both[1].sqrt().item()


def train(args: argparse.Namespace, device: torch.device) -> None:
    pipeline = Pipeline(args, device)
    # Matrices of linear layers are decayed. One group has no tensors of two kinds: DTensors, and plain ones.
    decayed = [m.weight for m in pipeline.stage.modules() if isinstance(m, nn.Linear)]
    known = {id(p) for p in decayed}
    others = [p for p in pipeline.stage.parameters() if id(p) not in known]
    groups = [
        {"params": [p for p in some if isinstance(p, DTensor) == sharded], "weight_decay": decay}
        for some, decay in ((decayed, 0.1), (others, 0.0))
        for sharded in (True, False)
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=args.rate, betas=(0.9, 0.95))

    text, generator = read(args), torch.Generator().manual_seed(args.seed)
    autocast = torch.autocast(device.type, args.dtype, enabled=args.dtype != torch.float32)
    begin = time.monotonic()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, step / args.warmup)
        optimizer.zero_grad()
        with autocast:
            loss = pipeline.gradients(sample(text, args, generator).to(device))
        loss, norm = pipeline.figures(loss)
        for p in pipeline.stage.parameters():
            p.grad.mul_(min(1, args.clip / (norm + 1e-6)))
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.7f}  norm {norm:.7f}  {time.monotonic() - begin:.1f} s", flush=True)


def sample(text: Tensor, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """Windows of the text with two bytes more than the context, the same on all ranks."""
    starts = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
    return text[starts + torch.arange(args.context + 2)].long()


def read(args: argparse.Namespace) -> Tensor:
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    if len(text) < args.context + 2:
        raise SystemExit(f"{args.text} has {len(text)} bytes; a window takes {args.context + 2}")
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    sizes = dict(
        tp=2, pp=2, steps=50, batch=8, micro_batches=4, context=64, channels=512, layers=12, heads=8, streams=4
    )
    for name, default in (sizes | dict(sinkhorn=20, warmup=10, seed=1)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument(
        "--recompute", type=int, default=2, help="rebuild the streams of so many layers at a time; 0: keep"
    )
    parser.add_argument("--next-weight", type=float, default=0.3, help="weight of the loss of the token after the next")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of streams and products")
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype)
    for name, of, parts in (("tp", "context", args.tp), ("tp", "heads", args.tp), ("pp", "layers", args.pp)):
        if parts < 1 or getattr(args, of) % parts:
            raise SystemExit(f"--{name}: expected a divisor of --{of} {getattr(args, of)}, got {parts}")
    if args.batch % args.micro_batches or args.micro_batches < args.pp:
        raise SystemExit(
            f"--micro-batches: expected a divisor of --batch {args.batch} that is at least --pp {args.pp}, "
            f"got {args.micro_batches}"
        )
    return args


def main() -> None:
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != args.tp * args.pp:
        raise SystemExit(f"expected --tp {args.tp} x --pp {args.pp} processes, got {world}")
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)
    train(args, device)
    # By now the model is gone. A model that outlives its group can abort the process on its way out.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
