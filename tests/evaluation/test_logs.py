"""The audit of other engines: transformers' assisted generation passes, planted faults do not, a server is asked and judged."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from fakes.pairs import shared_bigrams
from transformers import AutoModelForCausalLM

import specdec
from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.evaluation import lossless
from specdec.evaluation.logs import LoggedText, Server, audit_server, audit_texts, law_of_server, law_of_texts, read_log
from specdec.models.load import shipped_folder
from specdec.tools import cli

PROMPTS = ["What is 2 + 3?", "Write a function that adds two numbers.", "Good morning."]
NEW_TOK = 24


@pytest.fixture(scope="module")
def pair():
    return specdec.load_pair("tiny", dtype="float32", device="cpu")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def logged(pair, tmp_path_factory):
    """Greedy logs of transformers: plain generation, and assisted by a copy of the target with noise in its weights."""
    target = AutoModelForCausalLM.from_pretrained(shipped_folder("tiny") / "target", dtype=torch.float32)
    assistant = AutoModelForCausalLM.from_pretrained(shipped_folder("tiny") / "target", dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    for weight in assistant.parameters():
        weight.data += 0.1 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=random)
    folder, records = tmp_path_factory.mktemp("logs"), ([], [])
    for prompt in PROMPTS:
        ids = torch.tensor([pair.ids_of(prompt)])
        for log, more in zip(records, ({}, {"assistant_model": assistant}), strict=True):
            out = target.generate(ids, max_new_tokens=NEW_TOK, do_sample=False, **more)
            log.append({"prompt": prompt, "output_ids": out[0, ids.shape[1] :].tolist()})
    return write(folder / "plain.jsonl", records[0]), write(folder / "assisted.jsonl", records[1])


def test_assisted_generation_of_transformers_passes(logged, capsys):
    assert cli.main(["audit", "--pair", "tiny", "--logs", *map(str, logged)]) == 0
    assert "Not lossless" not in capsys.readouterr().out


def test_a_changed_token_fails_unless_it_is_a_near_tie(pair, logged, tmp_path, capsys, monkeypatch):
    records = [json.loads(line) for line in logged[1].read_text().splitlines()]
    records[1]["output_ids"][5] = (records[1]["output_ids"][5] + 1) % pair.target.vocab_size
    changed = write(tmp_path / "changed.jsonl", records)
    assert cli.main(["audit", "--pair", "tiny", "--logs", str(logged[0]), str(changed)]) == 1
    assert "Not lossless" in capsys.readouterr().out
    plain, others = read_log(logged[0], pair), read_log(changed, pair)
    (row,) = audit_texts(pair, plain, others).failures.itertuples()
    assert (row.prompt, row.first_divergence, row.policy) == (1, 5, "other") and row.gap > row.tolerance > 0
    (other,) = audit_texts(pair, others, plain).failures.itertuples()
    assert other.gap == pytest.approx(row.gap), "a plain log that misses the best token is told as well"
    monkeypatch.setattr(lossless, "NOISES", 1e9)
    tied = audit_texts(pair, plain, others)
    assert tied.passed and tied.rows.near_tie.tolist() == [False, True, False]


def test_texts_without_ids_and_without_the_last_token_are_compared(pair, logged, tmp_path):
    plain = read_log(logged[0], pair)
    told = [dict(prompt_ids=one.prompt, text=pair.text_of(one.ids), finish_reason="stop") for one in plain]
    assert audit_texts(pair, plain, read_log(write(tmp_path / "text.jsonl", told), pair)).passed
    told[2]["text"] += " And more."
    assert len(audit_texts(pair, plain, read_log(write(tmp_path / "more.jsonl", told), pair)).failures) == 1
    end = min(pair.stop_tokens)
    ended = write(tmp_path / "ended.jsonl", [dict(prompt=[5], token_ids=[7, 8], finish_reason="stop")])
    assert read_log(ended, pair) == [LoggedText([5], [7, 8, end])]
    assert audit_texts(pair, [LoggedText([5], [])], [LoggedText([5], [])]).passed


def test_the_law_of_sampled_logs():
    pair = shared_bigrams()

    def drawn(temperature):
        options = dict(max_new_tokens=3, temperature=temperature, stop_tokens=())
        return [
            LoggedText([3, 1], decode(pair, [3, 1], Static(8, 2, 3), seed=seed, **options).tokens)
            for seed in range(400)
        ]

    right = law_of_texts(pair, drawn(1.0), 1.0)
    assert right.passed and right.draws > 400 and right.degrees > 5, right
    assert not law_of_texts(pair, drawn(0.6), 1.0).passed
    assert law_of_texts(pair, [LoggedText([3, 1], [0])] * 60, 1.0).p_value < 1e-9
    with pytest.raises(SpecdecError, match="answered 50 times"):
        law_of_texts(pair, drawn(1.0)[:20], 1.0)


class Handler(BaseHTTPRequestHandler):
    """/v1/models and /v1/completions over a pair. server.mode: "lossless", "wrong", or the form of its ids."""

    def log_message(self, *_):
        """Quiet."""

    def do_GET(self):
        self.reply({"data": [{"id": "mine"}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pair, wrong = self.server.pair, self.server.mode == "wrong"
        temperature = asked["temperature"] * (0.5 if wrong else 1.0)
        options = dict(max_new_tokens=asked["max_tokens"], temperature=temperature, seed=asked["seed"])
        tokens = decode(pair, asked["prompt"], Static(8, 2, 3), **options).tokens
        if wrong and len(tokens) > 3:
            tokens[3] = (tokens[3] + 1) % pair.target.vocab_size  # a draft that nobody verified
        listed = {"content": [{"id": token} for token in tokens]}
        forms = {"logprobs": {"logprobs": listed}, "text": {"text": pair.text_of(tokens), "finish_reason": "stop"}}
        self.reply({"choices": [forms.get(self.server.mode, {"token_ids": tokens, "text": ""})]})

    def reply(self, record):
        body = json.dumps(record).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def serving(pair):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.pair, server.mode, server.url = pair, "lossless", f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("mode", ["lossless", "logprobs", "text"])
def test_a_lossless_server_passes(serving, pair, mode):
    serving.mode = mode
    found = audit_server(pair, PROMPTS, Server(serving.url), NEW_TOK)
    assert found.passed and found.rows.equal.all() and set(found.rows.policy) == {"mine"}


def test_the_command_catches_a_wrong_server(serving, capsys):
    typed = ["audit", "--pair", "tiny", "--server", f"{serving.url}/v1/", "--suites", "toy/gsm8k", "--limit", "2"]
    typed += ["--max-new-tokens", "8", "--draws", "60"]
    assert cli.main(typed) == 0 and "are draws from the target's distribution" in capsys.readouterr().out
    serving.mode = "wrong"
    assert cli.main([*typed, "--temperature", "0"]) == 1
    said = capsys.readouterr().out
    assert "Not lossless" in said and "draws" not in said


def test_a_server_that_samples_too_cold_is_caught(serving):
    serving.pair = shared_bigrams()
    assert law_of_server(serving.pair, [3, 1], Server(serving.url), 300).passed
    serving.mode = "wrong"
    assert not law_of_server(serving.pair, [3, 1], Server(serving.url), 300).passed


def test_bad_input_is_told_in_a_sentence(pair, serving, tmp_path, capsys):
    good = [LoggedText([5], [7])]
    for call, told in (
        (lambda: read_log(tmp_path / "none.jsonl", pair), "there is no file"),
        (lambda: read_log(write(tmp_path / "empty.jsonl", []), pair), "holds no answer"),
        (lambda: read_log(write(tmp_path / "x.jsonl", [{"prompt": "Hi"}]), pair), "line 1: an answer needs"),
        (lambda: read_log(write(tmp_path / "y.jsonl", [[1]]), pair), "line 1: an answer needs"),
        (lambda: read_log(write(tmp_path / "z.jsonl", [dict(prompt="Hi", output_ids=[10**6])]), pair), "vocabulary"),
        (lambda: audit_texts(pair, good, [LoggedText([6], [7])]), "different prompts"),
        (lambda: audit_texts(pair, good, good * 2), "1 plain answers and the 2 others"),
        (lambda: law_of_texts(pair, [LoggedText([5], [7], exact=False)], 1.0), "log output_ids"),
        (lambda: Server("http://example.org"), "another machine"),
        (lambda: Server("localhost:8000"), "http://localhost:8000"),
        (lambda: Server("http://127.0.0.1:9"), "gave no answer"),
        (lambda: Server(f"{serving.url}/elsewhere"), "OpenAI-compatible"),
    ):
        with pytest.raises(SpecdecError, match=told):
            call()
    assert Server(serving.url.replace("127.0.0.1", "localhost"), any_host=True).model == "mine"
    assert cli.main(["audit", "--pair", "tiny", "--logs", "nowhere", "nowhere"]) == 2
    assert "there is no file nowhere" in capsys.readouterr().err
