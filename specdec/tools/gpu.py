"""Does the package work on this GPU, how fast, and what was predicted? Four parts of minutes each.

    check      the same texts as plain decoding and as a CPU, greedy and sampled, every policy
    latencies  prices of models of 1B, 8B and 14B with random weights: a cost model for each
    live       milliseconds a token of plain decoding and of trees on SmolLM2
    predicted  a data sheet's and an H100's prices beside those measured here

torch and transformers are enough, but policies need pydantic too, and fitting prices pandas and
scipy, here or where runs/gpu is taken. All is eager: no GPU was there to try CUDA graphs on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec import machine, runs
from specdec.core.decode import autoregress, decode, decode_many
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static
from specdec.core.tree_config import tree_from
from specdec.core.verification import Picker
from specdec.costs.measure import CalibrateConfig, Measurements, Timings
from specdec.costs.model import CostModel
from specdec.costs.profiles import HOSTS, LLAMA_8B, profile, roofline, sheet
from specdec.errors import SpecdecError, check_name, first_line
from specdec.evaluation.lossless import NearTies
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_network import layer_like, network_of
from specdec.models.load import at_hand, load_pair
from specdec.models.pairs import shipped_folder
from specdec.models.target import Target
from specdec.policies.base import load_policy

Row = dict[str, Any]
PARTS = {"check": 160, "latencies": 160, "live": 60, "predicted": 1}  # seconds, estimated
QUESTIONS = ["What is 12 + 7?", "Tell me a story about a small dog.", "Hello", "Count to twenty."]
TREES = ("8,3,3", "16,4,4", "32,5,8", "60,7,10")
# Llama-3.2-1B, Llama-3.1-8B, Qwen3-14B
SIZES = """hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim
vocab_size""".split()
SHAPES = {
    "1b": (2048, 8192, 16, 32, 64, 128256),
    "8b": (4096, 14336, 32, 32, 128, 128256),
    "14b": (5120, 17408, 40, 40, 128, 151936),
    "tiny": (64, 128, 8, 8, 8, 512),
}
# both sides of the steps that an H100 has
NODES = (0, 1, 3, 7, 15, 23, 31, 47, 60, 63, 64, 95, 127, 128, 191, 220)
GRID = CalibrateConfig(30.0, 0, (128, 1024), (1, 4, 8, 10, 16, 32), NODES, 8, progress=False)
TINY = CalibrateConfig(0.3, 0, (10, 60), (1, 2), (0, 2, 5), 3, progress=False)


def run(part: str, device: str = "cuda", shape: str = "") -> list[Row]:
    """The rows of a part, one per step. The same call continues after steps that succeeded.

    shape: of the latencies, default 1b, 8b and 14b. On a CPU only "tiny", to try the parts. Rows
    are kept in runs/gpu/PART.json, for this machine and code.
    """
    check_name("part", part, PARTS)
    check_name("shape", shape or "8b", SHAPES)
    # 1. where it runs
    tried = (device, shape) == ("cpu", "tiny") or part == "predicted"
    if not tried and (device == "cpu" or not torch.cuda.is_available()):
        advice = "device='cpu' with shape='tiny' tries the parts on the processor"
        raise SpecdecError(f"this needs a GPU, and torch finds none; {advice}.")
    # 2. what was measured before
    key = {**facts(device, shape), "code": machine.code_hash()}
    record = runs.found(place(part))
    if record.get("key") != key or part == "predicted":
        record = {"key": key, **machine.commit(), "steps": {}}
    done = record["steps"]
    print(f"{part}: about {PARTS[part]} seconds on a GPU, less what was done before", flush=True)
    # 3. a step that fails is written down, and does not end the part
    steps = steps_of(part, device, shape)
    for name, step in steps.items():
        begin = time.perf_counter()
        if not done.get(name, {}).get("ok"):
            try:
                done[name] = {"ok": True, **step()}
            except Exception as error:  # noqa: BLE001 - whatever a GPU raises
                done[name] = {"ok": False, "error": f"{type(error).__name__}: {first_line(error)}"}
            done[name]["seconds"] = round(time.perf_counter() - begin, 1)
            runs.write_json(place(part), record)
        print(f"{name}: {done[name]}", flush=True)
    return [{"step": name, **done[name]} for name in steps]


def place(name: str) -> Path:
    """The file of a part, or of a shape's timings or costs."""
    return runs.home() / "runs" / "gpu" / f"{name}.json"


def facts(device: str, shape: str) -> Row:
    """What times depend on besides the code."""
    here = {**machine.speed_facts(), "device": device, "torch": torch.__version__}
    here |= {"shape": shape, "eager": True, "dtype": "float32" if device == "cpu" else "bfloat16"}
    if device != "cpu" and shutil.which("nvidia-smi"):
        # the highest clock: that of the moment differs from call to call
        command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv"]
        here["clocks"] = subprocess.check_output(command, text=True)
    return here


def steps_of(part: str, device: str, shape: str) -> Row:
    """The steps of a part by name, with the pairs that are here; for "tiny" the smallest alone."""
    names = ["tiny"] if shape == "tiny" else list(filter(at_hand, ("small", "smollm2")))
    if part == "live":
        return {"live": partial(speeds, names[-1], device)}
    if part == "latencies":
        shapes = [shape] if shape else ["1b", "8b", "14b"]
        return {name: partial(measured, name, device) for name in shapes}
    steps: Row = {}
    if part == "predicted":
        for host, launches in HOSTS.items():
            fields: Row = {**LLAMA_8B, **launches, **sheet("h100")}
            steps[f"data sheet, {host}"] = partial(predicted, roofline(**fields))
            steps[f"H100, {host}"] = partial(predicted, profile(f"h100-llama-3.1-8b-{host}"))
        if place(f"timings-{shape or '8b'}").is_file():
            steps[f"here, {shape or '8b'}, eager"] = lambda: predicted(priced(shape or "8b"))
        return steps
    shared = os.environ.get("SPECDEC_SHARED", (machine.checkout() or Path.cwd()).parent / "shared")
    vectors = Path(shared) / "golden"
    if (vectors / "golden.json").is_file():
        steps["golden vectors"] = partial(golden, vectors, device)
    for name in names:
        for dtype in ("float32", "bfloat16"):
            steps[f"{name} {dtype}"] = partial(texts, name, device, dtype)
        for folder in sorted((shipped_folder(name) / "policies").glob("*-float32")):
            steps[f"{name}/{folder.name}"] = partial(texts, name, device, "float32", folder.name)
    return steps


def golden(vectors: Path, device: str) -> Row:
    """The official engine's texts and numbers of cycles, in float32."""
    parts = {"target": vectors / "target", "drafter": vectors / "drafter"}
    pair = load_pair(**parts, dtype="float32", device=device)
    book = json.loads((vectors / "golden.json").read_text(encoding="utf-8"))
    row = {"texts": 0, "failed": 0}
    for text in book["generation"][:: 5 if device == "cpu" else 1]:
        prompt, ids = book["prompts"][text["prompt"]], text["output_new_ids"]
        # the official engine never emits the last bonus token
        answer = decode(pair, prompt, Static(*book["configs"][text["config"]]), len(ids) + 1)
        row["texts"] += 1
        row["failed"] += answer.tokens[: len(ids)] != ids or len(answer.rows) != text["cycles"]
    return {**row, "ok": not row["failed"]}


def texts(name: str, device: str, dtype: str, policy: str = "") -> Row:
    """Texts of trees or of a shipped policy, alone and together, beside plain decoding's: how many
    part from it at a near-tie, as low precision may, and how many otherwise.
    """
    pair = load_pair(name, dtype=dtype, device=device)
    few = 1 if device == "cpu" else 4
    questions, trees = QUESTIONS[:few], (pair.usual_tree, *map(tree_from, TREES[:few]))
    policies: list[Policy] = [Static.of(tree) for tree in trees]
    if policy:
        policies = [load_policy(f"{name}/{policy}")]
    # the default tree depends on the device
    row: Row = {"texts": 0, "near_ties": 0, "failed": 0, "default_tree": pair.usual_tree.text}
    for temperature in (0.0, 1.0):
        options: Row = dict(max_new_tokens=32, temperature=temperature, seed=3)
        together = [decode_many(pair, questions, tree, **options) for tree in policies]
        for question, *answers in zip(questions, *together, strict=True):
            answers += [decode(pair, question, tree, **options) for tree in policies]
            plain = autoregress(pair, question, **options).tokens
            picker = Picker.from_settings(temperature, 3).of_text(pair.ids_of(question))
            ties = NearTies(pair, question, plain, picker, temperature)
            for answer in answers:
                equal, *_, near_tie = ties.compare(answer.tokens)
                row["texts"] += 1
                row["near_ties"] += near_tie
                row["failed"] += not (equal or (near_tie and dtype != "float32"))
    if dtype == "float32":
        cpu = load_pair(name, dtype=dtype, device="cpu")
        for question in questions:
            there = autoregress(cpu, question, 32).tokens
            row["failed"] += autoregress(pair, question, 32).tokens != there
    return {**row, "ok": not row["failed"]}


def measured(shape: str, device: str) -> Row:
    """Times cycles of random weights. timings-SHAPE.json keeps them, costs-SHAPE.json the fit."""
    pair = random_pair(shape, device)
    grid = TINY if shape == "tiny" else GRID
    timings = Measurements(pair, grid, [list(range(64))]).finish()
    record = {"key": facts(device, shape), "rows": vars(timings)}
    runs.write_text(place(f"timings-{shape}"), json.dumps(record))
    place(f"costs-{shape}").unlink(missing_ok=True)
    costs = priced(shape)
    return {"step_ms": round(costs.step, 2), **costs.errors, "costs": str(place(f"costs-{shape}"))}


def priced(shape: str) -> CostModel:
    """The cost model of the timings of a shape, fitted once."""
    file = place(f"costs-{shape}")
    if not file.is_file():
        from specdec.costs.calibrate import fit

        key, rows = json.loads(place(f"timings-{shape}").read_text(encoding="utf-8")).values()
        why = f"Measured on {key['gpu'] or key['cpu']}, random weights, eager."
        grid = TINY if shape == "tiny" else GRID
        ranges = {"verify_nodes": (0, grid.nodes[-1]), "expansions": (0, grid.depth)}
        fields: Row = dict(machine=key, dtype=key["dtype"], provenance=why, ranges=ranges)
        name = f"llama-{shape}@{machine.short_name(key)}"
        fit(Timings(**rows), name=name, **fields).save(file)
    return CostModel.load(file)


def random_pair(shape: str, device: str) -> Pair:
    """transformers' Llama and an EAGLE-3 drafter of a shape, with random weights."""
    sizes: Row = dict(zip(SIZES, SHAPES[shape], strict=True))
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(**sizes, num_key_value_heads=8, max_position_embeddings=8192)
    dtype = facts(device, shape)["dtype"]
    with torch.device(device):
        target = Target(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
        drafted = min(32000, config.vocab_size)
        layer = layer_like(config, config.vocab_size, draft_vocab_size=drafted)
        return Pair(target, EagleDrafter(network_of(layer), target), name=f"llama-{shape}")


def speeds(name: str, device: str) -> Row:
    """Milliseconds and cycles a token of plain decoding and of trees; a first question warms up."""
    pair = load_pair(name, device=device)
    questions = QUESTIONS[: 2 if device == "cpu" else 4]
    counted = 63 * len(questions[1:])
    spent: Counter = Counter()
    for number, question in enumerate(questions):
        answers = {"plain": autoregress(pair, question, 64, stop_tokens=())}
        for tree in (pair.usual_tree, *map(tree_from, TREES)):
            answers[tree.text] = decode(pair, question, Static.of(tree), 64, stop_tokens=())
        for label, answer in answers.items():
            if number:
                spent[f"{label} ms"] += answer.decode_ms / counted
                spent[f"{label} cycles"] += (len(answer.rows) or 63) / counted
    rates = {label: round(value, 3) for label, value in spent.items()}
    return {"pair": name, "default_tree": pair.usual_tree.text, **rates}


def predicted(costs: CostModel) -> Row:
    """Milliseconds after 1,024 tokens."""
    times = {
        "plain": costs.step_ms(1024),
        "61 rows": costs.verify_ms(60, 1024),
        "draft level": costs.expand_ms(10, 1024),
        "cycle 6,4,1": costs.cycle_ms(1, 4, 5, 1024),
        "cycle 60,7,10": costs.cycle_ms(10, 7, 59, 1024),
    }
    return {label: round(float(ms), 2) for label, ms in times.items()}


def main(words: list[str]) -> int:
    """`specdec.book gpu PART`, or `gpu PART cpu tiny` on a processor; 1 if a step failed."""
    if not words:
        print(f"give a part: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        return int(not all(row["ok"] for row in run(*words[:3])))
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 2
