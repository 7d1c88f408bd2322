# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on data that is made to hurt, by bench/rule_accuracy.py: within the bounds that it derives, and what is
not is noticed."""

import importlib.util
import sys

import pytest
import torch


@pytest.fixture
def accuracy(root):
    spec = importlib.util.spec_from_file_location("rule_accuracy", root / "bench" / "rule_accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def status_of(accuracy, monkeypatch, device, dtype) -> int:
    options = ["--device", device.type, "--dtype", dtype, "--tokens", "150", "--no-fla"]
    monkeypatch.setattr(sys, "argv", ["rule_accuracy.py", *options])
    return accuracy.main()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_within_bounds(accuracy, device, dtype, monkeypatch, capsys):
    assert status_of(accuracy, monkeypatch, device, dtype) == 0, capsys.readouterr().out


@pytest.mark.parametrize("wrong", [1 + 2**-5, float("nan")])
def test_beyond_bounds(accuracy, wrong, monkeypatch):
    right = accuracy.weft_rule

    def rule(query, *rest):
        o, state = right(query, *rest)
        return o if query.dtype == torch.float64 else o * wrong, state

    monkeypatch.setattr(accuracy, "weft_rule", rule)
    assert status_of(accuracy, monkeypatch, torch.device("cpu"), "bf16") == 1
