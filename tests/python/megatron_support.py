# SPDX-License-Identifier: Apache-2.0
"""What the tests of weft.compat.megatron share."""

from types import SimpleNamespace

import pytest
import torch
from compat_oracle import dtypes_but_f16
from weft.compat import megatron

EPS = 1e-6
dtypes = dtypes_but_f16
sizes = pytest.mark.parametrize("s, b, n, c", [(3, 2, 4, 40), (1, 5, 2, 33), (2, 2, 3, 17)])
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
PARAMETERS = "mapping_proj.weight weight bias alpha_pre alpha_post alpha_res head_fn base scale h_res h_post h_pre"


def config(n=4, c=40, iterations=20, **fields):
    defaults = dict(mhc_num_residual_streams=n, hidden_size=c, mhc_sinkhorn_iterations=iterations,
                    mhc_init_gating_factor=0.01, params_dtype=torch.float32, sequence_parallel=False,
                    perform_initialization=True)  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def make(n=4, c=40, iterations=20, dtype=torch.float32, seed=0, **fields):
    """A module whose parameters are all random, so that every one of them matters."""
    torch.manual_seed(seed)
    module = megatron.HyperConnectionModule(config(n, c, iterations, params_dtype=dtype, **fields), 1)
    with torch.no_grad():
        module.bias.normal_()
        for name in ALPHAS:
            getattr(module, name).normal_()
    return module
