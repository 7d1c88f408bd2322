# SPDX-License-Identifier: Apache-2.0
"""Blocks of other models as stacks: their function stays, keyword arguments go where they are taken, names of parameters
have a map, tuples are served or rejected."""

import copy

import pytest
import torch
import weft.torch as wt
from compare import DRAWS, PATH, UNIT, Noise, close, move
from torch import nn

C, N = 16, 4
EXACT = "transformer_engine"  # no eps: plain blocks stay what they are


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / C**0.5
        return self.out((scores if mask is None else scores + mask).softmax(-1) @ v)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(C), Attention(), norm(C), Mlp()

    def forward(self, x, mask=None):
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.mlp(self.ln_2(x))


PARTS = [("ln_1", "attn"), ("ln_2", "mlp")]


class Model(nn.Module):
    """Two blocks, with parameters that are all of their own."""

    def __init__(self, norm=nn.LayerNorm, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(2)
        self.h = nn.ModuleList(Block(norm) for _ in range(2))
        self.to(dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn(p.shape) / 8)

    def forward(self, x, mask=None):
        for block in self.h:
            x = block(x, mask=mask)
        return x


def converted(model, **options):
    options = {"numerics": EXACT, "dtype": next(model.parameters()).dtype, **options}
    new = copy.deepcopy(model)
    new.h = nn.ModuleList([wt.convert_blocks(new.h, PARTS, C, N, **options)])
    return new


def results(model, x, mask, names) -> list[torch.Tensor]:
    """The output, the gradient of x and those of the parameters that both models have."""
    leaf = x.clone().requires_grad_()
    y = model(leaf, mask=mask)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *map(model.get_parameter, names)], upstream)]


def inputs():
    torch.manual_seed(4)
    mask = torch.where(torch.rand(3, 5, 5) < 0.3, -torch.inf, 0.0).double()
    mask.diagonal(dim1=1, dim2=2).zero_()
    return torch.randn(3, 5, C, dtype=torch.float64), mask


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("fold", [False, True])
def test_function_stays(fold, streams):
    """Results and all gradients of the old parameters, in float64, where the bound is that of rounding."""
    model = Model(lambda c: nn.RMSNorm(c, eps=1e-5) if fold else nn.LayerNorm(c))
    new = copy.deepcopy(model)
    stack = wt.convert_blocks(new.h, PARTS, C, streams, fold_norms=fold, numerics=EXACT, dtype=torch.float64)
    new.h = nn.ModuleList([stack])
    assert stack.joins() == [None] * 3 and stack.joins_entry() is None
    names = {f"h.{a}": f"h.0.{b}" for a, b in wt.block_names(stack).items()}
    assert set(names) == set(model.state_dict())
    x, mask = inputs()
    want = results(model, x, mask, names)
    unit = UNIT[torch.float64]
    with Noise(unit):
        moved = [results(model, move(x, unit), mask, names) for _ in range(DRAWS)]
    for k, (got, exact) in enumerate(zip(results(new, x, mask, names.values()), want, strict=True)):
        noise = max(float((m[k] - exact).abs().max()) for m in moved)
        close(got, exact, PATH * noise, ["output", "d_x", *names][k])


@pytest.mark.parametrize("preset", ["deepseek_v4", "liger"])
def test_an_eps_shows(preset):
    """Rules with an eps of 1e-6 keep the function to about that for every part."""
    model, (x, mask) = Model(), inputs()
    want, got = model(x, mask=mask), converted(model, numerics=preset)(x, mask=mask)
    error = float(((got - want).abs().max() / want.abs().max()).detach())
    assert 1e-9 < error < 4 * 8e-6


def test_fresh_gates():
    """plain=False leaves the sites as they are made."""
    stack = wt.convert_blocks(Model().h, PARTS, C, N, plain=False, dtype=torch.float64)
    for k, layer in enumerate(stack.layers):
        fresh = wt.HyperConnection(C, N, site=k, dtype=torch.float64)
        assert torch.equal(layer.connection.alpha, fresh.alpha) and torch.equal(layer.connection.beta, fresh.beta)
    plain = wt.convert_blocks(Model().h, PARTS, C, N, dtype=torch.float64)
    pre = plain.layers[0].connection(torch.randn(2, N, C, dtype=torch.float64)).pre
    assert (pre - 1 / N).abs().max() < 1e-15 and not any(layer.connection.alpha.any() for layer in plain.layers)


def test_old_checkpoint():
    """A converted model loads what the plain one has saved, by the map of names; only the sites are new."""
    model, other = Model(), Model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    new = converted(other)
    names = {f"h.{a}": f"h.0.{b}" for a, b in wt.block_names(new.h[0]).items()}
    state = {names[k]: t for k, t in model.state_dict().items()}
    missing, unexpected = new.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) == {k for k in new.state_dict() if ".connection." in k}
    x, mask = inputs()
    assert torch.equal(new(x, mask=mask), converted(model)(x, mask=mask))


@pytest.mark.parametrize("options", [{}, {"join": False}, {"recompute": 2}, {"rebuild": True}], ids=str)
def test_keyword_arguments(options):
    """A mask goes to attention, whose forward takes it, and not to the MLP; layer by layer, joined and recomputed alike."""
    model, (x, mask) = Model(), inputs()
    want = converted(model)(x, mask=mask)
    got = converted(model, **options)(x, mask=mask)
    assert torch.equal(got, want) and not torch.equal(got, converted(model, **options)(x))
    with pytest.raises(TypeError, match="HyperConnectionStack: padding: expected an argument that a sub-layer takes"):
        converted(model, **options).h[0](x, padding=mask)


def test_keyword_arguments_of_a_layer_with_hooks():
    """A layer that is called as a module takes its own too."""
    model, (x, mask) = Model(), inputs()
    new = converted(model)
    want = new(x, mask=mask)
    for layer in new.h[0].layers:
        layer.register_forward_hook(lambda module, args, output: None)
    assert torch.equal(new(x, mask=mask), want)


def test_any_keyword_arguments():
    """A forward with **kwargs gets all of them; a layer that is called by itself, what it is given."""
    seen = []

    class Open(nn.Module):
        def forward(self, x, scale=1.0, **more):
            seen.append(sorted(more))
            return x * scale

    stack = wt.HyperConnectionStack([Open(), nn.Tanh()], C, N)
    stack(torch.randn(2, C), scale=2.0, label=1)
    assert seen == [["label"]]
    assert stack.layers[0].takes is None and stack.layers[1].takes == frozenset()
    with pytest.raises(TypeError, match="label"):
        stack.layers[1](torch.randn(2, N, C), label=1)


def test_compiles(fresh_dynamo):
    model, (x, mask) = Model(dtype=torch.float32), [t.float() for t in inputs()]
    new = converted(model)
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=mask), new(x, mask=mask), rtol=2**-20, atol=2**-20)


# ---- tuples ----------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value(x)


SERVED = {
    "output": (lambda x: x.tanh(), None),
    "a pair without a bias": (lambda x: (x.tanh(), None), None),
    "the first of a tuple": (lambda x: (x.tanh(), x @ x.mT), 0),
    "the last of a tuple": (lambda x: (x @ x.mT, 1, x.tanh()), -1),
    "an output where a tuple might be": (lambda x: x.tanh(), 0),
}
REJECTED = {
    "attention weights": (lambda x: (x, x @ x.mT), r"\(tensor \[2, 3, 16\], tensor \[2, 3, 3\]\)"),
    "three": (lambda x: (x, None, None), r"\(tensor \[2, 3, 16\], NoneType, NoneType\)"),
    "no tensor": (lambda x: {"output": x}, "got dict"),
    "nothing": (lambda x: None, "got NoneType"),
}


@pytest.mark.parametrize("name", SERVED)
def test_results_that_are_served(name):
    value, output = SERVED[name]
    x = torch.randn(2, 3, C)
    stacks = [
        wt.HyperConnectionStack([Returns(v)] * 2, C, N, output=o) for v, o in ((torch.tanh, None), (value, output))
    ]
    stacks[1].load_state_dict(stacks[0].state_dict())
    assert torch.equal(stacks[0](x), stacks[1](x))


@pytest.mark.parametrize("name", REJECTED)
def test_results_that_are_rejected(name):
    value, words = REJECTED[name]
    with pytest.raises(TypeError, match=rf"sublayer: expected an output .* with output=0 the first.*{words}"):
        wt.HyperConnectionStack([Returns(value)], C, N)(torch.randn(2, 3, C))


# ---- misuse ----------------------------------------------------------------------------------------------------------


class OnePlus(nn.RMSNorm):
    """Gemma's: a gain of 1 + weight under the name of an RMSNorm."""

    def forward(self, x):
        return super().forward(x) / self.weight * (1 + self.weight)


def test_misuse():
    blocks = Model().h
    bad = {
        "parts: expected modules of block 0, which has ln_1, attn, ln_2, mlp, got 'norm'": [("norm", "attn")],
        "got 'attention'": [("ln_1", "attention")],
    }
    for words, parts in bad.items():
        with pytest.raises(ValueError, match=words):
            wt.convert_blocks(blocks, parts, C, N)
    fold = {"fold_norms": True, "dtype": torch.float64}
    with pytest.raises(ValueError, match="which computes something else"):
        wt.convert_blocks(blocks, PARTS, C, N, **fold)
    with pytest.raises(ValueError, match="OnePlus.*which computes something else"):
        wt.convert_blocks(Model(lambda c: OnePlus(c, eps=1e-6)).h, PARTS, C, N, **fold)
    with pytest.raises(ValueError, match=r"expected RMSNorms with weight \[16\] and an eps, got None"):
        wt.convert_blocks(blocks, [(None, "attn")], C, N, **fold)
    with pytest.raises(ValueError, match=r"norms with one eps, got \[1e-06, 1e-05\]"):
        eps = iter([1e-5, 1e-6] * 2)
        wt.convert_blocks(Model(lambda c: nn.RMSNorm(c, eps=next(eps))).h, PARTS, C, N, **fold)
    with pytest.raises(TypeError, match="norm: expected fold_norms instead"):
        wt.convert_blocks(blocks, PARTS, C, N, norm=True)
    with pytest.raises(ValueError, match="expected one that convert_blocks has made"):
        wt.block_names(wt.HyperConnectionStack([nn.Tanh()], C, N))
    assert (
        wt.block_names(wt.convert_blocks(blocks, [(None, "mlp")], C, N))["1.mlp.up.bias"] == "layers.1.sublayer.up.bias"
    )


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [False, True])
def test_llama(fold):
    """The real package: logits and gradients with a padding mask, and the tokens of generate(), which uses a cache."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: its blocks are not converted"
    )
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", use_cache=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) / 8)
    new = copy.deepcopy(model)
    parts = [("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")]
    stack = wt.convert_blocks(new.model.layers, parts, 32, N, output=0, fold_norms=fold, numerics=EXACT)
    new.model.layers = nn.ModuleList([stack])
    text = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    kept = mask.bool()

    def logits_and_gradient(net):
        net.zero_grad()
        logits = net(text, attention_mask=mask).logits[kept]
        logits.square().mean().backward()
        return logits.detach(), net.model.embed_tokens.weight.grad.clone()

    # float32 twice: a few hundred roundings of logits, and of gradients that cancel.
    for got, want, allowed in zip(logits_and_gradient(new), logits_and_gradient(model), (1e-5, 1e-4), strict=True):
        assert (got - want).abs().max() <= allowed * want.abs().max()
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(new.generate(text, **settings), model.generate(text, **settings))
    names = {f"model.layers.{a}": f"model.layers.0.{b}" for a, b in wt.block_names(stack).items()}
    state = {names.get(k, k): t for k, t in model.state_dict().items()}
    missing, unexpected = new.load_state_dict(state, strict=False)
    assert not unexpected and all(".connection." in k for k in missing)
