"""Pairs: loading from folders, models and presets, prompts to ids, and finding out a wrongly read checkpoint."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from fakes.families import state_of
from fakes.golden import GOLDEN, needs_golden
from fakes.pairs import layer_fields, random_network
from fakes.refusals import refusal
from fakes.slow_layer import slow_children
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from specdec.core.pair import Pair
from specdec.models import drafters, load
from specdec.models import eagle_drafter as calibrate
from specdec.models.eagle_files import read_checkpoint, save_drafter
from specdec.models.eagle_drafter import EagleDrafter, agreement, calibrate_reading, own_text
from specdec.models.eagle_network import EagleConfig
from specdec.models.load import SHIPPED, load_drafter, load_pair
from specdec.models.target import Target

WORDS = ["<pad>", "<s>", "</s>", "<user>", "<answer>", "the", "fox", "runs", "home", "."]
DRAFTER = EagleConfig(32, 48, 4, 2, 64, 24, 32)
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def tokenizer():
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>"]})
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'thief' %}{{ raise_exception('no thieves') }}{% endif %}"
        "{{ ' <' + m.role + '> ' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ ' <answer>' }}{% endif %}"
    )
    return made


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with target/ (random weights, a tokenizer) and drafter/."""
    folder = tmp_path_factory.mktemp("some-pair")
    torch.manual_seed(0)
    more = dict(
        num_hidden_layers=8,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    config = LlamaConfig(**SIZES, **more)
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    save_drafter(random_network(DRAFTER), folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def pair(places) -> Pair:
    return load_pair(target=places / "target", drafter=places / "drafter")


def test_a_pair_from_folders_leaves_no_bar_and_a_loaded_model_alone(pair, places, capfd):
    assert pair.name.startswith("some-pair") and pair.stop_tokens == {2}
    assert pair.target.dtype == torch.float32 and pair.target.device.type == "cpu"
    assert (
        pair.target.model.config._attn_implementation == "sdpa" and not pair.target.model.training
    )
    assert pair.drafter.taps == pair.target.taps == (2, 4, 5)
    stored = load_file(places / "drafter" / "model.safetensors")
    assert torch.equal(pair.drafter.network.fc.weight, stored["fc.weight"])
    logging.enable_progress_bar()
    load_pair(target=places / "target", drafter=places / "drafter")
    assert "Loading weights" not in capfd.readouterr().err and logging.is_progress_bar_enabled()
    model = pair.target.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = state_of(model)
    other = load_pair(target=model, drafter=places / "drafter", tokenizer=places / "target")
    assert other.target.model is model and other.tokenizer is not None
    assert load_pair(target=model).tokenizer is None and load_pair(target=model).drafter is None
    drafter = load_drafter(places / "drafter", model)
    assert drafter.target.model is model
    agreement(drafter, torch.arange(8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert state_of(model) == hooks
    assert "keeps its dtype" in refusal(load_pair, target=model, dtype="bfloat16")


def test_targets_are_found_those_without_sdpa_loaded_eager_and_damaged_ones_refused(
    places, tmp_path
):
    verifier = {"verifier": {"name_or_path": str(places / "target")}}
    folder = planted(places / "drafter", tmp_path / "drafter", speculators_config=verifier)
    assert load_pair(drafter=folder).target.num_layers == 8
    assert "does not name its target" in refusal(load_pair, drafter=places / "drafter")
    out = Path(shutil.copytree(places, tmp_path / "out"))
    pair = load_pair(target=out, drafter=out)
    assert pair.name == "out" and pair.drafter is not None
    shutil.rmtree(out / "drafter")
    assert "has no config.json" in refusal(load_pair, target=out, drafter=out)
    experts = dict(num_local_experts=2, num_experts_per_tok=1, head_dim=8)
    config = GptOssConfig(**SIZES, **experts, num_hidden_layers=2, eos_token_id=2, pad_token_id=0)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    assert load_pair(target=tmp_path).target.model.config._attn_implementation == "eager"
    folder = Path(shutil.copytree(places / "target", tmp_path / "t"))
    weights = folder / "model.safetensors"
    state = load_file(weights)
    name = "model.layers.3.mlp.up_proj.weight"
    save_file(
        {key: value for key, value in state.items() if key != name}, weights, {"format": "pt"}
    )
    assert f"lacks {name};" in refusal(load_pair, target=folder)
    for data in (b"", (places / "target" / "model.safetensors").read_bytes()[:2000]):
        weights.write_bytes(data)
        assert "cannot be loaded as a transformers causal LM" in refusal(load_pair, target=folder)
    weights.unlink()
    assert "cannot be loaded" in refusal(load_pair, target=folder)
    torch.save(state, folder / "pytorch_model.bin")
    model = load_pair(target=folder).target.model
    assert torch.equal(model.state_dict()[name], state[name])
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer of" in refusal(load_pair, target=folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(load_pair, target=folder)


def test_precision_and_stop_tokens(places, tmp_path):
    folder = Path(shutil.copytree(places / "target", tmp_path / "t"))
    for stops, expected in ((None, set()), (5, {5}), ([2, 7], {2, 7})):
        for name in ("generation_config.json", "config.json"):
            settings = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(settings | {"eos_token_id": stops}))
        assert load_pair(target=folder).stop_tokens == expected
    for dtype in ("bfloat16", "float16"):
        pair = load_pair(
            target=places / "target", drafter=places / "drafter", dtype=dtype, device="cpu"
        )
        assert pair.target.dtype == pair.drafter.network.fc.weight.dtype == getattr(torch, dtype)
    assert "did you mean 'bfloat16'" in refusal(
        load_pair, target=places / "target", dtype="bf16loat"
    )
    assert "unknown device" in refusal(load_pair, target=places / "target", device="abacus")
    if not torch.cuda.is_available():
        assert "no usable CUDA" in refusal(load_pair, target=places / "target", device="cuda")


def test_drafters_that_do_not_fit_and_an_own_embedding_that_differs(pair, tmp_path):
    network, model = random_network(replace(DRAFTER, own_embedding=True)), pair.target.model
    different = load_drafter(save_drafter(network, tmp_path / "different"), model)
    assert different.config.own_embedding and different.embedding is different.network.embed_tokens
    network.embed_tokens.weight.copy_(pair.target.embedding.weight)
    same = load_drafter(save_drafter(network, tmp_path / "same"), model)
    assert not same.config.own_embedding and same.embedding is pair.target.embedding
    assert not hasattr(same.network, "embed_tokens")
    for change, words in (
        (dict(target_hidden_size=40), "features of width 40"),
        (dict(hidden_size=64), "brings no embedding"),
        (dict(vocab_size=65), "vocabulary of 65 exceeds the target's 64"),
        (dict(taps=(2, 4, 9)), "do not all exist in a target of 8 layers"),
    ):
        config = replace(DRAFTER, **({"target_hidden_size": 32} | change))
        folder = save_drafter(random_network(config), tmp_path / words)
        assert words in refusal(load_drafter, folder, Target(pair.target.model))
    shallow = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=5))
    own = save_drafter(random_network(DRAFTER), tmp_path / "own")
    assert "at least 7 layers" in refusal(load_drafter, own, shallow)


def test_drafters_by_kind(places, monkeypatch):
    monkeypatch.setattr(load, "shipped_folder", lambda name: places)
    own = load_pair("tiny")
    assert own.name == "tiny" and own.tokenizer is not None
    for drafter in ("eagle3", f"eagle3:{places / 'drafter'}"):
        given = load_pair("tiny", drafter=drafter).drafter
        assert torch.equal(given.network.fc.weight, own.drafter.network.fc.weight)
    monkeypatch.setitem(
        drafters.KINDS, "other", drafters.Kind("none:at_all", "other", ("other_heads",))
    )
    assert "no other drafter ships with 'tiny'" in refusal(load_pair, "tiny", drafter="other")
    assert drafters.kind_of({"other_heads": 3}) == "other" and drafters.kind_of({}) == "eagle3"
    monkeypatch.setitem(drafters.KINDS, "free", drafters.Kind("none:at_all"))
    assert "has no weights" in refusal(load_drafter, "free:x/y", own.target)
    monkeypatch.setattr(load, "shipped_folder", lambda name: Path("nowhere"))
    assert "not in this installation" in refusal(load_pair, "small")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pairs_agree(name):
    pair = load_pair(name)
    text = own_text(
        pair.target,
        torch.tensor(pair.ids_of([{"role": "user", "content": "Tell me about a fox."}])),
    )
    assert 0.2 < agreement(pair.drafter, text) < 1.0


def test_names_that_lead_nowhere(pair):
    for words, call, names, settings in [
        ("did you mean 'vicuna-13b'", load_pair, ["vicuna13b"], {}),
        ("use 'small'", load_pair, ["mini"], {}),
        ("'small'", load_pair, ["smal"], {}),
        ("not both", load_pair, [], {}),
        ("not both", load_pair, ["tiny"], {"target": "x/y"}),
        ("give either a preset", load_pair, [], {"drafter": "eagle3"}),
        ("neither a folder nor a hub id", load_pair, ["tiny"], {"drafter": "no-such-folder"}),
        ("neither a folder nor a hub id", load_pair, [], {"target": "/no/such/folder"}),
        ("cannot be loaded", load_pair, [], {"target": "owner/no-such-target"}),
        ("the name of a drafter is empty", load_pair, ["tiny"], {"drafter": " "}),
        ("the name of a drafter is empty", load_drafter, [""], {}),
        ("neither a folder nor a hub id", load_drafter, ["no-such-folder"], {}),
        ("cannot be fetched from the hub", load_drafter, ["owner/no-such-drafter"], {}),
        ("eagle3:FOLDER", load_drafter, ["eagle3"], {}),
        ("did you mean 'eagle3'", load_drafter, ["eagle2:folder"], {}),
        ("unknown reading", load_drafter, ["x/y"], {"reading": "guess"}),
    ]:
        assert words in refusal(
            call, *names, *([pair.target] if call is load_drafter else []), **settings
        )


def test_hub_falls_back_to_the_pickle(places, tmp_path, monkeypatch):
    asked, absent = [], [huggingface_hub.errors.EntryNotFoundError]

    def download(repository, name):
        asked.append((repository, name))
        if not (tmp_path / name).is_file():
            raise absent[-1](name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    shutil.copy(places / "drafter" / "config.json", tmp_path)
    torch.save(load_file(places / "drafter" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert load.drafter_folder("owner/name") == tmp_path
    assert [name for _, name in asked] == ["config.json", "model.safetensors", "pytorch_model.bin"]
    (tmp_path / "pytorch_model.bin").unlink()
    assert "has no weights" in refusal(lambda: read_checkpoint(load.drafter_folder("owner/name")))
    absent.append(
        huggingface_hub.errors.LocalEntryNotFoundError
    )  # no network: says nothing about what the hub has
    assert "cannot be fetched from the hub" in refusal(load.drafter_folder, "owner/name")


def slow_agreement(drafter: EagleDrafter, tokens: torch.Tensor, steps: int) -> float:
    """The same figure without caches, trees or sessions: every draft step recomputed from nothing."""
    with torch.inference_mode():
        out, right = drafter.target.model(tokens[None], output_hidden_states=True), []
        wanted = out.logits[0].argmax(-1)
        features = torch.cat([out.hidden_states[tap][0] for tap in drafter.taps], -1)
        for here in range(len(tokens) - steps):
            for last in range(here + 1, here + 1 + steps):
                path = tokens[here + 2 : last + 1].tolist()
                guess = int(
                    slow_children(drafter, tokens[: here + 2], features[: here + 1], path).argmax()
                )
                right.append(guess + int(drafter.network.d2t[guess]) == int(wanted[last]))
    return sum(right) / len(right)


@pytest.mark.parametrize("norm_output", [False, True])
def test_agreement_equals_the_slow_way(pair, norm_output):
    network = random_network(replace(DRAFTER, draft_vocab_size=64, norm_output=norm_output))
    target = Target(pair.target.model)
    drafter = EagleDrafter(network, target)
    target.taps = drafter.taps
    with torch.no_grad():  # a drafter that is right now and then
        network.lm_head.weight.copy_(target.model.lm_head.weight)
    tokens = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(3))
    slow = slow_agreement(drafter, tokens, 3)
    assert agreement(drafter, tokens, steps=3) == pytest.approx(slow)
    assert agreement(drafter, tokens, steps=1) == pytest.approx(slow_agreement(drafter, tokens, 1))
    assert slow > 0


def test_own_text_is_greedy_and_calibration_keeps_what_scores_best(pair, monkeypatch):
    greedy = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = pair.target.model.generate(torch.tensor([[1, 5]]), **greedy)
    assert own_text(pair.target, torch.tensor([1, 5]), 10).tolist() == plain[0].tolist()
    target = Target(pair.target.model)
    wrong = replace(
        DRAFTER, taps=(1, 3, 4), norm_output=True, norm_before_residual=True, rope_theta=5e5
    )
    true = replace(DRAFTER, taps=(2, 4, 5))

    def score(drafter, tokens):
        fields = ("taps", "norm_output", "norm_before_residual")
        right = sum(getattr(drafter.config, name) == getattr(true, name) for name in fields)
        assert (
            drafter.taps == target.taps == drafter.config.taps
            and drafter.network.config is drafter.config
        )
        return 0.2 + 0.2 * right + 0.01 * (drafter.config.rope_theta == 1e4)

    monkeypatch.setattr(calibrate, "agreement", score)
    drafter = EagleDrafter(random_network(wrong), target)
    doubts = ("taps", "norm_output", "norm_before_residual", "rope_theta")
    with pytest.warns(
        UserWarning, match=r"read with .*taps=\(2, 4, 5\).* instead of what its config.json says"
    ):
        tried = calibrate_reading(drafter, doubts, torch.tensor([1]))
    assert drafter.config == replace(true, rope_theta=5e5)
    assert tried["file"] == pytest.approx(0.2) and len(tried) == 3 * 2 * 2 * 2
    monkeypatch.setattr(
        calibrate, "agreement", lambda drafter, tokens: 0.3 + 0.1 * (drafter.taps == (1, 3, 4))
    )
    drafter = EagleDrafter(random_network(DRAFTER), target)  # a file that names no taps
    with pytest.warns(UserWarning, match=r"read with taps=\(1, 3, 4\) instead"):
        calibrate_reading(drafter, ("taps",), torch.tensor([1]))
    assert drafter.taps == target.taps == (1, 3, 4)
    monkeypatch.setattr(
        calibrate, "agreement", lambda drafter, tokens: 0.3 - 0.1 * (drafter.taps == (3, 5, 6))
    )
    drafter = EagleDrafter(random_network(DRAFTER), target)
    calibrate_reading(drafter, ("taps",), torch.tensor([1]))
    assert drafter.config.taps is None and drafter.taps == target.taps == (2, 4, 5)
    monkeypatch.setattr(calibrate, "agreement", lambda drafter, tokens: 0.05)
    with pytest.warns(UserWarning, match="trained for another target"):
        calibrate_reading(EagleDrafter(random_network(DRAFTER), target), (), torch.tensor([1]))


def planted(source: Path, folder: Path, **wrong) -> Path:
    """The drafter of `source` as a speculators file whose config.json states `wrong`."""
    network = read_checkpoint(source).network()
    layer = layer_fields(network.config)
    raw = {"speculators_model_type": "eagle3", "draft_vocab_size": network.config.draft_vocab_size}
    raw |= {"norm_before_residual": False, "transformer_layer_config": layer, **wrong}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    weights = {
        name.replace("midlayer.", "layers.0."): value.clone()
        for name, value in network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


OUTPUTS = {
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4]
}  # layer outputs where hidden_states are meant
EVERYTHING = {"norm_before_residual": True, "norm_output": True, **OUTPUTS}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        *(
            pytest.param(GOLDEN, wrong, marks=needs_golden)
            for wrong in (OUTPUTS, {"norm_output": True}, EVERYTHING)
        ),
        *((load.shipped_folder("tiny"), wrong) for wrong in (OUTPUTS, EVERYTHING)),
    ],
)
def test_planted_wrong_readings_are_found(tmp_path, source, wrong):
    pair = load_pair(target=source / "target")
    target, start = pair.target, [5, 77, 300, 41]
    if (
        pair.tokenizer is not None
    ):  # a trained pair: text of the kind it was trained on, or nothing can be told
        start = pair.ids_of(
            [{"role": "user", "content": "Write a story with Leo, Ivan, a pilot and a mirror."}]
        )
    right = load_drafter(source / "drafter", target)
    text = own_text(target, torch.tensor(start))
    best, taps = agreement(right, text), right.taps
    with pytest.warns(UserWarning):
        folder = planted(source / "drafter", tmp_path / "drafter", **wrong)
        misread = agreement(load_drafter(folder, target), text)
        drafter = load_drafter(folder, target, reading="calibrate", start=start)
    assert misread < best
    assert agreement(drafter, text) == pytest.approx(best)
    assert (
        drafter.taps == taps
        and not drafter.config.norm_output
        and not drafter.config.norm_before_residual
    )
    with warnings.catch_warnings():  # now that it is right, it is left alone, silently
        warnings.simplefilter("error")
        scores = calibrate_reading(drafter, ("norm_output",), torch.tensor(start))
    assert scores["file"] == pytest.approx(best) and len(scores) == 2
