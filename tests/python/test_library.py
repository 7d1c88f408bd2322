# SPDX-License-Identifier: Apache-2.0
"""What torch.library asks of a registered operator, for every operator that weft registers, gradients included."""

from pathlib import Path

import cases
import pytest
import torch
import weft.torch as wt
from compare import same, tuple_of
from library_support import KINDS, fresh, record
from torch import Tensor
from weft.torch import register

REGISTERED = sorted(register.OPERATORS)


def test_all_operators_are_recorded():
    """Every other test of this file covers every operator: cases.py has a case for it, or makes one from its table."""
    in_torch = {n.removeprefix("weft::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("weft::")}
    assert in_torch == set(REGISTERED)
    assert sorted(record("cpu")) == REGISTERED


def test_every_pass_of_the_library_is_registered():
    """Forward `x_fwd` is registered as `x`; replay has no tensor results of its own and is a function. `x_rebuild` is
    `x` with another choice of what is kept for backward."""
    passes = {name.removesuffix("_fwd") for name in wt.functional._C.ops()}
    assert passes - set(REGISTERED) == {"mhc_replay"}
    assert {name.replace("_rebuild", "") for name in REGISTERED} <= passes


def test_schemas_are_the_public_ones():
    """They are made of the library's tables: one that gains an argument must not change an interface in silence. An operator
    is written down with the release that has it first."""
    written = (Path(__file__).parent / "schemas.txt").read_text().splitlines()
    registered = {str(register.OPERATORS[name].op._schema).removeprefix("weft::") for name in REGISTERED}
    assert [line for line in written if not line.startswith("#") and line not in registered] == []


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, device):
    for name, calls in record(device, **KINDS[kind]).items():
        for func, args in calls if kind == "float32" else calls[-1:]:  # half a second each
            if register.OPERATORS[name].gradient is not None:
                args = tuple(a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
            torch.library.opcheck(func, args)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_fresh(kind, device):
    """One storage each, from its beginning, no larger than needed, and no input's."""
    for calls in record(device, **KINDS[kind]).values():
        for func, args in calls:
            results = tuple_of(func(*args))
            storages = [t.untyped_storage() for t in results]
            inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor) and a.numel()}
            for t, storage in zip(results, storages, strict=True):
                assert t.storage_offset() == 0, func
                assert storage.nbytes() == t.numel() * t.element_size(), func
            filled = [s.data_ptr() for s in storages if s.nbytes()]
            assert len(set(filled)) == len(filled) and not inputs & set(filled), func


@pytest.mark.parametrize("kind", KINDS)
def test_fake_results_are_like_real_ones(kind, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for calls in record(device, **KINDS[kind]).values():
        for func, args in calls:
            real = tuple_of(func(*args))
            with FakeTensorMode() as mode:
                fake = tuple_of(func(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)))
            meta = tuple_of(func(*(a.to("meta") if isinstance(a, Tensor) else a for a in args)))
            for r, f, m in zip(real, fake, meta, strict=True):
                for t in (f, m):
                    assert (t.shape, t.stride(), t.dtype) == (r.shape, r.stride(), r.dtype), func
                assert f.device == r.device and m.device.type == "meta", func


def test_padded_and_broadcast_streams(device):
    """Views that are not dense: results are dense, in x's order, real and fake."""
    padded = torch.randn(5, 6, 10, device=device)[:, 1:5, 2:8]
    broadcast = torch.randn(4, 6, device=device).expand(5, 4, 6)
    case = cases.make("post", lead=(5,), device=device)
    for x in (padded, broadcast):
        y = wt.post(**{**case.tensors, "x": x}, numerics=cases.SHORT)
        same(y, wt.post(**{**case.tensors, "x": x.contiguous()}, numerics=cases.SHORT), "post of a view")
        meta = {k: t.to("meta") for k, t in case.tensors.items()}
        fake = wt.post(**{**meta, "x": torch.empty_strided(x.shape, x.stride(), device="meta")}, numerics=cases.SHORT)
        assert fake.stride() == y.stride() and y.is_contiguous()
        x = x.detach().requires_grad_()
        (d_x,) = torch.autograd.grad(wt.contract(wt.post(**{**case.tensors, "x": x}, numerics="liger")).sum(), x)
        assert torch.isfinite(d_x).all()


def test_deterministic(device):
    """The same bits again, with other threads and other contents of fresh memory."""
    threads = torch.get_num_threads()
    try:
        for calls in record(device, c=33, lead=(70,)).values():
            for func, args in calls:
                first = tuple_of(func(*fresh(args)))
                torch.set_num_threads(1 if threads > 1 else 2)
                scratch = [torch.full((4096,), torch.nan, device=device) for _ in range(8)]
                del scratch
                same(tuple_of(func(*fresh(args))), first, func.name())
                torch.set_num_threads(threads)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", cases.CASES)
def test_double_backward_is_refused(name, device):
    case = cases.make(name, device=device)
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
    wrt = [t for t in leaves.values() if t is not None]
    outputs = tuple_of(case.function(**leaves))
    grads = torch.autograd.grad(
        outputs, wrt, [torch.randn_like(t).requires_grad_() for t in outputs], create_graph=True
    )
    with pytest.raises(
        NotImplementedError, match="_bwd: it has no gradient: weft's operators can be differentiated once"
    ):
        sum(g.sum() for g in grads).backward()


def test_double_backward_is_refused_with_main_grad(device):
    case = cases.make("pre", device=device)
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
    u = wt.pre(**leaves, numerics="liger", main_grad=True).u
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(u, leaves["x"], torch.randn_like(u).requires_grad_(), create_graph=True)


def test_functional_transforms_say_no(device):
    """vmap has no rule for these operators: it must not compute something else in silence."""
    x = torch.randn(3, 2, 4, 6, device=device)
    got = None
    try:
        got = torch.vmap(wt.contract)(x)
    except (RuntimeError, NotImplementedError):
        return
    same(got, wt.contract(x), "vmap")
