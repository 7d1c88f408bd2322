# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/ run, learn, and put weft where they say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps", "20", "--layers", "2", "--channels", "32", "--context", "32", "--batch", "8"]


# What the C++ runtime says when a thread is still there at exit. PyTorch's gloo groups do that now and then, with or
# without weft, after all work is done; the losses of such a run are as good as any.
ABORT_AT_EXIT = "terminate called without an active exception"


def losses(command, gloo=False):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0 or (gloo and ABORT_AT_EXIT in run.stderr), run.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", run.stdout, re.MULTILINE)]


def learned(values):
    # A model that knows nothing has a loss of about ln 256 = 5.5; NaN is not below anything.
    return len(values) == 3 and 4 < values[0] < 7 and values[-1] < values[0] - 0.5


GPT = [sys.executable, str(EXAMPLES / "gpt_mhc.py"), *SMALL]


def test_gpt_and_recompute_changes_nothing():
    plain = losses(GPT)
    assert learned(plain)
    assert losses([*GPT, "--recompute", "3"]) == plain


def test_gpt_options():
    assert learned(losses([*GPT, "--streams", "2", "--contract", "learned", "--dropout", "0.1", "--recompute", "2"]))


def test_gpt_fsdp2():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "gpt_mhc_fsdp2.py"), *SMALL]
    plain = losses(command, gloo=True)
    assert learned(plain)
    assert losses([*command, "--recompute", "2"], gloo=True) == plain


def test_finetune_deepseek_v4(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: its example is not run")
    command = [sys.executable, str(EXAMPLES / "finetune_deepseek_v4.py"), "--steps", "20", "--batch", "2"]
    assert learned(losses([*command, "--out", str(tmp_path)]))
    assert (tmp_path / "model.safetensors").exists()


def test_serve_by_token():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "serve_by_token.py"), "--tokens", "4", "--batch", "2"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and run.stdout.count("same bits") == 2 and "DIFFERENT" not in run.stdout, run.stdout


def test_convert_nanogpt():
    """The function stays at the conversion, the old checkpoint loads, and the streams part in training."""
    small = ["--steps", "30", "--layers", "2", "--channels", "32", "--context", "32"]
    command = [sys.executable, str(EXAMPLES / "convert_nanogpt.py"), *small]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-3000:]
    # Four parts, each with some dozen roundings more than plain addition.
    assert float(re.search(r"logits off by (\S+)", run.stdout)[1]) <= 4 * 64 * 2**-24
    assert "12 new ones stay fresh, same logits: True" in run.stdout
    values = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", run.stdout, re.MULTILINE)]
    assert len(values) == 4 and 4 < values[0] < 7 and values[2] < values[0] - 0.5 and values[3] < values[2]
    before, after = (float(x) for x in re.findall(r"streams apart: (\S+)", run.stdout))
    assert before <= 64 * 2**-24 < 1e-4 < after


@pytest.fixture
def layer_spec():
    module = importlib.util.spec_from_file_location("megatron_layer_spec", EXAMPLES / "megatron_layer_spec.py")
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    return loaded


def test_megatron_layer_spec(layer_spec):
    class Layer:
        pass

    places = dict.fromkeys(layer_spec.PLACES)
    spec = SimpleNamespace(module=nn.Module, submodules=SimpleNamespace(mlp="mlp", **places))
    new = layer_spec.with_weft(spec, Layer)
    assert new.module is Layer and new.submodules.mlp == "mlp"
    for place in layer_spec.PLACES:
        assert getattr(new.submodules, place).__module__.startswith("weft.compat.megatron")
        assert getattr(spec.submodules, place) is None  # the old one is as it was
    with pytest.raises(ValueError, match="mlp_hyper_connection"):
        layer_spec.with_weft(SimpleNamespace(module=None, submodules=SimpleNamespace()), Layer)


def test_megatron_bind(layer_spec):
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Sequential(nn.Identity()))
    for module in (model[1], model[2][0]):
        module._h_post_bda_op = module._sinkhorn_op = None
    mixer = model[0]
    mixer._fused_streamed_pre_gated_delta_rule = mixer.pre_gated_delta_rule = None
    mixer.activation = "silu"
    assert layer_spec.bind_weft(model, rule=False) == 3
    assert callable(model[1]._sinkhorn_op) and callable(model[2][0]._h_post_bda_op)
    assert callable(mixer.pre_gated_delta_rule) and not hasattr(mixer, "gated_delta_rule")
