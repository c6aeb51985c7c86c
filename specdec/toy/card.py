"""The model card of a small pair: facts read from its weights and training runs, as a dictionary and as a README.

A card is a plain dictionary, kept as card.json beside README.md and the weights; every figure in the README comes from
it. Knows nothing about how a pair is trained or measured.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import machine, runs
from specdec.core.rates import tau
from specdec.errors import SpecdecError
from specdec.toy import corpus
from specdec.toy.corpus.measure import distinct_n

CURVE_ROWS, LAST_ROWS = 24, 50  # points kept of a curve; steps that "at the end" is the mean of
_PARTS = ("target", "drafter")


# --- facts ------------------------------------------------------------------------------------------------------------


def card_of(
    target_dir: Path, drafter_dir: Path, run_dirs: Sequence[Path], measured: pd.DataFrame | None = None, name: str = ""
) -> dict:
    """The card of a pair, however it was trained.

    target_dir, drafter_dir: weights with config.json. run_dirs: the target's and the drafter's training folders
    (plan.json, loss.parquet). measured: what `pair.measure_pair` returns, or None. SpecdecError when a file is missing.
    """
    folders, logs = (Path(target_dir), Path(drafter_dir)), [Path(folder) for folder in run_dirs]
    if len(logs) != 2:
        raise SpecdecError(f"a card needs two training folders, the target's and the drafter's; got {len(logs)}.")
    return {
        "name": name or folders[0].resolve().parent.name,
        "weights": {part: weight_facts(folder) for part, folder in zip(_PARTS, folders, strict=True)},
        "training": {part: run_facts(folder) for part, folder in zip(_PARTS, logs, strict=True)},
        "families": list(corpus.FAMILIES),
        "measured": [] if measured is None else _records(summary(measured)),
        "measured_on": None if measured is None else {**machine.hardware(), **machine.commit()},
        "measured_how": {} if measured is None else dict(measured.attrs),
        "licence": importlib.metadata.metadata("specdec").get("License") or "that of the workbook",
    }


def weight_facts(folder: Path) -> dict:
    """Size, hash, parameters, floating-point types and config.json of a folder of weights."""
    file = Path(folder) / "model.safetensors"
    shapes = tensor_shapes(file)
    kinds = sorted({kind for kind, _ in shapes.values() if kind.startswith(("F", "BF"))})
    counted = [shape for kind, shape in shapes.values() if kind in kinds]
    return {
        "parameters": int(sum(np.prod(shape) for shape in counted)),
        "dtypes": kinds,
        "bytes": file.stat().st_size,
        "sha256": machine.file_hash(file),
        "config": runs.read_json(Path(folder) / "config.json"),
    }


def tensor_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """{tensor: (type as safetensors names it, shape)} of a file, without reading the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}
            return {name: (piece.get_dtype(), piece.get_shape()) for name, piece in slices.items()}
    except (OSError, SafetensorError) as error:
        raise SpecdecError(f"{file} cannot be read ({error}); train the pair first, or restore the file.") from error


def run_facts(folder: Path) -> dict:
    """What a training folder says: settings, steps, tokens, minutes, machines, commits, the curve in CURVE_ROWS rows."""
    plan, curve = runs.read_json(Path(folder) / "plan.json"), runs.read_table(Path(folder) / "loss.parquet")
    planned = plan["settings"]
    settings = planned.get("preset") or {**planned["settings"], "objective": planned["objective"]}
    names = ("cpu", "cpu_flags", "cores", "threads", "gpu", "python")
    machines = [{**{k: s.get(k) for k in names}, "torch": s["versions"]["torch"]} for s in plan["sessions"]]
    notes = Path(folder) / "notes.md"  # whatever a person did to this run that its plan does not say
    own = [len(runs.Shards(shards).read()) for shards in Path(folder).glob("regenerated-*") if shards.is_dir()]
    return {
        "settings": settings,
        "seed": planned["seed"],
        "notes": notes.read_text(encoding="utf-8").strip() if notes.is_file() else "",
        "finished": plan["finished"],
        "steps": len(curve),
        "seen_tok": int(curve["batch_tok"].sum()),
        "minutes": float(curve["elapsed_s"].iloc[-1]) / 60,
        "machines": [machine for place, machine in enumerate(machines) if machine not in machines[:place]],
        "commits": list(
            dict.fromkeys(f"{s['commit'] or 'none'}"[:12] + "+" * bool(s["dirty"]) for s in plan["sessions"])
        ),
        "sessions": len(plan["sessions"]),
        "own_chats": sum(own),
        "last": {k: float(v) for k, v in curve.tail(LAST_ROWS).mean().items() if k not in ("step", "elapsed_s")},
        "curve": _records(thin(curve.assign(step=curve["step"] + 1))),
    }


def thin(curve: pd.DataFrame, rows: int = CURVE_ROWS) -> pd.DataFrame:
    """The curve as means over at most `rows` stretches of equal length, each under the `step` it ends with."""
    rows = min(rows, len(curve))
    place = np.arange(len(curve)) * rows // len(curve)
    means = curve.groupby(place).mean()
    return means.assign(step=curve["step"].groupby(place).max())


def _records(table: pd.DataFrame) -> list[dict]:
    """Rows for JSON; what is missing becomes null."""
    return json.loads(table.to_json(orient="records"))


def summary(measured: pd.DataFrame) -> pd.DataFrame:
    """One row per suite and one for 'all': answers, tau (pooled over cycles), checked, correct, loops, distinct pairs.

    measured: one row per answer (`pair.measure_pair`). accuracy_frac is NaN where nothing can be checked. loop_frac
    pools 4-grams over the answers; distinct_2 is the share of distinct word pairs.
    """
    groups = {name: part for name, part in measured.groupby("suite", sort=False)}
    rows = []
    for name, part in {**groups, "all": measured}.items():
        checked = part["correct"].dropna()
        grams = int(part["grams"].sum())
        rows.append(
            {
                "suite": name,
                "answers": len(part),
                "new_tok": int(part["new_tok"].sum()),
                "tau": float(tau(part["cycle_tok"].sum(), max(1, part["cycles"].sum()))),
                "checked": len(checked),
                "correct": int(checked.sum()),
                "accuracy_frac": float(checked.mean()) if len(checked) else float("nan"),
                "loop_frac": float((part["loop_frac"] * part["grams"]).sum() / grams) if grams else 0.0,
                "distinct_2": distinct_n(part["text"], 2),
            }
        )
    return pd.DataFrame(rows)


def curve_of(card: dict, part: str) -> pd.DataFrame:
    """The stored curve of 'target' or 'drafter': one row per stretch of steps."""
    return pd.DataFrame(card["training"][part]["curve"])


def unrolled_accuracy(card: dict) -> pd.DataFrame:
    """The drafter's accuracy by unrolled step over training, long: columns step, draft_step (1, 2, ...), accuracy."""
    curve = curve_of(card, "drafter")
    names = [name for name in curve if name.startswith("accuracy_")]
    long = curve.melt("step", names, "draft_step", "accuracy").dropna()  # runs may unroll fewer steps early on
    return long.assign(draft_step=long["draft_step"].str.removeprefix("accuracy_").astype(int) + 1)


# --- the README -------------------------------------------------------------------------------------------------------


def card_text(card: dict) -> str:
    """README.md of a card: tables, in markdown."""
    columns = {part: {**_weights(card, part), **_training(card, part)} for part in _PARTS}
    facts = pd.DataFrame(columns).fillna("-").rename_axis("").reset_index()
    ends = pd.DataFrame({part: card["training"][part]["last"] for part in _PARTS})
    ends = ends[~ends.index.str.startswith("loss_")].map("{:.4g}".format)
    texts = [
        f"# {card['name']}: a target and its EAGLE-3 drafter",
        "**Toy scale.** The pair shows how speculative decoding behaves on a laptop. It is no assistant: it knows the "
        "generated tasks below and nothing about the world, and its numbers are not those of an 8B model.",
        f"    pair = specdec.load_pair({card['name']!r})",
        f"Task families it was trained on: {', '.join(card['families'])}. Prompts of the embedded suites were held out.",
        _table(facts),
        f"Means over the last {LAST_ROWS} training steps:",
        _table(ends.replace("nan", "-").rename_axis("").reset_index()),
        *(
            f"Note on the {part}: {card['training'][part]['notes']}"
            for part in _PARTS
            if card["training"][part]["notes"]
        ),
        *_measured(card),
        f"Licence: {card['licence']}, as the workbook. The weights were trained on generated text and library source only.",
    ]
    return "\n\n".join(texts) + "\n"


def _weights(card: dict, part: str) -> dict:
    facts, config = card["weights"][part], card["weights"][part]["config"]
    return {
        "parameters": f"{facts['parameters']:,}",
        "layers, width, heads, MLP": ", ".join(
            str(config[name])
            for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
        ),
        "vocabulary": f"{config.get('draft_vocab_size') or config['vocab_size']:,}",
        "type, MB": f"{', '.join(facts['dtypes'])}, {facts['bytes'] / 1e6:.2f}",
        "sha256": facts["sha256"][:16],
    }


def _training(card: dict, part: str) -> dict:
    facts, shape = card["training"][part], card["weights"][part]["config"]
    machine_used = facts["machines"][-1]
    objective = facts["settings"].get("objective", facts["settings"])
    settings = {**facts["settings"], **objective.get("rules", {})}
    above = ("class", "steps", *shape)
    return {
        "steps": f"{facts['steps']}" + ("" if facts["finished"] else " (stopped before its end)"),
        "tokens seen": f"{facts['seen_tok']:,}",
        "minutes, sessions": f"{facts['minutes']:.1f}, {facts['sessions']}",
        "machine": machine_used["gpu"] or f"{machine_used['cpu']} ({', '.join(machine_used['cpu_flags'])})",
        "threads": str(machine_used["threads"]),
        "Python, torch": f"{machine_used['python']}, {machine_used['torch']}",
        "commits (+: with local changes)": ", ".join(facts["commits"]),
        "own answers": f"{facts['own_chats']:,}",
        "seed": str(facts["seed"]),
        **{
            name: str(value)
            for name, value in settings.items()
            if name not in above and isinstance(value, int | float | str)
        },
    }


def _measured(card: dict) -> list[str]:
    if not card["measured"]:
        return ["Not measured."]
    how, table = card["measured_how"], pd.DataFrame(card["measured"])
    table = table.map(lambda value: f"{value:.3g}" if isinstance(value, float) else value).replace("nan", "-")
    return [
        f"Measured greedily, {how['dtype']}, tree {how['tree']} (total_tokens, depth, top_k), at most "
        f"{how['max_new_tokens']} tokens an answer, held-out prompts. tau: new tokens per pass of the target.",
        _table(table),
    ]


def _table(table: pd.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True)
