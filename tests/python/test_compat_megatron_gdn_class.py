# SPDX-License-Identifier: Apache-2.0
"""weft in the slots of Megatron's GatedDeltaNet of branch dev: the real class where its sources are at hand (a folder of
WEFT_TEST_PEERS), and dev's calls of its methods, by position and by name, on a module with dev's attributes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import weft.torch as wt
from compare import same
from peer_signatures import PEERS
from ranks_support import spawn
from signature_support import ours, theirs
from test_compat_signatures import root_of
from torch import nn
from weft.compat import megatron
from weft.compat.megatron import _gdn

HEADS = wt.GdnHeads(2, 4, 8, 6)
DEV = next(p for p in PEERS if "branch dev" in p.package)
NO_DEV = "Megatron-LM's branch dev is not below a folder of WEFT_TEST_PEERS: its class is not tested"


def test_the_real_classes():
    root = root_of(DEV)
    if root is None:
        pytest.skip(NO_DEV)
    program = Path(__file__).with_name("megatron_real.py")
    path = os.pathsep.join([str(root), str(program.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.count(": passed") == 6
    print(run.stdout)


RULE = (
    "q, k, v, g, beta, *, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
    "cu_seqlens=None, **kwargs"
)


def test_signature_of_the_rule():
    """dev's protocol for it."""
    assert ours(megatron.gated_delta_rule) == RULE
    root = root_of(DEV)
    if root is None:
        pytest.skip(NO_DEV)
    source = (root / "megatron/core/ssm/gated_delta_net/common.py").read_text()
    assert theirs(source)["GatedDeltaRuleInterface.__call__"] == f"self, {RULE}"


class Dev(nn.Module):
    """The attributes that dev's class has when its methods are called, and methods that must not be reached."""

    def __init__(self, device, ranks=1, conv_bias=True, activation="silu"):
        super().__init__()
        torch.manual_seed(5)
        self.qk_dim_local_tp, self.v_dim_local_tp = HEADS.key_heads * HEADS.key_dim, HEADS.value_heads * HEADS.value_dim
        self.key_head_dim, self.value_head_dim = HEADS.key_dim, HEADS.value_dim
        self.conv_bias, self.activation, self.use_qk_l2norm = conv_bias, activation, True
        channels = HEADS.channels
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, padding=3, bias=conv_bias, device=device)
        self.A_log = nn.Parameter(torch.randn(HEADS.value_heads, device=device))
        self.dt_bias = nn.Parameter(torch.randn(HEADS.value_heads, device=device))

    def _setup_variant_attrs(self):
        raise AssertionError("not called")

    def _fused_streamed_pre_gated_delta_rule(self):
        raise AssertionError("Megatron's own")

    def pre_gated_delta_rule(self):
        raise AssertionError("Megatron's own")


class Hooked(megatron.GatedDeltaNet, Dev):
    pass


def modules(device, **options):
    return [Hooked(device, **options), megatron.bind(Dev(device, **options), rule=False)]


def group(size, rank=0):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def direct(module, rows, **options):
    parameters = (module.conv1d.weight, module.conv1d.bias, module.A_log, module.dt_bias)
    sizes = dict(zip(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), HEADS, strict=True))
    return megatron.fused_streamed_pre_gated_delta_rule(rows, *parameters, **sizes, **options)


@pytest.mark.parametrize("conv_bias", [True, False])
def test_calls_of_dev(conv_bias, device):
    rows, cu = torch.randn(9, 1, HEADS.columns, device=device), torch.tensor([0, 4, 9], device=device)
    for module in modules(device, conv_bias=conv_bias):
        want, packed = direct(module, rows), direct(module, rows, cu_seqlens=cu)
        fused = module._fused_streamed_pre_gated_delta_rule
        same(fused(rows, cu_seqlens_q=None, seq_idx=None, cp_group=None, cp_group_headwise=None), want, "fused")
        same(fused(rows, cu_seqlens_q=cu, seq_idx=None, cp_group=None, cp_group_headwise=group(1)), packed, "packed")
        plain = module.pre_gated_delta_rule
        same(plain(rows, 1, 9, 1, None, None, None, packed_seq_params=None), want, "unfused")
        same(plain(rows, 1, 9, 1, group(1), cu, None, packed_seq_params=SimpleNamespace()), packed, "unfused, packed")


def test_heads_of_a_rank(device):
    """Head-wise context parallel: a rank has its heads of every section, and their parameters. Gradients of these come
    back from all ranks."""
    sizes = (16, 16, 24, 24, 4, 4)
    rows = torch.randn(9, 2, HEADS.columns, device=device)
    for module in modules(device):
        whole = direct(module, rows)
        (want,) = torch.autograd.grad(whole[0].sum() + whole[5].sum(), module.conv1d.weight)
        got = torch.zeros_like(want)
        for rank in range(2):
            mine = torch.cat([part.chunk(2, -1)[rank] for part in rows.split(sizes, -1)], -1)
            found = module._fused_streamed_pre_gated_delta_rule(mine, cp_group_headwise=group(2, rank))
            same(found, [t.chunk(2, 2)[rank].contiguous() for t in whole], f"rank {rank}")
            same(module.pre_gated_delta_rule(mine, 2, 9, 2, group(2, rank)), found, "unfused")
            got += torch.autograd.grad(found[0].sum() + found[5].sum(), module.conv1d.weight)[0]
        same(got, want, "d_weight")


def test_main_grad_of_a_rank():
    """Slices of a parameter are added where they belong."""
    module = Hooked("cpu")
    for p in module.parameters():
        p.main_grad = torch.zeros_like(p)
    sizes, rows = (16, 16, 24, 24, 4, 4), torch.randn(9, 2, HEADS.columns)
    for rank in range(2):
        mine = torch.cat([part.chunk(2, -1)[rank] for part in rows.split(sizes, -1)], -1)
        out = module._fused_streamed_pre_gated_delta_rule(mine, cp_group_headwise=group(2, rank))
        sum(t.sum() for t in out).backward()
    plain = Hooked("cpu")
    sum(t.sum() for t in direct(plain, rows)).backward()
    for name, p in plain.named_parameters():
        main = module.get_parameter(name).main_grad
        assert module.get_parameter(name).grad is None
        assert (main - p.grad).abs().max() <= 2**-22 * p.grad.abs().max(), name  # two ranks, added


TOKENS, CUTS = 12, [0, 2, 2, 7, 12]  # cuts between ranks fall between sequences and into them


def divided(rank: int, world: int, cases) -> list:
    return [tokens_of(rank, world, *case) for case in cases]


def tokens_of(rank: int, world: int, fused: bool, packed: bool):
    """As dev calls the two methods and the rule where the ranks have the tokens one after another (linear_cp_mode
    "chunkwise"): results and gradients of this rank's tokens, and those of the parameters."""
    torch.manual_seed(7)
    whole = torch.randn(TOKENS, 1 if packed else 2, HEADS.columns)
    module = megatron.bind(Dev("cpu"))
    rows = whole.chunk(world)[rank].clone().requires_grad_()
    cu = torch.tensor(CUTS) if packed else None
    context = SimpleNamespace(group=dist.group.WORLD) if world > 1 else None
    for _ in range(2):  # the second time ranks have agreed already
        module.zero_grad()
        rows.grad = None
        if fused:
            group = None if context is None else context.group
            out = module._fused_streamed_pre_gated_delta_rule(rows, cu_seqlens_q=cu, cp_group=group)
        else:
            out = module.pre_gated_delta_rule(rows, rows.shape[1], rows.shape[0], 1, None, cu, context)
        q, k, v, gate, beta, g = out
        o, _ = module.gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu, cp_context=context)
        (o * gate).square().sum().backward()
    results = [t.detach().transpose(0, 1).contiguous() for t in (*out, o)]
    return [*results, rows.grad], [p.grad for p in module.parameters()]


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("world, cases", [(2, [(True, True), (False, False)]), (4, [(False, True)])], ids=["2", "4"])
def test_tokens_of_a_rank(world, cases, tmp_path):
    """Chunk-wise context parallel: results with the bits of one rank, and gradients that add up to its."""
    ranks = spawn(divided, world, tmp_path, cases)
    for (want, parameters), *parts in zip(divided(0, 1, cases), *ranks, strict=True):
        *got, d_rows = [torch.cat(mine) for mine in zip(*(tokens for tokens, _ in parts), strict=True)]
        same(got, want[:-1], "results")
        # Next to a cut a row's gradient is a sum of four taps in two parts: four roundings here and there.
        assert (d_rows - want[-1]).abs().max() <= 4 * 2**-23 * want[-1].abs().max()
        for k, p in enumerate(parameters):
            mine = [of_rank[k] for _, of_rank in parts]
            # Sums of 24 rows, cut in another place: each has a rounding for every row.
            assert (sum(mine) - p).abs().max() <= 24 * 2**-23 * sum(t.abs() for t in mine).max(), k


def test_rule(device):
    """As dev calls it; one that is not weft's is left alone."""
    module = megatron.bind(Dev(device))
    q, k, v, _, beta, g = direct(module, torch.randn(9, 2, HEADS.columns, device=device))
    settings = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
    o, none = module.gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **settings, cu_seqlens=None, cp_context=None)
    same(o, wt.gdn_rule(q, k, v, beta, g)[0], "o")
    assert none is None
    assert not hasattr(megatron.bind(Dev(device), rule=False), "gated_delta_rule")


def test_misuse(monkeypatch):
    rows = torch.randn(9, 1, HEADS.columns)
    module = Hooked("cpu")
    bad = {
        "chunkwise_cp_context: layout: expected contiguous, got zigzag": lambda: module.pre_gated_delta_rule(
            rows, 1, 9, 1, None, None, SimpleNamespace(group=group(2), layout="zigzag")
        ),
        "activation: expected one of silu, swish, got gelu": lambda: megatron.bind(Dev("cpu", activation="gelu")),
    }
    for message, call in bad.items():
        with pytest.raises(NotImplementedError, match=message):
            call()
    monkeypatch.setattr(_gdn, "uses_native", lambda: True)
    with pytest.raises(NotImplementedError, match="cp_group: expected one rank in plain PyTorch"):
        module._fused_streamed_pre_gated_delta_rule(rows, cp_group=group(2))
    monkeypatch.undo()
    several = SimpleNamespace(group=group(2))
    wrong = {
        "gated_delta_rule: initial_state: expected None": lambda: megatron.gated_delta_rule(
            *[rows] * 5, initial_state=rows, cp_context=several
        ),
        "cp_size_headwise: expected 1, the size of its group, got 2": lambda: module.pre_gated_delta_rule(
            rows, 1, 9, 2, None
        ),
        r"qkvzba: expected \(8, 1, columns\)": lambda: module.pre_gated_delta_rule(rows, 1, 8, 1, None),
        "cp_group_headwise: expected a divisor of 16, got 3 ranks": lambda: module.pre_gated_delta_rule(
            rows, 1, 9, 3, group(3)
        ),
        "bind: module: expected a module with slots .* or a GatedDeltaNet": lambda: megatron.bind(nn.Identity()),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="cp_context: expected a context of build_cp_context, got int"):
        megatron.gated_delta_rule(*[rows] * 5, cp_context=1)
    with pytest.raises(TypeError, match="expected no arguments beside a cp_context, got A_log"):
        megatron.gated_delta_rule(*[rows] * 5, cp_context=several, A_log=rows)
    with pytest.raises(TypeError, match="bases: expected a class with _fused_streamed_pre_gated_delta_rule"):
        type("Older", (megatron.GatedDeltaNet, nn.Module), {})
    with pytest.raises(TypeError, match="GatedDeltaNet: expected a class that has Megatron's behind"):
        megatron.GatedDeltaNet()
