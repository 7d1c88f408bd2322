# SPDX-License-Identifier: Apache-2.0
"""Calls of every function of weft.torch.functional and weft.torch.gdn with random tensors, beside the same call of
oracle.py or gdn_oracle.py."""

from collections.abc import Callable
from typing import NamedTuple

import gdn_cases
import oracle
import pytest
import torch
import weft
from torch import Tensor
from weft import _C
from weft.torch import functional as F
from weft.torch import register

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SUB_EPS, P = 1e-5, 0.3
HEAD = {"rms_eps": 1e-5, "rms_eps_kind": "outside", "pre_eps": 1e-3}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Case(NamedTuple):
    function: Callable
    expression: Callable
    tensors: dict[str, Tensor | None]
    coarse: tuple[
        str, ...
    ] = ()  # inputs of a projection that is allowed 16 bits of them ([M1] in docs/reference/math.md)


class Maker:
    """Random tensors of one shape, dtype and place."""

    def __init__(
        self, n, c, lead, dtype, device, swapped=False, flat=False, optional=True, param_dtype=None, mixed=True
    ):
        self.n, self.c, self.lead, self.dtype, self.device = n, c, tuple(lead), dtype, torch.device(device)
        self.swapped, self.flat, self.optional = swapped, flat, optional
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.param_dtype = param_dtype or self.wide
        self.mixed = mixed
        self.gates = n * (n + 2) if mixed else 2 * n

    def put(self, t: Tensor, dtype) -> Tensor:
        return t.to(self.device, dtype)

    def streams(self) -> Tensor:
        if self.swapped:
            return self.put(torch.randn((*self.lead, self.c, self.n)), self.dtype).transpose(-1, -2)
        return self.put(torch.randn((*self.lead, self.n, self.c)), self.dtype)

    def row(self) -> Tensor:
        return self.put(torch.randn(*self.lead, self.c), self.dtype)

    def per_token(self, *shape) -> Tensor:
        return self.put(torch.rand((*self.lead, *shape), dtype=torch.float64) + 0.1, self.wide)

    def param(self, *shape, center=0.0, spread=1.0) -> Tensor:
        return self.put(center + spread * torch.randn(*shape), self.param_dtype)

    def phi(self, rows) -> Tensor:
        spread = 2 / (self.n * self.c) ** 0.5  # so that gates are neither flat nor saturated
        return self.param(rows, *((self.n * self.c,) if self.flat else (self.n, self.c)), spread=spread)

    def gain(self, *shape) -> Tensor | None:
        return self.param(*shape, center=1.0, spread=0.2) if self.optional else None

    def alpha(self) -> Tensor:
        return self.param(3 if self.mixed else 2, center=1.0, spread=0.3)

    def norm_weight(self) -> Tensor | None:
        return self.gain(*((self.n * self.c,) if self.flat else (self.n, self.c)))

    def site(self, shifted: bool) -> dict:
        """The parameters of one site, and pre_in of the shifted form."""
        return {
            "phi": self.phi(self.gates),
            "alpha": self.alpha(),
            "beta": self.param(self.gates),
            "norm_weight": self.norm_weight(),
            "pre_in": self.per_token(self.n) if shifted else None,
        }

    @property
    def coarse(self) -> tuple[str, ...]:
        """AMX and tensor cores take the weight, and in backward the gradient of h, as two bf16 numbers."""
        few_bits = self.device.type == "cuda" or weft.info()["isa"] == "amx"
        return ("x", "phi", "norm_weight") if few_bits and self.dtype in (torch.bfloat16, torch.float16) else ()

    @property
    def stores(self) -> bool:
        """What is handed on inside an operator is rounded to 16 bits."""
        return self.dtype in (torch.bfloat16, torch.float16)


def project(m: Maker, numerics) -> Case:
    tensors = {"x": m.streams(), "phi": m.phi(m.gates + 1), "norm_weight": m.norm_weight()}
    return Case(F.project, oracle.project, tensors, m.coarse)


def _gates(m: Maker, numerics, name: str) -> Case:
    tensors = {
        "h": m.put(torch.randn(*m.lead, m.gates), m.wide),
        "ms": m.per_token(),
        "alpha": m.alpha(),
        "beta": m.param(m.gates),
    }

    def function(**t):
        return getattr(F, name)(**t, numerics=numerics)

    def expression(**t):
        return getattr(oracle, name)(**t, numerics=numerics)

    return Case(function, expression, tensors)


def scale(m: Maker, numerics) -> Case:
    return _gates(m, numerics, "scale")


def coef(m: Maker, numerics) -> Case:
    return _gates(m, numerics, "coef")


def sinkhorn(m: Maker, numerics) -> Case:
    tensors = {"logits": m.put(2 * torch.randn(*m.lead, m.n, m.n), m.wide)}
    return Case(lambda logits: F.sinkhorn(logits, numerics), lambda logits: oracle.sinkhorn(logits, numerics), tensors)


def aggregate(m: Maker, numerics) -> Case:
    return Case(F.aggregate, oracle.aggregate, {"x": m.streams(), "pre": m.per_token(m.n)})


def _after(m: Maker) -> dict:
    """Streams and what a sub-layer leaves behind."""
    return {
        "x": m.streams(),
        "f": m.row(),
        "post": m.per_token(m.n),
        "res": m.per_token(m.n, m.n) if m.mixed else None,
        "bias": m.param(m.c) if m.optional else None,
    }


def post(m: Maker, numerics) -> Case:
    return Case(
        lambda **t: F.post(**t, numerics=numerics),
        lambda **t: oracle.post(**t, numerics=numerics),
        _after(m),
    )


def _step(m: Maker) -> tuple[Tensor, Tensor]:
    """A step for dropout and the factors that follow from it."""
    step = torch.tensor([-0x123456789ABCDEF], dtype=torch.int64)
    tokens = int(torch.tensor(m.lead).prod())
    factors = oracle.dropout_factors(int(step), tokens, m.n, m.c, P, token_base=7)
    return step.to(m.device), factors.view(*m.lead, m.n, m.c)


def post_dropout(m: Maker, numerics) -> Case:
    step, factors = _step(m)
    return Case(
        lambda **t: F.post(**t, numerics=numerics, dropout=P, dropout_step=step, token_base=7),
        lambda **t: oracle.post(**t, numerics=numerics, factors=factors),
        _after(m),
    )


def _made(m: Maker, numerics) -> tuple[Tensor, Callable]:
    """Streams that `post` made, with dropout, and a function that tells their source, in the memory order of x."""
    step, _ = _step(m)
    made_of = _after(m)
    source = F.Source(**made_of, dropout=P, dropout_step=step, token_base=7)
    x = F.post(**made_of, numerics=numerics, dropout=P, dropout_step=step, token_base=7)
    return x, lambda x: source._replace(x=torch.empty_like(x).copy_(source.x))


def post_rebuild(m: Maker, numerics) -> Case:
    x, source = _made(m, numerics)
    return Case(
        lambda **t: F.post(**t, numerics=numerics, source=source(t["x"])),
        lambda **t: oracle.post(**t, numerics=numerics),
        {**_after(m), "x": x},
    )


def expand(m: Maker, numerics) -> Case:
    def expression(u):
        return u[..., None, :].expand(*u.shape[:-1], m.n, m.c).clone()

    return Case(lambda u: F.expand(u, m.n), expression, {"u": m.row()})


def contract_mean(m: Maker, numerics) -> Case:
    return Case(F.contract, lambda x: x.mean(-2), {"x": m.streams()})


def contract_sum(m: Maker, numerics) -> Case:
    return Case(lambda x: F.contract(x, "sum"), lambda x: x.sum(-2), {"x": m.streams()})


def head(m: Maker, numerics) -> Case:
    tensors = {
        "x": m.streams(),
        "phi": m.phi(m.n),
        "alpha": m.param(1, center=1.0, spread=0.3),
        "beta": m.param(m.n),
        "norm_weight": m.norm_weight(),
    }
    return Case(lambda **t: F.head(**t, **HEAD), lambda **t: oracle.head(**t, **HEAD), tensors, m.coarse)


def _pre(m: Maker, numerics, sub_norm: bool, shifted: bool) -> Case:
    tensors = {"x": m.streams(), **m.site(shifted), "sub_weight": m.gain(m.c) if sub_norm else None}
    options = {"numerics": numerics, "sub_eps": SUB_EPS, "sub_norm": sub_norm}
    stored = None
    if sub_norm and m.stores:
        stored = F.pre(**{**tensors, "sub_weight": None}, **{**options, "sub_norm": False}).u.cpu()
    return Case(
        lambda **t: F.pre(**t, **options),
        lambda **t: oracle.pre(**t, **options, stored_u=stored),
        tensors,
        m.coarse,
    )


def pre(m: Maker, numerics) -> Case:
    return _pre(m, numerics, sub_norm=False, shifted=False)


def pre_norm(m: Maker, numerics) -> Case:
    return _pre(m, numerics, sub_norm=True, shifted=False)


def pre_shifted(m: Maker, numerics) -> Case:
    return _pre(m, numerics, sub_norm=True, shifted=True)


def _boundary(
    m: Maker, numerics, sub_norm: bool, shifted: bool, dropout: bool, made: bool = False, keep: bool = True
) -> Case:
    tensors = {**_after(m), **m.site(shifted), "sub_weight": m.gain(m.c) if sub_norm else None}
    source = None
    if made:
        tensors["x"], source = _made(m, numerics)
    options = {"numerics": numerics, "sub_eps": SUB_EPS, "sub_norm": sub_norm}
    factors = None
    if dropout:
        step, factors = _step(m)
        options |= {"dropout": P, "dropout_step": step, "token_base": 7}
    stored_y = stored_u = None
    if m.stores:
        stored = F.boundary(**{**tensors, "sub_weight": None}, **{**options, "sub_norm": False})
        stored_y, stored_u = stored.y.cpu(), stored.u.cpu()

    def expression(x, f, post, res, bias, **site):
        y = oracle.post(x, f, post, res, bias, numerics=numerics, factors=factors)
        rest = {"numerics": numerics, "sub_eps": SUB_EPS, "sub_norm": sub_norm, "stored_u": stored_u}
        return y, *oracle.pre(snap_y(y), **site, **rest)

    def snap_y(y):
        return oracle.snap(y, stored_y)

    def function(**t):
        return F.boundary(**t, **options, source=source and source(t["x"]), keep=keep)

    return Case(function, expression, tensors, m.coarse)


def boundary(m: Maker, numerics) -> Case:
    return _boundary(m, numerics, sub_norm=False, shifted=False, dropout=False)


def boundary_norm(m: Maker, numerics) -> Case:
    return _boundary(m, numerics, sub_norm=True, shifted=False, dropout=True)


def boundary_shifted(m: Maker, numerics) -> Case:
    return _boundary(m, numerics, sub_norm=True, shifted=True, dropout=True)


def boundary_rebuild(m: Maker, numerics) -> Case:
    """x comes with what it was made of."""
    return _boundary(m, numerics, sub_norm=True, shifted=True, dropout=True, made=True)


def boundary_unkept(m: Maker, numerics) -> Case:
    return _boundary(m, numerics, sub_norm=True, shifted=False, dropout=True, keep=False)


def rmsnorm(m: Maker, numerics) -> Case:
    tensors = {"u": m.row(), "weight": m.gain(m.c)}
    return Case(lambda **t: F.rmsnorm(**t, eps=SUB_EPS), lambda **t: oracle.rmsnorm(**t, eps=SUB_EPS), tensors)


CASES = {
    f.__name__: f
    for f in (
        project,
        scale,
        sinkhorn,
        coef,
        aggregate,
        post,
        post_dropout,
        post_rebuild,
        expand,
        contract_mean,
        contract_sum,
        head,
        pre,
        pre_norm,
        pre_shifted,
        boundary,
        boundary_norm,
        boundary_shifted,
        boundary_rebuild,
        boundary_unkept,
        rmsnorm,
    )
}
CASES |= {name: lambda m, numerics, make=make: Case(*make(m)) for name, make in gdn_cases.CASES.items()}


def _of_table(name: str) -> Callable:
    """A case for an operator that is in the library's list alone. Its expression is the reference, which the tests of the
    library hold against finite differences."""
    operator, rows = register.OPERATORS[name], register.TABLES[f"{name}_fwd"].rows

    def tensor(m: Maker, row) -> Tensor | None:
        if row.optional and not m.optional:
            return None
        if row.dims == register.STREAMS:
            return m.streams()
        if row.dims == ("tokens", "channels"):
            return m.row()
        sizes = [{"streams": m.n, "channels": m.c, "gates": m.gates}.get(d, d) for d in row.dims if d != "tokens"]
        return m.per_token(*sizes) if "tokens" in row.dims else m.param(*sizes, center=1.0, spread=0.3)

    def make(m: Maker, numerics) -> Case:
        numbers = {"float": 0.5, "int": 0, "bool": True, "float[]": F.pack(numerics)}
        scalars = {s: numbers[operator.arguments[s]] for s in operator.scalars}

        def function(**tensors):
            return operator.op(*({**tensors, **scalars}[a] for a in operator.arguments))

        return Case(function, function, {t: tensor(m, rows[t]) for t in operator.tensors})

    return make


def _has_case(name: str) -> bool:
    stem = name.removeprefix("mhc_")
    return any(f"{case}_".startswith(f"{stem}_") for case in CASES)


CASES |= {
    name: _of_table(name)
    for name, operator in register.OPERATORS.items()
    if f"{name}_fwd" in register.TABLES and operator.gradient is not None and not _has_case(name)
}
# The presets iterate 20 times. Fewer say as much about the wiring, and the expressions are ten times as quick.
SHORT = F.Numerics.preset("deepseek_v4")._replace(sinkhorn_iters=3)


def on(name: str, device) -> bool:
    """Whether a case can run there: not every operator has kernels for a GPU."""
    op = name if name in _C.ops() else "_".join(name.split("_")[:2])
    passes = (op,) if op in _C.ops() else (f"{op}_fwd", f"{op}_bwd")
    return torch.device(device).type == "cpu" or not op.startswith("gdn_") or all(_C.has(p, "cuda") for p in passes)


def need(name: str, device) -> None:
    """Skips a test that cannot run there."""
    if not on(name, device):
        pytest.skip(f"{name}: no kernels for a GPU")


def _maker(name, n=4, c=6, lead=(2, 3), dtype=torch.float32, device="cpu", **kind) -> Maker:
    need(name, device)
    return Maker(n, c, lead, dtype, device, **kind)


GDN_HEADS = gdn_cases.Sizes(_maker("gdn_pre")).heads  # of the cases with these defaults


def make(name: str, *, numerics=SHORT, **kind) -> Case:
    return CASES[name](_maker(name, **kind), numerics)


STEPS = {"gdn_pre_step": gdn_cases.step, "gdn_rule_step": gdn_cases.rule_step}


def make_step(name: str = "gdn_pre_step", **kind) -> Callable:
    """A call of an operator without a gradient."""
    return STEPS[name](_maker(name, **kind))
