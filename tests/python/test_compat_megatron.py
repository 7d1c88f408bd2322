# SPDX-License-Identifier: Apache-2.0
"""weft.compat.megatron as a package: signatures, with and without Megatron, misuse."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron_support import make
from signature_support import ours
from torch import nn
from weft.compat import megatron

pytestmark = pytest.mark.usefixtures("native")

# ---- signatures --------------------------------------------------------------------------------------------

SIGNATURES = {  # of names that have no counterpart with parameters; the others: test_compat_signatures.py
    "native_proj_rms_compute_h": "x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps=1e-06, compute_h_eps=1e-06",
    "fused_proj_rms": "x, weight, eps=1e-06",
    "fused_h_post_bda_into": "h_res, original_residual, h_post, x, bias, out",
    "SinkhornKnopp.apply": "H_res_logits, num_iterations",
}


@pytest.mark.parametrize("name, parameters", SIGNATURES.items(), ids=SIGNATURES)
def test_signature(name, parameters):
    function = megatron
    for part in name.split("."):
        function = getattr(function, part)
    assert ours(function) == parameters


# ---- with and without Megatron -----------------------------------------------------------------------------

FAKE = """
from torch import nn
import torch
class HyperConnectionModule(nn.Module):
    def __init__(self, config, layer_number):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.n, self.hidden_size = config.mhc_num_residual_streams, config.hidden_size
        self.sinkhorn_iterations = config.mhc_sinkhorn_iterations
        self.mapping_proj = nn.Linear(self.n * self.hidden_size, self.n * self.n + 2 * self.n, bias=False)
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            setattr(self, name, nn.Parameter(torch.full((1,), config.mhc_init_gating_factor)))
        self.bias = nn.Parameter(torch.zeros(self.n * self.n + 2 * self.n))
        if getattr(config, "slots", False):
            self._sinkhorn_op = None
"""
USE = """
from types import SimpleNamespace
import torch
from megatron.core.transformer.hyper_connection import HyperConnectionModule as Base
from weft.compat.megatron import HyperConnectionModule, uses_native
assert issubclass(HyperConnectionModule, Base) and HyperConnectionModule is not Base
assert uses_native() == NATIVE
config = SimpleNamespace(mhc_num_residual_streams=2, hidden_size=8, mhc_sinkhorn_iterations=5,
                         mhc_init_gating_factor=0.1)
u, res, post = HyperConnectionModule(config, 1)(torch.ones(3, 1, 16))
assert u.shape == (3, 1, 8) and (res.sum(-2) - 1).abs().max() < 1e-5
config.slots = True
try:
    HyperConnectionModule(config, 1)
except NotImplementedError as error:
    assert "bind" in str(error)
else:
    raise AssertionError("a module of branch dev was accepted")
"""


def test_derives_from_megatron_where_there_is_one(tmp_path, native):
    package = tmp_path / "megatron" / "core" / "transformer"
    package.mkdir(parents=True)
    (package / "hyper_connection.py").write_text(FAKE)
    environment = {**os.environ, "WEFT_COMPAT_NATIVE": str(int(native))}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", USE.replace("NATIVE", str(native))]
    subprocess.run(command, env=environment, check=True, timeout=1800)


def test_does_not_need_megatron():
    assert megatron.HyperConnectionModule.__mro__[1].__module__.startswith("weft.compat.megatron")


# ---- misuse ------------------------------------------------------------------------------------------------

M = megatron
X, W, B, ONE = torch.zeros(3, 1, 32), torch.zeros(24, 32), torch.zeros(24), torch.zeros(1)
RES, POST, F = torch.zeros(3, 1, 4, 4), torch.zeros(3, 1, 4), torch.zeros(3, 1, 8)
S = X.view(3, 1, 4, 8)
bda = M.get_bias_dropout_add(True, False)


def merge(res=RES, x=X, post=POST, f=F, bias=None, p=0.0):
    return make(4, 8).fused_h_res_h_post_bda(res, x, post, (f, bias), p, True, False)


MISUSE = {
    "streams": (lambda: make(0, 8), ValueError, "config: expected streams"),
    "iterations": (lambda: make(4, 8, 0), ValueError, "mhc_sinkhorn_iterations of at least 1"),
    "no streams": (
        lambda: M.HyperConnectionModule(SimpleNamespace(hidden_size=8), 1),
        AttributeError,
        "mhc_num_residual_streams or num_residual_streams",
    ),
    "width": (lambda: make(4, 8)(X[..., :31]), ValueError, r"x: expected shape \(3, 1, 32\)"),
    "not a tensor": (lambda: make(4, 8)(None), TypeError, "x: expected a tensor, got NoneType"),
    "h_pre": (lambda: make(4, 8).aggregate(X, F), ValueError, "h_pre: expected shape"),
    "h_res": (lambda: merge(res=POST), ValueError, "h_res: expected shape"),
    "h_post": (lambda: merge(post=F), ValueError, "h_post: expected shape"),
    "f": (lambda: merge(f=X), ValueError, "layer output: expected shape"),
    "bias": (lambda: merge(bias=B), ValueError, r"bias: expected shape \(8,\)"),
    "dropout": (lambda: merge(p=1.0), ValueError, "0 <= dropout_prob < 1, got 1.0"),
    "contract": (lambda: M.HyperConnectionModule.output_contract(X, 3), ValueError, "multiple of n = 3"),
    "square": (lambda: M.fused_sinkhorn(F, 5), ValueError, "input_logits: expected shape"),
    "rounds": (lambda: M.fused_sinkhorn(RES, 0), ValueError, "num_iterations: expected at least 1"),
    "native rounds": (lambda: M.native_sinkhorn(RES, 0), ValueError, "num_iterations: expected at least 1"),
    "into another shape": (lambda: M.fused_h_aggregate_into(S, POST, X), ValueError, "out: expected shape"),
    "into another dtype": (lambda: M.fused_h_aggregate_into(S, POST, F.half()), ValueError, "out: expected contiguous"),
    "into a parameter": (
        lambda: M.native_h_aggregate_into(S, POST, F.clone().requires_grad_()),
        ValueError,
        "outside of autograd",
    ),
    "weight": (lambda: M.fused_proj_rms(X.view(3, 32), W[:, :30]), ValueError, "weight: expected shape"),
    "rows": (
        lambda: M.fused_proj_rms_compute_h(X.view(3, 32), W[:20], ONE, ONE, ONE, B, 4),
        ValueError,
        r"weight: expected shape \(24, 32\)",
    ),
    "head": (lambda: M.learned_output_contract(X, W[:3], B[:4], ONE, 4, 1e-6), ValueError, "head_fn: expected shape"),
    "head's n": (lambda: M.learned_output_contract(X, W[:3], B[:3], ONE, 3, 1e-6), ValueError, "multiple of n = 3"),
    "add": (lambda: M.native_fused_add_3(X, X, F), ValueError, "c: expected shape"),
    "slots": (lambda: M.bind(nn.Linear(2, 2)), ValueError, "expected a module with slots"),
    "another preset": (lambda: M.bind(nn.Linear(2, 2), "liger"), ValueError, "preset: expected one of megatron_main"),
    "residual": (lambda: bda((X, None), F, 0.0), ValueError, "residual: expected shape"),
    "prob": (lambda: bda((X, None), X, 1.0), ValueError, "0 <= prob < 1"),
}


@pytest.mark.parametrize("call, error, words", MISUSE.values(), ids=MISUSE)
def test_misuse(call, error, words):
    with pytest.raises(error, match=words):
        call()
