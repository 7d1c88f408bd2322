# SPDX-License-Identifier: Apache-2.0
"""Misuse is an exception of the right type whose message names the operator, the argument, what was expected and what
came; and calls from several threads at once are nothing special."""

import threading
import time
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import torch
import weft
import weft.torch as wt
from compare import same, tuple_of
from conftest import needs_gpu
from weft import _C
from weft.torch import framework, register

NUM = {"numerics": "liger"}


def refuses(kind, message, function, *args, **kwargs):
    with pytest.raises(kind, match=message):
        function(*args, **kwargs)


def post_args(**other) -> dict:
    return {**cases.make("post").tensors, **NUM, **other}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_wrong_shapes():
    refuses(
        ValueError,
        r"mhc_post_fwd: f: dim 1 \(channels\): expected 6 like the other tensors, got 7",
        wt.post,
        **post_args(f=torch.randn(2, 3, 7)),
    )
    refuses(
        ValueError,
        r"mhc_post_fwd: f: dim 0 \(tokens\): expected 6 like the other tensors, got 4",
        wt.post,
        **post_args(f=torch.randn(2, 2, 6)),
    )
    refuses(
        ValueError,
        r"mhc_post_fwd: bias: expected 1 dimensions, got shape \[2, 6\]",
        wt.post,
        **post_args(bias=torch.randn(2, 6)),
    )
    refuses(
        ValueError,
        r"mhc_aggregate_fwd: x: expected at least 2 dimensions, got shape \[6\]",
        raw_aggregate,
        torch.randn(6),
    )
    case = cases.make("pre")
    refuses(
        ValueError,
        r"mhc_pre_fwd: phi: dim 0: expected 2n \+ n\^2 = 24 for 4 streams and three scales, got 23",
        wt.pre,
        **{**case.tensors, "phi": case.tensors["phi"][:23]},
        **NUM,
    )
    refuses(
        ValueError,
        r"mhc_pre_fwd: phi: dim 0: expected 2n = 8 for 4 streams and two scales, got 24",
        wt.pre,
        **{**case.tensors, "alpha": torch.randn(2)},
        **NUM,
    )
    refuses(
        ValueError,
        r"mhc_pre_fwd: alpha: dim 0: expected 3, or 2 without a residual mix, got 4",
        wt.pre,
        **{**case.tensors, "alpha": torch.randn(4)},
        **NUM,
    )
    independent = cases.make("pre", mixed=False)
    refuses(
        ValueError,
        r"mhc_pre_fwd: phi: dim 0: expected 2n \+ n\^2 = 24 for 4 streams and three scales, got 8",
        wt.pre,
        **{**independent.tensors, "alpha": torch.randn(3)},
        **NUM,
    )
    refuses(
        ValueError,
        "coefficients: expected 2n numbers a token with two scales, got 23",
        wt.coef,
        torch.randn(3, 23),
        torch.rand(3),
        torch.rand(2),
        torch.rand(23),
        "hy_v4",
    )
    refuses(
        ValueError,
        "mhc_coef_fwd: res: expected none with an alpha of two scales, which has no residual mix, got a tensor",
        fill,
        "mhc_coef",
        (torch.empty(3, 4), torch.empty(3, 4), torch.empty(3, 4, 4)),
        torch.randn(3, 8),
        torch.rand(3),
        torch.rand(2),
        torch.rand(8),
        wt.functional.pack("hy_v4"),
    )
    refuses(
        ValueError,
        "coefficients: expected 2n . n.n numbers a token, got 23",
        wt.coef,
        torch.randn(3, 23),
        torch.rand(3),
        torch.rand(3),
        torch.rand(23),
        "liger",
    )


def fill(name: str, results: tuple, *args):
    """Past the function's own look at shapes, to the extension's."""
    register.OPERATORS[name].kernel.fill(0, *results, *args)


def raw_aggregate(x):
    fill("mhc_aggregate", (torch.empty(3, 6),), x, torch.rand(3, 4))


def test_streams_that_differ():
    refuses(
        ValueError,
        r"mhc_aggregate_fwd: pre: dim 1 \(streams\): expected 4 like the other tensors, got 5",
        wt.aggregate,
        torch.randn(3, 4, 6),
        torch.rand(3, 5),
    )
    refuses(ValueError, "streams", wt.expand, torch.randn(3, 6), 33)
    refuses(ValueError, "streams", wt.expand, torch.randn(3, 6), 0)
    refuses(ValueError, "phi", wt.pre, torch.randn(3, 4, 6), torch.randn(24, 25), torch.rand(3), torch.rand(24), **NUM)


def test_wrong_dtypes():
    refuses(
        ValueError,
        "mhc_post_fwd: x: expected a floating-point dtype, got i64",
        wt.post,
        **post_args(x=torch.ones(2, 3, 4, 6, dtype=torch.int64)),
    )
    refuses(
        ValueError,
        "mhc_post_fwd: x: expected float32, bfloat16, float16 or float64, or int32 or int64 for indices, got another"
        " dtype of 16 bits",
        wt.post,
        **post_args(x=torch.ones(2, 3, 4, 6, dtype=torch.int16)),
    )
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises((ValueError, BufferError, TypeError, RuntimeError)) as caught:
            wt.contract(torch.ones(3, 4, 6).to(dtype))
        assert "mhc_contract_fwd: x: " in str(caught.value), dtype
    refuses(
        ValueError,
        "mhc_post_fwd: f: .*expected f32.*, got bf16",
        wt.post,
        **post_args(f=torch.randn(2, 3, 6).bfloat16()),
    )
    refuses(ValueError, "f64", wt.post, **post_args(res=torch.rand(2, 3, 4, 4, dtype=torch.float64)))
    refuses(
        ValueError,
        "mhc_post_fwd: step: expected an int64 or uint64 tensor",
        wt.post,
        **post_args(dropout=0.5, dropout_step=torch.zeros(1, dtype=torch.int32)),
    )


def test_not_a_tensor():
    for other in (np.zeros((3, 4, 6), np.float32), [[1.0]], 3.0, "x"):
        with pytest.raises(
            RuntimeError, match="weft::mhc_contract.*Expected a value of type 'Tensor' for argument 'x'"
        ):
            wt.contract(other)
        name = type(other).__name__
        with pytest.raises(TypeError, match=f"mhc_contract_fwd: x: expected a tensor with DLPack's.*, got {name}"):
            fill("mhc_contract", (torch.empty(3, 6),), other, 0)


def test_leading_dimensions_that_do_not_collapse():
    x = torch.randn(3, 2, 4, 6).transpose(0, 1)
    refuses(
        ValueError,
        r"mhc_contract_fwd: x: expected leading dimensions that are one run of tokens \(call contiguous\(\)\), got",
        wt.contract,
        x,
    )
    same(wt.contract(x.contiguous()), wt.contract(x.transpose(0, 1)).transpose(0, 1).contiguous(), "made contiguous")


def test_mixed_devices():
    for k in ("x", "f", "post", "res", "bias"):
        args = post_args()
        refuses(
            ValueError,
            "mhc_post: expected all tensors on one device, got cpu, meta",
            wt.post,
            **{**args, k: args[k].to("meta")},
        )


@needs_gpu
def test_cpu_and_cuda():
    args = post_args()
    cuda = {k: t.cuda() if isinstance(t, torch.Tensor) else t for k, t in args.items()}
    message = "mhc_post_fwd: f: expected a tensor on cuda:0 like x, got one on cpu"
    refuses(ValueError, message, wt.post, **{**cuda, "f": args["f"]})
    message = "mhc_post_fwd: f: expected a tensor on cpu like x, got one on cuda:0"
    refuses(ValueError, message, wt.post, **{**args, "f": cuda["f"]})
    message = "mhc_post_fwd: step: expected a tensor on cuda:0 like x, got one on cpu"
    refuses(ValueError, message, wt.post, **cuda, dropout=0.5, dropout_step=torch.zeros(1, dtype=torch.int64))
    refuses(NotImplementedError, "f64|float64", wt.contract, torch.randn(3, 4, 6, dtype=torch.float64, device="cuda"))


def test_outputs_that_overlap():
    x = torch.randn(3, 4, 6)
    with pytest.raises(ValueError, match="mhc_contract_fwd: u: expected memory of its own, got memory shared with x"):
        fill("mhc_contract", (x[:, 0],), x, 0)
    with pytest.raises(ValueError, match="mhc_contract_fwd: u: "):
        fill("mhc_contract", (torch.empty(1, 6).expand(3, 6),), x, 0)


def test_a_refused_call_writes_nothing():
    out = torch.full((3, 6), 7.0)
    with pytest.raises(ValueError):
        fill("mhc_aggregate", (out,), torch.randn(3, 4, 6), torch.rand(3, 5))
    assert torch.equal(out, torch.full((3, 6), 7.0))


# ---- scalars and names -----------------------------------------------------------------------------------------------


def test_names():
    names = ", ".join(weft.presets())
    refuses(
        ValueError, f"numerics: expected one of {names}, got 'deepseek'", wt.sinkhorn, torch.randn(3, 4, 4), "deepseek"
    )
    refuses(ValueError, "preset: expected one of weft's presets, got 'x'", wt.Numerics.preset, "x")
    base = wt.Numerics.preset("liger")
    for field, names in (
        ("sinkhorn", "log, softmax_eps, clamp, add, threshold"),
        ("apply", "in_out, out_in"),
        ("rms_eps_kind", "inside, outside"),
    ):
        message = f"numerics: {field}: expected one of {names}, got 'other'"
        refuses(ValueError, message, wt.sinkhorn, torch.randn(3, 4, 4), base._replace(**{field: "other"}))
    refuses(
        ValueError, "mhc_contract: kind: expected one of mean, sum, got 'max'", wt.contract, torch.randn(3, 4, 6), "max"
    )
    refuses(
        ValueError,
        "mhc_project: precision: expected one of full, tf32, got 'half'",
        wt.project,
        torch.randn(3, 4, 6),
        torch.randn(5, 24),
        precision="half",
    )
    head = cases.make("head").tensors
    refuses(
        ValueError,
        "mhc_head: rms_eps_kind: expected one of inside, outside, got 'out'",
        wt.head,
        **head,
        rms_eps_kind="out",
    )


def test_numbers():
    logits = torch.randn(3, 4, 4)
    base = wt.Numerics.preset("liger")
    for iters in (0, -1):
        refuses(
            ValueError,
            f"mhc_sinkhorn_fwd: .*sinkhorn_iters: expected .*, got {iters}",
            wt.sinkhorn,
            logits,
            base._replace(sinkhorn_iters=iters),
        )
    refuses(
        ValueError,
        "sinkhorn_iters: expected a whole number, got 2.5",
        wt.sinkhorn,
        logits,
        base._replace(sinkhorn_iters=2.5),
    )
    refuses(
        ValueError,
        "sinkhorn_iters: expected a whole number, got nan",
        wt.sinkhorn,
        logits,
        base._replace(sinkhorn_iters=float("nan")),
    )
    for eps in (-1.0, float("nan"), float("inf")):
        refuses(
            ValueError,
            "mhc_sinkhorn_fwd: .*sinkhorn_eps: expected",
            wt.sinkhorn,
            logits,
            base._replace(sinkhorn_eps=eps),
        )
    for p in (1.0, 1.5, -0.1, float("nan")):
        refuses(ValueError, "mhc_post_fwd: dropout.p: expected .*, got", wt.post, **post_args(dropout=p))
    refuses(
        ValueError,
        "mhc_post_fwd: dropout.token_base: expected .*, got -1",
        wt.post,
        **post_args(dropout=0.5, token_base=-1),
    )
    refuses(ValueError, "rmsnorm_fwd: eps: expected .*, got -1", wt.rmsnorm, torch.randn(3, 6), eps=-1)
    refuses(
        ValueError,
        "mhc_pre_fwd: sub_eps: expected .*, got nan",
        wt.pre,
        **cases.make("pre_norm").tensors,
        **NUM,
        sub_norm=True,
        sub_eps=float("nan"),
    )


def test_sub_weight_without_sub_norm():
    """A gain that nothing would use is refused, not ignored."""
    tensors = cases.make("pre_norm").tensors
    refuses(ValueError, "mhc_pre_fwd: sub_weight: expected v to be there with it, got none", wt.pre, **tensors, **NUM)


def test_extension_calls():
    x, u = torch.randn(3, 2, 4), torch.empty(3, 4)
    # Numbers that a field of 32 bits does not hold are not cut down to ones that it does.
    for kind in (2**32, 2**40 + 1, -(2**33)):
        refuses(ValueError, "mhc_contract_fwd: kind: expected 0 to 1", fill, "mhc_contract", (u,), x, kind)
    logits = torch.randn(3, 2, 2)
    for field, value in ((4, float("inf")), (4, 2.0**32), (6, float("nan")), (6, 1e300)):
        numbers = [1e-6, 0.0, 0.0, 2.0, 0.0, 0.0, 20.0, 0.0]
        numbers[field] = value
        refuses(ValueError, "mhc_sinkhorn_fwd: numerics", fill, "mhc_sinkhorn", (logits.clone(),), logits, numbers)
    for numbers in ([0.0] * 7, (0.0,) * 10, 1.0, None):
        message = "mhc_sinkhorn_fwd: numerics: expected 9 numbers, got"
        refuses(TypeError, message, fill, "mhc_sinkhorn", (logits.clone(),), logits, numbers)
    refuses(TypeError, "must be real number", fill, "mhc_sinkhorn", (logits.clone(),), logits, ["x"] * 8)
    message = r"mhc_contract_fwd: fill: expected \(add, 1 results, 1 tensors, 1 scalars\), got 3 arguments"
    refuses(TypeError, message, fill, "mhc_contract", (u,), x)
    refuses(ValueError, "mhc_contract_fwd: x: expected a tensor, got none", fill, "mhc_contract", (u,), None, 0)
    hooks = {name: vars(framework)[name] for name in framework.__all__}
    try:
        _C.set_framework(SimpleNamespace(**hooks | {"threads": lambda: 2**12 + 1}))
        refuses(ValueError, "exec.threads: expected 0 to 4096", fill, "mhc_contract", (u,), x, 0)
    finally:
        _C.set_framework(framework)


def test_sections_of_a_projection():
    """Columns that are not there are not read, whoever calls."""
    heads, proj = wt.GdnHeads(1, 2, 4, 4), torch.randn(1, 3, 28)
    tensors = (None,) * 5, torch.randn(16, 2), None, torch.rand(2), None, None, None
    scalars = (wt.GdnOptions().packed(), True, True, False, 0)

    def pre(q, heads):
        return torch.ops.weft.gdn_pre(q, *tensors[0], *tensors[1:], list(heads), *scalars)

    refuses(ValueError, "gdn_pre_fwd: q: expected 28 columns, got 27", pre, proj[..., :-1], heads)
    message = r"gdn_pre_fwd: q: expected rows \[B, S, columns\] or a section \[B, S, heads, dim\], got 2"
    refuses(ValueError, message, pre, proj[0], heads)
    refuses(ValueError, "gdn_pre_fwd: heads: expected numbers from 1 to", pre, proj, (0, 2, 4, 4))
    refuses(TypeError, "heads: expected 4 numbers, got", pre, proj, (1, 2, 4))
    assert pre(proj, heads)[0].shape == (1, 3, 2, 4)


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_replay_has_no_gradient():
    x = torch.randn(3, 4, 6, requires_grad=True)
    layers = [wt.ReplayLayer(pre=torch.rand(3, 4))]
    refuses(
        NotImplementedError,
        r"mhc_replay_fwd: it has no gradient: call it under torch.no_grad\(\)",
        wt.replay,
        x,
        layers,
        "liger",
    )
    refuses(
        NotImplementedError,
        "mhc_replay_fwd",
        wt.replay,
        x.detach(),
        [wt.ReplayLayer(pre=torch.rand(3, 4, requires_grad=True))],
        "liger",
    )
    with torch.no_grad():
        ((u, y),) = wt.replay(x, layers, "liger")
    same(u, wt.aggregate(x.detach(), layers[0].pre), "under no_grad")
    assert y is None


def test_replay_messages():
    x = torch.randn(3, 4, 6)
    refuses(ValueError, r"mhc_replay_fwd: layers\[0\]", wt.replay, x, [wt.ReplayLayer(pre=torch.rand(3, 5))], "liger")
    refuses(
        TypeError,
        "mhc_replay_fwd: layers: expected dicts",
        _C.replay,
        tuple(wt.Numerics.preset("liger").packed()),
        1,
        x,
        [(1,)],
    )


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads(device):
    """Four Python threads at once, on the same inputs, have the results of one."""
    case = cases.make("boundary_norm", n=4, c=64, lead=(300,), device=device)

    def work():
        leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
        outputs = tuple_of(case.function(**leaves))
        grads = torch.autograd.grad(
            outputs, [t for t in leaves.values() if t is not None], [torch.ones_like(t) for t in outputs]
        )
        return [*outputs, *grads]

    want = work()
    results = [None] * 4

    def run(k):
        for _ in range(5):
            results[k] = work()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(4):
        same(results[k], want, f"thread {k}")


def test_errors_of_threads_are_their_own():
    messages: dict[int, set] = {k: set() for k in range(4)}

    def run(k):
        for _ in range(50):
            try:
                wt.aggregate(torch.randn(3, 4, 6), torch.rand(3, 5 + k))
            except ValueError as error:
                messages[k].add(str(error))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    want = "mhc_aggregate_fwd: pre: dim 1 (streams): expected 4 like the other tensors, got {}"
    assert messages == {k: {want.format(5 + k)} for k in range(4)}


def test_the_interpreter_runs_while_the_library_works():
    """The GIL is released: a counter in another thread moves on during one call, long because it has one core."""
    x = torch.randn(6000, 8, 512)
    phi = torch.randn(80, 8 * 512)
    ticks, stop, threads = [], threading.Event(), torch.get_num_threads()

    def count():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    torch.set_num_threads(1)
    try:
        begin = time.perf_counter()
        wt.project(x, phi)
        end = time.perf_counter()
    finally:
        torch.set_num_threads(threads)
        stop.set()
        thread.join()
    assert end - begin > 0.02, "the call is too short to tell"
    inside = [t for t in ticks if begin + 0.005 < t < end - 0.005]
    assert inside, f"no tick of the other thread in a call of {end - begin:.3f} s"
