# SPDX-License-Identifier: Apache-2.0
"""What the tests of Gated DeltaNet share."""

import torch
import weft.torch as wt

HEADS = wt.GdnHeads(2, 4, 8, 16)


def front(device="cpu", heads=HEADS, width=4, bias=True, dtype=torch.float32, **options) -> wt.GatedDeltaFront:
    torch.manual_seed(7)
    module = wt.GatedDeltaFront(heads, width, bias=bias, device=device, dtype=dtype, **options)
    with torch.no_grad():
        module.dt_bias.normal_()
    return module


def rows(*lead, device="cpu", dtype=torch.float32, heads=HEADS) -> torch.Tensor:
    return torch.randn(*lead, heads.columns).to(device, dtype)


def everything(module, proj, **arguments) -> list:
    """Results and gradients: of the projection, of the state where there is one, of the parameters."""
    leaves = [proj.detach().requires_grad_()]
    state = arguments.pop("state", None)
    if state is not None:
        leaves.append(state.detach().requires_grad_())
        arguments["state"] = leaves[1]
    out = [t for t in module(leaves[0], **arguments) if t is not None]
    torch.manual_seed(3)
    upstream = [torch.randn(t.shape, device=t.device, dtype=torch.float32).to(t.dtype) for t in out]
    return [*out, *torch.autograd.grad(out, [*leaves, *module.parameters()], upstream)]
