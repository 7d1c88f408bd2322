# SPDX-License-Identifier: Apache-2.0
"""Calls of the functions of weft.torch.gdn with random tensors, beside the same call of gdn_oracle.py. They are part of
cases.CASES: what a case makes of a Maker's sizes is in `Sizes`."""

import gdn_oracle as oracle
import torch
import weft.torch as wt
from torch import Tensor

NORM_EPS = 1e-3


class Sizes:
    """Sizes of a call from those of a Maker: n value heads, for one or two key heads, key dim c and value dim c + 1;
    leading dimensions as [B, S], one of them as [T]; `swapped` memory is (S, B, columns)."""

    def __init__(self, m):
        self.m = m
        self.key_heads = 2 if m.n % 2 == 0 and m.n > 2 else 1
        self.heads = wt.GdnHeads(self.key_heads, m.n, m.c, m.c + 1)
        self.width = 1 + m.c % 4 if m.flat else 4 - m.n % 3
        self.lead = m.lead if len(m.lead) == 2 else (1, m.lead[0] if m.lead else 1)
        self.short = len(m.lead) == 1  # [T, ...] instead of [1, T, ...]

    @property
    def tokens(self) -> int:
        return self.lead[0] * self.lead[1]

    def _lay(self, t: Tensor) -> Tensor:
        if self.m.swapped:
            t = t.transpose(0, 1).contiguous().transpose(0, 1)
        return t.squeeze(0) if self.short else t

    def acts(self, *shape, spread=1.0) -> Tensor:
        return self._lay(self.m.put(spread * torch.randn(*self.lead, *shape), self.m.dtype))

    def packed(self, *shape) -> Tensor:
        """The same tokens as one row [T, ...]."""
        return self.m.put(torch.randn(self.tokens, *shape), self.m.dtype)

    def offsets(self, dtype=torch.int32) -> Tensor:
        """An empty sequence first, one token, an empty one in between, the rest; the last token belongs to nobody."""
        end = max(0, self.tokens - 1)
        cuts = [0, 0, min(1, end), min(1, end), min(3, end), end]
        return torch.tensor(cuts, dtype=dtype, device=self.m.device)

    def parameters(self) -> dict:
        m, taps = self.m, (self.heads.channels, 1, self.width) if self.m.flat else (self.heads.channels, self.width)
        return {
            "weight": m.param(*taps, spread=0.5),
            "a_log": m.param(m.n, center=0.5, spread=0.5),
            "dt_bias": m.param(m.n) if m.optional else None,
            "bias": m.param(self.heads.channels, spread=0.3) if m.optional else None,
        }

    def states(self, count: int, slots: int) -> Tensor | None:
        if not self.m.optional:
            return None
        return self.m.put(torch.randn(count, self.heads.channels, slots), self.m.dtype)


def _rows(t: Tensor) -> Tensor:
    return t if t.dim() == 3 else t.unsqueeze(0)


def _like(results, short: bool):
    return tuple(t.squeeze(0) if short and k < 6 else t for k, t in enumerate(results))


def _pre(s: Sizes, **settings):
    """One row of everything, with a state that goes in and comes out."""
    slots = max(1, s.width - 1) + 1
    tensors = {"proj": s.acts(s.heads.columns), **s.parameters(), "state": s.states(s.lead[0], slots)}
    options = settings.pop("options", wt.GdnOptions())
    history = None if s.m.optional else slots

    def function(**t):
        return wt.gdn_pre(**t, heads=s.heads, options=options, final_state=True, history=history, **settings)

    def expression(proj, **t):
        sections = oracle.split(_rows(proj), s.heads)
        plain = {k: v for k, v in settings.items() if k == "repeat"}
        results = oracle.gdn_pre(*sections, **t, options=options, final_state=True, history=history, **plain)
        return _like(results, s.short)

    return function, expression, tensors


def gdn_pre(m):
    return _pre(Sizes(m))


def gdn_pre_options(m):
    """Everything that is not the default."""
    options = wt.GdnOptions(
        activation="linear", l2_eps=0.1, q_scale=0.5, beta_scale=2.0, head_map="tiled", g_chunk=2, g_log2=True
    )
    full = torch.float64 if m.dtype == torch.float64 else torch.float32
    return _pre(Sizes(m), options=options, beta_dtype=full, gate="view")


def gdn_pre_grouped(m):
    """Query and key with their own heads and lengths."""
    return _pre(Sizes(m), options=wt.GdnOptions(l2norm=False), repeat=False)


def gdn_pre_packed(m):
    """Several sequences in one row of tokens, and six tensors for the six sections."""
    s = Sizes(m)
    cu = s.offsets()
    unit, value = (s.heads.key_heads, s.heads.key_dim), (s.heads.value_heads, s.heads.value_dim)
    parts = {"q": unit, "k": unit, "v": value, "z": value, "b": value[:1], "a": value[:1]}
    slots = max(1, s.width - 1)
    tensors = {
        **{k: s.packed(*shape) for k, shape in parts.items()},
        **s.parameters(),
        "state": s.states(cu.shape[0] - 1, slots),
    }

    def function(q, k, v, z, b, a, **t):
        return wt.gdn_pre(wt.GdnSections(q, k, v, z, b, a), **t, cu_seqlens=cu, final_state=True, history=slots)

    def expression(q, k, v, z, b, a, **t):
        rows = [x.unsqueeze(0) for x in (q, k, v, z, b, a)]
        results = oracle.gdn_pre(*rows, **t, cu_seqlens=cu, options=wt.GdnOptions(), final_state=True, history=slots)
        return _like(results, True)

    return function, expression, tensors


def _rule(s: Sizes, heads: int, cu, head_map: str):
    m = s.m
    put = s.packed if cu is not None else s.acts
    count = cu.shape[0] - 1 if cu is not None else s.lead[0]
    lead = (s.tokens,) if cu is not None else s.lead[1:] if s.short else s.lead
    wide = torch.float64 if m.dtype == torch.float64 else torch.float32
    key_dim, value_dim = min(m.c, 8), min(m.c, 8) + 1
    state = m.put(0.3 * torch.randn(count, m.n, key_dim, value_dim), wide) if m.optional else None
    tensors = {
        "query": put(heads, key_dim),
        "key": (0.5 * put(heads, key_dim)).to(m.dtype),
        "value": put(m.n, value_dim),
        "beta": m.put(torch.rand(*lead, m.n) * 0.8 + 0.1, wide),
        "g": m.put(-torch.rand(*lead, m.n), wide),
        "state": state,
    }
    short = cu is not None or s.short

    def function(**t):
        return wt.gdn_rule(**t, cu_seqlens=cu, head_map=head_map, final_state=True)

    def expression(query, key, value, beta, g, state):
        rows = [x.unsqueeze(0) if short else x for x in (query, key, value, beta, g)]
        o, final = oracle.gdn_rule(*rows, state, cu_seqlens=cu, head_map=head_map)
        return o.squeeze(0) if short else o, final

    return function, expression, tensors


def gdn_rule(m):
    s = Sizes(m)
    return _rule(s, s.key_heads, None, "tiled")


def gdn_rule_packed(m):
    s = Sizes(m)
    return _rule(s, m.n, s.offsets(torch.int64), "interleaved")


def _norm(m, gate: str):
    """z between other columns of its rows. Of a view without elements empty_like has other strides than its fake."""
    s = Sizes(m)
    skip, columns = (1, m.c + 3) if s.tokens else (0, m.c)
    tensors = {"o": s.acts(m.n, m.c), "z": s.acts(m.n, columns), "weight": m.gain(m.c)}

    def function(o, z, weight):
        return wt.gdn_norm(o, z[..., skip : m.c + skip], weight, NORM_EPS, gate=gate)

    def expression(o, z, weight):
        return oracle.gdn_norm(o, z[..., skip : m.c + skip], weight, NORM_EPS, gate)

    return function, expression, tensors


def gdn_norm(m):
    return _norm(m, "silu")


def gdn_norm_sigmoid(m):
    return _norm(m, "sigmoid")


CASES = {
    f.__name__: f
    for f in (
        gdn_pre,
        gdn_pre_options,
        gdn_pre_grouped,
        gdn_pre_packed,
        gdn_rule,
        gdn_rule_packed,
        gdn_norm,
        gdn_norm_sigmoid,
    )
}


def rule_step(m):
    """A call of gdn_rule_step with all of its results."""
    s = Sizes(m)
    lead, heads = s.lead, s.heads
    unit, value = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    shapes = (unit, unit, value, value[:1], value[:1])
    parts = [m.put(torch.randn(*lead, *shape), m.dtype) for shape in shapes]
    parts[4] = -parts[4].abs().to(torch.float64 if m.dtype == torch.float64 else torch.float32)
    state = m.put(torch.randn(lead[0] + 2, heads.value_heads, heads.key_dim, heads.value_dim), m.dtype)
    index = torch.tensor([lead[0] + 1, -1, *range(lead[0])][: lead[0]], device=m.device) if m.optional else None
    return lambda: wt.gdn_rule_step(*parts, state=state, state_index=index, token_states=m.optional)


def step(m):
    """A call of gdn_pre_step, which has no gradient: a function of nothing."""
    s = Sizes(m)
    batch = s.lead[0]
    tensors = {"proj": s.acts(s.heads.columns), **s.parameters()}
    state = m.put(torch.randn(batch + 2, s.heads.channels, max(1, s.width - 1)), m.dtype)
    index = torch.tensor([batch + 1, -1, *range(batch)][:batch], device=m.device) if m.optional else None
    return lambda: wt.gdn_pre_step(**tensors, state=state, state_index=index, heads=s.heads)
