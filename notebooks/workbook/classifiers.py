"""Fits the classifiers among the heuristics, Disco, SpecDec++ and C2T, to recordings of EAGLE-3.

Balanced samples and AdamW at 1e-4, as in LTD's appendix A.1. `*_arrays` compute inputs and labels
from a trace, `fit_*` train on arrays and write the policy. Knows nothing about models or the cycle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specdec.core.policy import Policy
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.policies import heuristics
from specdec.policies.base import Learned, Network
from specdec.replays.trace import Trace
from specdec.training.loop import TrainingRun, batches, descend, seeded


def disco_arrays(
    trace: Trace, *, max_depth: int = 12, verify_nodes: int = 60, top_k: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs float32 [M, top_k + 2], labels bool [M]): every question that Disco could get.

    Label of the question after n expansions: whether the tree of n expansions and `verify_nodes`
    nodes contains the target's token at depth n + 1.
    """
    scores, ranks = trace.column("scores", top_k), trace.ranks[top_k]
    inputs, labels, parents = [], [], np.zeros((len(trace), 1), dtype=np.float32)
    start = 0
    for n in range(min(max_depth, trace.depth + 1)):
        end = pool_size(n, top_k)
        newest = scores[:, start:end]
        inputs.append(
            heuristics.disco_inputs(newest.reshape(len(trace), -1, top_k), parents, n, top_k)
        )
        labels.append(ranks[:, n, n] < verify_nodes)
        parents, start = np.sort(newest, axis=-1)[:, : -top_k - 1 : -1], end
    return np.concatenate(inputs), np.concatenate(labels)


def specdec_plus_arrays(
    trace: Trace, *, max_depth: int = 12, verify_nodes: int = 60, top_k: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """(features float16 [R, F], labels int8 [R, max_depth + 1]): 1 if a level of the deepest tree
    holds the target's token, 0 at the first that does not, -1 below it.
    """
    if trace.features is None:
        raise SpecdecError(
            "SpecDec++ learns from the target's features; record with features=True."
        )
    deepest = min(max_depth, trace.depth)
    accepted = trace.accepted_tok(np.arange(len(trace)), top_k, deepest, verify_nodes)[:, None]
    level = np.arange(max_depth + 1)
    labels = np.where(level < accepted, 1, np.where(level == accepted, 0, -1))
    labels[:, deepest + 1 :] = -1  # not recorded
    return trace.features, labels.astype(np.int8)


def c2t_arrays(
    trace: Trace, *, max_depth: int = 8, top_k: int = 10, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs float32 [M, 2], labels bool [M]): all nodes on the target's path, and as many others
    of the same pools.
    """
    depth, random = min(max_depth, trace.depth), np.random.default_rng(seed)
    count = pool_size(depth, top_k)
    scores, ranks = (
        trace.column("scores", top_k)[:, :count],
        trace.ranks[top_k][:, depth, : depth + 1],
    )
    depths = heuristics.node_depths(count, top_k)
    inputs, labels = [], []
    for row_scores, row_ranks in zip(scores, ranks, strict=True):
        path = row_ranks[row_ranks < count]
        if not len(path):
            continue
        order = np.argsort(-row_scores, kind="stable")  # ties to the earlier node, as in the tree
        rest = np.delete(order, path)  # a chain may be entirely on the path
        others = random.choice(rest, size=min(len(path), len(rest)), replace=False)
        nodes = np.concatenate((order[path], others))
        inputs.append(np.stack((row_scores[nodes], depths[nodes] / 10), axis=-1))
        labels.append(np.arange(len(nodes)) < len(path))
    if not inputs:
        raise SpecdecError(
            "no target path enters any of these trees; record more positions before fitting C2T."
        )
    return np.concatenate(inputs).astype(np.float32), np.concatenate(labels)


@dataclass(frozen=True)
class FitOptions:
    """Settings of a fit. The weights and all random draws come from `seed`. policy: settings of the
    policy.
    """

    out_dir: Path
    epochs: int
    rate: float = 1e-4  # AdamW's, for all three
    batch: int = 256
    seed: int = 0
    resume: bool = True
    policy: dict = field(default_factory=dict)


def fit_disco(inputs, labels, *, out_dir: Path, epochs: int = 50, hidden: int = 128, **options):
    """(Disco, curve), fitted to `disco_arrays`; the policy is also in out_dir/policy. options: of
    FitOptions.
    """
    layers = nn.Sequential(nn.Linear(np.shape(inputs)[-1], hidden), nn.ReLU(), nn.Linear(hidden, 1))
    return _fit(heuristics.Disco, layers, inputs, labels, FitOptions(out_dir, epochs, **options))


def fit_c2t(inputs, labels, *, out_dir: Path, epochs: int = 50, hidden: int = 64, **options):
    """(C2T, curve), fitted to `c2t_arrays` as in `fit_disco`."""
    layers = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    return _fit(heuristics.C2T, layers, inputs, labels, FitOptions(out_dir, epochs, **options))


def fit_specdec_plus(
    features, labels, *, out_dir: Path, epochs: int = 5, hidden: int = 1024, **options
):
    """(SpecDec++, curve), fitted to `specdec_plus_arrays`. Balanced over (position, level)
    pairs.
    """
    features, labels = np.asarray(features), np.asarray(labels)
    matching = features.ndim == labels.ndim == 2 and len(features) == len(labels)
    assert matching, "features and labels of the same positions"
    module = _Residual(features.shape[1], hidden, labels.shape[1])
    row, level = np.nonzero(labels >= 0)
    options = FitOptions(
        out_dir,
        epochs,
        policy={"max_depth": labels.shape[1] - 1, **options.pop("policy", {})},
        **options,
    )
    inputs = heuristics.unit_features(features)
    return _fit(
        heuristics.SpecDecPlus, module, inputs, labels[row, level] == 1, options, row, level
    )


EPOCHS = {"Disco": 50, "C2T": 50, "SpecDec++": 5}  # number of epochs for each
_FITS = {
    "Disco": (fit_disco, disco_arrays, {"max_depth", "verify_nodes", "top_k"}),
    "C2T": (fit_c2t, c2t_arrays, {"max_depth", "top_k"}),
    "SpecDec++": (fit_specdec_plus, specdec_plus_arrays, {"max_depth", "verify_nodes", "top_k"}),
}


def fitted(
    name: str, trace: Trace, out_dir: Path, *, seed: int = 0, policy: dict, **options
) -> Policy:
    """The classifier of this name (a key of EPOCHS), fitted to a recording. policy: its settings.
    options: of FitOptions.
    """
    fit, arrays, takes = _FITS[name]
    examples = arrays(trace, **{key: value for key, value in policy.items() if key in takes})
    options = {"epochs": EPOCHS[name], **options}
    return fit(*examples, out_dir=Path(out_dir), seed=seed, policy=policy, **options)[0]


class _Residual(nn.Module):
    """head(silu(gate(x)) + skip(x)): [B, F] -> [B, levels]."""

    def __init__(self, features: int, hidden: int, levels: int):
        super().__init__()
        self.gate, self.skip = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, levels)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(nn.functional.silu(self.gate(features)) + self.skip(features))


def exported(module: nn.Module) -> Network | heuristics.ResidualNetwork:
    """The trained module in numpy."""
    if isinstance(module, _Residual):
        return heuristics.ResidualNetwork(
            {name: value.numpy() for name, value in module.state_dict().items()}
        )
    linear = [layer for layer in module if isinstance(layer, nn.Linear)]
    weights, biases = (
        [getattr(layer, name).detach().numpy() for layer in linear] for name in ("weight", "bias")
    )
    return Network(weights, biases, "relu")


def _fit(
    kind, module: nn.Module, inputs, known, options: FitOptions, row=None, column=None
) -> tuple[Learned, pd.DataFrame]:
    """Binary cross-entropy over a balanced sample. The curve: epoch, loss and accuracy on that
    sample.

    inputs float32 [M, I]; known bool [N], labels of output column[n] of input row[n]; default one
    per input, the only output's.
    """
    known = np.asarray(known, dtype=bool)
    if row is None:
        assert np.ndim(inputs) == 2 and known.shape == (len(inputs),), (
            "inputs [M, I] and one label per input"
        )
        row, column = np.arange(len(known)), np.zeros(len(known), dtype=int)
    inputs = torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float32))
    sample, seed, out_dir = balanced(known, options.seed), options.seed, Path(options.out_dir)
    row, column, labels = (
        torch.from_numpy(np.ascontiguousarray(array[sample])) for array in (row, column, known)
    )
    labels = labels.float()
    data = hashlib.sha256(inputs.numpy().tobytes() + known.tobytes()).hexdigest()
    shape = [list(weight.shape) for weight in module.parameters()]
    plan = {
        "kind": kind.__name__,
        "data": data,
        "shape": shape,
        "batch": options.batch,
        "seed": seed,
    }
    plan |= {"rate": options.rate, "steps": options.epochs}
    with seeded(seed, -1):
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    optimizer = torch.optim.AdamW(module.parameters(), options.rate)

    def epoch(number: int, _) -> dict:
        total, right = 0.0, 0
        with seeded(seed, number):
            order = list(batches(len(labels), options.batch))
        for part in order:
            logits = module(inputs[row[part]]).gather(1, column[part, None])[:, 0]
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[part])
            total += descend(optimizer, loss) * len(part)
            right += int(((logits > 0) == (labels[part] > 0)).sum())
        return {"loss": total / len(labels), "accuracy": right / len(labels)}

    run = TrainingRun(out_dir, plan, options.resume)
    run.track({"network": module}, [optimizer])
    run.run(epoch, kind.__name__, all_or_nothing=True, shown=("loss", "accuracy"))
    policy = kind(**options.policy)
    policy.network = exported(module)
    policy.trained_for = {"examples": len(labels), "epochs": options.epochs}
    policy.save(out_dir / "policy")
    run.finish(**run.table().iloc[-1][["loss", "accuracy"]].to_dict())
    return policy, run.table()


def balanced(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Indices of equally many positives and negatives, all of the rarer kind. SpecdecError if one
    kind is missing.
    """
    positive, negative = np.flatnonzero(labels), np.flatnonzero(~labels)
    count = min(len(positive), len(negative))
    if not count:
        raise SpecdecError(
            "a classifier needs examples of both kinds, but all labels are equal; record more "
            "positions."
        )
    random = np.random.default_rng(seed)
    return np.concatenate(
        [random.choice(rows, count, replace=False) for rows in (positive, negative)]
    )
