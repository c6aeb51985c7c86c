"""The command line: 14 commands. OPTIONS says once what every option is; a command names its own.

Heavy modules are imported inside the functions, so that `--help` is instant. Exit statuses: 0; 1 if
the command found a fault; 2 for bad input; 130 for Ctrl-C. `--debug` shows the traceback instead.
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

from specdec import machine
from specdec.errors import SpecdecError

SYSTEMS = ("resps", "ltd", "radar", "ours")
DRAFTERS = "eagle3 ppow block eagle1 hass griffin medusa hydra lm".split()
ACTIONS = ("run", "contents", "pages", "student", "lab", "tidy")
SCALES = ("laptop", "paper")
RECORDINGS = "record"  # the name of the runs that `record` writes
# name -> (kind, default, help). kind: a type, [type] for several values, a tuple of choices, bool
# for a flag, or "append" for pairs of name and value
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    # the pair and its place
    "pair": (str, None, "target and drafter by name, or a folder or hub id (default: small)"),
    "target": (str, None, "a preset, folder, hub id or GGUF file of a causal language model"),
    "drafter": (str, None, "a drafter's folder or hub id, or a kind, not the pair's own"),
    "dtype": (str, "auto", "number format of weights: auto, float32, bfloat16 or float16"),
    "device": (str, "auto", "where to run: auto, cpu or cuda"),
    "device_map": (str, None, "spread the target's layers over several GPUs: auto, balanced"),
    "on": (str, None, "several processes or machines: local, ray or ray://host:port"),
    "jobs": (int, None, "number of parallel jobs with --on (default: all cores)"),
    # prompts
    "suites": ([str], (), "suites such as laptop/gsm8k (default: embedded ones for the pair)"),
    "folder": (str, None, "JSONL files of suites that are not embedded (default: SPECDEC_DATA)"),
    "limit": (int, 4, "maximum number of prompts per suite; 0 takes all"),
    "part": (("train", "tune", "test"), None, "use only this split of each suite"),
    "data": (str, None, "conversations (drafters) or a file of prompts (controllers)"),
    # decoding and measuring
    "prompt": (str, None, "text to continue; a user message if the pair has a chat template"),
    "policy": (str, "tuned", "tuned, autoregressive, eagle3, static:60,7,10, or a policy's folder"),
    "methods": ([str], ("autoregressive", "eagle3", "eagle3-scripts"), "methods to compare"),
    "raw": (bool, False, "continue the text itself, without the chat template"),
    "max_new_tokens": (int, 128, "maximum number of new tokens per answer"),
    "temperature": (float, 0.0, "sampling temperature; 0 decodes greedily"),
    "seed": (int, 0, "random seed"),
    "repeats": (int, 1, "number of times to decode every prompt"),
    "tuned": (bool, False, "add the fastest static tree on the tuning prompts; judge on the rest"),
    "force": (bool, False, "start over instead of continuing or reusing a run"),
    "cpu_time": (bool, False, "measure processor time instead of the wall clock (one thread)"),
    "gpu": (str, None, "compute from this GPU's data sheet: a100, h100, rtx3090 or t4"),
    "seconds": (float, 45.0, "duration of the measurement"),
    "estimate": (bool, False, "only print the estimated time and space"),
    # recordings
    "depth": (int, 12, "draft forwards after the first of the deepest tree"),
    "top_ks": ([int], (1, 2, 8, 16), "widths whose acceptance is recorded, but not the trees"),
    "trees": ([int], (4, 10), "widths whose whole trees are recorded"),
    "family": ([int], (), "record every tree up to these children per node and nodes per level"),
    "most_nodes": (int, 240, "largest number of verified nodes that can be replayed"),
    "trace": (str, None, "folder of a recording (default: the newest one of the pair)"),
    "costs": (str, None, "costs of a cycle: file of `specdec calibrate` or a hardware profile"),
    "machines": ([str], None, "hardware profiles to judge at as well (default: three GPUs)"),
    # trainings
    "preset": (str, None, "settings by name"),
    "set": ([str], (), "change settings of the preset, such as passes=2 (repeatable)"),
    "objective": (str, "ppow", "what to optimise: ppow, cst, kl_only, distillspec-reverse, ..."),
    "fields": ([str], (), "change settings of the objective, such as beta=0.1"),
    "start_from": (str, None, "folder of the drafter to continue from"),
    "minutes": (float, None, "stop after this many minutes instead of the preset's steps"),
    "steps": (int, None, "length of the training in steps or decisions (default: the preset's)"),
    "restart": (bool, False, "start over instead of continuing a run"),
    "budget": (SCALES, "laptop", "training length in decisions"),
    "variant": (("max_entropy", "standard"), "max_entropy", "variant of Re-SpS"),
    "order": (("6.1", "4"), "6.1", "section of LTD's paper whose order of rounds is used"),
    "out": (str, None, "output folder or file"),
    "tokens": (str, "3M", "total number of answer tokens in the folder, such as 500k or 3M"),
    "rows": (int, 64, "number of chats generated in parallel"),
    "answer_tok": (int, 320, "maximum number of tokens of an answer"),
    "prompts": (str, None, "file of prompts to answer before others are made up"),
    # the book
    "action": (ACTIONS, None, "what to do with the notebooks"),
    "all": (bool, False, "run every notebook of the book, not only the main ones"),
    "scale": (SCALES, "laptop", "budgets of the notebooks"),
    "only": ([str], (), "names of notebooks or beginnings of them (2: the twenties)"),
    "p": ("append", (), "set a parameter of the notebooks (repeatable)"),
    "smoke": (bool, False, "run with the small settings of the tests"),
    "notebooks": (str, None, "folder of the notebooks (default: SPECDEC_NOTEBOOKS)"),
    "publish": (bool, False, "copy the items of the runs into figures/"),
    "replace": (bool, False, "with --publish: also replace items with more rows than these"),
    "check": (bool, False, "change nothing; only list notebooks that are not tidy"),
}
PAIR = "pair target drafter"
PLACE = "dtype device device_map"
PROMPTS = "suites folder limit part"
DECODING = "max_new_tokens temperature seed"
REQUIRED = object()  # as the default of an option

# name -> (function, its options, defaults that differ from OPTIONS)
COMMANDS: dict[str, tuple[Callable, str, dict[str, Any]]] = {}


def command(name: str, *options: str, **defaults) -> Callable:
    """Decorator that adds a function to COMMANDS; its docstring is the help."""

    def add(function: Callable) -> Callable:
        COMMANDS[name] = (function, " ".join(options), defaults)
        return function

    return add


def add_option(parser: argparse.ArgumentParser, name: str, defaults: dict[str, Any]) -> None:
    """The argument of an option; a name in capitals is a positional one."""
    kind, default, text = OPTIONS[name.lower()]
    default = defaults.get(name, default)
    facts: dict[str, Any] = {"help": text}
    if isinstance(kind, tuple):
        facts["choices"] = kind
    if name.isupper():
        parser.add_argument(name.lower(), **facts)
        return
    facts.update(default=default, required=default is REQUIRED)
    if kind is bool:
        del facts["required"]
        facts["action"] = "store_true"
    elif kind == "append":
        facts.update(action="append", nargs=2, default=[], metavar=("NAME", "VALUE"))
    elif isinstance(kind, list) and default == ():
        facts.update(type=kind[0], action="extend", nargs="*", default=[])
    elif isinstance(kind, list):
        facts.update(type=kind[0], nargs="*")
    elif kind in (int, float):
        facts["type"] = kind
    if default not in (None, (), False, REQUIRED):
        facts["help"] = f"{text} (default: {default})"
    parser.add_argument("-p" if name == "p" else f"--{name.replace('_', '-')}", **facts)


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    title = "Speculative decoding, measured and reproduced."
    top = argparse.ArgumentParser("specdec", description=title)
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    training = commands.add_parser("train", help="train a drafter or a controller")
    systems = training.add_subparsers(dest="system", required=True, metavar="system")
    for name, (function, options, defaults) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        about = {"help": function.__doc__, "description": function.__doc__}
        each = (systems if group else commands).add_parser(last, **about)
        each.set_defaults(run=function)
        for option in options.split():
            add_option(each, option, defaults)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    args = parser().parse_args(arguments)
    if getattr(args, "notebooks", None):
        os.environ[machine.NOTEBOOKS_VARIABLE] = args.notebooks
    usual = warnings.formatwarning
    # a warning without its line of code
    warnings.formatwarning = lambda message, *_, **__: f"specdec: {message}\n"
    try:
        return args.run(args) or 0
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stderr.close()
        return 0
    except (SpecdecError, KeyboardInterrupt) as error:
        if args.debug:
            raise
        if isinstance(error, KeyboardInterrupt):
            error = "stopped; what was written is kept, and the same command continues."
        print(f"specdec: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpecdecError) else 130
    finally:
        warnings.formatwarning = usual


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
        parts = [name]
        if self.drafter:
            kind, source = kind_and_source(self.drafter)
            if kind not in (None, "eagle3", name):
                parts.append(kind)
            if source and name_of(source) != name:
                parts.append(name_of(source))
        return "+".join(parts)

    def load(self):
        """The pair with its drafter."""
        from specdec.models.load import load_pair

        name = self.name
        source = {"target": self.target} if self.target else {"name": self.base}
        if self.device_map:
            source["device_map"] = self.device_map
        pair = load_pair(**source, drafter=self.drafter, dtype=self.dtype, device=self.device)
        pair.name = name
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

    place = Path(folder) if folder else runs.recorded(pair)
    if folder or (recording_folder(place) / "trace.json").is_file():
        return open_trace(place, pair)
    why = f"nothing was recorded with {pair} yet"
    raise SpecdecError(f"{why}; run `specdec record` for it, or name a recording with --trace.")


def find_costs(text: str | None, pair: str, dtype: str):
    """The costs in a file or of a hardware profile; default those that `calibrate` wrote."""
    from specdec.costs.model import CostModel
    from specdec.costs.profiles import prices

    if text:
        return prices(text)
    place = costs_file(pair, dtype)
    if not place.is_file():
        advice = "run `specdec calibrate` for it, or give --costs a file or a hardware profile"
        raise SpecdecError(f"there are no costs of {pair} in {dtype} yet; {advice}.")
    return CostModel.load(place)


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


def suites_of(args: argparse.Namespace) -> list[str]:
    """The named suites, or the usual embedded ones for the pair."""
    from specdec.data.suites import DEFAULT_NAMES, embedded_suite

    pair = Models.of(args).name
    return args.suites or [embedded_suite(name, pair) for name in DEFAULT_NAMES]


def print_table(table, digits: int = 2) -> None:
    from specdec.report.tables import markdown

    print(markdown(table, digits=digits))


@command("doctor")
def doctor(args) -> int:
    """report this machine's features, missing parts and the costs of a cycle here"""
    import pandas

    from specdec.models.load import load_pair
    from specdec.tools import estimate

    checks = estimate.checks()
    print_table(checks)
    print()
    pair = load_pair("small", dtype="float32")
    rows = [estimate.cycle_costs(pair, estimate.suite_prompts(pair), pair.usual_tree)]
    print_table(pandas.DataFrame(rows))
    return int((checks["state"] == estimate.FAULT).any())


@command("pairs")
def pairs(args) -> None:
    """list the pairs known by name to --pair and the notebooks"""
    from specdec.models.load import at_hand
    from specdec.models.pairs import names

    for name in names():
        print(f"{name:20} {'available' if at_hand(name) else 'to be downloaded'}")


@command("decode", "PROMPT policy raw", PAIR, PLACE, DECODING)
def decode(args) -> None:
    """decode one prompt and print text, tau and tokens per second"""
    from specdec.core.decode import autoregress
    from specdec.core.decode import decode as drafted
    from specdec.core.policy import Static

    # a wrong name is refused before a model is read
    models = Models.of(args)
    method = None if args.policy == "tuned" else models.method(args.policy)
    pair = models.load()
    if args.policy == "tuned":
        method = Static.of(pair.usual_tree)
    settings = options_of(args, f"raw {DECODING}")
    if method is None:
        out = autoregress(pair, args.prompt, **settings)
        facts = f"autoregressive: {out.new_tok} tokens"
    else:
        out = drafted(pair, args.prompt, method, **settings)
        facts = f"{method!r}: {out.new_tok} tokens, tau {out.tau:.2f} in {len(out.rows)} cycles"
    print(out.tokens if out.text is None else out.text)
    print(f"[{facts}, {out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)


AUDITED: dict[str, Any] = {"methods": (), "max_new_tokens": 32, "temperature": None}


@command("audit", "methods", PAIR, PLACE, DECODING, PROMPTS, **AUDITED)
def audit(args) -> int:
    """check that no tree and no policy changes the text, at temperature 0 and 1"""
    from specdec.data.suites import gather, openings
    from specdec.evaluation import lossless

    models = Models.of(args)
    policies = lossless.default_policies(args.seed)
    policies.update({text: models.method(text) for text in args.methods})
    items = gather(suites_of(args), **options_of(args, "limit part folder seed"))
    pair = models.load()
    # greedy text repeats itself and hides faults, so both by default
    temperatures = (0.0, 1.0) if args.temperature is None else (args.temperature,)
    settings = options_of(args, "max_new_tokens seed")
    prompts = openings(pair, items)
    result = lossless.audit(pair, prompts, policies, temperatures=temperatures, **settings)
    print_table(result.table)
    if result.unasked:
        print(f"Never asked, so not tested: {', '.join(result.unasked)}.")
    if len(result.failures):
        print("Not lossless; the first of the texts that differ:")
        print_table(result.failures.head())
    return int(not result.passed)


MEASURING = "repeats force on jobs"


@command("evaluate", "methods tuned", MEASURING, PAIR, PLACE, DECODING, PROMPTS)
def evaluate(args) -> None:
    """measure the speed of methods on suites"""
    from specdec.evaluation import bench
    from specdec.evaluation.tuning import tune_static

    models = Models.of(args)
    methods = {text: models.method(text) for text in args.methods}
    if args.tuned and args.part not in (None, "test"):
        raise SpecdecError(f"--tuned evaluates on the test part, not on --part {args.part}.")
    suites = suites_of(args)
    pair = models.load()
    if args.tuned:
        settings = options_of(args, f"{DECODING} folder")
        methods["tuned"] = tune_static(pair, suites, **settings).policy
        args.part = "test"
    # a run of the same settings is continued or reused
    settings = options_of(args, f"{DECODING} {MEASURING} folder limit part")
    run = bench.evaluate(methods, suites, pair, **settings)
    columns = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau"]
    columns += ["tok_per_s", "same_frac", "accuracy_frac"]
    print_table(bench.summary(run).reindex(columns=columns).dropna(axis=1, how="all"))
    print(run.directory)


@command("estimate", "gpu repeats max_new_tokens dtype device", PAIR, PROMPTS)
def estimate(args) -> None:
    """estimate memory and time of a run before it runs"""
    from specdec.tools.estimate import estimate as expected

    names = "dtype device drafter gpu max_new_tokens limit folder part repeats"
    needed = expected(Models.of(args).base, suites_of(args), **options_of(args, names))
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    print(needed.sentence, file=sys.stderr)


SHAPES = "depth top_ks trees family most_nodes"


@command(
    "record", "data estimate on jobs suites folder limit", SHAPES, PAIR, PLACE, DECODING, limit=40
)
def record(args) -> None:
    """record what every tree would accept, so that any policy can be replayed"""
    from specdec import runs
    from specdec.data.suites import NAMES, Prompt, embedded_suite
    from specdec.replays import record as recording
    from specdec.tools.estimate import estimate_record
    from specdec.training.drafter.generate_data import read_prompts

    # 1. the pair and its prompts
    pair = Models.of(args).load()
    settings = options_of(args, f"{DECODING} {SHAPES} limit folder on jobs")
    widths = (*args.top_ks, *args.trees)
    settings["lengths"] = recording.usual_lengths(pair, widths, args.depth)
    prompts: Any = args.suites or [embedded_suite(name, pair.name) for name in NAMES]
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
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    # 3. the recording, which other commands then find
    trace = recording.record(pair, prompts, **settings)
    print(f"{trace!r}", file=sys.stderr)
    for run in runs.find(RECORDINGS):
        if run.key == trace.header["key"]:
            leave_recording(run.directory, trace)
            print(run.directory)


WRITING = "TARGET out tokens minutes rows answer_tok prompts folder seed"


@command("generate-data", WRITING, PLACE, out=REQUIRED)
def generate_data(args) -> None:
    """let a chat model write prompts and answers to train its drafter on"""
    from specdec.training.drafter import generate_data as chats

    thousands = {"k": 1_000, "M": 1_000_000}
    try:
        total = int(float(args.tokens.rstrip("kM")) * thousands.get(args.tokens[-1:], 1))
    except ValueError:
        raise SpecdecError(f"--tokens takes 500k or 3M, not {args.tokens!r}.") from None
    settings = options_of(args, "seed rows answer_tok")
    config = chats.ChatConfig(**settings, prompts=Path(args.prompts or chats.PROMPTS))
    end = {"tokens": total, "minutes": args.minutes, "benchmarks": args.folder}
    files = chats.generate_chats(Models.of(args).load(), config, args.out, **end)
    counts = ", ".join(f"{name} {count:,}" for name, count in files.counts.items())
    print(f"{args.out} holds {files.answer_tok:,} answer tokens ({counts}).")


@command("score", "POLICY trace costs machines")
def score(args) -> None:
    """judge a controller by replay: speed over plain decoding and the tuned tree"""
    from specdec.evaluation import score as module

    machines = module.MACHINES if args.machines is None else args.machines
    result = module.score(args.policy, trace=args.trace, costs=args.costs, machines=machines)
    print_table(result.table, digits=3)
    print(f"\n{result.sentence}")


@command("calibrate", "seconds seed cpu_time out", PAIR, PLACE)
def calibrate(args) -> None:
    """measure the time of every part of a cycle on this machine"""
    from specdec.core.pair import dtype_name
    from specdec.costs.calibrate import calibrate as measure

    pair = Models.of(args).load()
    costs = measure(pair, **options_of(args, "seconds seed cpu_time"))
    dtype = dtype_name(pair.target.dtype)
    print(costs.save(args.out or costs_file(pair.name, dtype)))
    # costs kept elsewhere are not this machine's usual ones
    tree = None if args.out else keep_tree(pair.name, dtype)
    if tree:
        print(f"{pair.name} now decodes with the tree {tree.text}, the fastest at these costs.")


def train_drafter(args) -> None:
    """train a drafter of one kind, or continue one (ppow)"""
    from specdec.data.corpus import CorpusChats
    from specdec.training.drafter import chats, eagle3, presets

    names = (args.system, args.target, args.preset, args.set, args.start_from)
    aims = options_of(args, "seed fields objective")
    settings, aim, start = presets.training_named(*names, own_text=bool(args.data), **aims)
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
    settings = options_of(args, "steps seed variant")
    settings.update(preset=args.preset, changes=changes, paper=args.budget == "paper")
    # 3. the training
    usual = runs.runs_dir() / "policies" / runs.safe_name(pair) / f"{args.system}-{dtype}"
    folder = Path(args.out or usual)
    how = {"out_dir": folder, "resume": not args.restart}
    controllers.train_system(args.system, recorded, prices, **settings, **how)
    print(folder)


TRAINING = "target out data preset set steps seed restart"
DRAFTING = f"{TRAINING} device start_from minutes"
CONTROLLING = f"{TRAINING} pair drafter trace costs budget"
MORE = {"eagle3": "", "ppow": "objective fields", "resps": "variant", "ltd": "order"}
for _kind in DRAFTERS:
    _defaults = {"target": REQUIRED, "out": REQUIRED, "device": None}
    _defaults["preset"] = None if _kind == "ppow" else "small"
    COMMANDS[f"train {_kind}"] = (
        train_drafter,
        f"{DRAFTING} {MORE.get(_kind, 'fields')}",
        _defaults,
    )
for _kind in SYSTEMS:
    _options = f"{CONTROLLING} {MORE.get(_kind, '')}"
    COMMANDS[f"train {_kind}"] = (train_controller, _options, {"preset": "ours"})


@command("items", "scale publish replace notebooks")
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


RUNNING = "only p smoke all force scale notebooks on jobs"


@command("reproduce", RUNNING)
def reproduce(args) -> int:
    """run the notebooks whose results are out of date, and write a page of all results"""
    import yaml

    from specdec.tools import book

    opened = book.Book(args.scale)
    values = {name: yaml.safe_load(text) for name, text in args.p}  # a number, flag or list
    how = options_of(args, "force smoke on jobs")
    report = book.run(opened, args.only, parameters=values, everything=args.all, **how)
    if not args.only:
        book.write_page(opened)
    return int(report["state"].isin(["failed", "skipped"]).any())


@command("book", "ACTION out check", RUNNING)
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
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
