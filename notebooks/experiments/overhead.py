"""What controllers cost beside drafting and verifying, by component: while decoding, while
learning, and per prompt.

Components carry the names of Re-SpS's Tables 7 and 8 and of LTD's Table 9. Everything is measured
live on this machine; the policies may be untrained, since an answer takes as long whatever it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pandas as pd

from specdec.core import clock
from specdec.core.decode import decode
from specdec.core.policy import Chain, Policy
from specdec.core.tree import GrowingTree
from specdec.policies.base import Learned, PPOConfig

# Re-SpS's four groups, by the laps of a cycle. Its verification leaves out the target's forward;
# ours is that.
GROUPS = {
    "Drafting": ("draft_ms",),
    "Tree Structure Management": ("host_ms", "commit_ms"),
    "Verification": ("verify_ms",),
    "RL Policy Prediction": ("policy_ms",),
}
# Its components. Laps of a cycle, and methods that run between them: what no stop-watch covers is
# unaccounted for.
COMPONENTS = {
    "drafting_process": "draft_ms",
    "input_update": "commit_ms",
    "verification_process": "verify_ms",
}
TREE_WORK = {"tree_initialization": "restart", "tree_construction": "grow", "tree_update": "prune"}


@contextlib.contextmanager
def timed(**methods: tuple[object, str]) -> Iterator[dict[str, float]]:
    """Milliseconds spent in methods of objects, by the name given to each, while the block runs."""
    spent = dict.fromkeys(methods, 0.0)

    def watched(name: str, method):
        def call(*arguments):
            begin = clock.now()
            try:
                return method(*arguments)
            finally:
                spent[name] += 1e3 * (clock.now() - begin)

        return call

    with contextlib.ExitStack() as stack:
        for name, (owner, method) in methods.items():
            call = watched(name, getattr(owner, method))
            stack.enter_context(mock.patch.object(owner, method, call))
        yield spent


def tree_work() -> dict[str, tuple]:
    """What `timed` watches for the parts of the work on the tree, by Re-SpS's names for them."""
    return {name: (GrowingTree, method) for name, method in TREE_WORK.items()}


def inference(cycles: pd.DataFrame) -> pd.DataFrame:
    """Re-SpS's Table 8 of rows of cycles: component, time_ms (all cycles together), time_pct."""
    totals = {name: float(cycles[list(laps)].sum().sum()) for name, laps in GROUPS.items()}
    return _shares(totals | {"Total": sum(totals.values())}, "Total")


def training(
    cycles: pd.DataFrame, spent: dict[str, float], update_ms: float, transitions: float
) -> pd.DataFrame:
    """Re-SpS's Table 7: component, time_ms, time_pct of a training that decoded these cycles.

    spent: ms of TREE_WORK, tokenization, hidden_states_extraction, rl_policy_prediction and
    post_processing. update_ms: of one update of the policy. transitions: how many updates these
    cycles were enough for; a part of one counts as that part.
    """
    parts = {name: float(cycles[lap].sum()) for name, lap in COMPONENTS.items()} | spent
    parts["rl_policy_update"] = update_ms * transitions
    meaningful = sum(parts.values())
    # what the laps hold beside the methods that were watched
    around = float(cycles["policy_ms"].sum())
    for name in ("hidden_states_extraction", "rl_policy_prediction"):
        around -= spent.get(name, 0.0)
    rest = float(cycles["host_ms"].sum())
    for name in TREE_WORK:
        rest -= spent.get(name, 0.0)
    around = max(0.0, around)
    rest = max(0.0, rest)
    parts["Total meaningful time"] = meaningful
    parts["Container/organizational overhead"] = around
    parts["Unaccounted time (model inference, etc.)"] = rest
    return _shares(parts | {"TOTAL TIME": meaningful + around + rest}, "TOTAL TIME")


def _shares(totals: dict[str, float], whole: str) -> pd.DataFrame:
    table = pd.DataFrame({"component": totals.keys(), "time_ms": totals.values()})
    return table.assign(time_pct=100 * table["time_ms"] / totals[whole])


def decode_timed(
    pair, prompts: list, policy: Policy, max_new_tokens: int, **methods
) -> tuple[pd.DataFrame, dict]:
    """(cycles, spent): rows of the cycles of all prompts, with their TURN columns, and ms in
    `methods` as `timed` has it.

    prompts: (suite, id, token ids).
    """
    # the first answer of all takes longer
    decode(pair, prompts[0][2], policy, 4)
    parts = []
    with timed(**methods) as spent:
        for suite, prompt, ids in prompts:
            out = decode(pair, ids, policy, max_new_tokens)
            parts.append(out.cycles.assign(suite=suite, prompt=prompt, turn=0))
    return pd.concat(parts, ignore_index=True), spent


def per_sample(
    pair, prompts: list, depth_policy: Learned, size_policy: Learned, max_new_tokens: int
) -> pd.DataFrame:
    """LTD's Table 9: suite, method ("size", "depth", "total", "share"), value; ms, ms, s and % per
    prompt.
    """
    chain = Chain(depth_policy, size_policy)
    watched = {"size": (size_policy, "answer"), "depth": (depth_policy, "answer")}
    rows = []
    for suite in dict.fromkeys(suite for suite, *_ in prompts):
        of_suite = [prompt for prompt in prompts if prompt[0] == suite]
        cycles, spent = decode_timed(pair, of_suite, chain, max_new_tokens, **watched)
        total_ms = float(cycles["total_ms"].sum())
        values = {
            "size": spent["size"] / len(of_suite),
            "depth": spent["depth"] / len(of_suite),
            "total": total_ms / 1e3 / len(of_suite),
            "share": 100 * sum(spent.values()) / total_ms,
        }
        for name, value in values.items():
            rows.append({"suite": suite, "method": name, "value": value})
    return pd.DataFrame(rows)


def update_ms(policy: Learned, ppo: PPOConfig, repeats: int = 3) -> float:
    """Milliseconds of one update of the policy from n_steps transitions, the least of `repeats`."""
    import gymnasium
    from stable_baselines3 import PPO

    class Nothing(gymnasium.Env):
        """One step of zeros an episode."""

        shape = (policy.observation_size,)
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        action_space = gymnasium.spaces.Discrete(policy.actions)
        state = np.zeros(policy.observation_size, np.float32)

        def reset(self, *, seed=None, options=None):
            return self.state, {}

        def step(self, action):
            return self.state, 0.0, True, False, {}

    nets = {"net_arch": {"pi": list(ppo.pi), "vf": list(ppo.vf)}}
    settings = dict(n_steps=ppo.n_steps, batch_size=ppo.batch_size, n_epochs=ppo.n_epochs)
    settings |= dict(ent_coef=ppo.ent_coef, gamma=ppo.gamma)
    model = PPO("MlpPolicy", Nothing(), policy_kwargs=nets, device="cpu", seed=0, **settings)
    times_ms = []
    for _ in range(repeats):
        with timed(train=(model, "train")) as spent:
            model.learn(ppo.n_steps)
        times_ms.append(spent["train"])
    return min(times_ms)
