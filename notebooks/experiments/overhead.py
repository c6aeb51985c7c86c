"""Stop-watches on methods while a pair decodes, and on one update of a policy.

The policies may be untrained, since an answer takes as long whatever it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pandas as pd

from specdec.core import clock
from specdec.core.decode import decode
from specdec.core.policy import Policy
from specdec.policies.base import Learned, PPOConfig


@contextlib.contextmanager
def timed(**methods: tuple[object, str]) -> Iterator[dict[str, float]]:
    """Milliseconds spent in methods of objects, by the name given to each, while the block runs."""
    spent = dict.fromkeys(methods, 0.0)

    def watched(name: str, method):
        def call(*arguments):
            begin = clock.now()
            # what raises has taken its time, too
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


def decode_timed(
    pair, prompts: list, policy: Policy, max_new_tokens: int, **methods
) -> tuple[pd.DataFrame, dict]:
    """(cycles, spent): rows of all prompts' cycles, and ms in `methods` as `timed` has it.

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

    # a network and a rollout of the sizes that the training has
    nets = {"net_arch": {"pi": list(ppo.pi), "vf": list(ppo.vf)}}
    settings = dict(n_steps=ppo.n_steps, batch_size=ppo.batch_size, n_epochs=ppo.n_epochs)
    settings |= dict(ent_coef=ppo.ent_coef, gamma=ppo.gamma)
    model = PPO("MlpPolicy", Nothing(), policy_kwargs=nets, device="cpu", seed=0, **settings)
    times_ms = []
    for _ in range(repeats):
        # of `learn`, the update alone: no environment has to answer
        with timed(train=(model, "train")) as spent:
            model.learn(ppo.n_steps)
        times_ms.append(spent["train"])
    return min(times_ms)
