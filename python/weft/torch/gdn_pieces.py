# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet where each sequence is divided among the ranks of a group, in the order of ranks (context parallel).

Two things go from rank to rank. The convolution's tail, the last W - 1 rows of q, k and v, goes to the rank after before
anything is computed, so the front runs on all ranks at once. The rule's state goes when a rank has computed its piece:
the ranks compute the rule one after another. Gradients go back the same way, the tail's when the front's backward has
run.

A hop is a node of autograd's graph. Two of them make one: `_Received`, whose backward sends a gradient to the rank
before, and `_Passed`, through which the results of an operator go, and whose backward has the gradient of the operator's
final state come from the rank after. All ranks build the same graph, so messages meet in the order in which they are
sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import gdn
from .gdn import DEFAULTS, GdnHeads, GdnOptions, GdnPre, GdnSections
from .register import wide


class _Received(torch.autograd.Function):
    """What came from the rank before. `anchor` has the node run in backward."""

    @staticmethod
    def forward(ctx, pieces, received, anchor):
        ctx.pieces = pieces
        return received.view_as(received)

    @staticmethod
    def backward(ctx, grad):
        ctx.pieces._exchange(back=grad)
        torch.autograd.Variable._execution_engine.queue_callback(ctx.pieces._drain)
        return None, None, None


class _Passed(torch.autograd.Function):
    """Results of an operator, as they are; the gradient of what it sent to the rank after comes from there."""

    @staticmethod
    def forward(ctx, pieces, sent, *results):
        ctx.pieces, ctx.like = pieces, (sent.shape, sent.dtype, sent.device)
        return tuple(t.view_as(t) for t in results)

    @staticmethod
    def backward(ctx, *grads):
        shape, dtype, device = ctx.like
        _, grad = ctx.pieces._exchange(from_after=torch.empty(shape, dtype=dtype, device=device))
        return None, grad, *grads


class GdnPieces:
    """How sequences are divided among the ranks of `group`: this rank has `tokens` tokens of each of `batch` sequences,
    after those of the ranks before it. With cu_seqlens, the offsets of the whole, the tokens of all ranks side by side
    are packed sequences, and a piece may begin and end in the middle of one.

    All ranks make it together; what does not fit together is a ValueError on all of them. It serves all layers and
    steps with these sizes. `start` is the number of the piece's first token, `cu_seqlens` the offsets of the sequences
    in this piece, `joins_before` and `joins_after` whether one of them continues there."""

    def __init__(
        self,
        tokens: int,
        *,
        batch: int = 1,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("GdnPieces: group: expected an initialised process group, got none")
        self.group, self.tokens, self.batch = group, tokens, batch
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        offsets = None if cu_seqlens is None else [int(x) for x in torch.as_tensor(cu_seqlens).tolist()]
        pieces = self._gather((tokens, batch, offsets))
        self._same("batch", [b for _, b, _ in pieces])
        self._same("cu_seqlens", [o for _, _, o in pieces])
        sizes = [t for t, _, _ in pieces]
        for rank, size in enumerate(sizes):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"GdnPieces: tokens: expected at least 1 on every rank, got {size!r} (rank {rank})")
        if not isinstance(batch, int) or batch < 1 or (batch != 1 and offsets is not None):
            expected = "1 with cu_seqlens" if offsets is not None else "at least 1"
            raise ValueError(f"GdnPieces: batch: expected {expected}, got {batch!r}")
        self._sizes, self.start = sizes, sum(sizes[: self.rank])
        self._agreed: set[Any] = set()
        self._under_way: tuple[Sequence[Any], Sequence[Any]] = ((), ())
        end, total = self.start + tokens, sum(sizes)
        if offsets is None:
            self.joins_before, self.joins_after = self.rank > 0, self.rank < self.ranks - 1
            self._begins, self._offsets = [0], None
            return
        if len(offsets) < 2 or offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)) or offsets[-1] > total:
            raise ValueError(
                f"GdnPieces: cu_seqlens: expected offsets from 0 that do not decrease, to at most {total}, the tokens of "
                f"all ranks, got {offsets}"
            )
        self.joins_before = any(a < self.start < b for a, b in pairwise(offsets))
        self.joins_after = any(a < end < b for a, b in pairwise(offsets))
        inside = [
            (max(a, self.start), min(b, end)) for a, b in pairwise(offsets) if a < end and b > self.start and a < b
        ]
        inside = inside or [(self.start, self.start)]
        self._begins = [a for a, b in pairwise(offsets) if a < b]
        self._offsets = [a - self.start for a, _ in inside] + [inside[-1][1] - self.start]

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self._offsets is None else torch.tensor(self._offsets, dtype=torch.int32)

    def pre(
        self,
        proj: Tensor | GdnSections,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        heads: GdnHeads | tuple[int, int, int, int] | None = None,
        options: GdnOptions = DEFAULTS,
        repeat: bool = True,
        gate: str = "copy",
        beta_dtype: torch.dtype | None = None,
        main_grad: bool = False,
    ) -> GdnPre:
        """`gdn_pre` of this rank's piece. Every rank has the gradient of the parameters from its own tokens."""
        parts, _ = gdn._parts("gdn_pre", proj, heads)
        heads = gdn._heads("gdn_pre", parts, heads)
        slots = weight.shape[-1] - 1
        self._check_chunks(options.g_chunk)
        settings = (tuple(heads), slots + 1, *options, parts[0].dtype)
        self._check("gdn_pre: proj", parts[0].shape[:2], settings)
        call = {"heads": heads, "options": options, "repeat": repeat, "gate": gate, "beta_dtype": beta_dtype}
        inputs = (weight, a_log, dt_bias, bias)
        hops = slots > 0 and (self.joins_before or self.joins_after)
        state = self._tails(parts, heads, slots, inputs) if hops else None
        out = gdn.gdn_pre(
            proj,
            *inputs,
            **call,
            cu_seqlens=self._offsets_beside(parts[0]),
            state=state,
            final_state=hops and self.joins_after,
            history=slots,
            main_grad=main_grad,
        )
        if hops and self.joins_after:
            carriers = (out.query, out.key, out.value, out.beta, out.g)
            query, key, value, beta, g = self._passed(out.final_state, carriers)
            out = GdnPre(query, key, value, out.gate, beta, g)
        return out

    def rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        g: Tensor,
        *,
        scale: float | None = None,
        head_map: str = "interleaved",
        final_state: bool = False,
        waves: int = 1,
    ) -> tuple[Tensor, Tensor | None]:
        """`gdn_rule` of this rank's piece, after the ranks before it. With final_state=True the last rank, or with
        cu_seqlens each rank for the sequences in its piece, has the states after the last of its tokens; None on other
        ranks. The heads are computed in so many waves, one after another: the rank after begins with the first while
        this one continues with the second. On a GPU of compute capability 9.0 a wave of fewer than 2048 value channels
        takes other kernels than more of them, whose results differ by rounding."""
        lead = query.shape[:-2] if query.dim() == 4 else (1, *query.shape[:-2])
        heads, unlike = query.shape[-2], query.shape[-2] != value.shape[-2]
        self._check("gdn_rule: query", lead, (*value.shape[-2:], *query.shape[-2:], value.dtype, head_map, waves))
        if waves < 1 or heads % waves or (waves > 1 and unlike and head_map == "tiled"):
            expected = (
                "1 with fewer, tiled key heads" if waves > 0 and heads % waves == 0 else f"a divisor of {heads} heads"
            )
            raise ValueError(f"gdn_rule: waves: expected {expected}, got {waves}")
        wanted = final_state and (self._offsets is not None or not self.joins_after)
        options = {"scale": scale, "head_map": head_map, "final_state": wanted or self.joins_after}
        options["cu_seqlens"] = self._offsets_beside(value)
        if waves == 1:
            o, final = self._wave((query, key, value, beta, g), options)
        else:
            parts = (
                t.split(t.shape[d] // waves, d) for t, d in ((query, -2), (key, -2), (value, -2), (beta, -1), (g, -1))
            )
            os, finals = zip(*(self._wave(part, options) for part in zip(*parts, strict=True)), strict=True)
            o, final = torch.cat(os, -2), torch.cat(finals, 1) if wanted else None
        self._drain()
        return o, final if wanted else None

    def _wave(self, inputs: tuple[Tensor, ...], options: dict) -> tuple[Tensor, Tensor | None]:
        """The rule for some heads: state from the rank before, state to the rank after."""
        query, _, value, *_ = inputs
        state = None
        if self.joins_before:
            shape = (self.batch, value.shape[-2], query.shape[-1], value.shape[-1])
            received, _ = self._exchange(from_before=value.new_empty(shape, dtype=wide(value)))
            state = self._as_state(received, inputs)
        o, final = gdn.gdn_rule(*inputs, **options, state=state)
        if self.joins_after:
            self._exchange(forth=final[-self.batch :])
            (o,) = self._passed(final, (o,))
        return o, final

    # ---- hops ----------------------------------------------------------------------------------------------------------

    def _tails(self, parts, heads: GdnHeads, slots: int, inputs) -> Tensor:
        """Sends the last rows of this piece to the rank after, and returns the state before this one."""
        with torch.no_grad():
            own = self.tokens if self._offsets is None else self._offsets[-1] - self._offsets[-2]
            full = wide(parts[0])
            rows = _channels(parts, heads, min(own, slots)).to(full) if self.joins_after else None
            like = parts[0].new_empty((self.batch, heads.channels, slots), dtype=full) if self.joins_before else None
            alone = own >= slots or not self.joins_before or (self._offsets is not None and len(self._offsets) > 2)
            if alone:
                tail = None
                if rows is not None:
                    tail = torch.nn.functional.pad(rows, (slots - rows.shape[-1], 0))
                received, _ = self._exchange(forth=tail, from_before=like)
            else:  # a piece shorter than the tail: that of the rank before slides on
                received, _ = self._exchange(from_before=like)
                if rows is not None:
                    self._exchange(forth=torch.cat([received[..., own:], rows], -1))
            self._drain()
        if received is None:  # zeros, so that gradients between ranks are of the same dtype everywhere
            sequences = self.batch if self._offsets is None else len(self._offsets) - 1
            return parts[0].new_zeros((sequences, heads.channels, slots), dtype=full)
        return self._as_state(received, (*parts, *inputs))

    def _as_state(self, received: Tensor, inputs) -> Tensor:
        """The states before the sequences of this piece: of the first one, or of all of a batch, what came."""
        anchor = next((t for t in inputs if t is not None and t.requires_grad), None)
        if torch.is_grad_enabled() and anchor is not None:
            received = _Received.apply(self, received, anchor)
        others = 0 if self._offsets is None else len(self._offsets) - 2
        return torch.cat([received, received.new_zeros((others, *received.shape[1:]))]) if others else received

    def _passed(self, final: Tensor, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sent = final[-self.batch :]
        return _Passed.apply(self, sent, *results) if sent.requires_grad else results

    def _exchange(
        self,
        *,
        forth: Tensor | None = None,
        back: Tensor | None = None,
        from_before: Tensor | None = None,
        from_after: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends to the rank after and to the one before, and fills memory with what they send. What is only sent is under
        way afterwards, one message at a time, and its memory kept; work may continue."""
        calls = [
            dist.P2POp(call, t.contiguous() if call is dist.isend else t, self._global(step), self.group)
            for call, t, step in (
                (dist.isend, forth, 1),
                (dist.isend, back, -1),
                (dist.irecv, from_before, -1),
                (dist.irecv, from_after, 1),
            )
            if t is not None
        ]
        works = dist.batch_isend_irecv(calls) if calls else ()
        if from_before is not None or from_after is not None:
            for work in works:
                work.wait()
        else:
            self._drain()
            self._under_way = (works, calls)
        return from_before, from_after

    def _drain(self) -> None:
        """Waits until the message that is under way has been taken."""
        works, _ = self._under_way
        self._under_way = ((), ())
        for work in works:
            work.wait()

    def _global(self, step: int) -> int:
        rank = self.rank + step
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    # ---- whether pieces fit together -----------------------------------------------------------------------------------

    def _gather(self, mine: Any) -> list[Any]:
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, mine, self.group)
        return everybody

    def _same(self, what: str, values: list[Any]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"GdnPieces: {what}: expected the same on all ranks, got {values[0]} (rank 0), {value} (rank {rank})"
                )

    def _check(self, what: str, lead, settings: tuple) -> None:
        """That all ranks call alike, when they do so for the first time."""
        mine = (what, tuple(lead), settings)
        if mine in self._agreed:
            return
        calls = self._gather(mine)
        self._same("call", [call for call, _, _ in calls])
        for rank, (_, shape, _) in enumerate(calls):
            expected = (self.batch, self._sizes[rank])
            if shape != expected:
                raise ValueError(f"{what}: expected [B, S] {list(expected)} on rank {rank}, got {list(shape)}")
        self._same(f"{what}: sizes, dtype and options", [own for _, _, own in calls])
        self._agreed.add(mine)

    def _check_chunks(self, chunk: int) -> None:
        cuts = [sum(self._sizes[:rank]) for rank in range(1, self.ranks)] if chunk else []
        for rank, cut in enumerate(cuts, 1):
            begin = max(a for a in self._begins if a <= cut) if self._begins else cut
            if (cut - begin) % chunk:
                raise ValueError(
                    f"gdn_pre: options: g_chunk: expected pieces that begin with a chunk of {chunk}, got {cut - begin} "
                    f"tokens of a sequence in front of rank {rank}"
                )

    def _offsets_beside(self, like: Tensor) -> Tensor | None:
        return None if self._offsets is None else torch.tensor(self._offsets, dtype=torch.int32, device=like.device)


def _channels(parts, heads: GdnHeads, count: int) -> Tensor:
    """The last `count` rows of what the convolution reads, q | k | v, as [B, C, count]."""
    last = [t[:, t.shape[1] - count :].flatten(2) for t in parts[:3] if t is not None]
    return torch.cat(last, -1)[..., : heads.channels].transpose(1, 2)
