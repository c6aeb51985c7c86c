"""Other decoders (peers) in a run of the bench, and the reasons where they cannot run."""

import importlib.metadata
import sys
import types
import warnings
from unittest.mock import Mock, call

import pytest
import torch

import specdec
from specdec.core import clock
from specdec.errors import SpecdecError
from specdec.evaluation import bench, peers
from specdec.models import load

PROMPTS = {"mine": ["What is 2 + 3?", "Count from one to five, and then from one to five again."]}
FEW = dict(max_new_tokens=12, name="peers", progress=False)


def test_transformers_decodes_the_same_text_assisted_by_the_targets_first_layers(tiny, monkeypatch):
    found, absent = peers.peers_of(tiny)
    assert list(found) == [peers.GENERATE, peers.LOOKUP, peers.ASSISTED] and list(absent) == [peers.LLAMA]
    run = specdec.evaluate({"plain": "autoregressive", "tree": specdec.Static(8, 3, 2), **found}, PROMPTS, tiny, **FEW)
    rows = run.read_table("prompts")
    assert len(rows) == 10 and rows["same"].all() and rows["total_ms"].gt(0).all()
    assert sorted(rows.groupby("prompt")["order"].nunique()) == [5, 5]  # in turns with ours
    table = specdec.summary(run).set_index("method")
    assert table.loc[list(found), "tau"].isna().all() and table.loc["tree", "tau"] > 1
    assert table.loc[list(found), "speedup"].gt(0).all()
    peer, layers = peers.peers_of(tiny, [peers.ASSISTED])[0][peers.ASSISTED], tiny.target.num_layers
    used, model, forward = set(), tiny.target.model, tiny.target.model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **o: used.add(model.config.num_hidden_layers) or forward(*a, **o))
    peer.decode(tiny, tiny.ids_of("Hello"), 6)
    assert used == {2, layers} and model.config.num_hidden_layers == layers


@pytest.fixture
def llama(monkeypatch, tmp_path):
    """A preset whose target comes from a file, and a package that says `tokens` whatever it is asked."""
    planted = Mock(file=tmp_path / "Some-135M.Q4_1-0123456789ab.gguf", tokens=[5, 6])
    planted.Llama.return_value.generate.side_effect = lambda ids, temp: iter(planted.tokens)
    monkeypatch.setitem(sys.modules, "llama_cpp", planted)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(load, "gguf_of", lambda name: planted.file)
    peers._llama.cache_clear()
    yield planted
    peers._llama.cache_clear()


def test_llama_reads_the_same_ids_and_its_text_may_differ(tiny, llama):
    stop = min(tiny.stop_tokens)
    llama.tokens += [stop, 7]
    peer = peers.peers_of(tiny, ["llama.cpp"])[0]["llama.cpp"]
    assert "9.9" in peer.note and "Q4_1" in peer.note
    out = peer.decode(tiny, [1, 2, 3], 8)
    assert out.tokens == [5, 6, stop] and out.finish_reason == "stop" and out.decode_ms >= 0
    assert peer.decode(tiny, [1, 2, 3], 2).tokens == [5, 6]
    assert llama.Llama.call_count == 1 and llama.Llama.call_args.args == (str(llama.file),)
    assert llama.Llama.return_value.mock_calls == [call.reset(), call.generate([1, 2, 3], temp=0.0)] * 2
    with_theirs = {"plain": "autoregressive", "tree": specdec.Static(8, 3, 2), "llama.cpp": peer}
    run = specdec.evaluate(with_theirs, {"mine": ["Hi"]}, tiny, **FEW)  # no warning: this text is not ours
    assert run.record()["results"]["texts_differing"] == 0
    assert not run.read_table("prompts").set_index("method")["same"]["llama.cpp"]


def test_what_cannot_run_is_a_sentence(tiny, monkeypatch, tmp_path):
    pytest.raises(SpecdecError, peers.peers_of, tiny, ["vllm"]).match("unknown peer")
    ways = {"plain": "autoregressive", **peers.peers_of(tiny, [peers.GENERATE])[0]}
    sampled = pytest.raises(SpecdecError, bench.evaluate, ways, PROMPTS, tiny, temperature=1.0, **FEW)
    sampled.match("run greedily only")
    monkeypatch.setattr(load, "gguf_of", lambda name: tmp_path / "a.Q4_1.gguf")
    monkeypatch.setattr(peers, "PACKAGE", "no-such-package")
    assert peers.peers_of(tiny, ["llama.cpp"]) == ({}, {"llama.cpp": "no-such-package is not installed here."})


def test_peers_say_what_they_are(tiny):
    found, absent = peers.peers_of(tiny)
    early = (
        "transformers' assisted generation; no smaller model shares the tokenizer, so the target's first 2 layers, which "
        "were not trained to end there, assist"
    )
    said = {
        "generate": ("transformers, one token per forward", None),
        "generate, lookup": ("transformers' prompt lookup, 10 tokens", ("prompt_lookup_num_tokens", 10)),
        "generate, early exit": (early, ("assistant_early_exit", 2)),
    }
    assert found == {name: peers.Transformers(name, *one) for name, one in said.items()}
    assert absent == {"llama.cpp": "the target of tiny comes from no GGUF file."}
    for layers, used in ((2, 1), (32, 6)):  # a fifth
        other = types.SimpleNamespace(name="tiny", target=types.SimpleNamespace(num_layers=layers))
        assert peers.peers_of(other, [peers.ASSISTED])[0][peers.ASSISTED].setting[1] == used
    assert peers.peers_of(tiny, ["generate"])[1] == {}


def pair_of(generate, **fields):
    model = types.SimpleNamespace(generate=generate)
    target = types.SimpleNamespace(device=torch.device("cpu"), model=model, position_limit=None)
    return types.SimpleNamespace(**{"target": target, "stop_tokens": frozenset({9, 8}), "text_of": str} | fields)


def test_generate_is_asked_for_greedy_text_and_all_of_its_time_is_decoding(tiny):
    asked = []

    def generate(prompt, **options):
        warnings.warn("an assistant's settings", stacklevel=1)
        asked.append((prompt.tolist(), {**options, "attention_mask": options["attention_mask"].tolist()}))
        return torch.tensor([[1, 2, 3, 9, 4]])

    shared = dict(pad_token_id=0, do_sample=False, attention_mask=[[1, 1]], max_new_tokens=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = peers.Transformers("a", "b", ("some_setting", 5)).decode(pair_of(generate), [1, 2], 7)
        endless = pair_of(generate, stop_tokens=frozenset())
        whole = peers.Transformers("a", "b").decode(endless, [1, 2], 7)
    assert asked == [
        ([[1, 2]], {"some_setting": 5, "eos_token_id": [8, 9], **shared}),
        ([[1, 2]], {"eos_token_id": None, **shared}),
    ]
    found = (out.tokens, out.prompt_tok, out.rows, out.text, out.prefill_ms, out.finish_reason)
    assert found == ([3, 9], 2, [], "[3, 9]", 0.0, "stop")
    assert (whole.tokens, whole.finish_reason) == ([3, 9, 4], "length")
    seconds = iter(range(100))
    with clock.counted_by(lambda: float(next(seconds))):
        out = peers.Transformers("a", "b").decode(pair_of(lambda *_, **__: torch.tensor([[1, 3, 4]])), [1], 1)
    assert out.decode_ms >= 1e3 and out.decode_ms % 1e3 == 0 and out.tokens == [3]


def test_llama_is_loaded_once_with_the_targets_context(llama, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    file, pair = str(tmp_path / "Some.Q8_0.gguf"), pair_of(None)
    peer = peers._llama_peer(tmp_path / "Some.Q8_0.gguf", "1.2")
    note = "another engine, llama-cpp-python 1.2, on the target's own file and with its weights, Q8_0"
    assert peer == peers.LlamaCpp("llama.cpp", note, file, "1.2")
    assert peers._llama_peer(tmp_path / "model.gguf", "1.2").note.endswith("its weights, GGUF")
    assert peer.tokens(pair, [1], 8) == [5, 6] and peer.tokens(pair, [1], 1) == [5]
    pair.target.position_limit = 77
    peer.tokens(pair, [1], 8)
    settings = dict(n_threads=3, n_threads_batch=3, verbose=False)
    assert llama.Llama.call_args_list == [call(file, n_ctx=size, **settings) for size in (4096, 77)]
