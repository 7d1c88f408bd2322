# SPDX-License-Identifier: Apache-2.0
"""Gradients that do not go back to autograd by themselves: GradX and main_grad."""

import cases
import oracle
import pytest
import torch
import weft.torch as wt
from cases import DTYPES, short
from compare import check, same
from torch import nn
from weft.torch import GradX

C, N = 6, 4


def parts(device, dtype=torch.float32, lead=(3,), **kind):
    """Tensors of one site with separate operators: project, aggregate, post."""
    m = cases.Maker(N, C, lead, dtype, device, **kind)
    return {
        "x": m.streams(),
        "phi": m.phi(5),
        "pre": m.per_token(N),
        "f": m.row(),
        "post": m.per_token(N),
        "res": m.per_token(N, N),
    }, m.coarse


def site(x, phi, pre, f, post, res, grad_x=None):
    h, ms = wt.project(x, phi, grad_x=grad_x)
    u = wt.aggregate(x, pre, grad_x=grad_x)
    y = wt.post(x, f, post, res, numerics="liger", grad_x=grad_x)
    return h, ms, u, y


def expression(x, phi, pre, f, post, res):
    y = oracle.post(x, f, post, res, numerics="liger")
    return *oracle.project(x, phi), oracle.aggregate(x, pre), y


# ---- GradX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("swapped", [False, True])
def test_grad_x_is_the_sum(dtype, swapped, device):
    """Of the three operators' gradients, in fp32 with one rounding: the bound of a single rounding holds."""
    tensors, coarse = parts(device, dtype, swapped=swapped)
    check(lambda **t: site(**t, grad_x=GradX()), expression, tensors, coarse=coarse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=short)
def test_grad_x_in_the_streams_dtype(dtype):
    tensors, _ = parts("cpu", dtype)
    check(lambda **t: site(**t, grad_x=GradX(dtype=None)), expression, tensors)


def test_grad_x_sums_once():
    """One rounding for 16-bit streams where autograd has three: the sum is that of float32, rounded. (On the CPU: a GPU
    projects 16-bit streams on tensor cores.)"""
    tensors, _ = parts("cpu", torch.bfloat16)
    upstream = None
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        cast = {k: t.to(dtype) if k in ("x", "f") else t for k, t in tensors.items()}
        x = cast["x"].detach().requires_grad_()
        outputs = site(**{**cast, "x": x}, grad_x=GradX())
        upstream = upstream or [torch.randn_like(t) for t in outputs]
        (grads[dtype],) = torch.autograd.grad(outputs, x, [g.to(t) for g, t in zip(upstream, outputs, strict=True)])
    same(grads[torch.bfloat16], grads[torch.float32].bfloat16(), "one rounding")


def test_grad_x_again_and_again(device):
    """The same object serves the next forward pass after the backward pass."""
    tensors, _ = parts(device)
    grad_x = GradX()
    want = None
    for _ in range(3):
        x = tensors["x"].detach().requires_grad_()
        outputs = site(**{**tensors, "x": x}, grad_x=grad_x)
        sum(t.float().sum() for t in outputs).backward()
        want = x.grad if want is None else want
        same(x.grad, want, "the next pass")


def test_grad_x_buffer(device):
    """Memory for the sum can be given: streams' order, whatever the buffer's shape."""
    tensors, _ = parts(device, swapped=True)
    buffer = torch.full((tensors["x"].numel(),), torch.nan, device=device)
    grads = []
    for grad_x in (GradX(), GradX(buffer=buffer)):
        x = tensors["x"].detach().requires_grad_()
        outputs = site(**{**tensors, "x": x}, grad_x=grad_x)
        grads += torch.autograd.grad(outputs, x, [torch.ones_like(t) for t in outputs])
    same(grads[1], grads[0], "in the buffer")
    same(buffer.view(3, C, N).mT.contiguous(), grads[0].contiguous(), "the buffer was used")
    kept = grads[1].clone()
    buffer.fill_(torch.nan)
    same(grads[1], kept, "the gradient outlives the buffer's contents")
    for wrong in (buffer[1:], buffer.half(), buffer.to("meta")):
        x = tensors["x"].detach().requires_grad_()
        outputs = site(**{**tensors, "x": x}, grad_x=GradX(buffer=wrong))
        with pytest.raises(RuntimeError, match=f"GradX: buffer: expected {x.numel()} elements of torch.float32 on"):
            sum(t.sum() for t in outputs).backward()


def test_grad_x_without_gradients_is_nothing(device):
    """Where x needs no gradient the object is left alone."""
    tensors, _ = parts(device)
    grad_x = GradX()
    f = tensors["f"].detach().requires_grad_()
    outputs = site(**{**tensors, "f": f}, grad_x=grad_x)
    outputs[-1].sum().backward()
    assert f.grad is not None
    with torch.no_grad():
        site(**{**tensors, "x": tensors["x"].detach().requires_grad_()}, grad_x=grad_x)
    x = tensors["x"].detach().requires_grad_()
    sum(t.sum() for t in site(**{**tensors, "x": x}, grad_x=grad_x)).backward()
    assert x.grad is not None


def test_grad_x_missing_first_writer(device):
    tensors, _ = parts(device)
    x = tensors["x"].detach().requires_grad_()
    grad_x = GradX()
    h, ms, u, y = site(**{**tensors, "x": x}, grad_x=grad_x)
    with pytest.raises(RuntimeError, match="GradX: aggregate came in backward before post had written"):
        u.sum().backward()
    grad_x = GradX()
    h, _ = wt.project(x, tensors["phi"], grad_x=grad_x)
    with pytest.raises(RuntimeError, match="GradX: project came in backward before post had written"):
        h.sum().backward()


def test_grad_x_second_writer(device):
    tensors, _ = parts(device)
    x = tensors["x"].detach().requires_grad_()
    rest = (tensors["f"], tensors["post"], tensors["res"])
    grad_x = GradX()
    wt.post(x, *rest, numerics="liger", grad_x=grad_x)
    with pytest.raises(RuntimeError, match="GradX: expected one post for each backward pass, got a second one before"):
        wt.post(x, *rest, numerics="liger", grad_x=grad_x)
    grad_x = GradX()
    y = wt.post(x, *rest, numerics="liger", grad_x=grad_x)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="GradX: post came twice in one backward pass"):
        y.sum().backward()


def test_grad_x_early_reuse(device):
    """The next forward pass before the sum was handed over, and before any backward pass."""
    tensors, _ = parts(device)
    x = tensors["x"].detach().requires_grad_()
    grad_x = GradX()
    site(**{**tensors, "x": x}, grad_x=grad_x)
    with pytest.raises(RuntimeError, match="GradX: expected one project for each backward pass, got a second one"):
        wt.project(x, tensors["phi"], grad_x=grad_x)
    grad_x = GradX()
    y = wt.post(x, tensors["f"], tensors["post"], tensors["res"], numerics="liger", grad_x=grad_x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="GradX: project came before the last backward pass had ended with project"):
        wt.project(x, tensors["phi"], grad_x=grad_x)


def test_grad_x_of_another_x(device):
    tensors, _ = parts(device)
    x = tensors["x"].detach().requires_grad_()
    grad_x = GradX()
    wt.project(x, tensors["phi"], grad_x=grad_x)
    for other in (x.detach().clone().requires_grad_(), x[:2]):
        with pytest.raises(RuntimeError, match="GradX: expected aggregate to have the same x as project, got another"):
            wt.aggregate(other, tensors["pre"][: other.shape[0]], grad_x=grad_x)


# ---- main_grad -------------------------------------------------------------------------------------------------------

PARAMS = {  # function: its parameters
    "project": ("phi", "norm_weight"),
    "scale": ("alpha", "beta"),
    "coef": ("alpha", "beta"),
    "head": ("phi", "alpha", "beta", "norm_weight"),
    "pre_norm": ("phi", "alpha", "beta", "norm_weight", "sub_weight"),
    "boundary_norm": ("phi", "alpha", "beta", "norm_weight", "sub_weight"),
    "gdn_pre": ("weight", "a_log", "dt_bias", "bias"),
    "gdn_norm": ("weight",),
}
CALLS = {
    "project": lambda **t: wt.project(**t, main_grad=True),
    "scale": lambda **t: wt.scale(**t, numerics=cases.SHORT, main_grad=True),
    "coef": lambda **t: wt.coef(**t, numerics=cases.SHORT, main_grad=True),
    "head": lambda **t: (wt.head(**t, **cases.HEAD, main_grad=True),),
    "pre_norm": lambda **t: wt.pre(**t, numerics=cases.SHORT, sub_norm=True, main_grad=True),
    "boundary_norm": lambda **t: wt.boundary(**t, numerics=cases.SHORT, sub_norm=True, main_grad=True),
    "gdn_pre": lambda **t: wt.gdn_pre(**t, heads=cases.GDN_HEADS, main_grad=True)[:6],
    "gdn_norm": lambda o, z, weight: (wt.gdn_norm(o, z[..., : o.shape[-1]], weight, main_grad=True),),
}


def step(name, params: dict, tensors: dict) -> None:
    """One micro-batch whose loss is the sum of all results."""
    sum(t.float().sum() for t in CALLS[name](**{**tensors, **params})).backward()


def test_every_function_with_main_grad_is_tested():
    import inspect

    takes = {k for k in wt.__all__ if inspect.isfunction(f := getattr(wt, k)) and "main_grad" in f.__annotations__}
    assert takes == {k for k in takes if any(f"{name}_".startswith(f"{k}_") for name in PARAMS)}


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", PARAMS)
def test_main_grad_accumulates(name, flat, param_dtype, device):
    """fp32 main_grad of any parameter dtype gets the sum of two micro-batches; autograd gets nothing."""
    case = cases.make(name, device=device, flat=flat, param_dtype=param_dtype, dtype=torch.bfloat16)
    values = {k: case.tensors[k] for k in PARAMS[name]}
    tensors = {k: t.detach().requires_grad_() for k, t in case.tensors.items() if k not in values and t is not None}
    absent = {k: None for k, t in case.tensors.items() if t is None}

    def run(start, times: int = 1) -> dict:
        params = {k: nn.Parameter(t.clone()) for k, t in values.items()}
        for p in params.values():
            if start is not None:
                p.main_grad = torch.full(p.shape, start, device=device)
        for _ in range(times):
            step(name, params, tensors | absent)
        return params

    returned, fresh, once, twice = run(None), run(0.0), run(0.5), run(0.5, times=2)
    for k in values:
        g = fresh[k].main_grad
        assert g.any() and fresh[k].grad is None, f"{k}: expected no gradient beside main_grad"
        same(returned[k].grad, g.to(param_dtype), f"{k}: the gradient that autograd gets")
        # One rounding of each sum.
        assert ((once[k].main_grad - (0.5 + g)).abs() <= 2**-24 * (0.5 + g).abs()).all(), k
        assert ((twice[k].main_grad - (0.5 + g + g)).abs() <= 2**-23 * (0.5 + 2 * g.abs())).all(), k


def test_main_grad_is_looked_up_in_backward(device):
    """Set, replaced or taken away after forward: what the parameter has when backward comes counts."""
    case = cases.make("project", device=device)
    phi = nn.Parameter(case.tensors["phi"])
    weight = nn.Parameter(case.tensors["norm_weight"])

    def forward():
        return wt.project(case.tensors["x"], phi, weight, main_grad=True)[0].sum()

    forward().backward()  # no attribute: as without main_grad
    want = phi.grad.clone()
    phi.grad = None
    loss = forward()
    phi.main_grad = torch.zeros_like(phi)
    loss.backward()
    assert phi.grad is None
    same(phi.main_grad, want, "set after forward")
    loss, old = forward(), phi.main_grad
    phi.main_grad = torch.zeros_like(phi)
    loss.backward()
    same(phi.main_grad, want, "replaced after forward")
    same(old, want, "the old one")
    loss = forward()
    phi.main_grad = None
    loss.backward()
    same(phi.grad, want, "taken away after forward")
    assert weight.grad is not None


def test_main_grad_of_a_frozen_parameter(device):
    case = cases.make("project", device=device)
    phi = nn.Parameter(case.tensors["phi"], requires_grad=False)
    phi.main_grad = torch.zeros_like(phi)
    x = case.tensors["x"].detach().requires_grad_()
    wt.project(x, phi, None, main_grad=True)[0].sum().backward()
    assert x.grad is not None and not phi.main_grad.any()


def test_grad_added_to_main_grad(device):
    """Frameworks that set the flag to False find it True, and their hooks run: autograd gets a tensor of the shape."""
    case = cases.make("project", device=device)
    phi = nn.Parameter(case.tensors["phi"])
    phi.main_grad = torch.zeros_like(phi)
    phi.grad_added_to_main_grad = False
    fired = []
    phi.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.shape))
    wt.project(case.tensors["x"], phi, main_grad=True)[0].sum().backward()
    assert phi.grad_added_to_main_grad is True
    assert fired == [phi.shape]
    assert phi.main_grad.any()
    plain = nn.Parameter(case.tensors["phi"])
    plain.grad_added_to_main_grad = False
    wt.project(case.tensors["x"], plain, main_grad=True)[0].sum().backward()
    assert plain.grad_added_to_main_grad is False, "no main_grad: the gradient was returned"
    same(plain.grad, phi.main_grad, "the gradient itself")


def test_memory_that_is_there_in_backward_only(device):
    """get_main_grad() returns it, and overwrite_main_grad says that it holds nothing."""
    case = cases.make("project", device=device)
    phi, plain = (nn.Parameter(case.tensors["phi"].clone()) for _ in range(2))
    memory = torch.full_like(phi, float("nan"))
    phi.get_main_grad, phi.overwrite_main_grad = lambda: memory, True
    for _ in range(2):  # the second time over what the first has left
        wt.project(case.tensors["x"], phi, main_grad=True)[0].sum().backward()
    assert phi.main_grad is memory and phi.grad is None
    wt.project(case.tensors["x"], plain, main_grad=True)[0].sum().backward()
    same(memory, plain.grad, "d_phi")
    phi.overwrite_main_grad = False
    wt.project(case.tensors["x"], phi, main_grad=True)[0].sum().backward()
    same(memory, 2 * plain.grad, "added")


def test_stand_in_of_zeros(device):
    """An engine that adds what autograd gets asks for zeros by zero_out_wgrad."""
    case = cases.make("project", device=device)
    phi = nn.Parameter(case.tensors["phi"])
    phi.main_grad, phi.grad_added_to_main_grad, phi.zero_out_wgrad = torch.zeros_like(phi), False, True
    wt.project(case.tensors["x"], phi, main_grad=True)[0].sum().backward()
    assert phi.grad.shape == phi.shape and not phi.grad.any() and phi.main_grad.any()


def test_main_grad_of_the_wrong_shape(device):
    case = cases.make("project", device=device)
    phi = nn.Parameter(case.tensors["phi"])
    phi.main_grad = torch.zeros(3, 3, device=device)
    with pytest.raises(ValueError, match="mhc_project_bwd: d_phi: "):
        wt.project(case.tensors["x"], phi, main_grad=True)[0].sum().backward()


def test_main_grad_with_grad_x(device):
    tensors, _ = parts(device)
    phi = nn.Parameter(tensors["phi"])
    phi.main_grad = torch.zeros_like(phi)
    x, grad_x = tensors["x"].detach().requires_grad_(), GradX()
    h, ms = wt.project(x, phi, main_grad=True, grad_x=grad_x)
    y = wt.post(x, tensors["f"], tensors["post"], tensors["res"], numerics="liger", grad_x=grad_x)
    (h.sum() + ms.sum() + y.sum()).backward()
    plain, weight = tensors["x"].detach().requires_grad_(), tensors["phi"].detach().requires_grad_()
    h, ms = wt.project(plain, weight)
    y = wt.post(plain, tensors["f"], tensors["post"], tensors["res"], numerics="liger")
    (h.sum() + ms.sum() + y.sum()).backward()
    same(phi.main_grad, weight.grad, "d_phi")
    torch.testing.assert_close(x.grad, plain.grad, rtol=2**-22, atol=2**-22 * float(plain.grad.abs().max()))
