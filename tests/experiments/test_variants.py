"""The papers' ablation tables: every variant is trained once, judged beside the paper's own tree,
and named as it names it.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes.traces import COSTS, round_costs, synthetic_trace

from specdec import runs
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import replay

from experiments import variants


@pytest.fixture
def recording():
    trace = synthetic_trace(positions=16, depth=7, top_ks=(10,), most_nodes=70)
    trace.turns["part"] = np.resize(["train", "tune", "test"], len(trace.turns))
    return trace


def test_the_size_policys_variants_are_the_papers(recording, tmp_path, monkeypatch):
    asked = []

    def train(trace, costs, config, *, seed, out_dir, progress):
        assert config.size.features_size == (8 if "hidden" in config.size.parts else 0)
        asked.append((out_dir.name, config.reward, config.size.parts, config.size.ppo.pi))
        assert [part.learner for part in config.rounds] == ["size"]
        return type("Trained", (), {"policy": Static(4, 2, 10)})

    monkeypatch.setattr(variants, "train_ltd", train)
    options = {"seeds": (0, 1), "progress": False}
    compared = variants.size_alone(recording, round_costs(), tmp_path, **options)
    seen = list(variants.SIZE_ALONE)
    assert [name for name in compared.table["method"].unique() if name in seen] == seen
    assert len(asked) == 2 * len(seen) and len({name for name, *_ in asked}) == len(asked)
    assert {reward for _, reward, *_ in asked} == {
        "accepted",
        "time_cost",
        "throughput",
        ltd.OURS.reward,
    }
    assert {parts for *_, parts, _ in asked} == set(ltd.OBSERVATIONS.values())
    assert {shape for *_, shape in asked} >= {(1024,), (1024, 256), (1024, 512, 256)}


def test_resps_stands_beside_the_papers_tree(recording, tmp_path, monkeypatch):
    trained = {}

    def train(trace, costs, config, *, seed, out_dir, progress):
        trained[out_dir.name] = config
        return Static(*((4, 2, 10) if config.ppo.ent_coef > 0.05 else (24, 2, 10)))

    monkeypatch.setattr(variants, "train_resps", train)
    monkeypatch.setitem(variants.PAPER_TREES, "resps", TreeConfig(8, 2, 10))
    options = {
        "changes": {"push_partial": True},
        "seeds": (0, 1),
        "widths": (8, 4),
        "progress": False,
    }
    table, turns = variants.resps_variants(recording, round_costs(), tmp_path, **options)
    assert (
        table["row"].tolist()
        == ["Standard PPO + Feature Vector", "Max-Entropy PPO + Feature Vector"] * 2
    )
    assert table["width"].tolist() == [8, 8, 4, 4] and len(trained) == 8
    assert {config.ppo.pi for config in trained.values()} == {(8, 8), (4, 4)}
    assert all(config.push_partial and config.state == "concat" for config in trained.values())
    assert (table["unique_actions"] == 1).all() and table["over_eagle3"].gt(0).all()
    assert table["over_eagle3"][0] == table["over_eagle3"][2] != table["over_eagle3"][1]
    own = turns.groupby(["row", "width", "seed"]).size()
    assert len(own) == 8 and (own == len(recording.select(part="test").turns)).all()


class Kept(Static):
    """A static tree with an interval, which replay need not know."""

    def with_settings(self, interval):
        return Kept(4 if interval == 1 else 16, 2, 10)


def test_the_sweep_counts_all_turns_once_per_seed(recording):
    sweep, turns = variants.interval_sweep(
        recording, round_costs(), [Kept(4, 2, 10)] * 2, (1, 10), progress=False
    )
    once, _ = variants.interval_sweep(
        recording, round_costs(), [Kept(4, 2, 10)], (1, 10), progress=False
    )
    pd.testing.assert_frame_equal(
        sweep.drop(columns="policy_frac"), once.drop(columns="policy_frac")
    )
    assert sweep["interval"].tolist() == [1, 10] and sweep["seconds"].nunique() == 2
    assert turns.groupby("interval")["time_ms"].sum().tolist() == (2e3 * sweep["seconds"]).tolist()


def test_radars_grid_trains_every_point_of_the_papers_tables_once(recording, tmp_path, monkeypatch):
    asked = {}

    def train(trace, costs, config, *, seed, out_dir):
        asked[out_dir.name] = config
        return type("Trained", (), {"policy": Static(4, 2 if config.alpha > 0.03 else 6, 10)})

    monkeypatch.setattr(variants, "train_radar", train)
    grid = {"alpha": (0.02, 0.04), "gamma": (0.9, 1.0)}
    options = {"seeds": (0, 1), "grid": grid, "progress": False}
    table = variants.radar_grid(recording, round_costs(), tmp_path, radar.PAPER, **options)
    assert len(asked) == len(table) == 8 and {config.gamma for config in asked.values()} == {
        0.9,
        1.0,
    }
    assert table[["alpha", "gamma"]].drop_duplicates().values.tolist() == [
        [0.02, 0.9], [0.02, 1.0], [0.04, 0.9], [0.04, 1.0]
    ]  # fmt: skip
    assert (table.loc[table["alpha"] == 0.04, "draft_calls"] == 3).all() and (
        table["draft_calls"] > 2.9
    ).all()
    assert table.loc[table["alpha"] == 0.02, "draft_calls"].gt(3).all()
    # LTD's Tables 2, 6 and 10, and RADAR's grid.
    recorded = json.loads(Path(__file__).with_name("choices.json").read_text())
    assert runs.plain(variants.SIZE_ALONE) == recorded["size_alone"]
    assert runs.plain(variants.RADAR_GRID) == recorded["radar_grid"]


class Drawing(Static):
    """A static tree that may be told how to draw its answers."""


def test_the_training_phase_is_of_the_questions_that_were_learned_from(recording, monkeypatch):
    seen, trees = [], [Drawing(4, 2, 10), Drawing(16, 3, 10)]
    monkeypatch.setattr(
        Drawing,
        "with_settings",
        lambda self, **settings: seen.append(settings) or self,
        raising=False,
    )
    config = changed(resps.OURS, {"while_training": {"interval": 3, "temperature": None}})
    phase = variants.training_phase(recording, COSTS, config, trees)
    assert seen == [{"interval": 3, "temperature": 1.0}] * 2
    train = recording.select(part="train")
    cycles = sum(len(replay(train, tree, COSTS, keep_cycles=True).cycles) for tree in trees)
    (row,) = phase[["method", "suite", "turns", "cycles", "unique_actions"]].values.tolist()
    assert row == ["Training phase", "all", 2 * len(train.turns), cycles, 2]
    assert phase["rounds_per_turn"].tolist() == pytest.approx([cycles / 2 / len(train.turns)])
