"""Commands that take minutes: `evaluate`, `estimate`, `train`, `reproduce`; and what all commands share.

Each command is a function that adds its options to a parser and one that runs what was parsed and returns the status.
Heavy imports happen inside. Knows nothing about the parser as a whole or how errors are shown.
"""

from __future__ import annotations

import sys

from specdec.config import SpecdecError


def pair_options(parser) -> None:
    parser.add_argument("--pair", default="small", help="a preset such as tiny, small or llama-3.1-8b")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)


def quiet() -> None:
    """Without transformers' own progress bars: loading a shipped pair takes a moment."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load(given):
    from specdec.hub import load_pair

    quiet()
    return load_pair(given.pair, dtype=given.dtype, device=given.device)


def at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise SpecdecError(f"{name} must be at least {low}, got {value}.")


# --- evaluate and estimate --------------------------------------------------------------------------------------------

DEFAULT_SUITES = ["laptop/gsm8k", "laptop/humaneval", "laptop/mt_bench"]


def suite_options(parser) -> None:
    parser.add_argument(
        "--suites", nargs="+", default=DEFAULT_SUITES, metavar="SUITE", help="names such as laptop/gsm8k"
    )
    parser.add_argument("--folder", help="folder of JSONL files for suites that are not embedded")
    parser.add_argument("--limit", type=int, default=4, help="prompts per suite; 0 for all")
    parser.add_argument("--part", choices=["train", "tune", "test"], help="part of each suite (default: all of it)")
    parser.add_argument("--repeats", type=int, default=1)


def evaluate_options(parser) -> None:
    pair_options(parser)
    suite_options(parser)
    parser.add_argument(
        "--methods", nargs="+", default=["autoregressive", "eagle3", "eagle3-scripts"], metavar="METHOD"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="add the static tree tuned on the suites' tune part; judge on test"
    )
    parser.add_argument("--name", default="evaluate", help="of the run directory")
    parser.add_argument("--force", action="store_true", help="start over instead of continuing or reusing a run")


def evaluate(given) -> int:
    from specdec import bench, tables
    from specdec.methods import method_from

    methods = {text: method_from(text) for text in given.methods}
    _refuse_or_print(_estimated(given, probe=False))
    pair, part = load(given), given.part
    options = dict(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    options |= dict(folder=given.folder)
    if given.tuned:
        methods["tuned"], part = _tuned(given, pair, options), "test"
    options |= dict(limit=given.limit or None, part=part, repeats=given.repeats, name=given.name, force=given.force)
    run = bench.evaluate(methods, given.suites, pair, **options)
    table = bench.summary(run)
    shown = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau", "tok_per_s", "same_frac"]
    print(tables.markdown(table[[name for name in shown if name in table]]))
    print(f"\nEvery row is in {run.directory}.")
    return 0


def _tuned(given, pair, options: dict):
    """The tuned static tree; SpecdecError where the judgement was to be made on prompts it may have seen."""
    from specdec.tuning import tune_static

    if given.part not in (None, "test"):
        raise SpecdecError(f"--tuned judges on the test part of the suites, not on --part {given.part}.")
    policy = tune_static(pair, given.suites, **options).policy
    print(f"The fastest static tree on the tuning prompts is {policy!r}.", file=sys.stderr)
    return policy


def estimate_options(parser) -> None:
    pair_options(parser)
    suite_options(parser)
    parser.add_argument("--prompt-tok", type=int, default=1024, help="longest prompt to reserve memory for")


def estimate(given) -> int:
    _refuse_or_print(_estimated(given, prompt_tok=given.prompt_tok))
    return 0


def _estimated(given, **options):
    from specdec.estimate import estimate

    at_least("--limit", given.limit, 0)
    at_least("--repeats", given.repeats, 1)
    at_least("--max-new-tokens", given.max_new_tokens, 1)
    places = dict(dtype=given.dtype, device=given.device, max_new_tokens=given.max_new_tokens, folder=given.folder)
    wanted = dict(limit=given.limit or None, part=given.part, repeats=given.repeats)
    return estimate(given.pair, given.suites, **places, **wanted, **options)


def _refuse_or_print(needed) -> None:
    from specdec.estimate import refusal

    sentence = refusal(needed)
    if sentence is not None:
        raise SpecdecError(sentence)
    print(needed.sentence, file=sys.stderr)


# --- train ------------------------------------------------------------------------------------------------------------


def train_options(parser) -> None:
    systems = parser.add_subparsers(dest="system", required=True, metavar="target|eagle3|resps|ltd|radar|ours")
    target = systems.add_parser("target", help="a target of the shipped kind, from the generated corpus")
    eagle3 = systems.add_parser("eagle3", help="an EAGLE-3 drafter for any target, by the training-time test")
    eagle3.add_argument("--target", required=True, help="folder or hub id of a causal LM with its tokenizer")
    eagle3.add_argument("--data", help="JSONL of conversations (ShareGPT or UltraChat style); default the corpus")
    for system in (target, eagle3):
        system.add_argument("--preset", default="small", help="tiny, mini or small (eagle3: paper as well)")
        system.add_argument("--out", required=True, help="folder for weights, curve and checkpoints")
        system.add_argument("--minutes", type=float, help="stop on time instead of on steps")
        system.add_argument("--steps", type=int)
        system.add_argument("--seed", type=int, default=0)
        system.add_argument("--threads", type=int)
        system.add_argument("--device", help="default: a GPU where there is one")
        system.add_argument("--restart", action="store_true", help="start over instead of continuing")
    for name in CONTROLLERS:
        _controller_options(systems.add_parser(name, help=f"{CONTROLLERS[name]} controller, on a recording"))


CONTROLLERS = {"resps": "Re-SpS's", "ltd": "LTD's", "radar": "RADAR's", "ours": "our"}


def _controller_options(system) -> None:
    system.add_argument("--pair", default="small", help="name of the pair that was recorded")
    system.add_argument("--preset", default="ours", choices=["paper", "official", "ours"])
    system.add_argument("--trace", required=True, help="folder of a recording (record, or notebook 21)")
    system.add_argument("--costs", required=True, help="JSON file of calibrate, or the name of a hardware profile")
    system.add_argument("--out", required=True, help="folder for policy, curve and checkpoints")
    system.add_argument("--budget", default="laptop", choices=["laptop", "paper"], help="decisions to learn from")
    system.add_argument("--seed", type=int, default=0)
    system.add_argument("--restart", action="store_true", help="start over instead of continuing")


def _train_controller(given) -> int:
    from pathlib import Path

    from specdec.costs import CostModel, profile
    from specdec.trace import open_trace

    trace = open_trace(Path(given.trace), given.pair)
    costs = CostModel.load(given.costs) if Path(given.costs).is_file() else profile(given.costs)
    options = dict(seed=given.seed, out_dir=Path(given.out), resume=not given.restart)
    if given.system == "radar":
        from specdec.policies.radar import RadarPolicy
        from specdec.train import radar, radar_data, radar_objective

        flat_nodes = RadarPolicy.preset(given.preset).flat_nodes
        data = radar_data.from_trace(trace.select(part="train"), flat_nodes=flat_nodes)
        latency = radar_objective.latency_ms(costs, data.context_tok, flat_nodes)
        facts = {"pair": trace.header["pair"], "costs": costs.name}
        radar.train_radar(data, latency, given.preset, trained_for=facts, **options)
    elif given.system == "ours":
        _train_ours(given, trace, costs)
    else:
        from specdec.train import controllers

        train = {"resps": controllers.train_resps, "ltd": controllers.train_ltd}[given.system]
        train(trace, costs, given.preset, budget=given.budget, **options)
    print(given.out)
    return 0


def _train_ours(given, trace, costs) -> None:
    """On the narrowest beam whose whole trees were recorded: the cheapest to draft."""
    from pathlib import Path

    from specdec import runs
    from specdec.statics import best_static
    from specdec.trace import joined
    from specdec.train.ours import train_ours

    top_k = min(trace.header["trees"], default=None)
    if top_k is None:
        raise SpecdecError(f"{given.trace} keeps no whole trees; record again with trees=(4,), for example.")
    tune, learn = (joined([trace.select(part=part)], top_k) for part in ("tune", "train"))
    options = dict(top_k=top_k, start=best_static(tune, costs), choose_on=tune, seed=given.seed, policy_ms=None)
    policy, curve = train_ours(learn, costs, **options)
    runs.write_table(Path(given.out) / "curve.parquet", curve)
    policy.save(Path(given.out) / "policy")


def train(given) -> int:
    if given.system in CONTROLLERS:
        return _train_controller(given)
    names = ("minutes", "steps", "seed", "threads", "device")
    options = {name: getattr(given, name) for name in names} | {"resume": not given.restart}
    if given.system == "target":
        from specdec.train.pretrain import train_target

        folder = train_target(given.preset, given.out, **options)
    else:
        from specdec.train.data import load_conversations
        from specdec.train.eagle3 import train_drafter

        chats = load_conversations(given.data) if given.data else None
        folder = train_drafter(given.target, given.out, given.preset, chats, **options)
    print(folder)
    return 0


# --- reproduce --------------------------------------------------------------------------------------------------------


def reproduce_options(parser) -> None:
    parser.add_argument("--scale", default="laptop", choices=["laptop", "paper"])
    parser.add_argument("--full", action="store_true", help="whole suites instead of a few prompts of each")
    parser.add_argument("--all", action="store_true", help="every notebook of the book, not only the main ones")
    parser.add_argument("--force", action="store_true", help="run notebooks that are fresh, too")


def reproduce(given) -> int:
    from specdec import book

    chosen = book.Book(given.scale).choose((), given.all)
    whole = [entry.name for entry in chosen if given.full and entry.name.startswith("30_evaluate")]
    reports = []
    for names, parameters in (([e.name for e in chosen if e.name not in whole], {}), (whole, {"limit": 0})):
        if names:
            reports.append(book.run(given.scale, names, force=given.force, parameters=parameters))
    return int(any(report["state"].isin(["failed", "skipped"]).any() for report in reports))
