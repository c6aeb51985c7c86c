"""Decoding methods by name: a policy or plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static, unused
from specdec.core.protocols import Drafter
from specdec.core.records import EXTEND, SIZE
from specdec.core.tree_config import TREES, tree_from
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.pairs import describe_pair, fingerprint
from specdec.policies.base import combine, load_policy, policy_folder

AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class DraftedBy:
    """A policy with its own drafter on the target that all methods share."""

    drafter: Drafter
    policy: Policy
    name: str = ""  # the drafter's identity for the run: its kind and the source of its weights

    @property
    def tuned_on(self) -> frozenset[str]:
        return self.policy.tuned_on

    @property
    def fingerprinted(self) -> dict:
        # the target is the run's own, so the drafter's weights suffice
        described = describe_pair(Pair(self.drafter.target, self.drafter))
        drafter = [self.name, described["weights"], described.get("drafter")]
        return {"drafter": drafter, "policy": fingerprint(self.policy)}

    def of(self, pair: Pair) -> Pair:
        """The pair with this drafter."""
        return replace(pair, drafter=self.drafter)


def unused_method(method):
    """The method in its given state, for one text."""
    if isinstance(method, DraftedBy):
        return replace(method, policy=unused(method.policy))
    return None if method is None else unused(method)


def method_from(text: str) -> Policy | None:
    """A method from text: "autoregressive" (None), a name in TREES,
    "static:total_tokens,depth,top_k[,beam,...]", or a policy's folder or name.
    """
    kind, _, numbers = text.partition(":")
    if text == AUTOREGRESSIVE:
        return None
    if text in TREES:
        return Static.of(TREES[text])
    if kind == "static":
        return Static.of(tree_from(numbers))
    # a folder that is missing is reported as one
    if policy_folder(text).is_dir() or "/" in text:
        return load_policy(text)
    raise nearest_name_error("method", text, [AUTOREGRESSIVE, *TREES, "static:60,7,10"])


def load_controller(folder: str | Path | list | tuple) -> Policy:
    """The learned policy of a folder; LTD's two policies also as a pair of folders."""
    if not isinstance(folder, list | tuple):
        return load_policy(folder)
    parts = {policy.kind: policy for policy in map(load_policy, folder)}
    if set(parts) != {EXTEND, SIZE}:
        why = f"{list(map(str, folder))} must be LTD's two policies"
        raise SpecdecError(f"{why}, one for depth and one for size.")
    return combine(parts[EXTEND], parts[SIZE])


def named_methods(methods: dict) -> dict[str, Policy | None]:
    """{name: policy, or None for plain decoding}; texts as in `method_from`."""
    if not isinstance(methods, dict) or not methods:
        example = "{'plain': 'autoregressive'}"
        raise SpecdecError(f"methods is a dict of names and policies, such as {example}.")
    policies = {}
    for name, method in methods.items():
        policy = method_from(method) if isinstance(method, str) else method
        if not isinstance(policy, Policy | DraftedBy | None):
            why = f"method {name!r} is a {type(policy).__name__}"
            raise SpecdecError(f"{why}; give a policy, 'autoregressive' or 'static:60,7,10'.")
        policies[str(name)] = policy
    return policies


def baseline_of(methods: dict[str, Policy | None]) -> str:
    """The method that all others are compared with: plain decoding if present, else the first."""
    return next((name for name, policy in methods.items() if policy is None), next(iter(methods)))
