# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the Python tests. weft is the installed package, or else the tree's own (`make python` builds it)."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("weft") is None:
    sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402  (the path above comes first)
import torch._dynamo  # noqa: E402
import weft  # noqa: E402
from weft.compat import megatron  # noqa: E402
from weft.torch import storage  # noqa: E402

NO_GPU = None if torch.cuda.is_available() and weft.info()["cuda"] else "no GPU: torch or weft cannot use one here"
if NO_GPU and os.environ.get("WEFT_TEST_NEEDS_GPU"):  # a record of a GPU is not made of skipped tests
    pytest.exit(NO_GPU, returncode=4)
needs_gpu = pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))


def pytest_collection_modifyitems(items):
    """WEFT_TEST_SHARE=2/4 runs every fourth test, from the second on."""
    share = os.environ.get("WEFT_TEST_SHARE")
    if share:
        first, step = map(int, share.split("/"))
        items[:] = items[first - 1 :: step]


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(1234)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request) -> torch.device:
    """Every device that serves the test's dtype, where it has one."""
    if request.param == "cuda" and request.node.callspec.params.get("dtype") == torch.float64:
        pytest.skip("float64 is served by the reference, on the CPU")
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture
def fresh_dynamo():
    """A compiler that remembers nothing of other tests, and leaves them nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(params=["move", "copy"])
def way(request, monkeypatch):
    """A test with either way of giving an output its memory back."""
    if request.param == "move" and not storage.CAN_MOVE:
        pytest.skip("this PyTorch cannot move memory between storages")
    monkeypatch.setattr(storage, "CAN_MOVE", request.param == "move")


@pytest.fixture(params=[False, True], ids=["weft", "native"])
def native(request):
    """weft.compat.megatron over weft, and over plain PyTorch, which has to be right as well."""
    megatron.use_native(request.param)
    yield request.param
    megatron.use_native(False)
