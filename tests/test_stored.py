"""A stored file that is wrong ends in one sentence that names it; a changed byte is noticed."""

import json
import pickle
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from fakes import refusals
from fakes.pairs import random_pair
from fakes.traces import round_costs

from specdec import runs, stored
from specdec.costs.model import CostModel
from specdec.data.suites import load_suite
from specdec.models.eagle_files import read_network, save_drafter
from specdec.models.load import load_pair, shipped_folder
from specdec.models.ngrams import CopyOdds
from specdec.policies.base import load_policy
from specdec.policies.ltd import DepthPolicy
from specdec.replays.record import record
from specdec.replays.trace import open_trace
from specdec.training.drafter.chats import load_conversations

from workbook.book import read_book


class GONE:
    """In place of a value: the field goes."""


def refusal(call, *words) -> str:
    message = refusals.refusal(call)
    assert all(word in message for word in words), message
    return message


def edited(path: Path, changes: dict) -> Path:
    """The JSON file with other values; its checksum goes, so that other checks are reached."""
    content = json.loads(path.read_text()) | changes
    content = {name: value for name, value in content.items() if value is not GONE}
    content.pop("checksum", None)
    path.write_text(json.dumps(content))
    return path


def flip(path: Path, part: float = 0.4) -> None:
    content = bytearray(path.read_bytes())
    content[int(part * len(content))] ^= 1
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a recording."""
    sizes = dict(depth=2, top_ks=(2,), trees=(2,), max_new_tokens=6, progress=False, name="one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("recorded")))
        record(random_pair(), {"mine": [[1, 2, 3]]}, **sizes)
        return runs.find("one")[0].directory


@pytest.fixture
def recording(recorded, tmp_path):
    return Path(shutil.copytree(recorded, tmp_path / "recording"))


@pytest.fixture
def policy(tmp_path):
    learner = DepthPolicy(depth=4, top_k=3, total_tokens=12, stride=1).fill_at_random((8,))
    return learner.save(tmp_path / "policy")


@pytest.fixture
def drafter(tmp_path):
    return save_drafter(random_pair().drafter.network, tmp_path / "drafter")


@pytest.fixture
def language_model(tmp_path):
    return Path(shutil.copytree(shipped_folder("tiny") / "target", tmp_path / "lm"))


def read_all(folder: Path) -> None:
    trace = open_trace(folder)
    for column in ("context_tok",), ("ranks", 2), ("scores", 2), ("tokens", 2), ("root_rank",):
        trace.column(*column)


def test_a_recording_is_sealed(recording):
    read_all(recording)
    shard = recording / "positions" / "part-00000.parquet"
    for path in (recording / "trees" / "part-00000.parquet", recording / "turns.parquet", shard):
        content = path.read_bytes()
        flip(path)
        refusal(lambda: read_all(recording), path.name, "sha256")
        path.write_bytes(content)
    header = recording / "trace.json"
    text = header.read_text()
    header.write_text(text.replace('"seed": 0', '"seed": 1'))
    refusal(lambda: open_trace(recording), "trace.json", "checksum")
    # without a seal, rows are compared with the turns
    header.write_text(text)
    edited(header, {"files": GONE})
    longer = pd.read_parquet(recording / "turns.parquet").assign(positions=99)
    longer.to_parquet(recording / "turns.parquet")
    refusal(lambda: read_all(recording), "positions", "rows")
    shard.unlink()
    refusal(lambda: read_all(recording), "there is no file", "part-00000.parquet")
    header.unlink()
    refusal(lambda: open_trace(recording), "there is no finished recording", "trace.json")


SAVED = {
    "costs": lambda folder: round_costs().save(folder / "costs.json"),
    "copies": lambda folder: CopyOdds(((3,) * 7,) * 4, ((5,) * 7,) * 4).save(folder),
}
NAN = float("nan")
# fixture or one of SAVED -> (the file, how it is read, wrong values of its fields)
WRONG = {
    "recording": (
        "trace.json",
        open_trace,
        [{"schema": 99}, {"depth": "x"}, {"depth": GONE}, {"top_ks": []}, {"most_nodes": 10**11}],
    ),
    "policy": (
        "policy.json",
        load_policy,
        [{"schema": 7}, {"class": "os.system"}, {"settings": 3}, {"settings": GONE}, {"extra": 1}],
    ),
    "costs": (
        "",
        CostModel.load,
        [{"widths": "abc"}, {"verify": [1, "x"]}, {"rest_ms": NAN}, {"root": [[1]]}],
    ),
    "drafter": (
        "config.json",
        read_network,
        [
            {"hidden_size": "x"},
            {"num_attention_heads": 0},
            {"rms_norm_eps": NAN},
            {"eagle_config": 3},
            {"vocab_size": 10**9, "draft_vocab_size": 10**9},
        ],
    ),
    "copies": (
        "",
        lambda file: CopyOdds.load(file.parent),
        [{"hits": [[-9] * 7] * 4}, {"scale": 0}, {"outcomes": GONE}, {"hits": [[9] * 7] * 4}],
    ),
}
CASES = [(kind, changes) for kind in WRONG for changes in WRONG[kind][2]]


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=str)
def test_files_of_other_values(kind, changes, request, tmp_path):
    name, read, _ = WRONG[kind]
    place = SAVED[kind](tmp_path) if kind in SAVED else request.getfixturevalue(kind)
    path = edited(place / name if name else place, changes)
    refusal(lambda: read(place), path.name)


@pytest.mark.parametrize(
    "changes", [{"top_k": "four"}, {"depth": -1}, {"temperature": 0}, {"surplus": 2}], ids=str
)
def test_a_policy_with_other_settings(policy, changes):
    settings = json.loads((policy / "policy.json").read_text())["settings"]
    edited(policy / "policy.json", {"settings": settings | changes})
    refusal(lambda: load_policy(policy), "policy.json")


def test_policies_are_sealed(policy):
    assert load_policy(policy).depth == 4
    flip(policy / "policy.safetensors", 0.9)
    refusal(lambda: load_policy(policy), "policy.safetensors", "sha256")
    text = (policy / "policy.json").read_text()
    (policy / "policy.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    refusal(lambda: load_policy(policy), "policy.json", "checksum")
    refusal(lambda: load_policy(policy / "nowhere"), "there is no policy")
    for path in shipped_folder("small").parent.rglob("policy.json"):
        assert "checksum" in json.loads(path.read_text()), path


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": 3}', "{"])
def test_run_json(home, text):
    run = runs.start("bad", {})
    run.path("run.json").write_text(text)
    refusal(lambda: runs.find("bad"), "run.json")


@pytest.mark.parametrize(
    "text", ["3", "- 3", "- main: true", "- name: a\n  reads: 3", "- name: a\n  smoke: [1]"]
)
def test_the_book(tmp_path, text):
    (tmp_path / "a.ipynb").write_text("{}")
    (tmp_path / "book.yml").write_text(text)
    refusal(lambda: read_book(tmp_path), "book.yml")


def test_weights_of_a_language_model(language_model):
    weights = language_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refusal(lambda: load_pair(target=language_model), "cannot be loaded")
    weights.unlink()
    bomb = refusals.Bomb(language_model / "ran")
    for write in (pickle.dump, torch.save):  # bare, and in torch's container
        with open(language_model / "pytorch_model.bin", "wb") as file:
            write({"model.norm.weight": torch.ones(32), "bomb": bomb}, file)
        refusal(lambda: load_pair(target=language_model), "cannot be loaded")
    assert not (language_model / "ran").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[" * 100_000, b"3\n", b"["])
def test_files_of_texts(tmp_path, content):
    path = tmp_path / "gsm8k.jsonl"
    path.write_bytes(content)
    refusal(lambda: load_suite("gsm8k", tmp_path), path.name)
    refusal(lambda: load_conversations(path), path.name)
    for read in (stored.read_json, runs.read_yaml):
        (tmp_path / "file").write_bytes(b"{[" * 5_000)
        assert "cannot be read as" in refusals.refusal(read, tmp_path / "file")
