# SPDX-License-Identifier: Apache-2.0
"""A program for test_compat_megatron_gdn_class.py: weft in the GatedDeltaNet and the HyperConnectionModule of Megatron-LM's
branch dev, the real classes, whose sources are on PYTHONPATH. What a machine without a GPU lacks is put in its place:
Triton, which is imported and never called here, fla, of which the class's own plain PyTorch needs the l2 norm, and the
number of the current device."""

import sys
import tempfile
import types
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch._dynamo
import torch._inductor.runtime.autotune_cache
import torch._inductor.runtime.triton_compat  # noqa: F401  (before there is a Triton to be found)
import torch._inductor.utils
from compare import PATH, check, same
from torch import nn


class Anything:
    """Decorates and is indexed, as Triton's names are at import."""

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key):
        return self


class Absent(types.ModuleType):
    __path__, __version__ = (), "3.7.1"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def l2norm(x, eps=1e-6, output_dtype=None):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def not_here(*args, **kwargs):
    raise AssertionError("fla was called")


def stand_in(name: str, **names) -> None:
    module = types.ModuleType(name)
    vars(module).update(names, __path__=[])
    sys.modules[name] = module


torch.compile = lambda f=None, **options: (lambda g: g) if f is None else f
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.nvtx.range = lambda *args: nullcontext()
sys.modules |= {name: Absent(name) for name in ("triton", "triton.language", "triton.runtime")}
for package in ("fla", "fla.modules", "fla.ops"):
    stand_in(package)
stand_in("fla.modules.convolution", causal_conv1d=not_here)
stand_in("fla.modules.l2norm", l2norm=l2norm)
stand_in("fla.ops.cp", build_cp_context=lambda cu_seqlens, group, conv1d_kernel_size: SimpleNamespace(group=group))
stand_in("fla.ops.gated_delta_rule", chunk_gated_delta_rule=not_here)

import compat_oracle as oracle  # noqa: E402
import gdn_oracle  # noqa: E402
import torch.distributed as dist  # noqa: E402
import weft.torch as wt  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules, get_parameter_local_cp  # noqa: E402
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet as Real  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.hyper_connection import HyperConnectionModule  # noqa: E402
from ranks_support import spawn  # noqa: E402
from weft.compat import megatron  # noqa: E402

HIDDEN, HEADS = 24, wt.GdnHeads(2, 4, 8, 6)


class Hooked(megatron.GatedDeltaNet, Real):
    pass


class Linear(nn.Linear):
    """As Megatron calls its own."""

    def __init__(self, size, out, *, config, bias=False, **options):
        super().__init__(size, out, bias=bias)

    def forward(self, x):
        return super().forward(x), None


class Norm(nn.Module):
    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Ranks:
    """A process group to look at."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def make(kind, conv_bias=False, cp=None, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=HEADS.key_dim,
        linear_value_head_dim=HEADS.value_dim,
        linear_num_key_heads=HEADS.key_heads,
        linear_num_value_heads=HEADS.value_heads,
        activation_func=nn.functional.silu,
        perform_initialization=False,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
        **options,
    )
    groups = SimpleNamespace(tp=Ranks(), cp=cp or Ranks(), tp_cp=cp or Ranks())
    parts = GatedDeltaNetSubmodules(in_proj=Linear, out_norm=Norm, out_proj=Linear)
    module = kind(config, parts, layer_number=1, conv_bias=conv_bias, pg_collection=groups)
    torch.manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / max(p.shape[-1], 4) ** 0.5)
    return module


def expression(hidden, cu_seqlens=None, **p):
    rows = (hidden @ p["in_proj.weight"].T).transpose(0, 1)
    sections = gdn_oracle.split(rows, HEADS)
    q, k, v, z, beta, g = gdn_oracle.gdn_pre(
        *sections, p["conv1d.weight"], p["A_log"], p["dt_bias"], p.get("conv1d.bias"), cu_seqlens=cu_seqlens,
        options=wt.GdnOptions(),
    )  # fmt: skip
    o, _ = gdn_oracle.gdn_rule(q, k, v, beta, g, cu_seqlens=cu_seqlens)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * p["out_norm.weight"]
    y = o * nn.functional.silu(z)
    return y.flatten(2).transpose(0, 1) @ p["out_proj.weight"].T


def inputs(module, s=7, b=2) -> dict:
    return {"hidden": torch.randn(s, b, HIDDEN), **{k: p.detach() for k, p in module.named_parameters()}}


def layer(module, **more):
    def call(hidden, **parameters):
        out, bias = torch.func.functional_call(module, parameters, (hidden, None), more)
        assert bias is None
        return out

    return call


def whole_layer() -> None:
    """Forward and all gradients against the float64 expression: the real class in plain PyTorch, and with weft."""
    plain = make(Real, deterministic_mode=True)
    tensors = inputs(plain)
    worst = {"its own": check(layer(plain), expression, tensors)}
    for fusion in (False, True):
        for deterministic in (False, True):
            options = {"gdn_pre_gated_delta_rule_fusion": fusion, "deterministic_mode": deterministic}
            module = make(Hooked, **options)
            assert module.gdn_pre_gated_delta_rule_fusion == fusion
            assert dict(module.state_dict()).keys() == dict(plain.state_dict()).keys()
            worst[f"weft, {options}"] = check(layer(module), expression, tensors)
    for name, ratio in worst.items():
        print(f"whole layer, {name}: {ratio:.3f} of the bound (which has a factor of {PATH})")
    try:
        make(Real, deterministic_mode=True, gdn_pre_gated_delta_rule_fusion=True)
    except ValueError as error:
        assert "deterministic" in str(error)
    else:
        raise AssertionError("Megatron takes the fusion in deterministic mode by now: weft need not step in")


def bound_module() -> None:
    """bind gives the bits of the class; without the rule, Megatron's own stays."""
    want, own = make(Hooked), make(Real, deterministic_mode=True)
    hidden = torch.randn(7, 2, HIDDEN)
    rule = own.gated_delta_rule
    half = megatron.bind(make(Real, deterministic_mode=True), rule=False)
    assert half.gated_delta_rule is rule and half(hidden, None)[0].isfinite().all()
    module = megatron.bind(make(Real))
    assert type(module) is Real
    same(module(hidden, None)[0], want(hidden, None)[0], "bind")


def packed() -> None:
    cu = torch.tensor([0, 1, 4, 9], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    for fusion in (False, True):
        module = make(Hooked, conv_bias=True, gdn_pre_gated_delta_rule_fusion=fusion)
        check(
            layer(module, packed_seq_params=params),
            lambda hidden, **p: expression(hidden, cu_seqlens=cu, **p),
            inputs(module, 9, 1),
        )


def by_heads() -> None:
    """A rank's heads: what the real method computes of them, and the bits of all heads at once."""
    plain, module = make(Real, deterministic_mode=True), make(Hooked)
    sizes = plain.in_proj_split_sections
    rows = torch.randn(7, 2, HEADS.columns)
    whole = module.pre_gated_delta_rule(rows, 2, 7, 1, Ranks())
    for rank in range(2):
        group = Ranks(2, rank)
        mine = torch.cat([part.chunk(2, -1)[rank] for part in rows.split(sizes, -1)], -1)
        got = module.pre_gated_delta_rule(mine, 2, 7, 2, group, packed_seq_params=None)
        fused = module._fused_streamed_pre_gated_delta_rule(
            mine, cu_seqlens_q=None, seq_idx=None, cp_group=None, cp_group_headwise=group
        )
        same(list(got), list(fused), "both methods")
        same(list(got), [t.chunk(2, 2)[rank].contiguous() for t in whole], "a rank's heads of all")
        theirs = Real.pre_gated_delta_rule(plain, mine, 2, 7, 2, group)
        for a, b in zip(got, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            # Two chains of a few dozen roundings each.
            assert ((a - b).abs() <= 128 * 2**-24 * b.abs().max()).all()
        sliced = get_parameter_local_cp(plain.conv1d.weight, 0, group, [16, 16, 24])
        from weft.compat.megatron._gdn_class import _of_this_rank

        same(_of_this_rank(module, group)[0][0], sliced, "conv1d.weight")


DIVIDED = [(fusion, cu) for fusion in (False, True) for cu in (None, [0, 2, 8, 12])]


def divided(rank: int, world: int) -> list:
    """The layer's result, and gradients of its input and parameters, where each rank has its tokens."""
    return [layer_of_a_rank(rank, world, *case) for case in DIVIDED]


def layer_of_a_rank(rank: int, world: int, fusion: bool, offsets) -> tuple:
    group = dist.group.WORLD if world > 1 else None
    mode = {"cp_partition_mode": "contiguous", "linear_cp_mode": "chunkwise"}
    module = make(Hooked, conv_bias=True, cp=group, gdn_pre_gated_delta_rule_fusion=fusion, **mode)
    torch.manual_seed(5)
    hidden = torch.randn(12, 1, HIDDEN).chunk(world)[rank].clone().requires_grad_()
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    params = None if cu is None else PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    out, _ = module(hidden, None, packed_seq_params=params)
    out.square().sum().backward()
    return [out.detach(), hidden.grad], [p.grad for p in module.parameters()]


def by_tokens() -> None:
    """Chunk-wise context parallel on two processes, through the class's own forward, dense and packed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = spawn(divided, 2, folder)
    for (tokens, parameters), first, second in zip(divided(0, 1), *ranks, strict=True):
        # Linear layers sum in an order of their own for fewer rows: chains of a few dozen roundings.
        for k, of_one in enumerate(tokens):
            got = torch.cat([first[0][k], second[0][k]])
            assert (got - of_one).abs().max() <= 128 * 2**-24 * of_one.abs().max(), k
        for k, of_one in enumerate(parameters):
            a, b = first[1][k], second[1][k]
            assert (a + b - of_one).abs().max() <= 128 * 2**-24 * max(a.abs().max(), b.abs().max()), k


def hyper_connections() -> None:
    """Forward, merge and all gradients of dev's HyperConnectionModule in its own plain PyTorch and with weft in its slots,
    against the float64 equations; and the aggregate into memory that is given."""
    n, c, s, b = 4, 24, 5, 2
    config = TransformerConfig(
        num_layers=1, hidden_size=c, num_attention_heads=2, num_residual_streams=n, mhc_sinkhorn_iterations=5
    )
    torch.manual_seed(9)
    plain, module = HyperConnectionModule(config, 1), HyperConnectionModule(config, 1)
    assert megatron.bind(module) is module
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn(p.shape) / max(p.shape[-1], 4) ** 0.5)
    module.load_state_dict(plain.state_dict())
    tensors = {"x": torch.randn(s, b, n * c), "f": torch.randn(s, b, c), "bias": torch.randn(c)}
    tensors |= {f"p.{k}": p.detach() for k, p in plain.named_parameters()}

    def layer_of(net):
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.p = net

            def forward(self, x, f, bias):
                u, res, post, residual = self.p(x)
                y = self.p.fused_h_res_h_post_bda(res, residual, post, (f, bias), 0.0, True, False)
                return u, res, post, y

        whole = Whole()
        return lambda x, f, bias, **p: torch.func.functional_call(whole, p, (x, f, bias))

    def expected(x, f, bias, **p):
        streams, rows = x.unflatten(-1, (n, c)), p["p.mapping_proj.weight"].unflatten(-1, (n, c))
        h, ms = oracle.project(streams, rows)
        alpha = torch.cat([p[f"p.alpha_{k}"] for k in ("pre", "post", "res")])
        pre, post, logits = oracle.gates(h, ms, alpha, p["p.bias"], n, 1e-6, "outside", 1e-6, 2.0)
        res = oracle.sinkhorn(logits, "softmax_eps", 5, 1e-6)
        y = oracle.combine(streams, f, post, res, bias, "in_out").flatten(-2)
        return oracle.aggregate(streams, pre), res, post, y

    for whose, net in (("its own", plain), ("weft", module)):
        print(f"hyper connections, {whose}: {check(layer_of(net), expected, tensors):.3f} of the bound")
    out = torch.empty(s, b, c)
    x, h_pre = tensors["x"], torch.rand(s, b, n)
    got = module.aggregate(x, h_pre, out=out)
    assert got.data_ptr() == out.data_ptr()
    same(got, module.aggregate(x, h_pre), "into")


if __name__ == "__main__":
    torch.manual_seed(1)
    for part in (whole_layer, bound_module, packed, by_heads, by_tokens, hyper_connections):
        part()
        print(f"{part.__name__}: passed")
