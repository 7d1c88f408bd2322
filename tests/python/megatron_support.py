# SPDX-License-Identifier: Apache-2.0
"""What the tests of weft.compat.megatron share."""

import pytest
import torch

EPS = 1e-6
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
sizes = pytest.mark.parametrize("s, b, n, c", [(3, 2, 4, 40), (1, 5, 2, 33), (2, 2, 3, 17)])
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
PARAMETERS = "mapping_proj.weight weight bias alpha_pre alpha_post alpha_res head_fn base scale h_res h_post h_pre"


def depth(n, c, tokens=0, iterations=20):
    return n * c + tokens + 4 * n * iterations + 32
