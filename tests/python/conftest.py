# SPDX-License-Identifier: Apache-2.0
"""Fixtures."""

import pytest
import torch
from weft.torch import storage


@pytest.fixture(params=["move", "copy"])
def way(request, monkeypatch):
    """A test with either way of giving an output its memory back."""
    if request.param == "move" and not storage.CAN_MOVE:
        pytest.skip("this PyTorch cannot move memory between storages")
    monkeypatch.setattr(storage, "CAN_MOVE", request.param == "move")


@pytest.fixture(params=["cpu"] + ["cuda"] * torch.cuda.is_available())
def device(request):
    return request.param
