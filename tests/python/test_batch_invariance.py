# SPDX-License-Identifier: Apache-2.0
"""A whole model has bitwise the same logits for a sequence alone, in a batch, in pieces and token by token, where its
sub-layers have: weft's operators leave that as it is. The model is that of examples/serve_by_token.py; its products see
one token at a time, because nn.Linear's sums depend on the number of rows."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

PATH = Path(__file__).parents[2] / "examples" / "serve_by_token.py"
STEPS, BATCH = 13, 7


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("serve_by_token", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def model(example, request):
    return example.Model(layers=2).to(request.param)


@pytest.fixture(autouse=True)
def one_thread():
    """These models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (BATCH, STEPS))


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


def test_threads(model, tokens):
    few = tokens[:3, :3]
    want = model(few)
    torch.set_num_threads(2)
    assert torch.equal(model(few), want)


def test_cache_matters(model, tokens):
    """The comparison can fail: without what came before, logits are others."""
    want = model(tokens)
    assert not torch.equal(model(tokens[:, 1:]), want[:, 1:])
    assert not torch.equal(model(tokens.flip(0)), want)


def test_layers_are_joined(model):
    assert model.stack.joins() == [None] * 3 and isinstance(model.stack.layers[0].sublayer, nn.Module)
