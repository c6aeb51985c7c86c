"""Training of RADAR's controller on its offline data: REINFORCE as the paper has it, or the exact gradient of throughput.

Runs resume exactly, are judged on held-out rows in tokens per millisecond, and end as a `RadarPolicy` on disk. What is
minimised stands in `radar_objective`, the data in `radar_data`. (RADAR section 2.2.)
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from specdec import runs
from specdec.config import SpecdecError, nearest_name_error
from specdec.policies.radar import LstmNetwork, RadarPolicy
from specdec.train import radar_objective as objective
from specdec.train.epochs import Epochs, batches, seeded
from specdec.train.loop import open_plan
from specdec.train.radar_data import STOPS, RadarData
from specdec.train.radar_objective import ALPHAS, PRESETS, RadarNetwork, RadarTraining, Rows

COLLAPSED_FRAC = 0.99  # a policy that stops at one depth this often is a constant in disguise


@dataclass(frozen=True)
class Trained:
    """policy: the epoch that was kept. curve: one row per epoch. results: tokens per ms of held-out rows and more.

    prompts: held-out rows summed by prompt: new_tok and total_ms of the policy and of the best constant depth
    (constant_tok, constant_ms), expectations both; for intervals with `stats.speedup`.
    """

    policy: RadarPolicy
    curve: pd.DataFrame
    results: dict
    prompts: pd.DataFrame


def train_radar(
    data: RadarData,
    latency_ms: np.ndarray,
    settings: RadarTraining | str = "ours",
    *,
    seed: int = 0,
    out_dir: Path,
    trained_for: dict | None = None,
    resume: bool = True,
    split_seed: int = 0,
) -> Trained:
    """Train one controller and write it to out_dir/policy, with loss.parquet, results.json and a checkpoint beside it.

    latency_ms: l(a) as [8] or [Q, 8] (`constant_latency_ms`, `latency_ms`). settings: a RadarTraining or a name of
    PRESETS. trained_for: pair, costs and the like, remembered by the policy. split_seed: which rows are held out, apart
    from `seed`, so that seeds differ in training alone. The same call continues a run that was stopped, bit for bit on
    one machine, and returns at once where it is finished.
    """
    settings = _settings(settings)
    latency = _checked_latency(latency_ms, len(data))
    split = data.split(settings.held_out_frac, settings.split_by, split_seed)
    train, held = (Rows.of(data.select(rows), latency[rows]) for rows in split)
    plan = open_plan(
        Path(out_dir),
        {"training": settings, "seed": seed, "split_seed": split_seed, "data": data.key,
         "latency": hashlib.sha256(latency.tobytes()).hexdigest(), "steps": settings.epochs, "minutes": None},
        resume,
    )  # fmt: skip
    run = _Run(settings, train, held, seed, Path(out_dir), plan)
    run.loop.run(run.epoch)
    flat_nodes = data.header.get("flat_nodes")  # as it was taught
    policy = RadarPolicy.preset(settings.policy, seed=seed, flat_nodes=flat_nodes)
    policy.network = LstmNetwork({name: value.numpy() for name, value in run.best.network.state_dict().items()})
    policy.trained_for = {"seed": seed, "data": data.header, "training": runs.plain(settings), **(trained_for or {})}
    results, prompts = run.judge(policy.temperature is None, data.prompts[split[1]])
    policy.save(Path(out_dir) / "policy")
    runs.write_json(Path(out_dir) / "results.json", results)
    run.loop.finish(**results)
    if results["most_common_frac"] >= COLLAPSED_FRAC:
        warnings.warn(
            f"this RADAR policy stops after {results['most_common_stop']} expansions in "
            f"{results['most_common_frac']:.1%} of held-out cycles: it collapsed to a constant; try another alpha or seed.",
            stacklevel=2,
        )
    return Trained(policy, run.loop.table, results, prompts)


def sweep(
    data: RadarData, latency_ms: np.ndarray, settings: RadarTraining | str = "official", *, alphas=ALPHAS,
    seeds=(0, 1, 2), out_dir: Path, trained_for: dict | None = None,
) -> tuple[Trained, pd.DataFrame]:  # fmt: skip
    """Every alpha with every seed, each a run of its own below `out_dir`. Returns the best run and a table of all.

    Best is the alpha with the highest mean held-out throughput over seeds, and of it the best seed: a single seed of
    this grid is mostly noise (sheet section 5). The table has one row per run: alpha, seed, and `results`.
    """
    settings = _settings(settings)
    found, rows = {}, []
    for alpha in alphas:
        for seed in seeds:
            one = dataclasses.replace(settings, alpha=alpha)
            folder = Path(out_dir) / f"alpha-{alpha:g}-seed-{seed}"
            found[alpha, seed] = train_radar(data, latency_ms, one, seed=seed, out_dir=folder, trained_for=trained_for)
            rows.append({"alpha": alpha, "seed": seed, **found[alpha, seed].results})
    if not rows:
        raise SpecdecError("the sweep is empty; give at least one alpha and one seed.")
    table = pd.DataFrame(rows)
    alpha = table.groupby("alpha")["tok_per_ms"].mean().idxmax()
    best = table[table["alpha"] == alpha].set_index("seed")["tok_per_ms"].idxmax()
    return found[alpha, best], table


def _settings(settings: RadarTraining | str) -> RadarTraining:
    if isinstance(settings, str):
        if settings not in PRESETS:
            raise nearest_name_error("preset of RADAR's training", settings, PRESETS)
        return PRESETS[settings]
    return settings


def _checked_latency(latency_ms, rows: int) -> np.ndarray:
    """float64 [rows, 8]."""
    latency = np.asarray(latency_ms, dtype=np.float64)
    if latency.shape not in ((STOPS,), (rows, STOPS)):
        raise SpecdecError(f"latency_ms must have shape ({STOPS},) or ({rows}, {STOPS}), not {latency.shape}.")
    if not np.isfinite(latency).all() or (latency <= 0).any() or (np.diff(latency, axis=-1) <= 0).any():
        raise SpecdecError("latency_ms must be above 0 and grow with every expansion; look at the cost model.")
    return np.broadcast_to(latency, (rows, STOPS)).copy()


class _Best(nn.Module):
    """The network of the best epoch so far; kept in the checkpoint."""

    def __init__(self, network: RadarNetwork):
        super().__init__()
        self.network = copy.deepcopy(network)
        self.register_buffer("score", torch.tensor(-torch.inf, dtype=torch.float64))
        self.register_buffer("epoch", torch.tensor(-1))


class _Run:
    """One training run: tensors, network, optimiser, and what an epoch does."""

    def __init__(self, settings: RadarTraining, train: Rows, held: Rows, seed: int, out_dir: Path, plan: dict):
        self.settings, self.train, self.held = settings, train, held
        with seeded(seed, -1):
            self.network = RadarNetwork(settings.dropout, settings.continue_bias)
        self.best = _Best(self.network)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.optimizer.param_groups[0]["peak"] = settings.learning_rate
        self.step_ms = train.draft_step_ms
        self.constant = objective.constant_stop(train)
        self.constant_rate = objective.throughput(objective.always(self.constant, train), train)
        self.loop = Epochs(
            out_dir, plan, {"network": self.network, "best": self.best}, [self.optimizer], settings.factor,
            f"radar, seed {seed}", seed=seed, shown=("loss", "tok_per_ms", "draft_calls"),
        )  # fmt: skip

    def epoch(self, number: int, factor: float) -> dict:
        """One pass over the training rows, then judge. Returns the row of the curve."""
        rate = self.constant_rate  # tokens per ms that the policy has shown it can reach, or a constant can
        if self.settings.objective == "lagrangian":
            probs = objective.stop_probs(self.network, self.train, greedy=True)
            rate = max(rate, objective.throughput(probs, self.train))
        losses = []
        for rows in batches(len(self.train.scores), self.settings.batch):
            batch = self.train[rows]
            loss = objective.loss_of(self.settings, self.network(batch.scores), batch, rate, self.step_ms, factor)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        row = {"loss": float(np.mean(losses)), "rate_per_ms": rate, **self._held_out(rate)}
        self._keep(number, row)
        return row

    def _held_out(self, rate: float) -> dict:
        self.network.eval()
        with torch.no_grad():
            parts = [
                objective.loss_of(self.settings, self.network(part.scores), part, rate, self.step_ms).item()
                * len(part.scores)
                for part in (self.held[rows] for rows in torch.arange(len(self.held.scores)).split(4096))
            ]
        greedy, drawn = (objective.stop_probs(self.network, self.held, greedy) for greedy in (True, False))
        calls = torch.arange(1, STOPS + 1, dtype=drawn.dtype)
        return {
            "held_out_loss": sum(parts) / len(self.held.scores),
            "tok_per_ms": objective.throughput(greedy, self.held),
            "tok_per_ms_drawn": objective.throughput(drawn, self.held),
            "draft_calls": float((greedy @ calls).mean()),
            "draft_calls_drawn": float((drawn @ calls).mean()),
        }

    def _keep(self, number: int, row: dict) -> None:
        greedy = RadarPolicy.preset(self.settings.policy).temperature is None
        name = "tok_per_ms" if greedy else "tok_per_ms_drawn"
        score = -row["held_out_loss"] if self.settings.select_by == "surrogate" else row[name]
        if score > float(self.best.score):
            self.best.network.load_state_dict(self.network.state_dict())
            self.best.score.fill_(score)
            self.best.epoch.fill_(number)

    def judge(self, greedy: bool, prompts: np.ndarray) -> tuple[dict, pd.DataFrame]:
        """The kept epoch on held-out rows against the constant depth that was best on the training rows."""
        held = self.held
        probs = objective.stop_probs(self.best.network, held, greedy)
        constant = objective.always(self.constant, held)
        shares = probs.mean(0)
        rate, constant_rate = objective.throughput(probs, held), objective.throughput(constant, held)
        best_rate = objective.clairvoyant_rate(held)
        results = {
            "tok_per_ms": rate,
            "constant_tok_per_ms": constant_rate,
            "gain_frac": rate / constant_rate - 1,
            "gain_over_eight_calls_frac": rate / objective.throughput(objective.always(STOPS - 1, held), held) - 1,
            "known_lengths_tok_per_ms": best_rate,  # whoever knows every row's expected lengths
            "constant_stop": self.constant,
            "draft_calls": float((shares * torch.arange(1, STOPS + 1)).sum()),
            "stop_fracs": shares.tolist(),
            "most_common_stop": int(shares.argmax()),
            "most_common_frac": float(shares.max()),
            "kept_epoch": int(self.best.epoch),
            "held_out_rows": len(held.scores),
            "held_out_prompts": len(np.unique(prompts)),
        }
        columns = dict(zip(("new_tok", "total_ms"), objective.yields(probs, held), strict=True))
        columns |= dict(zip(("constant_tok", "constant_ms"), objective.yields(constant, held), strict=True))
        table = pd.DataFrame({"prompt": prompts, **{name: value.numpy() for name, value in columns.items()}})
        return results, table.groupby("prompt", as_index=False).sum()
