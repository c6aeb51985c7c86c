"""What we take from stable-baselines3: PPO of given settings, its actor alone, and that actor in numpy.

Knows nothing about rollouts, files or the systems.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from specdec.env import make_vec
from specdec.policies.learned import Network


def model_of(make_env, ppo: dict, envs: int, seed: int):
    """stable-baselines3's PPO with these settings: its networks, buffer and update; it never steps an environment."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    def rate(remaining: float) -> float:
        return ppo["learning_rate"] * rate_factor(1 - remaining, ppo["warmup_frac"], ppo["linear_decay"])

    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[ppo["activation"]]
    widths = dict(pi=list(ppo["pi"]), vf=list(ppo["vf"]))
    same = ("batch_size", "n_epochs", "clip_range", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
    with seeded_all(seed, -1):
        model = PPO(
            "MlpPolicy", make_vec(make_env, envs, seed), learning_rate=rate, n_steps=ppo["n_steps"] // envs, seed=seed,
            device="cpu", policy_kwargs=dict(net_arch=widths, activation_fn=activation),
            **{name: ppo[name] for name in same},
        )  # fmt: skip
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def rate_factor(progress: float, warmup_frac: float, linear_decay: bool) -> float:
    """The learning rate as a fraction of its peak: linear warm-up from 0, then constant or linear to 0 at the end."""
    if progress < warmup_frac:
        return progress / warmup_frac
    return (1 - progress) / (1 - warmup_frac) if linear_decay else 1.0


def export(policy, activation: str, scale=None) -> Network:
    """The actor of a stable-baselines3 MlpPolicy as a numpy Network; scale (mean, deviation) moves into its first layer:
    W / deviation and b - W (mean / deviation), so that it reads raw observations."""
    layers = [layer for layer in policy.mlp_extractor.policy_net if isinstance(layer, torch.nn.Linear)]
    layers.append(policy.action_net)
    weights = [layer.weight.detach().double().numpy() for layer in layers]
    biases = [layer.bias.detach().double().numpy() for layer in layers]
    if scale is not None:
        weights[0] = weights[0] / scale[1]
        biases[0] = biases[0] - weights[0] @ scale[0]
    return Network(weights, biases, activation)


def action_logits(policy, observations: np.ndarray) -> np.ndarray:
    """float32 [B, actions] of a stable-baselines3 MlpPolicy for observations float32 [B, O]."""
    with torch.no_grad():
        hidden = policy.mlp_extractor.forward_actor(torch.from_numpy(np.ascontiguousarray(observations)))
        return policy.action_net(hidden).numpy()


@contextlib.contextmanager
def seeded_all(seed: int, number: int):
    """torch's and numpy's global generators set from (seed, number) inside the block, and as they were afterwards."""
    words = np.random.SeedSequence((seed, number + 1, 1)).generate_state(2)
    before = np.random.get_state()  # noqa: NPY002  stable-baselines3 shuffles with it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002
