# SPDX-License-Identifier: Apache-2.0
"""gdn_rule beyond what every operator is asked: pieces, chunks, heads."""

import cases
import pytest
import torch
import weft.torch as wt
from compare import same
from gdn_support import front, rows


def test_rule_in_pieces(device):
    cases.need("gdn_rule", device)
    out = front(device)(rows(2, 13, device=device))
    whole, final = wt.gdn_rule(out.query, out.key, out.value, out.beta, out.g, final_state=True)
    state, parts = None, []
    for span in (slice(0, 1), slice(1, 5), slice(5, 13)):
        o, state = wt.gdn_rule(*(t[:, span] for t in (*out[:3], out.beta, out.g)), state=state, final_state=True)
        parts.append(o)
    same(torch.cat(parts, 1), whole, "pieces")
    same(state, final, "state")


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_rule_in_chunks_is_the_same_function(chunk):
    """The reference backend computes it either way; float64, 13 tokens: a few hundred roundings."""
    tensors = [t.double() for t in front()(rows(2, 13))[:6]]
    arguments = (*tensors[:3], tensors[4], tensors[5])
    want, got = wt.gdn_rule(*arguments)[0], wt.gdn_rule(*arguments, chunk=chunk)[0]
    assert (got - want).abs().max() <= 1000 * 2**-53 * want.abs().max()


def test_rule_takes_key_heads(device):
    """Query and key with their own heads, or repeated: the same bits."""
    cases.need("gdn_rule", device)
    few, many = front(device, repeat=False), front(device)
    proj = rows(2, 9, device=device)
    results = []
    for module in (few, many):
        leaf = proj.detach().requires_grad_()
        out = module(leaf)
        o, _ = wt.gdn_rule(out.query, out.key, out.value, out.beta, out.g)
        torch.manual_seed(3)
        results.append([o, *torch.autograd.grad(o, leaf, torch.randn_like(o))])
    same(results[0][0], results[1][0], "o")
    a, b = results[0][1], results[1][1]
    assert (a - b).abs().max() <= 16 * 2**-24 * b.abs().max()  # heads of a group are summed in another place
