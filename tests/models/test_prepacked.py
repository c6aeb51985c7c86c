"""Packed linear layers: the same numbers within rounding, renewed with the weights, handed back whatever happens."""

import pytest
import torch
import torch.nn.functional as F
from fakes.families import FAMILIES, build
from fakes.families import tokens as random_tokens
from torch import nn

from specdec.models import prepacked
from specdec.models.prepacked import OWN, PACKED, ROWS, PrepackedLinears, can_prepack, prepacked_linear
from specdec.models.target import Target

F32, BF16 = torch.float32, torch.bfloat16
CAN_BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
NEEDS_BF16 = pytest.mark.skipif(not CAN_BF16, reason="this processor multiplies no bfloat16")


@pytest.fixture(autouse=True)
def pack_everything(monkeypatch):
    """Small matrices are left alone for speed's sake; here they are packed from the first row on, so that tests stay small."""
    monkeypatch.setattr(prepacked, "PREPACK_FROM_WEIGHTS", 1)
    monkeypatch.setattr(prepacked, "best_kernels", lambda groups: (PACKED,) * (ROWS[-1] + 1))


def random(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=NEEDS_BF16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (64, 32), (130, 257)])
def test_products_equal_the_plain_ones_within_rounding(outputs, inputs, bias, dtype):
    weight, offset = random(outputs, inputs, dtype=dtype), random(outputs, seed=1, dtype=dtype) if bias else None
    forward = prepacked_linear(weight, offset)
    for shape in ((1, inputs), (1, 1, inputs), (1, 4, inputs), (2, 3, inputs), (61, inputs)):
        x = random(*shape, seed=2, dtype=dtype)
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        # One rounding of the result, and sums of `inputs` products in float32.
        size = (x.double().abs() @ weight.double().abs().T) + (0 if offset is None else offset.double().abs())
        bound = size * (1e-6 * inputs**0.5 if dtype == F32 else 2**-7)
        assert forward(x).dtype == dtype and forward(x).shape == exact.shape
        assert ((forward(x).double() - exact).abs() <= bound).all()
    strided = random(4, 2 * inputs, dtype=dtype)[:, ::2]
    assert torch.allclose(forward(strided), F.linear(strided, weight, offset), atol=1e-4 if dtype == F32 else 0.5)


def test_modules_come_back_after_errors_and_what_cannot_be_packed_runs_plainly(monkeypatch):
    assert can_prepack(random(8, 8)) == torch.backends.mkldnn.is_available()
    assert can_prepack(random(8, 8).to(BF16)) == CAN_BF16
    half = random(8, 8, dtype=torch.float16)
    assert not can_prepack(half) and not can_prepack(half.double())
    x = random(2, 8, dtype=torch.float16)
    assert torch.equal(prepacked_linear(half)(x), F.linear(x, half))
    model, x = Block(), random(5, 16)
    packed = observed(model, x)
    replaced = model.out.forward = lambda x: F.linear(x, model.out.weight)  # as accelerate does
    handle = model.twice.register_forward_hook(lambda module, args, output: output + 1)
    expected = model(x)
    with pytest.raises(RuntimeError, match="stop"), packed.active():
        assert "forward" in model.a.__dict__ and model.out.forward is replaced and "forward" not in model.twice.__dict__
        assert torch.allclose(model(x), expected, atol=1e-5)
        raise RuntimeError("stop")
    assert not any("forward" in m.__dict__ for m in (model.a, model.b, model.c, model.twice))
    assert model.out.forward is replaced
    handle.remove()
    with pytest.raises(RuntimeError, match="stop"), packed.observing():
        raise RuntimeError("stop")
    assert not any(m._forward_pre_hooks for m in model.modules())
    model = nn.Sequential(type("Quantised", (nn.Linear,), {})(8, 8), nn.Linear(8, 8))
    with PrepackedLinears(model).active():
        assert "forward" not in model[0].__dict__ and "forward" in model[1].__dict__
    with PrepackedLinears(model, most_bytes=8).active():
        assert not any("forward" in m.__dict__ for m in model)
    monkeypatch.undo()
    assert not can_prepack(random(8, 8))


class Block(nn.Module):
    """Three layers that read the same input, one that reads something else, one that is called twice."""

    def __init__(self, dtype=F32, bias=False):
        super().__init__()
        torch.manual_seed(0)
        sizes = ((16, 16), (16, 8), (16, 24), (24, 16), (16, 16))
        self.a, self.b, self.c, self.out, self.twice = (nn.Linear(*size, bias=bias, dtype=dtype) for size in sizes)
        for p in self.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        together = self.a(x).repeat(1, 2)[:, :24] + self.b(x).repeat(1, 3) + self.c(x)
        return self.twice(self.twice(self.out(together)))


def observed(model: nn.Module, x) -> PrepackedLinears:
    packed = PrepackedLinears(model)
    with packed.observing():
        model(x)
    return packed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=NEEDS_BF16)])
def test_layers_of_one_input_are_joined_and_a_model_computes_the_same(dtype, bias):
    model, x = Block(dtype, bias), random(5, 16, dtype=dtype)
    expected, packed = model(x), observed(model, x)
    assert [len(group.modules) for group in packed._groups] == [3, 1, 1]
    for rows in (1, 5, 5, 2):  # the same input object twice, and others
        with packed.active():
            assert torch.allclose(model(x[:rows]), expected[:rows], atol=1e-5 if dtype == F32 else 0.1, rtol=0)
    with packed.active():
        b_alone, y = model.b(x), random(5, 16, seed=9, dtype=dtype)  # before the layer that computes for all
        assert torch.allclose(b_alone, F.linear(x, model.b.weight, model.b.bias), atol=0.05)
        model.a(x)  # another input gets no old part
        assert torch.allclose(model.c(y), F.linear(y, model.c.weight, model.c.bias), atol=0.05)
    assert all(group._input is None for group in packed._groups)  # nothing of a turn is held on to


@pytest.mark.parametrize("which", ["a", "b", "out"])
def test_a_changed_weight_is_seen_at_the_next_lending(which):
    model, x = Block(bias=True), random(5, 16)
    packed = observed(model, x)
    layer = getattr(model, which)

    def fresh(values):
        return nn.Parameter(torch.randn_like(values), requires_grad=False)

    for change in (
        lambda: None,
        lambda: layer.weight.mul_(2.0),
        lambda: setattr(layer, "weight", fresh(layer.weight)),
        lambda: layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()}),
        lambda: layer.bias.add_(1.0),
        lambda: setattr(layer, "bias", fresh(layer.bias)),
    ):
        change()
        with packed.active():
            inside = model(x)
        assert torch.allclose(inside, model(x), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "gpt-oss", "gpt2"])
def test_whole_models_compute_the_same_prepacked(name):
    model, prompt = build(*FAMILIES[name]), random_tokens(9, seed=4)
    with torch.no_grad():
        expected = model(prompt[None]).logits[0]
    target = Target(model)
    with target.inference():
        packed = sum("forward" in m.__dict__ for m in model.modules() if type(m) is nn.Linear)
        logits = target.forward(prompt, target.new_cache(16)).logits
    assert packed > 0 and torch.allclose(logits, expected, atol=1e-4)
    if name == "llama":
        sizes = sorted(len(group.modules) for group in target._prepacked._groups)
        assert sizes == sorted([3, 1, 2, 1] * 4 + [1])  # q k v, o, gate up, down; the head
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """The real choice, in a cache of its own."""
    monkeypatch.undo()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    prepacked._book.cache_clear()
    yield tmp_path
    prepacked._book.cache_clear()


def test_kernels_are_measured_once_per_machine_by_one_thread_and_kept(measuring, monkeypatch):
    group, state = [random(96, 64), random(32, 64)], torch.get_rng_state()
    kernels = prepacked.best_kernels([group])
    assert torch.equal(torch.get_rng_state(), state)  # a first use, which measures, draws as a later one does
    assert len(kernels) == ROWS[-1] + 1 and set(kernels) <= {OWN, prepacked.JOINT, PACKED}
    assert kernels[3] == kernels[4] and kernels[17] == kernels[32]  # a count goes by the next larger one measured
    monkeypatch.setattr(prepacked, "_measure", None)
    prepacked._book.cache_clear()  # as another process: reads what was written
    assert prepacked.best_kernels([group]) == kernels
    (path,) = measuring.iterdir()
    assert path.name.startswith("kernels-")
    pytest.raises(TypeError, prepacked.best_kernels, [[random(8, 64)]])  # another shape was not measured
    # A cache that cannot be read or written is no obstacle.
    monkeypatch.undo()
    monkeypatch.setenv("SPECDEC_CACHE", str(measuring))
    path.write_text("{damaged")
    prepacked._book.cache_clear()
    assert len(prepacked.best_kernels([[random(64, 64)]])) == ROWS[-1] + 1
    monkeypatch.setenv("SPECDEC_CACHE", str(path / "below-a-file"))
    assert len(prepacked.best_kernels([[random(64, 64)]])) == ROWS[-1] + 1
    before = torch.get_num_threads()
    monkeypatch.setattr(prepacked, "_timed", lambda groups: [torch.get_num_threads()] * len(ROWS))
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            assert set(prepacked.best_kernels([[random(16 * threads, 64)]])) == {1}
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernels", [(OWN,) * 65, (PACKED,) * 65, (prepacked.JOINT,) * 65, (OWN,) * 4 + (PACKED,) * 61])
def test_every_choice_computes_the_same(kernels, monkeypatch):
    monkeypatch.setattr(prepacked, "best_kernels", lambda groups: kernels)
    model, x = Block(bias=True), random(5, 16)
    expected, packed = model(x), observed(model, x)
    with packed.active():
        for rows in (1, 5, 3):
            assert torch.allclose(model(x[:rows]), expected[:rows], atol=1e-5, rtol=0)
    weight = random(24, 16)
    assert torch.allclose(prepacked_linear(weight)(x), F.linear(x, weight), atol=1e-5)


def test_the_fastest_kernel_is_chosen(monkeypatch):
    spent = {"now": 0.0}

    def product(x):
        spent["now"] += 3.0
        return x

    def plain(x, weight, bias=None):
        spent["now"] += float(x.shape[-2])
        return x

    monkeypatch.setattr(prepacked, "_packed_product", lambda weight, bias: product)
    monkeypatch.setattr(prepacked.F, "linear", plain)
    monkeypatch.setattr(prepacked.time, "thread_time", lambda: spent["now"])
    chosen = prepacked._measure([[random(8, 8)]])
    assert chosen == [OWN, OWN] + [PACKED] * 5
