# SPDX-License-Identifier: Apache-2.0
"""main_grad through the drop-ins: every parameter of every one of them, the attributes of the protocol, and two
processes of DDP and of FSDP2."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compare import DRAWS, PATH, UNIT, Noise, close, move, same
from torch import nn
from weft.compat import fla, liger, megatron, tile_kernels, transformer_engine
from weft.torch import grads

N, C, T = 4, 16, 6
ROWS = N * (N + 2)
HEADS = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6}
CHANNELS, COLUMNS = 56, 88

tk, te = tile_kernels, transformer_engine


def streams(dtype=torch.float32):
    return torch.randn(T, N, C).to(dtype)


def te_layer(x, phi, alpha, beta, norm_weight, buffer=None):
    x = x.mT.unsqueeze(1).contiguous()
    return te.mhc_generate_mix_and_aggregate(x, phi, alpha, beta, norm_weight, fused_grad_x_acc_buffer=buffer)


def te_parts(x, phi, alpha, beta, norm_weight):
    h, ms = te.mhc_fused_projection(x.mT.reshape(T, C * N), phi, norm_weight=norm_weight)
    return te.mhc_fused_scale(h, alpha, beta, ms, N)


def tk_parts(x, fn, scale, base, norm_weight):
    return tk.mhc_pre_split_mixes(tk.mhc_pre_norm_fn(x, fn, norm_weight, 1e-6), scale, base, N, 2.0, 1e-6)


def big_fuse(x, fn, scale, base):
    return tk.mhc_pre_big_fuse(x, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 5)


def compute_h(x, weight, alpha_pre, alpha_post, alpha_res, bias):
    return megatron.fused_proj_rms_compute_h(x.flatten(1), weight, alpha_pre, alpha_post, alpha_res, bias, N)[:3]


CONFIG = SimpleNamespace(
    mhc_num_residual_streams=N, hidden_size=C, mhc_sinkhorn_iterations=5, mhc_init_gating_factor=0.3,
    params_dtype=torch.float32, sequence_parallel=False, perform_initialization=True,
)  # fmt: skip


def megatron_module(x, weight, bias, alpha_pre, alpha_post, alpha_res):
    """Its parameters are those of the case, the very objects."""
    module = megatron.HyperConnectionModule(CONFIG, 1)
    module.mapping_proj.weight, module.bias = weight, bias
    module.alpha_pre, module.alpha_post, module.alpha_res = alpha_pre, alpha_post, alpha_res
    return module(x.flatten(1).unsqueeze(1))


def megatron_parts(x, weight, bias, alpha_pre, alpha_post, alpha_res):
    module = megatron.HyperConnectionModule(CONFIG, 1)
    module.mapping_proj.weight, module.bias = weight, bias
    module.alpha_pre, module.alpha_post, module.alpha_res = alpha_pre, alpha_post, alpha_res
    return module._compute_h(*module._projection_and_get_norm(x.flatten(1).unsqueeze(1)))


def short_convolution(x, weight, bias):
    module = fla.ShortConvolution(C, 4, bias=True)
    module.weight, module.bias = weight, bias
    return module(x)[:1]


def pre_gdn(x, weight, conv_bias, a_log, dt_bias):
    rows = torch.linspace(-1, 1, T * COLUMNS).view(T, 1, COLUMNS) * x.mean()
    return megatron.fused_streamed_pre_gated_delta_rule(rows, weight, conv_bias, a_log, dt_bias, **HEADS)


def contract(x, fn, base, scale):
    return [megatron.learned_output_contract(x.flatten(1), fn, base, scale, N, 1e-6)]


def head_parts(x, fn, scale, base):
    return [tk.mhc_head_compute_mix(tk.mhc_pre_norm_fn(x, fn, None, 1e-6), scale, base, 1e-6)]


ALPHAS = dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), (1,))
TE = {"phi": (ROWS, C * N), "alpha": (3,), "beta": (1, ROWS), "norm_weight": (C * N,)}
TK = {"fn": (ROWS, N * C), "scale": (3,), "base": (ROWS,)}
SITE = {"weight": (ROWS, N * C), "bias": (ROWS,), **ALPHAS}
HEAD = {"fn": (N, N * C), "scale": (), "base": (N,)}
LIGER = {"phi": (N * C, ROWS), "b": (ROWS,), **dict.fromkeys(ALPHAS, ())}
CASES = {  # function of the streams and of parameters, and their shapes
    "te layer": (te_layer, TE),
    "te layer with a buffer": (lambda x, **p: te_layer(x, **p, buffer=torch.empty(x.numel())), TE),
    "te parts": (te_parts, TE),
    "tk pre": (lambda x, **p: tk.mhc_pre(x, **p)[1], {**TK, "norm_weight": (N * C,)}),
    "tk big fuse": (big_fuse, TK),
    "tk parts": (tk_parts, {**TK, "norm_weight": (N * C,)}),
    "tk head": (lambda x, **p: [tk.mhc_head(x, **p)], {**HEAD, "norm_weight": (N * C,)}),
    "tk head parts": (head_parts, {**HEAD, "scale": (1,)}),
    "liger coeffs": (lambda x, **p: liger.liger_mhc_coeffs(x, **p, allow_fp32=True), LIGER),
    "liger forward": (lambda x, **p: [liger.liger_mhc_forward(x, torch.tanh, **p, allow_fp32=True)], LIGER),
    "megatron compute_h": (compute_h, SITE),
    "megatron proj_rms": (
        lambda x, weight: megatron.fused_proj_rms(x.flatten(1), weight)[:1],
        {"weight": SITE["weight"]},
    ),
    "megatron module": (megatron_module, SITE),
    "megatron parts": (megatron_parts, SITE),
    "megatron contract": (contract, {"fn": (N, N * C), "base": (N,), "scale": (1,)}),
    "megatron gdn": (pre_gdn, {"weight": (CHANNELS, 1, 4), "conv_bias": (CHANNELS,), "a_log": (4,), "dt_bias": (4,)}),
    "fla convolution": (lambda x, **p: fla.causal_conv1d(x, **p)[:1], {"weight": (C, 4), "bias": (C,)}),
    "fla module": (short_convolution, {"weight": (C, 1, 4), "bias": (C,)}),
    "fla gate": (lambda x, **p: [fla.fused_gdn_gate(x, **p)], {"A_log": (1, 1, C, 1), "dt_bias": (C,)}),
}
names = pytest.mark.parametrize("name", CASES)


def parameters(name, dtype=torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = CASES[name][1]
    return {k: nn.Parameter((torch.randn(s, generator=generator) / 4).to(dtype)) for k, s in shapes.items()}


def step(name, params, x) -> None:
    """A micro-batch: the loss weighs all results."""
    results = CASES[name][0](x, **params)
    sum((t.float() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in results).backward()


def returned(name, x, dtype=torch.float32) -> dict[str, torch.Tensor]:
    params = parameters(name, dtype)
    step(name, params, x)
    for k, p in params.items():
        assert p.grad is not None and p.grad.abs().max() > 0, f"{k}: the case does not test it"
    return {k: p.grad for k, p in params.items()}


@names
def test_added(name):
    """Two micro-batches: autograd gets nothing, main_grad the sum of what it would have got."""
    x = streams()
    want, params = returned(name, x), parameters(name)
    for p in params.values():
        p.main_grad = torch.full(p.shape, 0.5)
    for _ in range(2):
        step(name, params, x)
    for k, p in params.items():
        assert p.grad is None, k
        error = (p.main_grad.double() - (0.5 + 2 * want[k].double())).abs()
        assert (error <= 2**-23 * (0.5 + 2 * want[k].abs())).all(), k  # two sums, each rounded once


@names
def test_protocol(name):
    """Memory from get_main_grad that holds NaN is written over, the flag is set and hooks run."""
    x = streams()
    want, params, asked, fired = returned(name, x), parameters(name), [], []
    for k, p in params.items():

        def memory(k=k, p=p):
            asked.append(k)
            return torch.full(p.shape, float("nan"))

        p.get_main_grad, p.overwrite_main_grad = memory, True
        p.grad_added_to_main_grad, p.zero_out_wgrad = False, True
        p.register_post_accumulate_grad_hook(lambda p, k=k: fired.append(k))
    step(name, params, x)
    assert sorted(asked) == sorted(fired) == sorted(params)
    for k, p in params.items():
        same(p.main_grad, want[k], k)
        assert p.grad_added_to_main_grad is True
        assert p.grad.shape == p.shape and not p.grad.any(), "a stand-in of zeros"


# What reaches an operator as a view keeps the precision of main_grad; the rest is rounded to the parameter's dtype first.
ROUNDED = {"alpha_pre", "alpha_post", "alpha_res"}


@names
def test_of_16_bit_parameters(name):
    """fp32 main_grad of bf16 parameters is not rounded to bf16."""
    if name in ("tk head parts", "fla convolution", "fla module", "megatron parts"):
        pytest.skip("its parameters do not reach an operator as they are")
    x = streams()
    want, params = returned(name, x, torch.bfloat16), parameters(name, torch.bfloat16)
    for p in params.values():
        p.main_grad = torch.zeros(p.shape)
    step(name, params, x)
    for k, p in params.items():
        # Each is one rounding of what the operator has in wider arithmetic.
        error = (want[k].float() - p.main_grad).abs()
        assert (error <= 2**-8 * (1 + 2**-8) * p.main_grad.abs()).all(), k
        if p.numel() > 4 and k not in ROUNDED:
            assert not torch.equal(p.main_grad, want[k].float()), f"{k}: rounded on its way"


def test_part_of_a_parameter():
    """mhc_head takes the first rows of a longer fn: of memory that is written over, the others are zero."""
    x = streams()
    fn, scale, base = nn.Parameter(torch.randn(ROWS, N * C)), torch.ones(1), torch.zeros(N)
    plain = nn.Parameter(fn.detach().clone())
    tk.mhc_head(x, plain, scale, base).sum().backward()
    fn.main_grad, fn.overwrite_main_grad = torch.full(fn.shape, float("nan")), True
    tk.mhc_head(x, fn, scale, base).sum().backward()
    same(fn.main_grad, plain.grad, "d_fn")
    assert fn.grad is None


def test_looked_up_in_backward():
    """Set after forward on a parameter that takes part, or taken away."""
    x, params = streams(), parameters("liger coeffs")
    want = returned("liger coeffs", x)
    for p in params.values():
        p.main_grad = None
    results = liger.liger_mhc_coeffs(x, **params, allow_fp32=True)
    params["phi"].main_grad = torch.zeros_like(params["phi"])
    sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in results).backward()
    same(params["phi"].main_grad, want["phi"], "d_phi")
    assert params["phi"].grad is None
    for k in ("b", *ALPHAS):
        same(params[k].grad, want[k], k)


def test_frozen_and_without_a_gradient():
    x, params = streams(), parameters("liger coeffs")
    for p in params.values():
        p.main_grad = torch.zeros_like(p)
    params["phi"].requires_grad_(False)
    step("liger coeffs", params, x)
    assert not params["phi"].main_grad.any() and params["b"].main_grad.any()
    with torch.no_grad():
        liger.liger_mhc_coeffs(x, **params, allow_fp32=True)


def test_a_compiled_graph_returns_gradients(fresh_dynamo):
    x, params = streams(), parameters("liger coeffs")
    want = returned("liger coeffs", x)
    for p in params.values():
        p.main_grad = torch.zeros_like(p)
    function = torch.compile(CASES["liger coeffs"][0], fullgraph=True, backend="aot_eager")
    results = function(x, **params)
    sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in results).backward()
    for k, p in params.items():
        assert not p.main_grad.any()
        same(p.grad, want[k], k)


def test_lent_views_are_not_kept_without_the_protocol():
    param = nn.Parameter(torch.zeros(2, 3))
    assert not hasattr(grads.lend(param, torch.t), "_weft_lent")
    assert grads.deposit(param) is param


# ---- two processes ---------------------------------------------------------------------------------------------------

WORLD, BATCH = 2, 8


class TeLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(ROWS, C * N) / 8)
        self.alpha, self.beta = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1, ROWS))
        self.inner = nn.Linear(C, C)

    def forward(self, x):
        x = x.mT.unsqueeze(1).contiguous()
        u, post, res = te.mhc_generate_mix_and_aggregate(x, self.phi, self.alpha, self.beta)
        y = te.mhc_fused_expand_combine(torch.tanh(self.inner(u)), None, post, x, res, N)
        return y.squeeze(1).mT


class TkLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fn = nn.Parameter(torch.randn(ROWS, N * C) / 8)
        self.scale, self.base = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(ROWS))
        self.inner = nn.Linear(C, C)

    def forward(self, x):
        u, (post, comb) = tk.mhc_pre(x, self.fn, self.scale, self.base)
        return tk.mhc_post(torch.tanh(self.inner(u)), x, post, comb)


class MegatronLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.site, self.inner = megatron.HyperConnectionModule(CONFIG, 1), nn.Linear(C, C)

    def forward(self, x):
        wide = x.flatten(1).unsqueeze(1)
        u, res, post = self.site(wide)
        y = self.site.fused_h_res_h_post_bda(res, wide, post, (torch.tanh(self.inner(u)), None), 0.0, True, True)
        return y.view(x.shape)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(C, C), nn.Tanh())
    around = liger.LigerMHC(inner, hc=N, c=C, tmax=5, phi_dtype=torch.float32, allow_fp32=True)
    for name in ALPHAS:  # FSDP2 takes no scalars
        setattr(around, name, nn.Parameter(torch.ones(1)))
    return nn.Sequential(TeLayer(), TkLayer(), around, MegatronLayer())


def is_ours(name: str) -> bool:
    return "inner" not in name and "layer" not in name


def batch() -> torch.Tensor:
    return torch.randn(BATCH, N, C, generator=torch.Generator().manual_seed(8))


def loss_of(net, x):
    return net(x).square().mean()


def gradients(net, x) -> dict:
    net.zero_grad()
    loss_of(net, x).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def by_ddp(rank: int) -> dict:
    """Parameters of drop-ins have main_grad, DDP averages the others. The stand-ins let its hooks run."""
    net = model()
    for name, p in net.named_parameters():
        if is_ours(name):
            p.main_grad, p.grad_added_to_main_grad, p.zero_out_wgrad = torch.zeros_like(p), False, True
    wrapped = nn.parallel.DistributedDataParallel(net)
    for half in batch().chunk(WORLD)[rank].chunk(2):  # two micro-batches, added up
        (loss_of(wrapped, half) / 2).backward()
    result = {}
    for name, p in net.named_parameters():
        if is_ours(name):
            assert p.grad_added_to_main_grad and not p.grad.any(), name
            dist.all_reduce(p.main_grad)
            result[name] = p.main_grad / WORLD
        else:
            result[name] = p.grad
    return result


def by_fsdp2(rank: int) -> dict:
    """The engine's memory is there for the unsharded parameters that forward sees, and is written over."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh, buffers = model(), init_device_mesh("cpu", (WORLD,)), {}
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def prepare(layer, args, prefix):
        for name, p in layer.named_parameters():
            if is_ours(name):
                assert not hasattr(p, "full_tensor"), "gathered before this hook"
                memory = buffers.setdefault(f"{prefix}.{name}", torch.full(p.shape, float("nan")))
                p.get_main_grad, p.overwrite_main_grad = (lambda memory=memory: memory), True

    for k, layer in enumerate(net):
        layer.register_forward_pre_hook(lambda layer, args, k=k: prepare(layer, args, str(k)))
    loss_of(net, batch().chunk(WORLD)[rank]).backward()
    result = {}
    for name, p in net.named_parameters():
        if is_ours(name):
            assert p.grad is None, name
            dist.all_reduce(buffers[name])
            result[name] = buffers[name] / WORLD
        else:
            result[name] = p.grad.full_tensor()
    return result


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    try:
        torch.save({way.__name__: way(rank) for way in (by_ddp, by_fsdp2)}, f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # the results are stored; gloo's threads can abort a process that leaves the usual way


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes(tmp_path):
    """main_grad, reduced, is the gradient of one process with the whole batch, held to the float64 gradient with the
    bounds of compare.py."""

    def of_one(noise: float) -> dict:
        wide, x = model().double(), batch().double()
        with Noise(noise) if noise else nullcontext():
            return gradients(wide, move(x, noise) if noise else x)

    exact, moved = of_one(0.0), [of_one(UNIT[torch.float32]) for _ in range(DRAWS)]
    noise = {name: max(float((m[name] - g).abs().max()) for m in moved) for name, g in exact.items()}
    assert sum(map(is_ours, exact)) == 16
    assert all(g.abs().max() > 100 * PATH * noise[name] for name, g in exact.items()), "a bound that says little"
    mp.spawn(work, (str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        for way, found in torch.load(tmp_path / f"{rank}.pt").items():
            assert found.keys() == exact.keys()
            for name, gradient in found.items():
                close(gradient, exact[name], PATH * noise[name], f"{way}: {name}")
