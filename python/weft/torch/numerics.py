# SPDX-License-Identifier: Apache-2.0
"""What differs between public implementations of mHC and changes the function computed."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C

RMS_EPS_KINDS = ("inside", "outside")
SINKHORN_RULES = ("log", "softmax_eps", "clamp", "add", "threshold")
APPLY_ORDERS = ("in_out", "out_in")


def choice(what: str, value: str, names: tuple[str, ...]) -> int:
    """The place of a word among those that are allowed; `what` begins the sentence of an error."""
    if value not in names:
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {value!r}")
    return names.index(value)


class Numerics(NamedTuple):
    """Start from a preset and change fields with `_replace`:

    >>> Numerics.preset("deepseek_v4")._replace(sinkhorn_iters=10)
    """

    rms_eps: float
    rms_eps_kind: str  # "inside": 1/sqrt(ms + eps); "outside": 1/(sqrt(ms) + eps)
    pre_eps: float  # pre = sigmoid + pre_eps
    post_mult: float  # post = post_mult * sigmoid + post_eps
    sinkhorn: str  # "log", "softmax_eps", "clamp", "add" or "threshold"
    sinkhorn_eps: float
    sinkhorn_iters: int
    apply: str  # y[o] += res[i, o] x[i] ("in_out") or res[o, i] x[i] ("out_in")
    post_eps: float = 0.0

    @classmethod
    def preset(cls, name: str) -> Numerics:
        """The numerics of one of `weft.presets()`."""
        rms_eps, kind, pre_eps, post_mult, rule, eps, iters, apply, post_eps = _C.preset(name)
        return cls(
            rms_eps,
            RMS_EPS_KINDS[kind],
            pre_eps,
            post_mult,
            SINKHORN_RULES[rule],
            eps,
            iters,
            APPLY_ORDERS[apply],
            post_eps,
        )

    def packed(self) -> list[float]:
        """As the registered operators take it: nine numbers in the order of the fields."""
        if not float(self.sinkhorn_iters).is_integer():
            raise ValueError(f"numerics: sinkhorn_iters: expected a whole number, got {self.sinkhorn_iters}")
        return [
            float(self.rms_eps),
            float(choice("numerics: rms_eps_kind", self.rms_eps_kind, RMS_EPS_KINDS)),
            float(self.pre_eps),
            float(self.post_mult),
            float(choice("numerics: sinkhorn", self.sinkhorn, SINKHORN_RULES)),
            float(self.sinkhorn_eps),
            float(self.sinkhorn_iters),
            float(choice("numerics: apply", self.apply, APPLY_ORDERS)),
            float(self.post_eps),
        ]


_packed_presets: dict[str, list[float]] = {name: Numerics.preset(name).packed() for name in _C.presets()}


def pack(numerics: Numerics | str) -> list[float]:
    """Numerics or the name of a preset, as the registered operators take it."""
    if isinstance(numerics, str):
        if numerics not in _packed_presets:
            raise ValueError(f"numerics: expected one of {', '.join(_packed_presets)}, got {numerics!r}")
        return _packed_presets[numerics]
    return numerics.packed()
