"""An untrained policy that goes by values."""

import numpy as np

from fakes.traces import round_costs
from specdec.policies.value import AcceptanceModel, ValuePolicy

SIZES = (0, 1, 3, 6, 12, 20)


def random_policy(features=32, seed=0, **fields):
    """An untrained policy whose network says something."""
    policy = ValuePolicy(**{"top_k": 3, "most_expansions": 4, "sizes": SIZES, **fields})
    levels = policy.inputs.levels
    random, width, outputs = (
        np.random.default_rng(seed),
        policy.inputs.size,
        levels * len(policy.sizes),
    )
    shapes = {"probe.weight": (4, features), "probe.bias": (4,), "hidden.weight": (16, width + 4)}
    shapes |= {"hidden.bias": (16,), "out.weight": (outputs, 16), "out.bias": (outputs,)}
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    policy.network = AcceptanceModel(arrays, levels, len(policy.sizes))
    return policy.price(round_costs(), 0.2)
