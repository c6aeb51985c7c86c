"""Every stored file that is wrong ends in one sentence that names it; a byte that has changed is noticed."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import refusals
from fakes.pairs import random_pair
from fakes.traces import round_costs
from fakes.values import random_policy
from safetensors.numpy import load_file, save_file

from specdec import runs, stored
from specdec.costs.model import CostModel
from specdec.data.suites import load_suite
from specdec.models.eagle_files import read_checkpoint, save_drafter
from specdec.models.load import shipped_folder
from specdec.models.ngrams import CopyOdds
from specdec.policies.base import load_policy
from specdec.policies.ltd import DepthPolicy
from specdec.replays.record import record
from specdec.replays.trace import open_trace
from specdec.training.drafter.chats import load_conversations
from specdec.training.drafter.generate_data import ChatFiles, read_prompts

from workbook.book import read_book


class GONE:
    """In place of a value: the field goes."""


def refusal(call, *words) -> str:
    message = refusals.refusal(call)
    assert all(word in message for word in words), message
    return message


def edited(path: Path, changes: dict) -> Path:
    """The JSON file with other values; its own checksum goes, since here other things are to be noticed."""
    content = json.loads(path.read_text())
    content = {name: value for name, value in (content | changes).items() if value is not GONE}
    content.pop("checksum", None)
    path.write_text(json.dumps(content))
    return path


def flip(path: Path, part: float = 0.4) -> None:
    content = bytearray(path.read_bytes())
    content[int(part * len(content))] ^= 1
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Folders of two recordings of one pair: other prompts, the same settings."""
    pair, folders = random_pair(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("recorded")))
        for name, prompt in (("one", [1, 2, 3]), ("two", [4, 5, 6, 7])):
            settings = dict(
                depth=2, top_ks=(2,), trees=(2,), max_new_tokens=6, progress=False, name=name
            )
            record(pair, {"mine": [prompt]}, **settings)
            folders.append(runs.find(name)[0].directory)
    return folders


@pytest.fixture
def recording(recorded, tmp_path):
    return Path(shutil.copytree(recorded[0], tmp_path / "recording"))


def read_all(folder: Path):
    trace = open_trace(folder)
    columns = ("context_tok",), ("ranks", 2), ("scores", 2), ("tokens", 2), ("root_rank",)
    return [trace.column(*column) for column in columns]


def test_a_recording_is_sealed(recorded, recording):
    assert len(read_all(recording)) == 5
    shard = recording / "positions" / "part-00000.parquet"
    for path in (recording / "trees" / "part-00000.parquet", recording / "turns.parquet", shard):
        kept = path.read_bytes()
        flip(path)
        refusal(lambda: read_all(recording), path.name, "sha256")
        path.write_bytes(kept)
    shutil.copy(
        recorded[1] / "positions" / "part-00000.parquet", shard
    )  # a shard of another recording
    refusal(lambda: read_all(recording), "part-00000.parquet")
    edited(
        recording / "trace.json", {"files": GONE}
    )  # as older recordings are: its rows do not fit the turns
    longer = pd.read_parquet(recording / "turns.parquet").assign(positions=99)
    longer.to_parquet(recording / "turns.parquet")
    refusal(lambda: read_all(recording), "positions", "rows")
    shard.unlink()
    refusal(lambda: read_all(recording), "there is no file", "part-00000.parquet")


def test_a_header_is_sealed(recording):
    path = recording / "trace.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    refusal(lambda: open_trace(recording), "trace.json", "checksum")
    path.write_text("[1]")
    refusal(lambda: open_trace(recording), "trace.json")
    path.unlink()
    refusal(lambda: open_trace(recording), "there is no finished recording", "trace.json")


@pytest.fixture
def policy(tmp_path):
    return (
        DepthPolicy(depth=4, top_k=3, total_tokens=12, stride=1)
        .fill_at_random((8,))
        .save(tmp_path / "policy")
    )


@pytest.fixture
def drafter(tmp_path):
    return save_drafter(random_pair().drafter.network, tmp_path / "drafter")


SAVED = {  # what no other test asks for
    "costs": lambda folder: round_costs().save(folder / "costs.json"),
    "copies": lambda folder: CopyOdds(((3,) * 7,) * 4, ((5,) * 7,) * 4).save(folder),
}
# fixture or one of SAVED -> (the file, how it is read, wrong values of its fields)
WRONG = {
    "recording": ("trace.json", open_trace, [
        {"schema": 99}, {"schema": GONE}, {"depth": "x"}, {"depth": GONE}, {"top_ks": None}, {"top_ks": GONE},
        {"top_ks": [0]}, {"top_ks": []}, {"most_nodes": float("nan")}, {"most_nodes": 10**11}, {"most_nodes": GONE},
        {"columns": []}, {"columns": GONE}, {"pair": 3}, {"pair": GONE}, {"key": GONE}, {"temperature": -1.0},
    ]),
    "policy": ("policy.json", load_policy, [
        {"schema": 7}, {"schema": GONE}, {"class": ["a"]}, {"class": GONE}, {"class": "os.system"}, {"settings": 3},
        {"settings": GONE}, {"trained_for": None}, {"trained_for": GONE}, {"surplus": 1},
    ]),
    "costs": ("", CostModel.load, [
        {"widths": "abc"}, {"verify": [1, "x"]}, {"step": None}, {"rest_ms": float("nan")}, {"rest_ms": -1.0},
        {"policy_ms": []}, {"ranges": {"top_k": 3}}, {"machine": 4}, {"errors": "x"}, {"name": 3}, {"provenance": 4},
        {"root": [[1]]}, {"nodes": [0, 1e30]}, {"schema": GONE}, {"class": GONE}, {"step": GONE}, {"surplus": 1},
    ]),
    "drafter": ("config.json", lambda folder: read_checkpoint(folder).network(), [
        {"hidden_size": "x"}, {"num_attention_heads": 0}, {"rms_norm_eps": float("nan")}, {"vocab_size": -3},
        {"rope_theta": float("inf")}, {"intermediate_size": 1.5}, {"norm_before_residual": "no"}, {"eagle_config": 3},
        {"architectures": 5}, {"draft_vocab_size": True}, {"vocab_size": 10**9, "draft_vocab_size": 10**9},
        {"hidden_size": 10**9},
    ]),
    "copies": ("", lambda file: CopyOdds.load(file.parent), [
        {"hits": [[float("inf")] * 7] * 4}, {"hits": [[-9] * 7] * 4}, {"scale": float("nan")}, {"scale": 0}, {"hash": "x"},
        {"matched": 3}, {"outcomes": GONE}, {"hits": [[1]], "outcomes": [[2]]}, {"hits": [[9] * 7] * 4}, {"hits": []},
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes"), [(kind, one) for kind in WRONG for one in WRONG[kind][2]], ids=str
)
def test_files_of_other_values(kind, changes, request, tmp_path):
    name, read, _ = WRONG[kind]
    place = SAVED[kind](tmp_path) if kind in SAVED else request.getfixturevalue(kind)
    path = edited(place / name if name else place, changes)
    refusal(lambda: read(place), path.name)


def test_a_policy_with_other_settings(policy):
    settings = json.loads((policy / "policy.json").read_text())["settings"]
    for changes in [
        {"top_k": "four"}, {"top_k": 10**9}, {"top_k": 1e9}, {"depth": -1}, {"seed": "x"}, {"activation": 3},
        {"temperature": float("nan")}, {"temperature": 0}, {"surplus": 2}, {"beam": [0]}, {"beam": "a"},
    ]:  # fmt: skip
        edited(policy / "policy.json", {"settings": settings | changes})
        refusal(lambda: load_policy(policy), "policy.json, settings of DepthPolicy")


def test_a_policy_with_other_arrays(policy):
    path = policy / "policy.safetensors"
    arrays = load_file(path)
    for change in [
        lambda arrays: {"bias.0": np.full_like(arrays["bias.0"], np.nan)},
        lambda arrays: {"extra": np.zeros(3, np.float32)},
        lambda arrays: {"weight.1": None},
        lambda arrays: {"weight.0": arrays["weight.0"][:, :-1].copy()},
    ]:
        save_file(
            {name: array for name, array in (arrays | change(arrays)).items() if array is not None},
            path,
        )
        edited(policy / "policy.json", {"files": GONE})
        refusal(lambda: load_policy(policy), "policy.safetensors")


def test_policies_are_sealed_and_one_of_another_pair_says_so(policy):
    trained = load_policy(policy)
    assert trained.depth == 4
    flip(policy / "policy.safetensors", 0.9)
    refusal(lambda: load_policy(policy), "policy.safetensors", "sha256")
    text = (policy / "policy.json").read_text()
    (policy / "policy.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    refusal(lambda: load_policy(policy), "policy.json", "checksum")
    refusal(lambda: load_policy(policy / "nowhere"), "there is no policy", "no policy.json")
    for path in shipped_folder("small").parent.rglob("policy.json"):
        assert "checksum" in json.loads(path.read_text()), path
    refusal(
        lambda: trained.logits(np.zeros(trained.observation_size + 1, np.float32)), "another pair"
    )
    network = random_policy(features=7).network
    refusal(lambda: network.state(np.zeros(8, np.float32)), "reads 7 numbers", "another pair")


def test_a_cost_model_comes_back_and_alien_shards_do_not(tmp_path, home):
    costs = round_costs(ranges={"top_k": (1, 10)}, policy_ms={"radar": 0.5}, machine={"cpu": "Z80"})
    assert CostModel.load(costs.save(tmp_path / "costs.json")) == costs
    ours, theirs = (runs.start(name, {}).shards("rows") for name in ("ours", "theirs"))
    for shards in (ours, theirs):
        shards.write(0, pd.DataFrame({"a": [1]}))
    assert len(ours.read()) == 1
    shutil.copy(theirs.path(0), ours.path(1))
    refusal(ours.read, "part-00001.parquet", "another run")
    shutil.move(ours.path(1), ours.folder / "part-x.parquet")
    refusal(ours.read, "part-x.parquet")


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": 3}', "{"])
def test_run_json(home, text):
    run = runs.start("bad", {})
    edited(run.path("run.json"), {"sessions": 3})
    refusal(lambda: runs.start("bad", {}), "run.json", "sessions")
    run.path("run.json").write_text(text)
    refusal(lambda: runs.find("bad"), "run.json")


def test_the_book(tmp_path):
    (tmp_path / "a.ipynb").write_text("{}")
    for text in [
        "3", "- 3", "- name: 3", "- main: true", "- name: a\n  parameters: 3", "- name: a\n  parameters: {laptop: 3}",
        "- name: a\n  reads: 3", "- name: a\n  writes: x", "- name: a\n  main: maybe", "- name: a\n  smoke: [1]",
        "- name: a\n  headline: 3", "- name: a\n  each: [1]", "- name: a\n  cost: {laptop: [1]}", "- name: a\n  may_read: 1",
    ]:  # fmt: skip
        (tmp_path / "book.yml").write_text(text)
        refusal(lambda: read_book(tmp_path), "book.yml")


def test_files_of_texts_and_files_that_are_none(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    calls = (
        (load_suite, "gsm8k", tmp_path),
        (load_conversations, path),
        (read_prompts, path),
        (ChatFiles, tmp_path, {}),
    )
    for content, (call, *given) in itertools.product(
        (b"\xff\xfe\n", b"[" * 100_000, b"3\n", b"["), calls
    ):
        path.write_bytes(content)
        assert path.name in refusals.refusal(call, *given)
    for read, kind in ((stored.read_json, "JSON"), (runs.read_yaml, "YAML")):
        path = tmp_path / f"file.{kind}"
        assert re.search(f"there is no file .*{path}.*check the path", refusals.refusal(read, path))
        for content in (b"{" * 5_000, b"a: " + b"[" * 5_000, b"\xff\xfe\x00"):
            path.write_bytes(content)
            assert f"{path} cannot be read as {kind}" in refusals.refusal(read, path)
