"""Ways of decoding by name: what a text means, what a folder holds, and what a run says of a
method.
"""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Chain, Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import bench, compare, lossless, methods
from specdec.evaluation.methods import DraftedBy, Sampling
from specdec.models.fingerprint import fingerprint
from specdec.policies.base import Network, load_policy
from specdec.policies.ltd import DepthPolicy, SizePolicy


@pytest.mark.parametrize(
    "config",
    [Sampling, bench.EvaluateConfig, compare.ReplayConfig, lossless.DistributionConfig],
    ids=lambda config: config.__name__,
)
def test_settings_unless_told_otherwise(config):
    recorded = json.loads(Path(__file__).with_name("defaults.json").read_text())
    assert runs.plain(asdict(config())) == recorded[config.__name__]


def test_methods_from_text_and_under_their_names_and_what_sampling_sets():
    refused = {
        "unknown method": ("autoregressive:1", "eagle3:1", "engine:60,7,10"),
        "did you mean 'eagle3'": ("eagel3",),
        "there is no policy": ("here/nothing", "here\\nothing"),
        "write static:": ("static", "static:8,3", "static:a,b,c"),
    }
    for message, text in ((message, text) for message, texts in refused.items() for text in texts):
        pytest.raises(SpecdecError, methods.method_from, text).match(message)
    assert methods.method_from("autoregressive") is None
    assert methods.method_from("static:8,3,2").plan == TreeConfig(8, 3, 2)
    assert methods.method_from("eagle3").plan == TreeConfig(60, 7, 10)
    assert methods.method_from("static:16,5,4,2,1").plan == TreeConfig(16, 5, 4, beam=(2, 1))
    for name, tree in methods.TREES.items():
        assert methods.method_from(name).plan == tree
    tree = Static(4, 2, 1)
    found = methods.named_methods({"plain": "autoregressive", 1: tree, "tree": tree, "none": None})
    assert found == {"plain": None, "1": tree, "tree": tree, "none": None}
    assert methods.baseline_of(found) == "plain"
    assert methods.baseline_of({"a": tree, "b": None}) == "b"
    assert methods.baseline_of({"a": tree, "b": tree}) == "a"
    for wrong in ([tree], {}, "plain"):
        pytest.raises(SpecdecError, methods.named_methods, wrong).match(
            "dict of names and policies"
        )
    half = SimpleNamespace(asks=(), limits=None, plan=None)
    pytest.raises(SpecdecError, methods.named_methods, {"half": half}).match(
        "'half' is a SimpleNamespace"
    )
    assert Sampling().warping == {} and Sampling().sampling == {"temperature": 0.0}
    whole = dict(top_k=0, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    assert Sampling(0.7, **whole).warping == whole
    assert Sampling(0.7, **whole).sampling == {"temperature": 0.7, **whole}


def test_a_run_knows_a_drafter_by_its_name_and_weights(monkeypatch):
    described = []

    def describe(pair):
        described.append(pair)
        return {"weights": "abc", "dtype": "float32"} | (
            {"drafter": "more"} if pair.drafter.more else {}
        )

    monkeypatch.setattr(methods, "describe_pair", describe)
    drafter = SimpleNamespace(target="target", more=True)
    own = DraftedBy(drafter, Static(4, 2, 1), "suffix")
    assert own.fingerprinted == {
        "drafter": ["suffix", "abc", "more"],
        "policy": fingerprint(Static(4, 2, 1)),
    }
    assert described == [Pair("target", drafter)]
    drafter.more = False
    assert DraftedBy(drafter, Static(4, 2, 1)).fingerprinted["drafter"] == ["", "abc", None]
    pair = Pair("target", "its own", "tokenizer", "name")
    assert own.of(pair) == Pair("target", drafter, "tokenizer", "name")
    assert pair.drafter == "its own"
    assert own.plan == TreeConfig(4, 2, 1) and own.asks == frozenset()


def saved(folder, kind, number=0):
    """A policy of LTD's, whose weights are all this number."""
    shape = dict(depth=3, top_k=3)
    policy = (
        DepthPolicy(total_tokens=5, **shape)
        if kind == "depth"
        else SizePolicy(sizes=(2, 4), drafted=3, **shape)
    )
    size = policy.actions, policy.observation_size
    policy.network = Network(
        [np.full(size, number, np.float32)], [np.zeros(policy.actions, np.float32)]
    )
    policy.save(folder)
    return folder


def numbers(policy: Chain) -> list[float]:
    return [float(part.network.weights[0][0, 0]) for part in policy.policies]


def test_where_a_policy_lies_in_a_folder(tmp_path, monkeypatch):
    saved(tmp_path / "one", "depth", 1)
    saved(tmp_path / "training" / "policy", "depth", 2)
    for place in ("both", "trained/policy"):
        saved(tmp_path / place / "depth", "depth", 3)
        saved(tmp_path / place / "size", "size", 4)
    saved(tmp_path / "half" / "depth", "depth")
    alone = [methods.load_controller(tmp_path / name) for name in ("one", "training")]
    assert [float(policy.network.weights[0][0, 0]) for policy in alone] == [1, 2]
    assert numbers(methods.load_controller(tmp_path / "both")) == [3, 4]
    assert numbers(methods.load_controller(str(tmp_path / "trained"))) == [3, 4]
    pair = tmp_path / "both" / "size", tmp_path / "one"
    assert numbers(methods.load_controller(pair)) == [1, 4]
    assert numbers(methods.method_from(str(tmp_path / "both"))) == [3, 4]
    for wrong in (tmp_path / "half", tmp_path / "nothing", [tmp_path / "one", tmp_path / "one"]):
        pytest.raises(SpecdecError, methods.load_controller, wrong)
    monkeypatch.chdir(tmp_path)
    assert float(methods.method_from("one").network.weights[0][0, 0]) == 1


def test_policies_are_found_where_they_were_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    policies = tmp_path / "home" / "runs" / "laptop" / "policies"
    saved(policies / "ours-float32" / "policy", "depth", 1)
    saved(policies / "ltd-float32" / "depth", "depth", 2)
    saved(policies / "ltd-float32" / "size", "size", 3)
    ours = load_policy("runs/laptop/policies/ours-float32")
    assert float(ours.network.weights[0][0, 0]) == 1
    assert numbers(load_policy("runs/laptop/policies/ltd-float32")) == [2, 3]
    assert [part.kind for part in load_policy("smollm2/ltd-float32").policies] == ["extend", "size"]
    for wrong in ("smollm2/our", "smolm2/ours-float32"):
        refused = pytest.raises(SpecdecError, load_policy, wrong)
        refused.match("smollm2/ours-float32")
