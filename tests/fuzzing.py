"""Calls of every public name and command, right but for one or two arguments, which are anything at all.

Each entry of `calls` is a function and arguments that are right; `spoiled` says what may stand in their place.
"""

import math
from pathlib import Path

import numpy as np
import torch
from fakes.pairs import shared_pair
from fakes.traces import round_costs, synthetic_trace

import specdec
from specdec import runs
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.models.eagle_files import save_drafter

PROMPT = [1, 2, 3]
JUNK = (
    None, True, False, 0, 1, -1, 2, 3, 10**12, -(10**30), 0.0, 0.5, -0.5, math.nan, math.inf, -math.inf, 1e300, 1 + 2j,
    "", "x", "tiny", "static:6,2,2", "../..", "\x00", b"x", (), (1,), [], [1], [[1, 2]], ["x"], [None], {}, {"a": 1},
    {1: 2, "1": 2}, {"plain": "autoregressive"}, frozenset(), {"plan"}, range(3), object(), int, len, Path("/nowhere"),
    Static(4, 1, 2), TreeConfig(4, 1, 2), np.int64(3), np.zeros(3), torch.zeros(2), torch.tensor([1, 2]),
)  # fmt: skip
SAMPLING = dict(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1)


def calls(home: Path) -> dict[str, tuple]:
    """name -> (function, right arguments by name). `home`: a folder that may be written to."""
    pair, costs, trace = shared_pair(), round_costs(), synthetic_trace(turns=2, positions=6, depth=2)
    tiny, drafter = specdec.load_pair("tiny", dtype="float32"), save_drafter(pair.drafter.network, home / "drafter")
    tree, policy = TreeConfig(6, 2, 2), Static(6, 2, 2)
    two = synthetic_trace(turns=2, positions=6, depth=2)
    two.turns["part"] = ["tune", "test"]
    text = dict(pair=pair, prompt=PROMPT, max_new_tokens=3, temperature=1.0, seed=1, stop_tokens=())
    texts = dict(max_new_tokens=3, progress=False)
    measured = dict(limit=1, seed=0, repeats=1, warmup=0, name="fuzz", part=None, folder=None, cpu_time=False, **texts)
    recorded = dict(
        depth=2, top_ks=(2,), trees=(), most_nodes=8, family=(), lengths=0, limit=1, seed=0, part="test", **texts
    )
    prompts, methods = {"mine": [PROMPT]}, {"plain": "autoregressive", "tree": policy, "same": policy}
    sheet = dict(bandwidth_gb_per_s=1e3, tflop_per_s=1e2, layers=4, hidden=64, most_nodes=16, widths=(1, 4))
    run = specdec.evaluate(methods, prompts, pair, **measured)
    specdec.record(pair, prompts, name="fuzz_record", **recorded)
    fields = {name: getattr(costs, name) for name in costs.__dataclass_fields__}
    return {
        "TreeConfig": (specdec.TreeConfig, dict(total_tokens=6, depth=2, top_k=3, flat_nodes=0, beam=(2, 1))),
        "Static": (specdec.Static, dict(total_tokens=6, depth=2, top_k=3, beam=())),
        "RandomPolicy": (specdec.RandomPolicy, dict(limits=tree, seed=0, asks=("plan",), smallest_top_k=1)),
        "Chain": (lambda one, two: specdec.Chain(one, two), dict(one=policy, two=specdec.RandomPolicy(tree))),
        "StaticShape": (specdec.StaticShape, dict(choices=((0,), (1,)))),
        "DraftTree": (specdec.DraftTree.from_arrays, dict(token=[1, 2], parent=[-1, 0], score=[0.0, -1.0])),
        "CostModel": (specdec.CostModel, fields),
        "CostModel.load": (specdec.CostModel.load, dict(path=costs.save(home / "costs.json"))),
        "roofline": (specdec.roofline, dict(parameters=1e6, drafter_parameters=1e5, name="mine", **sheet)),
        "Target": (specdec.Target, dict(model=pair.target.model, taps=(1,))),
        "decode": (specdec.decode, dict(policy=policy, **text, **{k: v for k, v in SAMPLING.items() if k not in text})),
        "stream": (lambda **settings: list(specdec.stream(**settings)), dict(policy=policy, **text)),
        "autoregress": (specdec.autoregress, dict(text, **SAMPLING)),
        "chat": (specdec.chat, dict(pair=tiny, turns=["x"], policy=policy, system=None, plain=False, max_new_tokens=3)),
        "decode_many": (specdec.decode_many, dict(pair=pair, prompts=[PROMPT], policy=policy, rows=2, plain=False, **texts)),
        "audit": (specdec.audit, dict(pair=pair, prompts=[PROMPT], policies=[policy], temperatures=(0.0,), seed=0, **texts)),
        "distribution_test": (
            specdec.distribution_test,
            dict(pair=pair, prompt=PROMPT, policy=policy, new_tok=2, draws=3, level=0.01, top_k=2, seed=0, progress=False),
        ),
        "evaluate": (specdec.evaluate, dict(methods=methods, suites=prompts, pair=pair, **measured)),
        "summary": (specdec.summary, dict(run=run, baseline="plain")),
        "noise_check": (specdec.noise_check, dict(run=run)),
        "tune_static": (
            specdec.tune_static, dict(pair=pair, prompts=prompts, grid=[tree, TreeConfig(4, 1, 2)], first=1, most=1, **measured)
        ),
        "record": (specdec.record, dict(pair=pair, prompts=prompts, name="fuzz_record", **recorded)),
        "estimate_record": (specdec.estimate_record, dict(pair=pair, prompts=prompts, samples=1, **recorded)),
        "open_trace": (specdec.open_trace, dict(folder=runs.find("fuzz_record")[0].directory, pair=None)),
        "replay": (specdec.replay, dict(trace=trace, policy=Static(6, 2, 3), costs=costs, policy_ms=0.1, keep_cycles=True)),
        "score": (specdec.score, dict(policy="static:6,2,3", trace=two, costs=costs, machines=(), policy_ms=0.1, progress=False)),
        "clairvoyant": (specdec.clairvoyant, dict(trace=trace, costs=costs, top_ks=(3,), depths=(1, 2), sizes=(2, 4))),
        "static_grid": (specdec.static_grid, dict(trace=trace, costs=costs, total_tokens=(4,), depths=(1,), top_ks=(3,), by=None)),
        "load_policy": (specdec.load_policy, dict(folder="small/ours-float32")),
        "load_pair": (specdec.load_pair, dict(name="tiny", dtype="float32", device="cpu", reading="file", tokenizer=None)),
        "load_drafter": (specdec.load_drafter, dict(path=drafter, target=pair.target, reading="file", start=None)),
    }  # fmt: skip


WORDS = ("", "-1", "0", "1", "3", "1e9", "nan", "inf", "x", "tiny", "static:6,2,2", "static:1", "eagle3", "autoregressive",
         "/nowhere", "../..", "é", "float32", "toy/gsm8k", "train")  # fmt: skip
COMMANDS = {  # right ones, whose work is small; an option may be spoiled or a word too many may stand at the end
    "decode": ["--pair", "tiny", "--max-new-tokens", "3", "--policy", "static:6,2,2", "--seed", "0", "--temperature", "0"],
    "audit": ["--pair", "tiny", "--max-new-tokens", "2", "--temperature", "0", "--suites", "toy/gsm8k", "--limit", "1"],
    "evaluate": ["--pair", "tiny", "--methods", "static:6,2,2", "--suites", "toy/gsm8k", "--limit", "1", "--max-new-tokens", "2"],
    "estimate": ["--pair", "llama-3.1-8b", "--dtype", "bfloat16", "--suites", "toy/gsm8k", "--limit", "1", "--prompt-tok", "9"],
    "record": ["--pair", "tiny", "--suites", "toy/gsm8k", "--limit", "1", "--depth", "2", "--top-ks", "2", "--estimate"],
    "check-recording": ["/nowhere"],
    "calibrate": ["--pair", "nobody", "--seconds", "1", "--out", "/nowhere/x.json"],
    "reprice": ["/nowhere", "--seconds", "1", "--out", "/nowhere"],
    "schedule": ["vllm", "--trace", "/nowhere", "--costs", "ltd-a100-vicuna-13b", "--drafter", "d", "--out", "/nowhere"],
    "book": ["run", "--only", "nobody", "--jobs", "1"],
    "items": [],
}  # fmt: skip
