"""Decoding methods by name: a policy or plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static, unused
from specdec.core.protocols import Drafter
from specdec.core.tree_config import TREES, tree_from
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.pairs import describe_pair, fingerprint
from specdec.policies.base import load_policy, policy_folder

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
