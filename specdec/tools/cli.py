"""The command line: 14 commands. OPTIONS says once what every option is; a command names its own.

Heavy modules are imported inside the functions, so that `--help` is instant. Exit statuses: 0; 1 if
the command found a fault; 2 for bad input; 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, check_integer, check_number, nearest_name_error, warn

SYSTEMS = ("resps", "ltd", "radar", "ours")
DRAFTERS = "eagle3 ppow block eagle1 hass griffin medusa hydra lm".split()
ACTIONS = ("run", "contents", "pages", "student", "lab", "tidy")
SCALES = ("laptop", "paper")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CONSTANTS = {"true": True, "false": False, "null": None}  # of YAML, in lower case
# of drafters, as in `pairs.KINDS`, which imports torch
KINDS = """eagle3 prompt_lookup suffix lookahead hybrid eagle1 griffin block medusa hydra
lm""".split()
AT_LEAST_1 = "max_new_tokens top_ks trees family most_nodes jobs steps tokens answer_tok".split()

FLAG: dict[str, Any] = {"action": "store_true"}
WORDS: dict[str, Any] = {"nargs": "*", "action": "extend", "default": []}
NUMBERS: dict[str, Any] = {"nargs": "*", "type": int, "default": ()}
TUNED: dict[str, Any] = {"default": "tuned"}
NAMED: dict[str, Any] = {"nargs": 2, "action": "append", "default": []}
NAMED["metavar"] = ("NAME", "VALUE")
# name -> (help, the other arguments of argparse's add_argument)
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # the pair and its place
    "pair": ("target and drafter by name, or a folder or hub id (default: small)", {}),
    "target": ("a preset, folder, hub id or GGUF file of a causal language model", {}),
    "drafter": ("a drafter's folder or hub id, or a kind, not the pair's own", {}),
    "dtype": ("number format of weights", {"choices": DTYPES, "default": "auto"}),
    "device": ("where to run: cpu or cuda", {"default": "auto"}),
    "device_map": ("spread the target's layers over several GPUs: auto, balanced", {}),
    "on": ("several processes or machines: local, ray or ray://host:port", {}),
    "jobs": ("number of parallel jobs with --on (default: all cores)", {"type": int}),
    # prompts
    "suites": ("suites such as laptop/gsm8k (default: embedded ones for the pair)", WORDS),
    "limit": ("maximum number of prompts per suite; 0 takes all", {"type": int, "default": 4}),
    "part": ("use only this split of each suite", {"choices": ("train", "tune", "test")}),
    "data": ("conversations (drafters) or a file of prompts (controllers)", {}),
    # decoding and measuring
    "prompt": ("text to continue; a user message if the pair has a chat template", {}),
    "policy": ("autoregressive, eagle3, static:60,7,10, or a policy's folder", TUNED),
    "methods": ("methods to compare, as for --policy", WORDS),
    "max_new_tokens": ("maximum number of new tokens per answer", {"type": int, "default": 128}),
    "temperature": ("0 decodes greedily", {"type": float, "default": 0.0}),
    "seed": ("random seed", {"type": int, "default": 0}),
    "tuned": ("add the fastest static tree on the tuning prompts; judge on the rest", FLAG),
    "force": ("start over instead of continuing or reusing a run", FLAG),
    "gpu": ("compute from this GPU's data sheet", {"choices": ("a100", "h100", "rtx3090", "t4")}),
    "seconds": ("duration of the measurement", {"type": float, "default": 45.0}),
    "estimate": ("only print the estimated time and space", FLAG),
    # recordings
    "depth": ("draft forwards after the first of the deepest tree", {"type": int, "default": 12}),
    "top_ks": ("widths whose acceptance is recorded", {**NUMBERS, "default": (1, 2, 8, 16)}),
    "trees": ("widths whose whole trees are recorded", {**NUMBERS, "default": (4, 10)}),
    "family": ("record every tree up to these children and nodes a level", NUMBERS),
    "most_nodes": ("most verified nodes that can be replayed", {"type": int, "default": 240}),
    "trace": ("folder of a recording (default: the newest one of the pair)", {}),
    "costs": ("costs of a cycle: file of `specdec calibrate` or a hardware profile", {}),
    # trainings
    "preset": ("settings by name", {}),
    "set": ("change settings of the preset, such as passes=2 (repeatable)", WORDS),
    "objective": ("what to optimise: cst, kl_only, distillspec-reverse, ...", {"default": "ppow"}),
    "fields": ("change settings of the objective, such as beta=0.1", WORDS),
    "start_from": ("folder of the drafter to continue from", {}),
    "minutes": ("stop after this many minutes, not the preset's steps", {"type": float}),
    "steps": ("length of the training, or its decisions, not the preset's", {"type": int}),
    "restart": ("start over instead of continuing a run", FLAG),
    "variant": ("variant of Re-SpS", {"default": "max_entropy"}),
    "order": ("section of LTD's paper for its rounds", {"choices": ("6.1", "4"), "default": "6.1"}),
    "out": ("output folder or file", {}),
    "tokens": ("answer tokens in the folder", {"type": int, "default": 3_000_000}),
    "answer_tok": ("maximum number of tokens of an answer", {"type": int, "default": 320}),
    # the book
    "action": ("what to do with the notebooks", {"choices": ACTIONS}),
    "all": ("run every notebook of the book, not only the main ones", FLAG),
    "scale": ("budgets of the notebooks", {"choices": SCALES, "default": "laptop"}),
    "only": ("names of notebooks or beginnings of them (2: the twenties)", WORDS),
    "p": ("set a parameter of the notebooks (repeatable)", NAMED),
    "smoke": ("run with the small settings of the tests", FLAG),
    "publish": ("copy the items of the runs into figures/", FLAG),
    "replace": ("with --publish: also replace items with more rows than these", FLAG),
    "check": ("change nothing; only list notebooks that are not tidy", FLAG),
}
PAIR = "pair target drafter"
PLACE = "dtype device device_map"
DECODING = "max_new_tokens temperature seed"
SHAPES = "depth top_ks trees family most_nodes"


def add_option(parser: argparse.ArgumentParser, name: str, defaults: dict[str, Any]) -> None:
    """The argument of an option; one with the default ... is required."""
    text, usual = OPTIONS[name.lower()]
    arguments = dict(usual)
    if name.isupper():
        parser.add_argument(name.lower(), help=text, **arguments)
        return
    if name in defaults:
        arguments["default"] = defaults[name]
    if arguments.get("default") is ...:
        arguments.update(required=True, default=None)
    if arguments.get("default"):
        text += " (default: %(default)s)"
    flag = "-p" if name == "p" else f"--{name.replace('_', '-')}"
    parser.add_argument(flag, help=text, **arguments)


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    title = "Speculative decoding, measured and reproduced."
    top = argparse.ArgumentParser("specdec", description=title)
    commands = top.add_subparsers(required=True, metavar="command")
    training = commands.add_parser("train", help="train a drafter or a controller")
    systems = training.add_subparsers(dest="system", required=True, metavar="system")
    for name, (function, options) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        about = {"help": function.__doc__, "description": function.__doc__}
        each = (systems if group else commands).add_parser(last, **about)
        each.set_defaults(run=function)
        for option in options.split():
            add_option(each, option, DEFAULTS.get(name, {}))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    args = parser().parse_args(arguments)
    # a warning without its line of code
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"specdec: {message}\n"
    try:
        check_options(args)
        return args.run(args) or 0
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stderr.close()
        return 0
    except SpecdecError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specdec: stopped; the same command continues what was written.", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = usual


def check_options(args: argparse.Namespace) -> None:
    """Refuse wrong numbers, names and files now: torch alone takes seconds to import."""
    names = known_names()
    for option, value in vars(args).items():
        for part in value if isinstance(value, list | tuple) else [value]:
            if type(part) is float:
                check_number(option, part)
            elif type(part) is int:
                check_integer(option, part, int(option in AT_LEAST_1))
            elif type(part) is str and option in names:
                check_place(option, part, names[option])
    if getattr(args, "prompt", None) == "":
        raise SpecdecError("the prompt is empty; give a text to continue.")


def known_names() -> dict[str, Sequence[str]]:
    """{option: the names that it accepts beside files, folders and hub ids}."""
    import yaml

    from specdec.core.tree_config import TREES

    package = Path(__file__).parents[1]
    pairs = ["tiny", "small", *yaml.safe_load((package / "models/presets.yml").read_bytes())]
    benchmarks = yaml.safe_load((package / "data/suites.yml").read_bytes())
    suites = [f"{form}{name}" for form in ("", "laptop/", "toy/") for name in benchmarks]
    methods = ["autoregressive", "static", "tuned", *TREES]
    files: dict[str, Sequence[str]] = dict.fromkeys(("data", "trace", "start_from"), ())
    names = {"pair": pairs, "target": pairs, "drafter": KINDS, "policy": methods}
    return {**files, **names, "methods": methods, "suites": suites, "on": ("local", "ray")}


def check_place(option: str, text: str, names: Sequence[str]) -> None:
    """Refuse what is no name (or name:more), no file or folder, and cannot be a hub id."""
    from specdec import machine
    from specdec.core.tree_config import tree_from

    kind, _, numbers = text.partition(":")
    if kind == "static":
        tree_from(numbers)
    # below this folder, the results and the checkout, as `runs.placed` looks for it
    results = Path(os.environ.get("SPECDEC_HOME", "")).expanduser()
    checkout = (machine.notebooks_folder() or results).parent
    place = Path(text).expanduser()
    if kind in names or any((home / place).exists() for home in (Path(), results, checkout)):
        return
    if not names or text.startswith((".", "/", "~")) or text.endswith(".py"):
        raise SpecdecError(f"there is no file or folder {text}; check the path.")
    if "/" not in text or option == "suites":
        raise nearest_name_error(f"value of {option}", text, names)


def value_of(text: str) -> Any:
    """The value of a notebook's parameter: a number, true, null, a list or dict in YAML, or text.

    YAML alone would read 010 as 8, 1:30 as 90 and 1e-3 as text.
    """
    import yaml

    try:
        value = yaml.load(text, Loader=yaml.BaseLoader)  # every leaf is text
    except yaml.YAMLError:
        return text
    return text if value is None else typed(value)


def typed(value: Any) -> Any:
    """The value with numbers and CONSTANTS in place of their texts."""
    if isinstance(value, dict):
        return {name: typed(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(typed, value))
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return CONSTANTS.get(value.lower(), value)


@dataclass(frozen=True)
class Models:
    """The chosen pair and its place; `small` without any choice."""

    pair: str | None = None
    target: str | None = None
    drafter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Models:
        """The models of a command's options."""
        return cls(**options_of(args, f"{PAIR} {PLACE}"))

    @property
    def base(self) -> str:
        """The preset or the target."""
        from specdec.models.pairs import named

        if self.pair and self.target:
            raise SpecdecError("give --pair (a preset) or --target (a folder or hub id), not both.")
        return self.target or named(self.pair or "small")

    @property
    def name(self) -> str:
        """The pair's name. With another drafter it is another one, as its recordings differ."""
        from specdec.models.pairs import kind_and_source, name_of

        name = name_of(self.base) if self.target else self.base
        kind, source = kind_and_source(self.drafter or "")
        parts = [name]
        if kind not in (None, "eagle3", name):
            parts.append(kind)
        if source and name_of(source) != name:
            parts.append(name_of(source))
        return "+".join(parts)

    def load(self):
        """The pair with its drafter."""
        from specdec.models.load import load_pair

        place = {"target" if self.target else "name": self.base, "drafter": self.drafter}
        pair = load_pair(**place, dtype=self.dtype, device=self.device, device_map=self.device_map)
        pair.name = self.name
        return pair

    def method(self, text: str):
        """A method by text, see `methods.method_from`; a warning if trained for another pair."""
        from specdec.evaluation.compare import warn_elsewhere
        from specdec.evaluation.methods import method_from

        policy = method_from(text)
        if policy is not None:
            warn_elsewhere(policy, pair=self.name)
        return policy


def costs_file(pair: str, dtype: str) -> Path:
    """The costs file written by `calibrate` and by notebook 21."""
    from specdec import runs

    return runs.recorded(pair) / f"costs-{dtype}.json"


def leave_recording(folder: Path | str, trace, scale: str = "laptop") -> Path:
    """Make the finished recording in `folder` the default one of its pair."""
    from specdec import runs
    from specdec.replays.trace import recording_folder

    folder = recording_folder(folder).resolve()
    if folder.is_relative_to(runs.home()):
        folder = folder.relative_to(runs.home())
    place = runs.recorded(trace.header["pair"], scale) / "recording.json"
    return runs.write_json(place, {"folder": folder.as_posix(), "key": trace.header["key"]})


def find_recording(folder: str | None, pair: str | None):
    """The recording in `folder`, or the last one of `pair`."""
    from specdec import runs
    from specdec.replays.trace import open_trace, recording_folder

    if not folder and not (recording_folder(runs.recorded(pair)) / "trace.json").is_file():
        why = f"nothing was recorded with {pair}"
        raise SpecdecError(f"{why}; run `specdec record`, or name a recording with --trace.")
    return open_trace(folder or runs.recorded(pair), pair)


def find_costs(text: str | None, pair: str, dtype: str):
    """The costs in a file or of a hardware profile; default those that `calibrate` wrote."""
    from specdec.costs.profiles import prices

    place = costs_file(pair, dtype)
    if not text and not place.is_file():
        why = f"there are no costs of {pair} in {dtype}"
        raise SpecdecError(f"{why}; run `specdec calibrate`, or give a file or profile (--costs).")
    return prices(text or place)


def keep_tree(pair: str, dtype: str):
    """Make the fastest static tree, by the last recording and costs of `pair`, its default tree."""
    from specdec import runs
    from specdec.replays.static_trees import best_static

    try:
        recorded = find_recording(None, pair)
        costs = find_costs(None, pair, dtype)
    except SpecdecError:  # nothing was recorded or calibrated
        return None
    if "tune" in set(recorded.turns["part"]):
        recorded = recorded.select(part="tune")
    best = best_static(recorded.restrict(costs.ranges), costs)
    runs.write_json(runs.tree_file(pair, dtype), dataclasses.asdict(best))
    return best


def options_of(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """These options of a command, of those that it has; a limit of 0 is none."""
    values = {name: getattr(args, name) for name in names.split() if hasattr(args, name)}
    if "limit" in values:
        values["limit"] = values["limit"] or None
    return values


def suites_of(args: argparse.Namespace, names: Sequence[str] = ()) -> list[str]:
    """The chosen suites, or embedded ones for the pair: `names` or the usual ones."""
    from specdec.data.suites import DEFAULT_NAMES, embedded_suite

    pair = Models.of(args).name
    return args.suites or [embedded_suite(name, pair) for name in names or DEFAULT_NAMES]


def print_table(table, digits: int = 2) -> None:
    from specdec.report.tables import markdown

    print(markdown(table, digits=digits))


def doctor(args) -> int:
    """report this machine's features and missing parts"""
    from specdec.tools import estimate

    checks = estimate.checks()
    print_table(checks)
    return int((checks["state"] == estimate.FAULT).any())


def pairs(args) -> None:
    """list the pairs known by name to --pair and the notebooks"""
    from specdec.models.load import at_hand
    from specdec.models.pairs import names

    for name in names():
        print(f"{name:20} {'available' if at_hand(name) else 'to be downloaded'}")


def decode(args) -> None:
    """decode one prompt and print text, tau and tokens per second"""
    from specdec.core import decode as decoding

    models = Models.of(args)
    # None is the pair's tuned tree
    policy = None if args.policy == "tuned" else models.method(args.policy)
    pair = models.load()
    settings = options_of(args, DECODING)
    if args.policy == "autoregressive":
        out = decoding.autoregress(pair, args.prompt, **settings)
        facts = f"{out.new_tok} tokens"
    else:
        out = decoding.decode(pair, args.prompt, policy, **settings)
        facts = f"{out.new_tok} tokens, tau {out.tau:.2f} in {len(out.rows)} cycles"
    print(out.tokens if out.text is None else out.text)
    print(f"[{args.policy}: {facts}, {out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)


def audit(args) -> int:
    """check that no tree and no policy changes the text, at temperature 0 and 1"""
    from specdec.data.suites import gather, openings
    from specdec.evaluation import lossless

    models = Models.of(args)
    policies = lossless.default_policies(args.seed)
    for text in args.methods:
        policies[text] = models.method(text)
    items = gather(suites_of(args), **options_of(args, "limit part seed"))
    pair = models.load()
    prompts = openings(pair, items)
    settings = options_of(args, "max_new_tokens seed")
    # greedy text repeats itself and hides faults, so both by default
    if args.temperature is not None:
        settings["temperatures"] = (args.temperature,)
    result = lossless.audit(pair, prompts, policies, **settings)
    print_table(result.table)
    if len(result.failures):
        print("Not lossless; the first of the texts that differ:")
        print_table(result.failures.head())
    return int(not result.passed)


def evaluate(args) -> None:
    """measure the speed of methods on suites (default: plain decoding and EAGLE-3's trees)"""
    from specdec.evaluation import bench, tuning

    models = Models.of(args)
    names = args.methods or ("autoregressive", "eagle3", "eagle3-scripts")
    methods = {text: models.method(text) for text in names}
    if args.tuned and args.part not in (None, "test"):
        raise SpecdecError(f"--tuned evaluates on the test part, not on --part {args.part}.")
    suites = suites_of(args)
    pair = models.load()
    if args.tuned:
        methods["tuned"] = tuning.tune_static(pair, suites, **options_of(args, DECODING)).policy
        args.part = "test"
    # a run of the same settings is continued or reused
    settings = options_of(args, f"{DECODING} force on jobs limit part")
    run = bench.evaluate(methods, suites, pair, **settings)
    columns = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau"]
    columns += ["tok_per_s", "same_frac", "accuracy_frac"]
    print_table(bench.summary(run).reindex(columns=columns).dropna(axis=1, how="all"))
    print(run.directory)


def estimate(args) -> None:
    """estimate memory and time of a run before it runs"""
    from specdec.tools.estimate import estimate as expected

    settings = options_of(args, "dtype device drafter gpu max_new_tokens limit")
    needed = expected(Models.of(args).base, suites_of(args), **settings)
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    print(needed.sentence, file=sys.stderr)


def record(args) -> None:
    """record what every tree would accept, so that any policy can be replayed"""
    from specdec import runs
    from specdec.data.suites import NAMES, Prompt
    from specdec.replays import record as recording
    from specdec.tools.estimate import estimate_record
    from specdec.training.drafter.generate_data import read_prompts

    # 1. the pair and its prompts
    pair = Models.of(args).load()
    settings = options_of(args, f"{DECODING} {SHAPES} limit on jobs")
    widths = (*args.top_ks, *args.trees)
    settings["lengths"] = recording.usual_lengths(pair, widths, args.depth)
    prompts: Any = suites_of(args, NAMES)
    if args.data:  # the user's turns of every line: the pair gives its own answers
        name = Path(args.data).stem
        prompts = {name: []}
        for chat in read_prompts(Path(args.data)):
            turns = tuple(turn["content"] for turn in chat if turn["role"] == "user")
            prompts[name].append(Prompt(f"{name}/{len(prompts[name])}", name, turns))
        settings["part"] = recording.SPLIT
    # 2. what it needs
    needed = estimate_record(pair, prompts, **settings)
    print(needed.sentence, file=sys.stderr)
    if args.estimate:
        return
    # 3. the recording, which other commands then find
    trace = recording.record(pair, prompts, **settings)
    print(f"{trace!r}", file=sys.stderr)
    folder = runs.runs_dir() / f"record-{trace.header['key'][:12]}"
    leave_recording(folder, trace)
    print(folder)


def generate_data(args) -> None:
    """let a chat model write prompts and answers to train its drafter on"""
    from specdec.models.eagle_network import default_taps
    from specdec.training.drafter import generate_data as chats

    config = chats.ChatConfig(**options_of(args, "seed answer_tok"))
    pair = Models.of(args).load()
    try:  # a warning, since chats serve every kind of drafter
        default_taps(pair.target.num_layers)
    except SpecdecError as error:
        warn(str(error))
    files = chats.generate_chats(pair, config, args.out, **options_of(args, "tokens minutes"))
    print(f"{args.out} holds {files.answer_tok:,} answer tokens ({dict(files.counts)}).")


def score(args) -> None:
    """judge a controller by replay: speed over plain decoding and the tuned tree"""
    from specdec.evaluation.score import score as judge

    result = judge(args.policy, trace=args.trace, costs=args.costs)
    print_table(result.table, digits=3)
    print(f"\n{result.sentence}")


def calibrate(args) -> None:
    """measure the time of every part of a cycle on this machine"""
    from specdec.core.pair import dtype_name
    from specdec.costs.calibrate import calibrate as measure

    pair = Models.of(args).load()
    costs = measure(pair, **options_of(args, "seconds seed"))
    dtype = dtype_name(pair.target.dtype)
    print(costs.save(costs_file(pair.name, dtype)))
    tree = keep_tree(pair.name, dtype)
    if tree:
        print(f"{pair.name} now decodes with the tree {tree.text}, the fastest at these costs.")


def train_drafter(args) -> None:
    """train a drafter of one kind, or continue one (ppow)"""
    from specdec.data.corpus import CorpusChats
    from specdec.models.eagle_network import default_taps
    from specdec.models.load import target_config
    from specdec.training.drafter import chats, eagle3, presets

    # without chats a drafter is continued on the target's own answers to the corpus
    preset = args.preset or ("continued" if args.data else "continued-corpus")
    names = (args.system, args.target, preset, args.set, args.start_from)
    aims = options_of(args, "seed fields objective")
    settings, aim, start = presets.training_named(*names, **aims)
    if aim.network in ("eagle3", "block"):
        default_taps(target_config(args.target).num_hidden_layers)
    budget = presets.Budget(**options_of(args, "minutes steps seed device"))
    conversations = chats.load_conversations(args.data) if args.data else CorpusChats()
    how: dict = {"settings": settings, "objective": aim, "start_from": start, "budget": budget}
    how.update(out_dir=args.out, resume=not args.restart)
    print(eagle3.train_drafter(args.target, conversations, **how))


def train_controller(args) -> None:
    """train a controller on a recording"""
    from specdec import runs
    from specdec.policies import ltd
    from specdec.policies.base import setting
    from specdec.training import controllers

    # 1. the recording and its prices; with --data they are made first
    models = Models.of(args)
    chosen = [f"--{name}={value}" for name, value in options_of(args, PAIR).items() if value]
    if args.data and args.trace:
        raise SpecdecError("give --data (prompts to record) or --trace, and not both.")
    if args.data:
        record(parser().parse_args(["record", "--data", args.data, "--limit=0", *chosen]))
        if not args.costs:
            calibrate(parser().parse_args(["calibrate", *chosen]))
    recorded = find_recording(args.trace, models.name if chosen or not args.trace else None)
    pair, dtype = recorded.header["pair"], recorded.header["dtype"]
    prices = find_costs(args.costs, pair, dtype)
    # 2. the settings
    changes = dict(setting("--set", "ppo.gamma=0.9", text) for text in args.set)
    if args.system == "ltd":
        changes.setdefault("rounds", ltd.ORDERS[args.order])
    settings = options_of(args, "steps seed variant preset")
    settings.update(changes=changes, resume=not args.restart)
    # 3. the training
    usual = runs.runs_dir() / "policies" / runs.safe_name(pair) / f"{args.system}-{dtype}"
    folder = Path(args.out or usual)
    controllers.train_system(args.system, recorded, prices, out_dir=folder, **settings)
    print(folder)


def items(args) -> int:
    """list the papers' tables and figures and the state of each"""
    from specdec import runs

    book_items = runs.workbook_module("items")
    if not args.publish:
        table = book_items.status(args.scale)
        print_table(table[["item", "state", "missing", "scale", "notebook"]])
        return 0
    sources = runs.workbook_module("claims").sources(args.scale, richest=not args.replace)
    published = book_items.publish(args.scale, sources, args.replace)
    # README's verdicts and figure follow from the published rows
    if runs.home() == runs.workbook():
        runs.workbook_module("speeds").write(book_items.figures_dir())
        page = runs.workbook_module("page")
        page.write_verdicts(runs.home() / "README.md", book_items.figures_dir())
    print_table(published)
    return int((published["state"] == "refused").any())


def reproduce(args) -> int:
    """run the notebooks whose results are out of date, and write a page of all results"""
    from specdec.parallel import interruptible
    from specdec.tools import book

    opened = book.Book(args.scale)
    values = {name: value_of(text) for name, text in args.p}
    how = options_of(args, "force smoke")
    with interruptible():
        report = book.run(opened, args.only, parameters=values, everything=args.all, **how)
    if not args.only:
        book.write_page(opened)
    return int(report["state"].isin(["failed", "skipped"]).any())


def use_book(args) -> int:
    """run the notebooks, list them, write them as pages or for students, open them, or tidy them"""
    from specdec import runs
    from specdec.tools import book

    if args.action == "run":
        return reproduce(args)
    if args.action == "lab":
        return book.open_lab()
    if args.action == "contents":
        lines = [book.contents(args.scale)]
    elif args.action == "pages":
        lines = runs.workbook_module("executed").write_pages(book.Book(args.scale), args.only)
    elif args.action == "student":
        lines = book.write_student_edition(Path(args.out or runs.home() / "runs" / "student"))
    else:
        lines = book.tidy_all(check=args.check)
    print(*lines or ["everything is tidy"], sep="\n")
    return int(args.check and bool(lines))


MODELS = f"{PAIR} {PLACE}"
RUNNING = "only p smoke all force scale"
TRAINING = "out data preset set steps seed restart"
# name -> (function, its options); the function's docstring is the help, and an option in capitals
# is a positional argument
COMMANDS: dict[str, tuple[Callable, str]] = {
    "doctor": (doctor, ""),
    "pairs": (pairs, ""),
    "decode": (decode, f"PROMPT policy {MODELS} {DECODING}"),
    "audit": (audit, f"methods suites limit part {MODELS} {DECODING}"),
    "evaluate": (evaluate, f"methods tuned suites limit part force on jobs {MODELS} {DECODING}"),
    "estimate": (estimate, f"gpu max_new_tokens dtype device suites limit {PAIR}"),
    "record": (record, f"data estimate on jobs suites limit {SHAPES} {MODELS} {DECODING}"),
    "generate-data": (generate_data, f"TARGET out tokens minutes answer_tok seed {PLACE}"),
    "score": (score, "POLICY trace costs"),
    "calibrate": (calibrate, f"seconds seed {MODELS}"),
    "items": (items, "scale publish replace"),
    "reproduce": (reproduce, RUNNING),
    "book": (use_book, f"ACTION out check {RUNNING}"),
}
# command -> defaults that differ from OPTIONS
DEFAULTS: dict[str, dict[str, Any]] = {
    "audit": {"max_new_tokens": 32, "temperature": None},
    "record": {"limit": 40},
    "generate-data": {"out": ...},
    "train ppow": {"preset": None},
}
_more = {"eagle3": "", "ppow": "objective fields", "resps": "variant", "ltd": "order"}
for _kind in DRAFTERS:
    _options = f"target {TRAINING} device start_from minutes {_more.get(_kind, 'fields')}"
    COMMANDS[f"train {_kind}"] = (train_drafter, _options)
    _usual = {"target": ..., "out": ..., "device": None, "preset": "small"}
    DEFAULTS[f"train {_kind}"] = {**_usual, **DEFAULTS.get(f"train {_kind}", {})}
for _kind in SYSTEMS:
    _options = f"{TRAINING} {PAIR} trace costs {_more.get(_kind, '')}"
    COMMANDS[f"train {_kind}"] = (train_controller, _options)
    DEFAULTS[f"train {_kind}"] = {"preset": "ours"}

if __name__ == "__main__":
    sys.exit(main())
