"""Ways of decoding by name: what a text means, what a folder holds, what names a method."""

from types import SimpleNamespace

import numpy as np
import pytest

from specdec.core.policy import Chain, Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import methods
from specdec.policies.base import Network, load_policy
from specdec.policies.ltd import DepthPolicy, SizePolicy

REFUSED = {
    "autoregressive:1": "unknown method",
    "eagel3": "did you mean 'eagle3'",
    "here/nothing": "there is no policy",
    "static:8,3": "write static:",
    "static:a,b,c": "write static:",
}


@pytest.mark.parametrize("text", REFUSED)
def test_texts_that_are_no_method(text):
    with pytest.raises(SpecdecError, match=REFUSED[text]):
        methods.method_from(text)


def test_methods_from_text_and_under_their_names():
    assert methods.method_from("autoregressive") is None
    assert methods.method_from("static:8,3,2").plan == TreeConfig(8, 3, 2)
    assert methods.method_from("static:16,5,4,2,1").plan == TreeConfig(16, 5, 4, beam=(2, 1))
    for name, tree in methods.TREES.items():
        assert methods.method_from(name).plan == tree
    tree = Static(4, 2, 1)
    named = methods.named_methods({"plain": "autoregressive", 1: tree, "none": None})
    assert named == {"plain": None, "1": tree, "none": None}
    assert methods.baseline_of(named) == "plain"
    assert methods.baseline_of({"a": tree, "b": None}) == "b"
    assert methods.baseline_of({"a": tree, "b": tree}) == "a"
    for wrong in ([tree], {}, "plain"):
        pytest.raises(SpecdecError, methods.named_methods, wrong).match("dict of names")
    half = {"half": SimpleNamespace(asks=(), limits=None, plan=None)}
    pytest.raises(SpecdecError, methods.named_methods, half).match("'half'")


def saved(folder, kind, number=0):
    """A policy of LTD's, whose weights are all this number."""
    policy = DepthPolicy(total_tokens=5, depth=3, top_k=3)
    if kind == "size":
        policy = SizePolicy(sizes=(2, 4), drafted=3, depth=3, top_k=3)
    weights = np.full((policy.actions, policy.observation_size), number, np.float32)
    policy.network = Network([weights], [np.zeros(policy.actions, np.float32)])
    policy.save(folder)


def numbers(policy) -> list[float]:
    parts = policy.policies if isinstance(policy, Chain) else [policy]
    return [float(part.network.weights[0][0, 0]) for part in parts]


def test_where_a_policy_lies_in_a_folder(tmp_path, monkeypatch):
    saved(tmp_path / "one", "depth", 1)
    saved(tmp_path / "training" / "policy", "depth", 2)
    saved(tmp_path / "both" / "policy" / "depth", "depth", 3)
    saved(tmp_path / "both" / "policy" / "size", "size", 4)
    saved(tmp_path / "half" / "depth", "depth")
    load = load_policy
    assert numbers(load(tmp_path / "one")) == [1] and numbers(load(tmp_path / "training")) == [2]
    assert numbers(load(str(tmp_path / "both"))) == [3, 4]
    assert numbers(methods.method_from(str(tmp_path / "both"))) == [3, 4]
    for wrong in (tmp_path / "half", tmp_path / "nothing"):
        pytest.raises(SpecdecError, load, wrong)
    monkeypatch.chdir(tmp_path)
    assert numbers(methods.method_from("one")) == [1]
