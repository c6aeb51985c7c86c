"""The model card of a small pair: facts read from its weights and training runs, and the README that tells them.

A card is a plain dictionary, kept as card.json beside README.md and the weights; every figure in the README comes from it.
Knows nothing about how a pair is trained or measured.
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
    given = plan["settings"]
    settings = given.get("preset") or given["settings"]
    whole = "batch_tok" in curve and curve["batch_tok"].notna().all()
    seen_tok = curve["batch_tok"].sum() if whole else len(curve) * settings["batch"] * settings["length"]
    kept = ("cpu", "cpu_flags", "cores", "threads", "gpu", "python")
    machines = [{**{k: s.get(k) for k in kept}, "torch": s["versions"]["torch"]} for s in plan["sessions"]]
    notes = Path(folder) / "notes.md"  # whatever a person did to this run that its plan does not say
    own = [len(runs.Shards(shards).read()) for shards in Path(folder).glob("regenerated-*") if shards.is_dir()]
    return {
        "settings": settings,
        "seed": given["seed"],
        "notes": notes.read_text(encoding="utf-8").strip() if notes.is_file() else "",
        "finished": plan["finished"],
        "steps": len(curve),
        "seen_tok": int(seen_tok),
        "minutes": float(curve["elapsed_s"].iloc[-1]) / 60,
        "machines": [one for place, one in enumerate(machines) if one not in machines[:place]],
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
    """README.md of a card, in markdown."""
    sections = (_opening, _weights, _data, _training, _curves, _vocabulary, _measured, _closing)
    return "\n\n".join(section(card) for section in sections) + "\n"


def _opening(card: dict) -> str:
    sizes = [f"{card['weights'][part]['parameters']:,} parameters" for part in _PARTS]
    minutes = sum(card["training"][part]["minutes"] for part in _PARTS)
    return (
        f"# {card['name']}: a target and its EAGLE-3 drafter\n\n"
        f"**Toy scale: a target of {sizes[0]} and a drafter of {sizes[1]}, trained in {minutes:.1f} minutes.** "
        "The pair shows how speculative decoding behaves on a laptop. It is no assistant: it knows the generated "
        "tasks below and nothing about the world, and its numbers are not those of an 8B model.\n\n"
        f"    pair = specdec.load_pair({card['name']!r})"
    )


def _weights(card: dict) -> str:
    rows = []
    for part in _PARTS:
        facts, config = card["weights"][part], card["weights"][part]["config"]
        rows.append(
            {
                "part": part,
                "shape": f"{_count(config['num_hidden_layers'], 'layer')}, width {config['hidden_size']}, "
                f"{config['num_attention_heads']} heads, MLP {config['intermediate_size']}",
                "parameters": f"{facts['parameters']:,}",
                "type": ", ".join(facts["dtypes"]),
                "MB": f"{facts['bytes'] / 1e6:.2f}",
                "sha256": facts["sha256"][:16],
            }
        )
    return "## Weights\n\n" + _table(rows)


def _data(card: dict) -> str:
    target, drafter = (card["training"][part] for part in _PARTS)
    pythons = ", ".join(dict.fromkeys(one["python"] for one in target["machines"]))
    lines = [
        f"- Generated text of {len(card['families'])} task families ({', '.join(card['families'])}), seed "
        f"{target['seed']}; prompts of the embedded suites are held out by hash."
    ]
    if target["settings"]["library_frac"]:
        lines.append(
            f"- {target['settings']['library_frac']:.0%} of the target's tokens: source of the standard library of Python "
            f"{pythons}; whole modules are held out. The text itself is not in these files."
        )
    if target["settings"].get("copying_start"):
        lines.append("- The target began with heads that copy (specdec/train/induction.py) instead of at random.")
    if target["settings"].get("drill_frac"):
        lines.append(f"- Copying drills: {target['settings']['drill_frac']:.0%} of the rest at the start, fading.")
    lines.append(
        f"- The drafter: the target's own answers to {drafter['own_chats']:,} conversations of the same generators "
        f"({drafter['settings']['regenerated_frac']:.0%} of its text), the rest as generated."
    )
    return "## Data\n\n" + "\n".join(lines)


def _training(card: dict) -> str:
    told = {}
    for part in _PARTS:
        facts = card["training"][part]
        settings, first = facts["settings"], facts["machines"][-1]
        told[part] = {
            "steps": f"{facts['steps']:,}" + ("" if facts["finished"] else " (stopped before its end)"),
            "tokens seen": f"{facts['seen_tok']:,}",
            "batch": f"{settings['batch']} rows of {settings['length']} tokens",
            "peak learning rate": f"{settings['learning_rate']:g}",
            "seed": str(facts["seed"]),
            "minutes": f"{facts['minutes']:.1f} in {_count(facts['sessions'], 'session')}",
            "machine": first["gpu"] or f"{first['cpu']} ({', '.join(first['cpu_flags'])})",
            "threads": str(first["threads"]),
            "Python, torch": f"{first['python']}, {first['torch']}",
            "commits (+: with local changes)": ", ".join(facts["commits"]),
        }
        if "rules" in settings:
            told[part]["unrolled steps"] = f"{settings['rules']['steps']}, weights {settings['rules']['decay']}^s"
    table = pd.DataFrame(told).fillna("-").rename_axis("").reset_index()
    notes = [
        f"Note on the {part}: {card['training'][part]['notes']}" for part in _PARTS if card["training"][part]["notes"]
    ]
    return "\n\n".join(["## Training", _table(table), *notes])


def _curves(card: dict) -> str:
    parts = ["## Loss curves\n\nMeans over equal stretches of the run."]
    for part in _PARTS:
        curve = thin(curve_of(card, part), 8)
        columns = ["step", "loss", *[name for name in curve if name.startswith("accuracy_")]]
        shown = curve[columns].copy()
        shown["step"] = [f"{int(step):,}" for step in curve["step"]]
        for name in columns[1:]:
            shown[name] = [f"{value:.3f}" if np.isfinite(value) else "-" for value in curve[name]]
        renamed = {name: f"accuracy, draft {int(name.rpartition('_')[2]) + 1}" for name in columns[2:]}
        parts.append(f"{part.capitalize()}:\n\n{_table(shown.rename(columns=renamed))}")
    return "\n\n".join(parts)


def _vocabulary(card: dict) -> str:
    config, last = card["weights"]["drafter"]["config"], card["training"]["drafter"]["last"]
    missing = last.get("missing_mass_frac")
    told = "was not recorded" if missing is None else f"is {missing:.2%} of the probability"
    return (
        f"## Draft vocabulary\n\n{config['draft_vocab_size']:,} of the target's {config['vocab_size']:,} tokens, the most "
        f"frequent in the answers. What the target puts outside it {told} (mean over the last {LAST_ROWS} training steps)."
    )


def _measured(card: dict) -> str:
    if not card["measured"]:
        return "## Measured\n\nNot measured."
    how, rows = card["measured_how"], []
    for row in card["measured"]:
        checked = f"{row['accuracy_frac']:.0%} ({row['correct']} of {row['checked']})" if row["checked"] else "-"
        rows.append(
            {
                "suite": row["suite"],
                "answers": row["answers"],
                "tau": f"{row['tau']:.2f}",
                "right answers": checked,
                "4-gram loops": f"{row['loop_frac']:.1%}",
                "distinct 2-grams": f"{row['distinct_2']:.2f}",
            }
        )
    return (
        f"## Measured\n\nGreedy, {how['dtype']}, tree {how['tree']} (total_tokens, depth, top_k), at most "
        f"{how['max_new_tokens']} tokens an answer, held-out prompts. tau: new tokens per pass of the target.\n\n"
        + _table(rows)
    )


def _closing(card: dict) -> str:
    return f"## Licence\n\n{card['licence']}, as the workbook. The weights were trained on text named above only."


def _table(rows) -> str:
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
