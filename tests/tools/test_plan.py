"""Plans: what a grid takes, by hand, and the sentence for each way to get one wrong."""

import math

import pytest
import yaml

from specdec import machine
from specdec.core.tree_config import GIB
from specdec.costs.profiles import roofline
from specdec.errors import SpecdecError
from specdec.tools import cli
from specdec.tools import estimate as plan

PAPERS = machine.checkout() / "notebooks" / "papers_plan.yml"
SMALL = {
    "machine": {"gpu": "a100", "count": 2},
    "pairs": ["llama-3.1-8b"],
    "suites": {"gsm8k": 9, "mt_bench": 4},
    "methods": {"plain": None, "eagle3": {"tree": [60, 7, 10], "tau": 4.0}},
    "warmup_prompts": 1,
}


def written(tmp_path, **changes):
    path = tmp_path / "plan.yml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return path


def priced(tmp_path, **changes):
    return plan.price(plan.read_plan(written(tmp_path, **changes)))


def test_hours_by_hand(tmp_path):
    """7.5e9 weights are read per step, 10 + 5 x 2 turns of 512 tokens, a cycle of 8 levels brings 4 tokens."""
    found = priced(tmp_path)
    weights = 8_030_261_248 - 128256 * 4096
    eagle3 = plan.shapes_of("llama-3.1-8b", "eagle3")[1]
    drafting = float(sum(weight.numel() for weight in eagle3.parameters()))
    gpu = dict(bandwidth_gb_per_s=2039, tflop_per_s=312, launch_ms_per_layer=0.5, draft_host_ms=0.9)
    costs = roofline(float(weights), drafting, layers=32, hidden=4096, kv_frac=0.25, **gpu)
    read = float(costs.verify_ms(511, 256))
    turn_ms = 2 * read + 512 * float(costs.step_ms(768)) + 128 * float(costs.cycle_ms(10, 7, 59, 768))
    assert found.gpu_hours == pytest.approx(20 * turn_ms / 3.6e6)
    assert found.hours == pytest.approx(10 * turn_ms / 3.6e6), "two GPUs, two shards of ten turns each"
    row = found.table.iloc[0]
    assert (row["gpus"], row["shards"]) == (1, 2)
    held = 2 * (weights + 128256 * 4096 + drafting)
    assert held / GIB < row["gib_per_gpu"] < held / GIB + 2
    assert held / 1e9 < row["storage_gb"] < held / 1e9 + 0.1


def test_every_axis_multiplies_and_methods_share_a_shard(tmp_path):
    once = priced(tmp_path)
    more = priced(tmp_path, temperatures=[0.0, 1.0], seeds=[0, 1, 2])
    assert more.gpu_hours == pytest.approx(6 * once.gpu_hours) and more.table["shards"].sum() == 12
    both = priced(tmp_path, pairs=["llama-3.1-8b", "deepseek-r1-8b"])
    assert both.gpu_hours == pytest.approx(2 * once.gpu_hours)
    slower = priced(tmp_path, methods=SMALL["methods"] | {"nothing accepted": {"tree": [60, 7, 10]}})
    assert slower.gpu_hours > 2 * once.gpu_hours and slower.table["shards"].sum() == 2
    named = priced(tmp_path, suites=["gsm8k", "mt_bench"])
    assert named.gpu_hours == pytest.approx(once.gpu_hours * (81 + 81 * 2) / (10 + 5 * 2))


def test_a_large_target_takes_several_gpus(tmp_path):
    large = priced(tmp_path, pairs=["llama-3.3-70b"], machine={"gpu": "h100", "count": 4})
    row = large.table.iloc[0]
    assert row["gpus"] == 4 and 2 * row["gib_per_gpu"] > plan.USED_FRAC * 80e9 / GIB, "two would be too few"
    assert large.hours == pytest.approx(large.gpu_hours / 4)  # one shard after the other
    with pytest.raises(SpecdecError, match="llama-3.3-70b needs 1.. GiB in bfloat16, and 1 h100 hold 67"):
        priced(tmp_path, pairs=["llama-3.3-70b"], machine={"gpu": "h100"})


def test_training_is_stated_by_number_or_by_pair(tmp_path):
    pairs = ["llama-3.1-8b", "llama-3.3-70b"]
    trained = {"tree": [60, 7, 10], "training_gpu_hours": 30}
    by_pair = {"tree": [60, 7, 10], "training_gpu_hours": {"llama-3.3-70b": 200}, "tau": {"llama-3.1-8b": 4.0}}
    found = priced(
        tmp_path, pairs=pairs, methods={"ltd": trained, "ppow": by_pair}, machine={"gpu": "h100", "count": 8}
    )
    assert found.training_gpu_hours == 2 * 30 + 200 and "260 GPU hours of training" in found.sentence


def test_the_papers_grid(capsys):
    """The example that ships, by the command that its first lines name."""
    assert "specdec estimate --plan notebooks/papers_plan.yml" in PAPERS.read_text()
    assert cli.main(["estimate", "--plan", str(PAPERS)]) == 0
    said = capsys.readouterr().out
    read = plan.read_plan(PAPERS)
    assert len(read.pairs) == 5 and len(read.suites) == 9 and len(read.methods) >= 12 and read.machine.count == 8
    shards = math.prod(map(len, (read.pairs, read.suites, read.temperatures, read.seeds)))
    assert f"{shards} shards on 8 h100 (eager)" in said and "not measured" in said
    assert all(pair in said for pair in read.pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("- a list", "must be a mapping with machine, pairs, suites and methods"),
        ("machine: {gpu: h100}", "pairs is missing"),
        ({"machine": None}, "machine: should be"),
        ({"machine": {"gpu": "h10"}}, "machine.gpu: unknown gpu 'h10'; did you mean 'h100'"),
        ({"machine": {"gpu": "h100", "gpus": 8}}, "machine.gpus is unknown"),
        ({"machine": {"gpu": "h100", "host": "graph"}}, "machine.host: unknown host 'graph'; did you mean 'graphs'"),
        ({"pairs": []}, "pairs: "),
        ({"pairs": ["llama-3.1-9b"]}, "pairs: unknown preset 'llama-3.1-9b'; did you mean 'llama-3.1-8b'"),
        ({"pairs": ["small", "small"]}, "pairs: one of them stands there twice"),
        ({"suites": {"gsm8k": 0}}, "suites.*gsm8k"),
        ({"suites": ["gsm9k"]}, "suites: unknown suites 'gsm9k'; did you mean 'gsm8k'"),
        ({"seeds": 3}, "seeds: "),
        ({"speed": 3}, "speed is unknown"),
        ({"dtype": "bf16"}, "dtype: unknown dtype 'bf16'; did you mean"),
        ({"methods": {"a": {"tau": 0.5}}}, "methods.a.tau"),
        ({"methods": {"a": {"tree": [60, 7]}}}, "methods.a.tree: a tree is total_tokens, depth and top_k"),
        ({"methods": {"a": {"tree": [60, -1, 10]}}}, "methods.a.tree: "),
        ({"methods": {"a": {"drafter": "eagel3", "tree": [2, 0, 1]}}}, "methods.a.drafter: unknown drafter 'eagel3'"),
        ({"methods": {"a": {"drafter": "lm", "tree": [2, 0, 1]}}}, "methods.a.drafter: a small language model"),
        ({"methods": {"a": {"tau": {"small": 2.0}}}}, "methods.a.tau: unknown tau 'small'"),
        ({"methods": {"a": {"trees": [2, 0, 1]}}}, "methods.a.trees is unknown"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path, changes, message):
    path = written(tmp_path, **(changes if isinstance(changes, dict) else {}))
    if isinstance(changes, str):
        path.write_text(changes)
    with pytest.raises(SpecdecError, match=message) as said:
        plan.read_plan(path)
    assert "plan.yml" in str(said.value) and "\n" not in str(said.value)
