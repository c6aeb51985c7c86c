"""Can trees be as fast here as they should be, and if not, what stands in the way: a short probe and a sentence.

A probe of seconds, not a benchmark: it says what a cycle is made of, in steps of plain decoding, and compares that with
what tau allows. Knows nothing about intervals (bench.py measures those) or about why a drafter drafts well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from specdec import machine
from specdec.clock import Clock
from specdec.config import SpecdecError, TreeConfig
from specdec.decoding import autoregress, decode
from specdec.hub import Pair
from specdec.methods import conversation, gather
from specdec.packing import packed_linear
from specdec.policy import Static

ASKED = {"bfloat16": 2.2, "float32": 1.4}  # a tuned tree, times as fast as plain decoding on a CPU
TREES = (TreeConfig(8, 3, 3), TreeConfig(16, 5, 3), TreeConfig(24, 5, 6))
SUITES = ("laptop/mt_bench", "laptop/humaneval", "laptop/gsm8k", "laptop/xsum", "laptop/wmt14")
FREE_SHARE = 1.25  # rows this much dearer than one still count as read along for free
HOST_SHARE = 0.1  # of a cycle; `specdec doctor --bench` asks for half of it


@dataclass(frozen=True)
class Reach:
    """The fastest of the probed trees on one pair, dtype and machine. *_steps: its mean cycle in plain steps.

    speed: tokens per second over those of plain decoding, prefill included, on the few probed prompts. rows_cost: the
    target's matrices times `rows` rows, as many as the largest probed tree verifies, over the same with one row: what
    the hardware asks for more tau. prefill_frac: the prompts' own forwards, of the tree's whole time. cpu_flags: of
    machine.hardware().
    """

    pair: str
    dtype: str
    tree: tuple[int, int, int]
    tau: float
    speed: float
    step_ms: float
    draft_steps: float
    verify_steps: float
    rest_steps: float
    rows: int
    rows_cost: float
    prefill_frac: float
    cpu_flags: tuple[str, ...]

    @property
    def cycle_steps(self) -> float:
        return self.draft_steps + self.verify_steps + self.rest_steps


def probe(
    pair: Pair, trees=TREES, *, suites=SUITES, max_new_tokens: int = 24, seed: int = 0, progress: bool = False
) -> Reach:
    """Decode one tuning prompt of each suite plainly and with each tree, in turns; what the fastest tree costs.

    trees: TreeConfigs. Seconds on an idle core for a small pair; with one CPU thread in processor time, so that a busy
    machine gives the same answer later. SpecdecError for a pair without a drafter or no trees.
    """
    if pair.drafter is None:
        raise SpecdecError(f"{pair.name} has no drafter, so there is no cycle to probe; load a pair with one.")
    if not trees:
        raise SpecdecError("there are no trees to probe; give at least one TreeConfig.")
    now = _counter(pair)
    ways = {
        "prefill": lambda ids: autoregress(pair, ids, 1),
        "plain": lambda ids: autoregress(pair, ids, max_new_tokens),
    }
    for tree in trees:
        policy, clock = Static.of(tree), Clock(pair.target.device)
        clock.now = now
        ways[tree] = lambda ids, policy=policy, clock=clock: decode(pair, ids, policy, max_new_tokens, clock=clock)
    items = gather(list(suites), part="tune", limit=1, seed=seed)
    prompts = [pair.ids_of(conversation(pair, item, 0, [])) for item in items]
    for way in ways.values():
        way(prompts[0])
    found, spent_s = {name: [] for name in ways}, dict.fromkeys(ways, 0.0)
    for ids in tqdm(prompts, desc=f"probe {pair.name}", unit="prompt", disable=not progress):
        for name, way in ways.items():
            begin = now()
            found[name].append(way(ids))
            spent_s[name] += now() - begin
    tokens = {name: sum(out.new_tok for out in outs) for name, outs in found.items()}
    best = max(trees, key=lambda tree: tokens[tree] / spent_s[tree])
    # What a token costs once the prompt is read: the whole answer less its first token.
    step_ms = 1e3 * (spent_s["plain"] - spent_s["prefill"]) / max(1, tokens["plain"] - tokens["prefill"])
    speed = tokens[best] / spent_s[best] * spent_s["plain"] / tokens["plain"]
    most_rows = max(tree.total_tokens for tree in trees)
    return _reach(pair, best, found[best], step_ms, speed, spent_s["prefill"] / spent_s[best], most_rows)


def _counter(pair: Pair):
    """Processor time, which leaves the neighbours out, where one CPU thread does all the work; else the wall clock."""
    alone = torch.get_num_threads() == 1 and pair.target.device.type == "cpu"
    return time.process_time if alone else time.perf_counter


def _reach(pair: Pair, tree: TreeConfig, outs: list, step_ms: float, speed: float, prefill: float, rows: int) -> Reach:
    cycles = [row for out in outs for row in out.rows]
    if not cycles or step_ms <= 0:
        raise SpecdecError(f"{pair.name} answered the probe with too few tokens; allow more of them.")
    mean = {
        part: sum(getattr(row, f"{part}_ms") for row in cycles) / len(cycles) for part in ("draft", "verify", "total")
    }
    return Reach(
        pair=pair.name,
        dtype=str(pair.target.dtype).removeprefix("torch."),
        tree=(tree.total_tokens, tree.depth, tree.top_k),
        tau=sum(row.new_tok for row in cycles) / len(cycles),
        speed=speed,
        step_ms=step_ms,
        draft_steps=mean["draft"] / step_ms,
        verify_steps=mean["verify"] / step_ms,
        rest_steps=(mean["total"] - mean["draft"] - mean["verify"]) / step_ms,
        rows=rows,
        rows_cost=rows_cost(pair, rows),
        prefill_frac=min(1.0, prefill),
        cpu_flags=tuple(machine.hardware()["cpu_flags"]),
    )


def rows_cost(pair: Pair, rows: int, repeats: int = 25) -> float:
    """The target's matrices times `rows` rows, over the same with one row: best of `repeats`, packed as decoding has them.

    About 1 where a forward only waits for its weights, `rows` where nothing but the arithmetic counts.
    """
    weights = [one.weight for one in pair.target.model.modules() if type(one) is torch.nn.Linear]
    clock, best = Clock(pair.target.device), {1: float("inf"), rows: float("inf")}
    clock.now = _counter(pair)
    with torch.inference_mode():
        products = [packed_linear(weight) for weight in weights]
        inputs = {count: [torch.zeros(count, w.shape[1]).to(w) for w in weights] for count in best}
        for _ in range(repeats):
            for count, given in inputs.items():
                clock.start()
                for product, x in zip(products, given, strict=True):
                    product(x)
                clock.lap("verify")
                best[count] = min(best[count], clock.seconds["verify"])
    return best[rows] / best[1]


def reaches(found: Reach) -> bool:
    """Whether the probe is at least as fast as what is asked of its dtype (dtypes without a goal always are)."""
    return found.speed >= ASKED.get(found.dtype, 0.0)


def sentence(found: Reach, bfloat16_share: float | None = None) -> str:
    """What the probe says: the speed beside what is asked, and, where it falls short, what the cycle pays for.

    bfloat16_share: doctor.bfloat16_share(), quoted where the processor has no matrix units.
    """
    tree, asked = "/".join(map(str, found.tree)), ASKED.get(found.dtype)
    text = f"{found.pair} in {found.dtype}: the tree {tree} decodes about {found.speed:.2f} times as fast as plain decoding"
    if asked is None:
        return f"{text}."
    if reaches(found):
        return f"{text} ({asked:g} was the aim)."
    text = f"{text}, where {asked:g} was the aim"
    paid = f"drafting {found.draft_steps:.1f}, verifying {found.verify_steps:.1f}, the rest {found.rest_steps:.1f}"
    if found.tau / found.cycle_steps >= asked:
        text += (
            f": its cycles alone are {found.tau / found.cycle_steps:.2f} times as fast ({found.cycle_steps:.1f} plain steps: "
            f"{paid}), but the prompts' own forwards, which no draft shortens, take {found.prefill_frac:.0%} of the time."
        )
    else:
        text += (
            f": at its tau of {found.tau:.1f} a cycle may cost {found.tau / asked:.1f} plain steps, and it costs "
            f"{found.cycle_steps:.1f} ({paid})."
        )
    return f"{text} {_reason(found, bfloat16_share)}"


def _reason(found: Reach, bfloat16_share: float | None) -> str:
    """Which part of the cycle is to blame, and what of the machine."""
    reasons = []
    if found.rows_cost > FREE_SHARE:
        reasons.append(
            f"trees with more tau do not pay, because the target's matrices alone cost {found.rows_cost:.1f} times as much "
            f"for {found.rows} rows as for one: {_why_rows_cost(found, bfloat16_share)}"
        )
    if found.draft_steps > found.verify_steps / 3:
        calls = found.tree[1] + 1
        reasons.append(f"{calls} draft forwards in a row cost {found.draft_steps / calls:.2f} of a plain step each")
    if found.rest_steps > HOST_SHARE * found.cycle_steps:
        reasons.append(f"the host takes {found.rest_steps / found.cycle_steps:.0%} of a cycle, as on a busy machine")
    if not reasons:
        return "No part of the cycle is dear here: what falls short is the drafter's tau."
    text = "; ".join(reasons)
    return f"{text[0].upper()}{text[1:]}."


def _why_rows_cost(found: Reach, bfloat16_share: float | None) -> str:
    waits = "a forward waits for arithmetic here, not only for its weights"
    if found.dtype != "bfloat16":
        return waits
    share = "" if bfloat16_share is None else f", and products in bfloat16 take {bfloat16_share:.2f} of float32's time"
    units = set(found.cpu_flags) & {"avx512_bf16", "bf16"}
    if "amx_bf16" in found.cpu_flags:
        return f"{waits}, in spite of its AMX units{share}"
    vector = f"only vector units ({', '.join(sorted(units))})" if units else "no units at all"
    return f"{waits}; this processor has no AMX but {vector} for bfloat16{share}"
