# SPDX-License-Identifier: Apache-2.0
"""Kernels of the extension remember plans and shapes. Whatever they remember, a call is the one that Python makes."""

import threading
from types import SimpleNamespace

import cases
import pytest
import torch
import weft.torch as wt
from compare import same, tuple_of
from library_support import KINDS, fresh, record
from torch.utils._python_dispatch import TorchDispatchMode
from weft import _C
from weft.torch import framework, register


def by_python(name: str, args: tuple) -> tuple:
    """What operator `name` does, without a kernel of the extension."""
    operator = register.OPERATORS[name]
    results = operator.outputs(*args)
    operator.fill(results, args)
    return tuple_of(results)


def tensors_of(args: tuple) -> tuple:
    return tuple(a for a in args if isinstance(a, torch.Tensor))


def bound(operator: register.Operator, **other) -> _C.Kernel:
    """A kernel of its own, which remembers nothing yet, bound as the operator of the library is."""
    library = operator.name if operator.name in register.TABLES else f"{operator.name}_fwd"
    table = register.TABLES[library]
    rows = other.get("rows") or register.bind(operator.name, table, operator.arguments, operator.results, {}, {})
    given = {
        "op": library,
        "tensors": operator.tensors,
        "scalars": operator.scalars,
        "results": operator.results,
        "rows": rows,
        "needs": (),
        "writes": (),
        "sections": None,
        "outputs": operator.outputs,
        "record": lambda *args: "recorded",
        "otherwise": lambda *args, **kwargs: "passed on",
    }
    return _C.Kernel(*(given | other).values())


def alike(got, want, what: str) -> None:
    got = tuple_of(got)
    same(got, want, what)
    assert [(t.shape, t.stride(), t.dtype, t.device) for t in got] == [
        (t.shape, t.stride(), t.dtype, t.device) for t in want
    ], what


@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_is_the_one_in_python(kind, device):
    for name, calls in record(device, **KINDS[kind]).items():
        for func, args in calls:
            written = fresh(args)
            want = by_python(name, written)
            for again in range(3):  # the first call of these scalars and shapes, and two that are remembered
                mine = fresh(args)
                with torch.no_grad():
                    alike(func(*mine), want, f"{name}, call {again}")
                alike(tensors_of(mine), tensors_of(written), f"{name}, arguments of call {again}")


def test_results_have_memory_of_their_own(device):
    x, pre = torch.randn(3, 4, 8, device=device), torch.rand(3, 4, device=device)
    results = [torch.ops.weft.mhc_aggregate(x, pre) for _ in range(4)]
    assert len({t.data_ptr() for t in results}) == 4
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in results)
    results[0].untyped_storage().resize_(0)  # as FSDP and recompute do
    results[0].untyped_storage().resize_(results[1].untyped_storage().nbytes())
    assert all(torch.equal(t, results[1]) for t in results[2:])


LEADS = [(6,), (2, 3), (3, 2), (1, 6), (6, 1), (), (12,), (2, 3, 2)]


@pytest.mark.parametrize("swapped", [False, True])
def test_shapes_take_turns(swapped, device):
    """More of them than are remembered, and some that are the same to the library."""
    for lead in LEADS * 3:
        x = torch.randn(*lead, 8, 4, device=device).transpose(-1, -2) if swapped else None
        x = torch.randn(*lead, 4, 8, device=device) if x is None else x
        f, post = torch.randn(*lead, 8, device=device), torch.rand(*lead, 4, device=device)
        res = torch.rand(*lead, 4, 4, device=device)
        args = (x, f, post, res, None, None, wt.numerics.pack("liger"), 0.0, 0)
        alike(torch.ops.weft.mhc_post(*args), by_python("mhc_post", args), f"post of {lead}")
        alike(torch.ops.weft.mhc_aggregate(x, post), by_python("mhc_aggregate", (x, post)), f"aggregate of {lead}")


def test_dtypes_and_absent_tensors_take_turns(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        for weight in (None, torch.rand(8, device=device), None):
            args = (torch.randn(3, 8, device=device, dtype=dtype), weight, 1e-6)
            alike(torch.ops.weft.rmsnorm(*args), by_python("rmsnorm", args), f"{dtype}, {weight}")


def test_offsets_of_one_shape_take_turns(device):
    """Their values change what is computed, and nothing that is remembered."""
    cases.need("gdn_rule", device)
    query, key, value = (torch.randn(1, 12, 2, 4, device=device) for _ in range(3))
    beta, g = torch.rand(1, 12, 2, device=device), -torch.rand(1, 12, 2, device=device)
    results = []
    for cuts in ([0, 6, 12], [0, 1, 12], [0, 6, 12], [0, 0, 0], [0, 11, 12]):
        for dtype in (torch.int32, torch.int64):
            offsets = torch.tensor(cuts, dtype=dtype, device=device)
            args = (query, key, value, beta, g, None, offsets, 0.5, 0, 0, True)
            results.append(by_python("gdn_rule", args))
            alike(torch.ops.weft.gdn_rule(*args), results[-1], f"offsets {cuts}, {dtype}")
    assert not torch.equal(results[0][0], results[2][0])


def test_many_scalars():
    """More tuples of scalars than are kept."""
    u = torch.randn(2, 8)
    for k in range(1200):
        eps = (k % 600 + 1) / 64
        got = torch.ops.weft.rmsnorm(u, None, eps)
        assert torch.allclose(got, u / (u.square().mean(-1, keepdim=True) + eps).sqrt(), atol=1e-5), eps


def test_workspaces_of_one_kernel():
    """It remembers what its last shapes took; others take more, or less."""
    operator = register.OPERATORS["mhc_project_bwd"]
    for tokens, channels in ((64, 32), (3, 8), (200, 64), (200, 64), (1, 8), (64, 32)):
        x, phi = torch.randn(tokens, 4, channels), torch.randn(24, 4, channels)
        args = (x, phi, None, torch.randn(tokens, 24), torch.randn(tokens), 0, [True, True, False])
        for add in (0, 1):
            got, want = ((torch.ones_like(x), torch.empty_like(phi), x.new_empty(0)) for _ in range(2))
            operator.fill(got, args, add)
            bound(operator).fill(add, *want, *args)
            same(got, want, f"{tokens} tokens of {channels} channels")


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func.namespace == "weft"
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    """A tensor around another."""

    seen = 0

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Sub.seen += func.namespace == "weft"
        return func(*(a.inner if isinstance(a, Sub) else a for a in args), **(kwargs or {}))


def test_others_see_calls(device):
    x, pre = torch.randn(3, 4, 8, device=device), torch.rand(3, 4, device=device)
    want = torch.ops.weft.mhc_aggregate(x, pre)
    with Counting() as counting:
        alike(torch.ops.weft.mhc_aggregate(x, pre), (want,), "under a mode")
    assert counting.seen == 1
    Sub.seen = 0
    same((torch.ops.weft.mhc_aggregate(Sub(x), pre),), (want,))
    assert Sub.seen == 1
    leaf = x.clone().requires_grad_()
    assert torch.ops.weft.mhc_aggregate(leaf, pre).grad_fn is not None
    with torch.no_grad():
        assert torch.ops.weft.mhc_aggregate(leaf, pre).grad_fn is None
    assert torch.ops.weft.mhc_aggregate(torch.nn.Parameter(x, requires_grad=False), pre).grad_fn is None
    with torch.inference_mode():
        inside = torch.ops.weft.mhc_aggregate(x, pre)
    assert inside.is_inference() and not torch.ops.weft.mhc_aggregate(x, pre).is_inference()
    meta = torch.ops.weft.mhc_aggregate(x.to("meta"), pre.to("meta"))
    assert meta.is_meta and meta.shape == (3, 8)


def test_a_framework_without_a_short_way(device):
    names = vars(framework)
    slow = SimpleNamespace(**{k: None if k.startswith("empty_") else names[k] for k in framework.__all__})
    x, pre = torch.randn(3, 4, 8, device=device), torch.rand(3, 4, device=device)
    want = by_python("mhc_aggregate", (x, pre))
    try:
        _C.set_framework(slow)
        for _ in range(2):
            alike(torch.ops.weft.mhc_aggregate(x, pre), want, "without a short way")
    finally:
        _C.set_framework(framework)
    alike(torch.ops.weft.mhc_aggregate(x, pre), want, "with it again")


def test_the_short_way_is_taken(device):
    """From the second call with the same shapes on, and for every result."""
    made = []
    hooks = {k: vars(framework)[k] for k in framework.__all__}
    empty = hooks[f"empty_{device.type}"]
    if empty is None:
        pytest.skip("this PyTorch has no short way")
    hooks[f"empty_{device.type}"] = lambda *shape: made.append(shape) or empty(*shape)
    args = (torch.randn(5, 24, device=device), torch.rand(5, device=device), torch.rand(3, device=device))
    args = (*args, torch.randn(24, device=device), wt.numerics.pack("liger"))
    try:
        _C.set_framework(SimpleNamespace(**hooks))
        for count in (0, 3, 6):
            torch.ops.weft.mhc_scale(*args)
            assert len(made) == count
    finally:
        _C.set_framework(framework)
    assert made[2] == ((5, 4, 4), (16, 4, 1), torch.float32)


def test_threads_share_kernels():
    """Shapes and scalars that several threads change all the time."""
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for k in range(300):
            lead = LEADS[(seed + k) % len(LEADS)]
            x, pre = torch.rand(*lead, 4, 8, generator=generator), torch.rand(*lead, 4, generator=generator)
            u = torch.ops.weft.mhc_aggregate(x, pre)
            v = torch.ops.weft.rmsnorm(u, None, float(k % 7 + seed + 1))
            exact = torch.einsum("...nc,...n->...c", x, pre)
            norm = exact / (exact.square().mean(-1, keepdim=True) + k % 7 + seed + 1).sqrt()
            if (
                u.shape != exact.shape
                or not torch.allclose(u, exact, atol=1e-5)
                or not torch.allclose(v, norm, atol=1e-5)
            ):
                wrong.append((seed, k))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_bad_kernels():
    aggregate = register.OPERATORS["mhc_aggregate"]
    rows = (("x", "x", None, 0), ("pre", "pre", None, 0), ("u", "u", None, 0))
    bad = {
        "Kernel: expected the name of an operator, got 'mhc_nothing'": {"op": "mhc_nothing"},
        "mhc_aggregate_fwd: tensors: expected a tuple of at most 32 names": {"tensors": ["x", "pre"]},
        "mhc_aggregate_fwd: scalars: expected a tuple of at most 16 names": {"scalars": (1,)},
        "mhc_aggregate_fwd: results: expected a tuple of at most 16 names": {"results": ("u",) * 17},
        "mhc_aggregate_fwd: expected a row of its table, got 'y'": {"rows": (*rows, ("y", "u", None, 0))},
        "mhc_aggregate_fwd: expected an argument, got 'u'": {"rows": (("x", "u", None, 0), *rows[1:])},
        "mhc_aggregate_fwd: expected a result or an argument, got 'v'": {"rows": (*rows[:2], ("u", "v", None, 0))},
        "mhc_aggregate_fwd: expected a scalar argument, got 'sub_norm'": {"rows": (("x", "x", "sub_norm", 1),)},
        "mhc_aggregate_fwd: expected rows .*, got 'x'": {"rows": ("x",)},
        "mhc_aggregate_fwd: expected an argument, got 'f'": {"needs": ("f",)},
        "mhc_aggregate_fwd: expected a scalar argument, got 'heads'": {"sections": ("heads", (("x", "x"),))},
    }
    for message, other in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            bound(aggregate, **other)
    with pytest.raises(TypeError, match="Kernel takes no keyword arguments"):
        _C.Kernel(op="mhc_aggregate_fwd")
    args = torch.randn(3, 4, 8), torch.rand(3, 4)
    kernel = bound(aggregate)
    alike(kernel(*args), by_python("mhc_aggregate", args), "a good one")
    assert kernel(args[0]) == kernel(*args, pre=1) == kernel(None, None) == kernel(args[0], 3) == "passed on"
    assert bound(aggregate, needs=("pre",))(args[0], None) == "passed on"
    assert kernel(args[0].clone().requires_grad_(), args[1]) == "recorded"
    two = bound(aggregate, outputs=lambda *args: (torch.empty(3, 8), torch.empty(3, 8)))
    with pytest.raises(TypeError, match="mhc_aggregate_fwd: outputs: expected 1 results, got 2"):
        two(*args)
    with pytest.raises(AttributeError, match="Tensor"):
        _C.set_framework(SimpleNamespace())


# ---- names -----------------------------------------------------------------------------------------------------------


def with_row(name: str, kind: str, optional: int) -> register.Table:
    """The table of `pre` with one more tensor in front of all others."""
    table = register.TABLES["mhc_pre_fwd"]
    row = register.Row(name, kind, "coef", optional, ("tokens", "streams"), None)
    return register.Table({name: row, **table.rows}, table.scalars)


@pytest.mark.parametrize("kind", ["in", "out", "grad"])
@pytest.mark.parametrize("optional", [0, 1])
def test_a_new_row_is_not_bound_in_silence(kind, optional):
    """A tensor that the library's table gains is an error of the operator that does not know it: nothing shifts."""
    pre = register.OPERATORS["mhc_pre"]
    table, binds, where = with_row("gain", kind, optional), {"v": "u"}, {"u": "not sub_norm", "v": "sub_norm"}
    with pytest.raises(TypeError, match="mhc_pre: gain: expected an argument or a result of that name"):
        register.bind("mhc_pre", table, pre.arguments, pre.results, binds, where)
    if kind == "in":
        signature = ", ".join(f"{kind} {name}" for name, kind in pre.arguments.items())
        with pytest.raises(TypeError, match="mhc_pre: gain: expected in its signature, for the library has it"):
            register.read_signature("mhc_pre", signature, table)


def test_a_new_scalar_is_not_left_out_in_silence():
    rmsnorm = register.TABLES["rmsnorm_fwd"]
    table = register.Table(rmsnorm.rows, {**rmsnorm.scalars, "offset": "real"})
    with pytest.raises(TypeError, match="rmsnorm: offset: expected in its signature"):
        register.read_signature("rmsnorm", "u, weight, eps", table)
    with pytest.raises(TypeError, match="rmsnorm: eps2: expected a name of the library's table or a type, got neither"):
        register.read_signature("rmsnorm", "u, weight, eps2", rmsnorm)


def test_every_row_is_bound_by_its_name(device):
    """The order of rows in the table, of arguments and of results is nobody's business."""
    pre = register.OPERATORS["mhc_pre"]
    table = register.TABLES["mhc_pre_fwd"]
    backwards = register.Table(dict(reversed(table.rows.items())), table.scalars)
    binds, where = {"v": "u"}, {"u": "not sub_norm", "v": "sub_norm"}
    rows = register.bind("mhc_pre", backwards, pre.arguments, pre.results, binds, where)
    case = cases.make("pre_norm", device=device).tensors
    args = tuple(case[name] for name in pre.tensors) + (wt.numerics.pack("liger"), True, 1e-6, 0)
    want = by_python("mhc_pre", args)
    alike(bound(pre, rows=(rows[-1], *rows[:-1]))(*args), want, "rows of another order")
    swapped = tuple(reversed(pre.results))
    got = [torch.empty_like(t) for t in reversed(want)]
    bound(pre, rows=rows[::-1], results=swapped).fill(0, *got, *args)
    alike(tuple(reversed(got)), want, "results of another order")


def test_nothing_is_recorded_below_autograd(device):
    x, pre = torch.randn(3, 4, 8, device=device, requires_grad=True), torch.rand(3, 4, device=device)
    with torch._C._AutoDispatchBelowAutograd():
        below = torch.ops.weft.mhc_aggregate(x, pre)
    assert below.grad_fn is None
    alike(below, (torch.ops.weft.mhc_aggregate(x, pre).detach(),), "below autograd")
