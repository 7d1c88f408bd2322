# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections as modules: one site, one layer around any sub-layer, entry and exit of a stack (stack.py)."""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from . import functional as F
from .numerics import Numerics, choice
from .stack_recompute import Group
from .unmerged import Unmerged


def _numerics(value: Numerics | str) -> Numerics:
    return Numerics.preset(value) if isinstance(value, str) else value


def _not_itself(module: nn.Module, kind: type, *methods: str) -> str | None:
    """Why the methods of a module are not those of `kind`, or None if they are."""
    if not isinstance(module, kind):
        return f"is {type(module).__name__}, not {kind.__name__}"
    for name in methods:
        if getattr(type(module), name) is not getattr(kind, name) or name in module.__dict__:
            return f"has a {name} of its own"
    return None


def _keywords_of(sublayer: nn.Module) -> frozenset[str] | None:
    """The names that a sub-layer's forward takes by keyword beside its input; None: any."""
    known = getattr(sublayer, "takes", None)
    if isinstance(known, frozenset):
        return known
    try:
        _, *parameters = inspect.signature(sublayer.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


_FIRST_MIXES = ("uniform", "identity")


def _rows(streams: int, residual_mix: bool) -> int:
    """Rows of a site's projection."""
    return streams * (streams + 2) if residual_mix else 2 * streams


def _first_beta(streams: int, first_mix: str, site: int, residual_mix: bool) -> Tensor:
    """First values of beta, rows pre, post, res. "uniform": zeros, so pre is 1/2, post 1 and res 1/n everywhere.
    "identity": 95 % of each of four streams stay where they are, post is 1, and pre, whose sum is 1, has the stream
    site mod n for the most part."""
    n = streams
    beta = torch.zeros(_rows(n, residual_mix), dtype=torch.float64)
    if first_mix == "identity":
        if n > 1:
            pre = torch.full((n,), 1 / (16 * n), dtype=torch.float64)
            pre[site % n] = 1 - (n - 1) / (16 * n)
            beta[:n] = torch.logit(pre)
        if residual_mix:
            beta[2 * n :].view(n, n).fill_diagonal_(4.0)
    return beta


def _fill(to: nn.Parameter, values: Tensor) -> None:
    """Values into a parameter, which may be one that FSDP2 has sharded."""
    with torch.no_grad():
        if hasattr(to, "placements"):
            from torch.distributed.tensor import distribute_tensor

            values = distribute_tensor(values.to(to.device, to.dtype), to.device_mesh, to.placements)
        to.copy_(values)


class HyperConnection(nn.Module):
    """One site: the parameters before one sub-layer, `forward` (everything before the sub-layer) and `merge`
    (everything after it).

    Parameters: phi [N, n*C] (rows pre, post, res), alpha [3], beta [N]; norm_weight [n*C] with norm_weight=True;
    sub_weight [C], the gain of the sub-layer's RMSNorm, with sub_norm=True. They are fp32 whatever the streams are.

    first_mix: first values of beta, "identity" or "uniform". With "identity" streams begin apart: each site reads one of
    them for the most part, that of its number `site` in the network.

    residual_mix=False: independent hyper-connections, whose streams pass a merge unchanged. There phi has 2n rows and
    alpha 2 elements, and of `numerics` the Sinkhorn rule means nothing; those of HY-V4 are "hy_v4"."""

    def __init__(
        self,
        channels: int,
        streams: int = 4,
        *,
        numerics: Numerics | str = "deepseek_v4",
        norm_weight: bool = False,
        sub_norm: bool = False,
        sub_eps: float = 1e-6,
        alpha_init: float = 0.01,
        first_mix: str = "identity",
        site: int = 0,
        residual_mix: bool = True,
        precision: str = "full",
        main_grad: bool = False,
        device=None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        choice("HyperConnection: first_mix", first_mix, _FIRST_MIXES)
        if channels < 1 or not 1 <= streams <= 32:
            raise ValueError(f"HyperConnection: expected channels >= 1 and streams 1 to 32, got {channels}, {streams}")
        if not math.isfinite(alpha_init):
            raise ValueError(f"HyperConnection: alpha_init: expected a finite number, got {alpha_init}")
        self.channels, self.streams = channels, streams
        self.numerics = _numerics(numerics)
        self.numerics.packed()  # a wrong name is an error here, not in the first step
        self.sub_norm, self.sub_eps = sub_norm, sub_eps
        self.alpha_init, self.precision, self.main_grad = alpha_init, precision, main_grad
        self.first_mix, self.site, self.residual_mix = first_mix, site, residual_mix
        gates = _rows(streams, residual_mix)
        make = {"device": device, "dtype": dtype}
        self.phi = nn.Parameter(torch.empty(gates, streams * channels, **make))
        self.alpha = nn.Parameter(torch.empty(3 if residual_mix else 2, **make))
        self.beta = nn.Parameter(torch.empty(gates, **make))
        self.norm_weight = nn.Parameter(torch.empty(streams * channels, **make)) if norm_weight else None
        self.sub_weight = nn.Parameter(torch.empty(channels, **make)) if sub_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.phi)
        nn.init.constant_(self.alpha, self.alpha_init)
        _fill(self.beta, _first_beta(self.streams, self.first_mix, self.site, self.residual_mix))
        for weight in (self.norm_weight, self.sub_weight):
            if weight is not None:
                nn.init.ones_(weight)

    def is_itself(self) -> bool:
        """Whether forward and merge compute what this class says, and no hook has the last word on their results."""
        return _not_itself(self, HyperConnection, "forward", "merge") is None and not self._forward_hooks

    def extra_repr(self) -> str:
        mix = "" if self.residual_mix else ", residual_mix=False"
        return f"channels={self.channels}, streams={self.streams}, sub_norm={self.sub_norm}{mix}"

    def _check(self, x: Tensor) -> None:
        if x.shape[-2:] != (self.streams, self.channels):
            raise ValueError(
                f"HyperConnection: x: expected [..., {self.streams}, {self.channels}], got {list(x.shape)}"
            )

    def forward(self, x: Tensor, pre_in: Tensor | None = None) -> F.Pre:
        """Input u [..., C] of the sub-layer and coefficients."""
        self._check(x)
        return F.pre(
            x,
            self.phi,
            self.alpha,
            self.beta,
            self.norm_weight,
            self.sub_weight,
            pre_in,
            numerics=self.numerics,
            sub_norm=self.sub_norm,
            sub_eps=self.sub_eps,
            precision=self.precision,
            main_grad=self.main_grad,
        )

    def merge(
        self,
        x: Tensor,
        f: Tensor,
        coef: F.Pre,
        bias: Tensor | None = None,
        *,
        dropout: float = 0.0,
        dropout_step: Tensor | None = None,
        token_base: int = 0,
        source: F.Source | None = None,
    ) -> Tensor:
        """The streams after the sub-layer, from its output f and the bias of its last linear, if that was left out."""
        return F.post(
            x,
            f,
            coef.post,
            coef.res,
            bias,
            numerics=self.numerics,
            dropout=dropout,
            training=self.training,
            dropout_step=dropout_step,
            token_base=token_base,
            source=source,
        )

    def follow(
        self,
        before: HyperConnection,
        x: Tensor,
        f: Tensor,
        coef: F.Pre,
        bias: Tensor | None = None,
        pre_in: Tensor | None = None,
        *,
        dropout: float = 0.0,
        dropout_step: Tensor | None = None,
        token_base: int = 0,
        source: F.Source | None = None,
        keep: bool = True,
    ) -> tuple[F.Pre, Tensor]:
        """`merge` of the site before this one and `forward` of this one in one call: a `Pre`, and the streams that it
        was made of. Both sites have the same numerics."""
        self._check(x)
        y, *results = F.boundary(
            x,
            f,
            coef.post,
            coef.res,
            self.phi,
            self.alpha,
            self.beta,
            bias,
            self.norm_weight,
            self.sub_weight,
            pre_in,
            numerics=self.numerics,
            sub_norm=self.sub_norm,
            sub_eps=self.sub_eps,
            dropout=dropout,
            training=before.training,
            dropout_step=dropout_step,
            token_base=token_base,
            precision=self.precision,
            main_grad=self.main_grad,
            source=source,
            keep=keep,
        )
        return F.Pre(*results), y


class HyperConnectionLayer(nn.Module):
    """A sub-layer (attention, MLP, anything from [..., C] to [..., C]) in n residual streams: x -> x.

    `norm=True` puts an RMSNorm between the aggregate and the sub-layer, inside the same operator; a sub-layer that
    normalises its own input takes norm=False. Of a sub-layer that returns more than its output, `output` is the place
    of that in the tuple. Other arguments as for HyperConnection."""

    def __init__(
        self,
        sublayer: nn.Module,
        channels: int,
        streams: int = 4,
        *,
        norm: bool = True,
        dropout: float = 0.0,
        output: int | None = None,
        **options,
    ):
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"HyperConnectionLayer: dropout: expected a number in [0, 1), got {dropout}")
        self.connection = HyperConnection(channels, streams, sub_norm=norm, **options)
        self.sublayer = sublayer
        self.dropout, self.output = dropout, output
        self.takes = _keywords_of(sublayer)  # of what a stack is called with, this goes to the sub-layer

    def forward(
        self, x: Tensor, *args, pre_in: Tensor | None = None, recompute_group: Group | None = None, **kwargs
    ) -> Tensor | tuple[Tensor, Tensor]:
        """With pre_in, the coefficients that the layer before predicted, the result is (streams, this layer's own).
        recompute_group is for the stack that a layer is part of; other arguments go to the sub-layer."""
        coef = self.connection(x, pre_in)
        y = Unmerged.run(self, x, coef, pre_in, args, kwargs, recompute_group).merge()
        return y if pre_in is None else (y, coef.pre)


class Expand(nn.Module):
    """Entry of a stack: [..., C] to [..., n, C], a copy for each stream."""

    def __init__(self, streams: int = 4):
        super().__init__()
        self.streams = streams

    def forward(self, u: Tensor) -> Tensor:
        return F.expand(u, self.streams)


class Contract(nn.Module):
    """Exit of a stack: the mean or the sum of the streams."""

    def __init__(self, kind: str = "mean"):
        super().__init__()
        choice("mhc_contract: kind", kind, F.CONTRACTIONS)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return F.contract(x, self.kind)


class Head(nn.Module):
    """Exit of a stack: learned contraction. Parameters phi [n, n*C], alpha [1], beta [n]."""

    def __init__(
        self,
        channels: int,
        streams: int = 4,
        *,
        rms_eps: float = 1e-6,
        rms_eps_kind: str = "inside",
        pre_eps: float = 1e-6,
        precision: str = "full",
        main_grad: bool = False,
        device=None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.options = {
            "rms_eps": rms_eps,
            "rms_eps_kind": rms_eps_kind,
            "pre_eps": pre_eps,
            "precision": precision,
            "main_grad": main_grad,
        }
        make = {"device": device, "dtype": dtype}
        self.phi = nn.Parameter(torch.empty(streams, streams * channels, **make))
        self.alpha = nn.Parameter(torch.empty(1, **make))
        self.beta = nn.Parameter(torch.empty(streams, **make))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.phi)
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:
        return F.head(x, self.phi, self.alpha, self.beta, **self.options)
