# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over ranks, each with a piece of every sequence, against one process.

Results and final states have the same bits, and so have the gradients that come through the rule alone. What differs is
where sums are cut. The gradient of a projection row next to a cut is a sum of W terms plus what comes from the rank
after, which is a sum too: each addition rounds by 2^-24 of what it has so far. The gradient of a parameter is a sum over
all tokens in one process, and a sum of the ranks' sums here: T additions, in fp32. Both are then rounded to the dtype
on every rank, and once more for the sum."""

import functools
from collections import defaultdict, deque
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import weft.torch as wt
from compare import same
from gdn_support import HEADS, front, rows
from ranks_support import spawn
from weft.torch import gdn_pieces

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)
U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}

# Tokens on each rank. The convolution reads three rows back: pieces of one and two tokens hand on what they were given.
DIVISIONS = {2: ((7, 9), (1, 15)), 4: ((5, 1, 2, 8), (4, 4, 4, 4))}
# Offsets of packed sequences: one over all ranks, cuts between ranks, empty ones, tokens behind the last offset.
PACKED = ((0, 16), (0, 3, 3, 7, 12, 16), (0, 1, 6, 14), (0, 0, 5), (0, 16, 16))


class Case(NamedTuple):
    sizes: tuple[int, ...]
    batch: int = 1
    offsets: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    way: str = (
        "rows"  # "sections": a projection in parts; "short": [T, ...]; "alone": no gradients; "waves": a head at a time
    )
    pairs: bool = False  # groups of two ranks, which compute the same
    heads: wt.GdnHeads = HEADS

    @property
    def tokens(self) -> int:  # of the whole, per sequence
        return sum(self.sizes)


def cases_of(world: int) -> list[Case]:
    lengths = [(2, None), *((1, offsets) for offsets in PACKED)]
    cases = [Case(sizes, *length, dtype) for sizes in DIVISIONS[world] for length in lengths for dtype in U]
    some = DIVISIONS[world][0]
    cases += [Case(some, 2, None, way="sections"), Case(some, 1, PACKED[1], way="sections")]
    cases += [
        Case(some, 1, PACKED[1], way="short"),
        Case(some, 2, None, way="alone"),
        Case(some, 1, PACKED[1], way="alone"),
    ]
    cases += [Case(some, 2, None, way="waves"), Case(some, 1, PACKED[1], way="waves")]
    return cases + [Case((7, 9), 2, None, pairs=True)] * (world == 4)


def compute(case: Case, pre, rule, start: int, end: int, device="cpu") -> dict:
    """Everything of front and rule for some tokens. The gradient that goes into them is a function of the token's number."""
    module = front(device, case.heads, dtype=case.dtype, repeat=case.way != "sections")
    torch.manual_seed(1234)
    leaf = rows(case.batch, case.tokens, device=device, dtype=case.dtype, heads=case.heads)[:, start:end]
    leaf = leaf.clone().requires_grad_(case.way != "alone")
    module.requires_grad_(case.way != "alone")
    proj, options = leaf, {}
    if case.way == "sections":
        qkv, z, b, a = leaf.split([HEADS.channels, 64, 4, 4], -1)
        proj, options = wt.GdnSections(qkv, None, None, z, b, a), {"repeat": False, "gate": "view"}
    elif case.way == "short":
        proj = leaf.squeeze(0)
    out = pre(proj, module.conv_weight, module.a_log, module.dt_bias, module.conv_bias, heads=case.heads, **options)
    between = (out.query, out.key, out.value, out.beta, out.g)
    o, final = rule(*between)
    result = {"tokens": [*between, out.gate, o], "final": final}
    if case.way != "alone":
        for t in between:
            t.retain_grad()
        shape = (case.batch, case.tokens, case.heads.value_heads, case.heads.value_dim)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))[:, start:end]
        result |= {"module": module, "backward": functools.partial(o.backward, whole.reshape(o.shape).to(o))}
        result |= {"leaves": [leaf, *between]}
    return result


def detached(result: dict) -> dict:
    """What is compared, behind the backward."""
    if "backward" in result:
        result.pop("backward")()
        d_proj, *gradients = (t.grad for t in result.pop("leaves"))
        result |= {"gradients": gradients, "d_proj": d_proj}
    module = result.pop("module", None)
    found = {k: [t.detach() for t in v] if isinstance(v, list) else v for k, v in result.items()}
    found["final"] = None if result["final"] is None else result["final"].detach()
    return found | {"parameters": parameter_gradients(module) if module else {}}


def parameter_gradients(module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in module.named_parameters()}


def pieces_of(rank: int, world: int) -> list[dict]:
    results = []
    pairs = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0] if world == 4 else None
    for case in cases_of(world):
        group, own = (pairs, rank % 2) if case.pairs else (None, rank)
        start = sum(case.sizes[:own])
        pieces = wt.GdnPieces(case.sizes[own], batch=case.batch, cu_seqlens=case.offsets, group=group)
        assert pieces.start == start
        waves = {"waves": 4, "sections": 2}.get(case.way, 1)  # of two key heads with sections
        rule = functools.partial(pieces.rule, final_state=True, waves=waves)
        got = compute(case, pieces.pre, rule, start, start + case.sizes[own])
        module = got.get("module")
        found = detached(got)
        if module:
            wt.sum_gradients(module.parameters(), group)
            found["parameters"] = parameter_gradients(module)
        results.append(found)
    return results


@pytest.mark.parametrize("world", DIVISIONS)
def test_pieces_are_the_whole(world, tmp_path):
    ranks = spawn(pieces_of, world, tmp_path)
    for k, case in enumerate(cases_of(world)):
        cu = None if case.offsets is None else torch.tensor(case.offsets)
        pre = functools.partial(wt.gdn_pre, cu_seqlens=cu)
        rule = functools.partial(wt.gdn_rule, cu_seqlens=cu, final_state=True)
        want = detached(compute(case, pre, rule, 0, 16))
        got = [r[k] for r in ranks]
        for part in (got[:2], got[2:]) if case.pairs else (got,):
            compare(case, part, want, world)


def compare(case: Case, got: list[dict], want: dict, world: int) -> None:
    assert not case.way == "alone" or "gradients" not in want
    tokens = 0 if case.way == "short" else 1
    for what in ("tokens", "gradients"):
        for k, whole in enumerate(want.get(what, ())):
            same(torch.cat([g[what][k] for g in got], tokens), whole, f"{case} {what} {k}")
    if case.offsets is None:
        same(got[-1]["final"], want["final"], f"{case} final state")
        assert all(g["final"] is None for g in got[:-1])
    else:
        finished(case, got, want["final"])
    if case.way == "alone":
        return
    # Up to four products and the tail's gradient, rounded each, twice; then to the dtype.
    d_proj = torch.cat([g["d_proj"] for g in got], 1)
    close(d_proj, want["d_proj"], 10 * 2**-24 + 2 * U[case.dtype], f"{case} d_proj")
    for name, gradient in want["parameters"].items():
        assert gradient.abs().max() > 0, name
        units = 2 * case.tokens * 2**-24 + 2 * world * U[gradient.dtype]
        close(got[0]["parameters"][name], gradient, units, f"{case} {name}")
        same(got[-1]["parameters"][name], got[0]["parameters"][name], f"{case} {name} on the last rank")


def finished(case: Case, got: list[dict], want: torch.Tensor) -> None:
    """Every packed sequence's final state is that of the rank where it ends."""
    start, seen = 0, 0
    for size, result in zip(case.sizes, got, strict=True):
        end = start + size
        inside = [n for n, (a, b) in enumerate(pairwise(case.offsets)) if a < b and a < end and b > start]
        assert result["final"].shape[0] == max(1, len(inside))
        for k, n in enumerate(inside):
            if case.offsets[n + 1] <= end:
                same(result["final"][k], want[n], f"{case} final state {n}")
                seen += 1
        start = end
    assert seen == sum(a < b for a, b in pairwise(case.offsets))


def close(got, want, units: float, what: str) -> None:
    difference = (got.double() - want.double()).abs().max()
    assert difference <= units * want.double().abs().max(), f"{what}: off by {difference} of {want.abs().max()}"


# ---- one process, one piece after the other ----------------------------------------------------------------------------


class Post:
    """Stands for torch.distributed where the ranks are one process that computes a piece after the other: what is sent waits until
    its turn comes. `rank` says whose turn it is."""

    isend, irecv = "isend", "irecv"
    is_available = is_initialized = staticmethod(lambda: True)

    class P2POp(NamedTuple):
        op: str
        tensor: torch.Tensor
        peer: int
        group: None

    def __init__(self, sizes: tuple[int, ...]):
        self.sizes, self.rank, self.letters = sizes, 0, defaultdict(deque)

    def get_rank(self, group):
        return self.rank

    def get_world_size(self, group):
        return len(self.sizes)

    def all_gather_object(self, everybody, mine, group):
        """Ranks differ in nothing but their tokens: (tokens, batch, offsets), or (what, (batch, tokens), settings)."""
        for rank, size in enumerate(self.sizes):
            first, second, third = mine
            everybody[rank] = (size, second, third) if isinstance(first, int) else (first, (second[0], size), third)

    def batch_isend_irecv(self, calls):
        for op, tensor, peer, _ in calls:
            if op == self.isend:
                self.letters[self.rank, peer].append(tensor.detach().clone())
            else:
                tensor.copy_(self.letters[peer, self.rank].popleft())
        return ()


# In chunks the pieces of a sequence but the last are multiples of 64 tokens; fp32 is computed token by token, and cut anywhere.
WIDE = wt.GdnHeads(1, 2, 64, 64)
ONE_PROCESS = [
    Case((64, 128, 37), 2, None, torch.bfloat16, heads=WIDE),
    Case((128, 64, 37), 1, (0, 50, 64, 220, 229), torch.bfloat16, heads=WIDE),
    Case((64, 71), 1, None, torch.bfloat16, heads=wt.GdnHeads(1, 2, 128, 128)),
    Case((64, 71), 1, None, torch.bfloat16, heads=wt.GdnHeads(8, 16, 128, 128)),
    Case((33, 2, 1, 14), 2, None, torch.float32, heads=WIDE),
    Case((33, 17), 1, (0, 30, 48), torch.float32, heads=WIDE),
]


@pytest.mark.parametrize("case", ONE_PROCESS, ids=str)
def test_pieces_one_after_another(case, device, monkeypatch):
    """The same on every device: what the backend computes from the states that it is given, without processes."""
    post = Post(case.sizes)
    monkeypatch.setattr(gdn_pieces, "dist", post)
    got = []
    for rank, end in enumerate(accumulate(case.sizes)):
        post.rank = rank
        pieces = wt.GdnPieces(case.sizes[rank], batch=case.batch, cu_seqlens=case.offsets)
        rule = functools.partial(pieces.rule, final_state=True)
        got.append(compute(case, pieces.pre, rule, pieces.start, end, device))
    for rank in reversed(range(len(got))):
        post.rank = rank
        got[rank] = detached(got[rank])
    assert not any(post.letters.values())  # all that was sent has been taken
    parameters = {n: sum(g["parameters"][n].float() for g in got).to(v) for n, v in got[0]["parameters"].items()}
    for part in got:
        part["parameters"] = parameters
    cu = None if case.offsets is None else torch.tensor(case.offsets, device=device)
    pre = functools.partial(wt.gdn_pre, cu_seqlens=cu)
    rule = functools.partial(wt.gdn_rule, cu_seqlens=cu, final_state=True)
    want = detached(compute(case, pre, rule, 0, case.tokens, device))
    compare(case, got, want, len(case.sizes))


# ---- pieces that do not join -------------------------------------------------------------------------------------------


def heads_of(rank: int) -> wt.GdnHeads:
    return wt.GdnHeads(2, 4, 8, 16 - 8 * rank)


def other_heads(rank, pieces):
    heads = heads_of(rank)
    module = front(heads=heads)
    pieces.pre(rows(1, 8, heads=heads), module.conv_weight, module.a_log, heads=heads)


def other_rows(rank, pieces):
    module = front()
    pieces.pre(rows(1, 8 + rank), module.conv_weight, module.a_log, heads=HEADS)


def other_calls(rank, pieces):
    t = torch.zeros(1, 8, 4, 8)
    if rank == 0:
        pieces.rule(t, t, t, t[..., 0], t[..., 0])
    else:
        module = front()
        pieces.pre(rows(1, 8), module.conv_weight, module.a_log, heads=HEADS)


def chunks(rank, pieces):
    module = front()
    pieces.pre(rows(1, 8), module.conv_weight, module.a_log, heads=HEADS, options=wt.GdnOptions(g_chunk=3))


def waves(rank, pieces, count, head_map="interleaved"):
    few, many = torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 4, 8)
    pieces.rule(few, few, many, many[..., 0], many[..., 0], waves=count, head_map=head_map)


MISFITS = {
    "batch": (
        lambda r: wt.GdnPieces(8, batch=2 + r),
        "GdnPieces: batch: expected the same on all ranks, got 2 (rank 0), 3 (rank 1)",
    ),
    "no tokens": (
        lambda r: wt.GdnPieces(8 * r),
        "GdnPieces: tokens: expected at least 1 on every rank, got 0 (rank 0)",
    ),
    "other offsets": (
        lambda r: wt.GdnPieces(8, cu_seqlens=(0, 4 + r, 16)),
        "GdnPieces: cu_seqlens: expected the same on all ranks, got [0, 4, 16] (rank 0), [0, 5, 16] (rank 1)",
    ),
    "offsets on one rank": (
        lambda r: wt.GdnPieces(8, cu_seqlens=(0, 16) if r else None),
        "GdnPieces: cu_seqlens: expected the same on all ranks, got None (rank 0), [0, 16] (rank 1)",
    ),
    "offsets past the end": (lambda r: wt.GdnPieces(8, cu_seqlens=(0, 17)), "to at most 16, the tokens of all ranks"),
    "offsets that decrease": (lambda r: wt.GdnPieces(8, cu_seqlens=(0, 9, 5)), "that do not decrease"),
    "offsets that begin late": (lambda r: wt.GdnPieces(8, cu_seqlens=(1, 5)), "expected offsets from 0"),
    "packed batch": (lambda r: wt.GdnPieces(8, batch=2, cu_seqlens=(0, 16)), "expected 1 with cu_seqlens, got 2"),
    "other heads": (
        lambda r: other_heads(r, wt.GdnPieces(8)),
        "GdnPieces: gdn_pre: proj: sizes, dtype and options: expected the same on all ranks",
    ),
    "other rows": (
        lambda r: other_rows(r, wt.GdnPieces(8)),
        "gdn_pre: proj: expected [B, S] [1, 8] on rank 1, got [1, 9]",
    ),
    "other calls": (
        lambda r: other_calls(r, wt.GdnPieces(8)),
        "GdnPieces: call: expected the same on all ranks, got gdn_rule: query (rank 0), gdn_pre: proj (rank 1)",
    ),
    "waves": (lambda r: waves(r, wt.GdnPieces(8), 4), "gdn_rule: waves: expected a divisor of 2 heads, got 4"),
    "no waves": (lambda r: waves(r, wt.GdnPieces(8), 0), "gdn_rule: waves: expected a divisor of 2 heads, got 0"),
    "tiled waves": (
        lambda r: waves(r, wt.GdnPieces(8), 2, "tiled"),
        "gdn_rule: waves: expected 1 with fewer, tiled key heads, got 2",
    ),
    "other waves": (
        lambda r: waves(r, wt.GdnPieces(8), 1 + r),
        "GdnPieces: gdn_rule: query: sizes, dtype and options: expected the same on all ranks",
    ),
    "chunks": (
        lambda r: chunks(r, wt.GdnPieces(8)),
        "g_chunk: expected pieces that begin with a chunk of 3, got 8 tokens of a sequence in front of rank 1",
    ),
}


def misfits(rank: int, world: int) -> dict[str, str]:
    said = {}
    for name, (call, _) in MISFITS.items():
        try:
            call(rank)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def test_misfits_are_errors_on_all_ranks(tmp_path):
    for rank, said in enumerate(spawn(misfits, 2, tmp_path)):
        for name, (_, message) in MISFITS.items():
            assert message in said[name], f"{name} on rank {rank}: {said[name]}"


def test_without_a_group():
    with pytest.raises(RuntimeError, match="GdnPieces: group: expected an initialised process group, got none"):
        wt.GdnPieces(4)
