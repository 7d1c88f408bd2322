# SPDX-License-Identifier: Apache-2.0
"""Tensor, sequence and pipeline parallel: examples/gpt_mhc_parallel.py against one process, and what it is made of."""

import json

import parallel_runs as runs
import pytest
import torch
import torch.distributed as dist
import weft.torch as wt
from compare import same
from ranks_support import spawn
from torch import nn
from weft.torch import stack_recompute

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)
SMALL = "--text LICENSE --steps 8 --warmup 4 --layers 2 --channels 64 --heads 4 --context 32 --batch 4".split()


def test_four_processes_against_one():
    plain = runs.one(SMALL)
    assert len(plain) == 8 and plain[-1][0] < plain[0][0] - 0.1
    allowed = runs.bounds(plain, [runs.disturbed(seed, SMALL) for seed in (1, 2)])
    # A bound that a wrong gradient would keep says nothing: these are rounding errors, amplified by eight steps.
    assert max(norm for _, norm in allowed) < 1e-3 * min(norm for _, norm in plain)
    share = runs.worst(runs.several(4, SMALL), plain, allowed)
    assert share <= 1, f"{share} of the bound"
    whole_stage = runs.several(2, [*SMALL, "--steps", "2", "--pp", "1"])
    share = runs.worst(whole_stage, plain[:2], allowed[:2])
    assert share <= 1, f"without a pipeline: {share} of the bound"


def test_first_steps_of_the_golden_run():
    golden = json.loads(runs.GOLDEN.read_text())
    four, allowed = golden["four_processes"], golden["bounds"]
    assert len(four) == 50 and four[-1][0] < 4
    assert runs.worst(four, golden["one_process"], allowed) <= 1
    again = runs.several(4, [*runs.ARGUMENTS, "--steps", "2"])
    share = runs.worst(again, four[:2], allowed[:2])
    assert share <= 1, f"{share} of the bound"


# ---- its parts ---------------------------------------------------------------------------------------------------------


SHAPES = ((7,), (3, 5), (), (2, 2), (4,), (6,), (9,))


def gradients_of(rank: int) -> list[torch.Tensor]:
    """Sums of which depend on their order, and those of the last one on where they are rounded."""
    generator = torch.Generator().manual_seed(50 + rank)
    sizes = [10 ** (3 * rank % 7)] * (len(SHAPES) - 1) + [1]
    return [torch.randn(shape, generator=generator) * size for shape, size in zip(SHAPES, sizes, strict=True)]


def sums(rank: int, world: int):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for p, gradient in zip(parameters, gradients_of(rank), strict=True):
        p.grad = gradient
    if rank == 1:
        parameters[4].grad = None
    parameters[5].main_grad, parameters[5].grad = parameters[5].grad.double(), None
    parameters[6] = nn.Parameter(parameters[6].detach().bfloat16())
    parameters[6].grad = gradients_of(rank)[6].bfloat16()
    frozen = nn.Parameter(torch.zeros(9), requires_grad=False)
    wt.sum_gradients([*parameters, frozen])
    assert frozen.grad is None and parameters[5].grad is None
    alone = dist.new_subgroups_by_enumeration([[k] for k in range(world)])[0]
    before = parameters[0].grad.clone()
    wt.sum_gradients(parameters, alone)
    same(parameters[0].grad, before, "a group of one")
    return [p.main_grad if k == 5 else p.grad for k, p in enumerate(parameters)]


def test_sum_gradients_in_the_order_of_ranks(tmp_path):
    everybody = [gradients_of(rank) for rank in range(3)]
    everybody[1][4] = torch.zeros_like(everybody[1][4])
    for got in spawn(sums, 3, tmp_path):
        for k, total in enumerate(got):
            parts = [
                own[k].double() if k == 5 else own[k].bfloat16().float() if k == 6 else own[k] for own in everybody
            ]
            same(total, ((parts[0] + parts[1]) + parts[2]).to(total.dtype), f"parameter {k}")
            assert total.dtype == {5: torch.float64, 6: torch.bfloat16}.get(k, torch.float32)
        assert not torch.equal(got[0], (everybody[2][0] + everybody[1][0]) + everybody[0][0])


class FromElsewhere(nn.Parameter):
    """A parameter whose memory for gradients is asked for."""

    def get_main_grad(self):
        return self.memory


def protocols(rank: int, world: int):
    """A parameter twice, one that no rank has a gradient of, memory that is asked for, main_grad in another placement."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    twice, of_nobody, of_one = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    twice.grad = torch.full((3,), 1.0 + rank)
    if rank == 1:
        of_one.grad = torch.zeros(3)
    asked = FromElsewhere(torch.zeros(3))
    asked.memory = torch.full((3,), 1.0 + rank)
    wt.sum_gradients([twice, of_nobody, of_one, asked, twice])
    assert of_nobody.grad is None and asked.grad is None and asked.main_grad is asked.memory
    assert of_one.grad is not None, "a gradient of zeros is one"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    whole = torch.arange(4.0)
    p = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["parts"], [Shard(0)]))
    p.main_grad = DTensor.from_local(whole * 10 ** mesh.get_local_rank("replicas"), mesh["parts"], [Replicate()])
    wt.sum_gradients([p], mesh.get_group("replicas"))
    assert p.grad is None and p.main_grad.placements == p.placements
    return [twice.grad, asked.memory, of_one.grad, p.main_grad.full_tensor()]


def test_sum_gradients_of_every_protocol(tmp_path):
    for got in spawn(protocols, 4, tmp_path):
        same(got, [torch.full((3,), 10.0)] * 2 + [torch.zeros(3), 11 * torch.arange(4.0)], "sums")


def test_sum_gradients_without_a_group():
    with pytest.raises(RuntimeError, match="sum_gradients: group: expected an initialised process group, got none"):
        wt.sum_gradients([nn.Parameter(torch.zeros(2))])


C, N, TOKENS = 16, 4, 8


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, u):
        return self.down(torch.tanh(self.up(u)))


def stack_of(**options) -> wt.HyperConnectionStack:
    torch.manual_seed(5)
    return wt.HyperConnectionStack([Pair() for _ in range(4)], C, N, alpha_init=0.3, **options)


def of_whole(model, x) -> list[torch.Tensor]:
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def sharded(rank: int, world: int):
    """Outputs of tensor parallel layers have no memory until the collective has ended; in a stack they are waited for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    plan = {
        "layers.*.sublayer.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.sublayer.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    results, discarded = [], []
    discard = stack_recompute.Run._discard
    stack_recompute.Run._discard = lambda run, tensor: (discarded.append(tensor.shape), discard(run, tensor))
    for options in ({}, {"recompute": 2}):
        model = parallelize_module(stack_of(**options), mesh, plan)
        assert model.joins() == [None] * 3 and model.joins_entry() is None
        x = whole_input().chunk(world, 1)[rank].contiguous().requires_grad_()
        results.append(of_whole(model, x))
        wt.sum_gradients([p for p in model.parameters() if not isinstance(p, DTensor)])
        results[-1] = [t.full_tensor() if isinstance(t, DTensor) else t.detach() for t in results[-1]]
    same(results[1], results[0], "recompute")
    assert len(discarded) == 2 * (1 + 2)  # in each group of two layers the streams between them, and both inputs
    return results[0]


def whole_input() -> torch.Tensor:
    return torch.randn(2, TOKENS, C, generator=torch.Generator().manual_seed(8))


def test_tensor_parallel_sublayers_in_a_stack(tmp_path):
    ranks = spawn(sharded, 2, tmp_path)
    want = of_whole(stack_of(), whole_input().requires_grad_())
    got = [torch.cat([r[k] for r in ranks], 1) if k < 2 else ranks[0][k] for k in range(len(want))]
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        # As in test_distributed.py: the order of sums over 16 tokens and 32 channels.
        assert (a - b).abs().max() <= 64 * 2**-24 * b.abs().max(), f"result {k}"
    same(ranks[1][2:], ranks[0][2:], "both processes")
