# SPDX-License-Identifier: Apache-2.0
"""A whole model has bitwise the same logits for a sequence alone, in a batch, in pieces and token by token, where its
sub-layers have: weft's operators leave that as it is. The model is that of examples/serve_by_token.py. Its sub-layers are
Gated DeltaNet layers by weft's operators and MLPs; all their products, and the head's, see one token at a time, because
nn.Linear's sums depend on the number of rows. On a GPU of compute capability 9.0 sites in bf16 are fused, those in f32 not."""

import importlib.util
from pathlib import Path

import pytest
import torch
import weft.torch as wt
from conftest import needs_gpu
from torch import nn

PATH = Path(__file__).parents[2] / "examples" / "serve_by_token.py"
STEPS, BATCH = 13, 7


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("serve_by_token", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(
    params=[(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 256)], ids=["f32", "bf16", "bf16-256"]
)
def model(example, request, device):
    dtype, channels = request.param
    return example.Model(channels, layers=2).to(device, dtype)


@pytest.fixture(autouse=True)
def one_thread():
    """These models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tokens(device):
    return torch.randint(0, 64, (BATCH, STEPS)).to(device)


def in_pieces(model, tokens, cuts):
    cache = model.new_cache(len(tokens))
    return torch.cat([model(piece, cache) for piece in tokens.split(cuts, 1)], 1)


def test_alone_and_in_a_batch(model, tokens):
    together = model(tokens)
    assert together.isfinite().all()
    for row in range(BATCH):
        assert torch.equal(model(tokens[row : row + 1])[0], together[row])


@pytest.mark.parametrize("cuts", [1, 2, [5, 1, 7]])
def test_in_pieces(model, tokens, cuts):
    assert torch.equal(in_pieces(model, tokens, cuts), model(tokens))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_threads(model, tokens):
    few = tokens[:3, :3]
    want = model(few)
    torch.set_num_threads(2)
    assert torch.equal(model(few), want)


@pytest.mark.parametrize("heads", [(2, 4, 64, 64), (16, 32, 64, 64)], ids=["few", "many"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)], indirect=True)
def test_rule_in_chunks(example, device, heads, monkeypatch):
    """Heads of 64 in bf16: the GPU computes their rule in chunks of 64 tokens, so pieces are multiples of that, but for
    the last. Many heads take other kernels than few."""
    monkeypatch.setattr(example, "HEADS", wt.GdnHeads(*heads))
    model = example.Model(256, layers=1).to(device, torch.bfloat16)
    tokens = torch.randint(0, 64, (3, 141)).to(device)
    together = model(tokens)
    assert together.isfinite().all()
    assert torch.equal(in_pieces(model, tokens, [64, 64, 13]), together)
    for row in range(3):
        assert torch.equal(model(tokens[row : row + 1])[0], together[row])


def test_cache_matters(model, tokens):
    """The comparison can fail: without what came before, logits are others."""
    want = model(tokens)
    assert not torch.equal(model(tokens[:, 1:]), want[:, 1:])
    assert not torch.equal(model(tokens.flip(0)), want)


def test_layers_are_joined(model):
    assert model.stack.joins() == [None] * 3 and isinstance(model.stack.layers[0].sublayer, nn.Module)
