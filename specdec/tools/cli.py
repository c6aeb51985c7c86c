"""The command line: the commands of GROUPS.

Parses, calls the library, prints. OPTIONS defines each argparse option once; a command is a function (it returns the exit
status) whose docstring is its help; the decorator lists its options and their differences. Everything heavy is imported on
demand, so that `--help` is fast. `tools.places` resolves the pair, policy, recording and costs.
Exit statuses: 0; 1 if the command ran and found a fault (a failed notebook, a different text, an untidy
notebook); 2 for bad input, in one sentence; 130 for Ctrl-C, in one sentence. --debug shows the traceback instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from specdec import machine, ranks, tools
from specdec.errors import SpecdecError, check_integer
from specdec.later import Later

COUNTS = ("rows", "answer_tok", "repeats", "rounds", "threads", "max_new_tokens", "jobs")
LOWEST = {"limit": 0} | dict.fromkeys(COUNTS, 1)  # for every command
FIRST_WORD_S = 5.0

GROUPS = {
    "look": "doctor pairs register decode estimate items help",
    "measure": "score audit evaluate record check-recording calibrate reprice evidence",
    "train": "generate-data train",
    "ship": "new-policy export schedule card reproduce book",
}


ROOMS = "core costs data evaluation models policies replays report training"
core, costs, data, evaluation, models, policies, replays, report, training = (
    Later(f"specdec.{room}") for room in ROOMS.split()
)
MODULES = "fanout runs models.load models.pairs evaluation.logs report.tables training.drafter"
fanout, runs, load, pairs, logs, tables, drafting = (Later(f"specdec.{name}") for name in MODULES.split())
pandas, torch, yaml = map(Later, ("pandas", "torch", "yaml"))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that states the default of every option that takes a value."""

    def _get_help_string(self, action):
        told = action.help or ""
        if not action.option_strings or action.nargs == 0 or "default" in told:
            return told
        typed = action.default if isinstance(action.default, list | tuple) else [action.default]
        shown = "none" if typed in ([], [None]) else " ".join(map(str, typed)).replace("%", "%%")
        return f"{told} (required)" if action.required else f"{told} (default: {shown})"


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    text = "Speculative decoding, measured and reproduced. `specdec help COMMAND` shows the options of a command."
    usage = "specdec [-h] [--debug] [--version] command ..."
    whole = argparse.ArgumentParser("specdec", usage, text, formatter_class=_Help)
    whole.add_argument("--debug", action="store_true", help="show the traceback of an error")
    whole.add_argument("--version", action="version", version=f"specdec {sys.modules['specdec'].__version__}")
    width = shutil.get_terminal_size().columns - 4
    for group, names in GROUPS.items():
        summaries = {f"{name:17}": COMMANDS[name][0] for name in names.split() if name in COMMANDS}
        indent = dict(subsequent_indent=" " * 17)
        told = [textwrap.fill(text, width, initial_indent=name, **indent) for name, text in summaries.items()]
        whole.add_argument_group(group, "\n".join(told))
    _add_commands(whole, COMMANDS, "command", help=argparse.SUPPRESS, prog="specdec")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    args = parser().parse_args(arguments)
    usual, warnings.formatwarning = warnings.formatwarning, _as_sentence
    try:
        _check(args)
        return _run(args)
    except KeyboardInterrupt:
        if args.debug:
            raise
        print("\nspecdec: stopped; what was written is kept, and the same command continues.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stderr.close()
        return 0
    except SpecdecError as error:
        if args.debug:
            raise
        if not ranks.leads() and ranks.joined():
            time.sleep(FIRST_WORD_S)  # rank 0 reports common errors, and torchrun then ends the others
        if not isinstance(error, ranks.RankZeroFailed) and (ranks.joined() or ranks.first_here()):
            print(f"specdec: {error}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = usual


def _check(args) -> None:
    """Check a command's options before it starts; sets the pair in `args.which`."""
    given = vars(args)
    for name, lowest in LOWEST.items():
        if given.get(name) is not None and given[name] < lowest:
            raise SpecdecError(f"--{name.replace('_', '-')} must be at least {lowest}, got {given[name]}.")
    if "on" in given:
        args.on = fanout.checked_place(args.on, args.jobs)
    if given.get("notebooks"):
        os.environ[machine.NOTEBOOKS_VARIABLE] = args.notebooks
    if {"pair", "target"} <= set(given):
        args.which = tools.places.which(args.pair, args.target, args.drafter)


def _run(args) -> int:
    """The command itself. With torchrun, only rank 0 prints."""
    if ranks.world() == 1:
        return args.run(args) or 0
    if args.run not in (_decode, _audit, _generate_data, _train_drafter):
        why = f"specdec {args.command} runs in one process"
        raise SpecdecError(f"{why}; start it without torchrun (where it decodes, --device-map auto uses several GPUs).")
    with contextlib.ExitStack() as stack:
        if not ranks.leads():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        status = args.run(args) or 0
        ranks.leave()
        return status


def _as_sentence(message, *_, **__) -> str:
    """A warning as a sentence, without its line of code."""
    return f"specdec: {message}\n"


def _add_commands(parser, commands: dict, what: str, **listed) -> None:
    """Add a table like COMMANDS; a nested table instead of options becomes subcommands."""
    parsers = parser.add_subparsers(dest=what, required=True, metavar=what, **listed)
    for name, (text, run, options, *changes) in commands.items():
        summary = {} if listed else {"help": f"{text} ({options})" if commands is BOOK else text}
        command = parsers.add_parser(name, description=text, formatter_class=_Help, **summary)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if isinstance(options, dict):
            _add_commands(command, options, "action" if name == "book" else "system")
            continue
        different = changes[0] if changes else {}
        for option in options.split():
            change = different.get(option.lstrip("-").replace("-", "_"), {})
            command.add_argument(option, **OPTIONS[option] | ({"help": change} if isinstance(change, str) else change))
        command.set_defaults(run=run)


def _pick(args, *names: str) -> dict:
    """These options as keyword arguments of a function with the same names."""
    return {name: getattr(args, name) for name in names}


def _suites(args) -> list[str]:
    """The named suites, or embedded ones for the pair: all of them to record, else the usual four."""
    names = data.suites.NAMES if args.command == "record" else data.suites.DEFAULT_NAMES
    return args.suites or [data.suites.embedded_suite(name, args.which.name) for name in names]


def _own_prompts(path: Path) -> dict:
    """The user's turns of every line, as one suite: the pair gives its own answers."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    chats = [chat for file in files for chat in drafting.generate_data.read_prompts(file)]
    asked = [tuple(message["content"] for message in chat if message["role"] == "user") for chat in chats]
    named = [(f"{path.stem}/{number}", path.stem, turns) for number, turns in enumerate(asked)]
    return {path.stem: [data.suites.Prompt(*facts) for facts in named]}


def _load(args):
    tp, spread = "tp" in args and args.tp, args.device_map if "device_map" in args else None
    return tools.places.load(args.which, args.dtype, args.device, tp=tp, spread=spread)


REQUIRED = {"required": True}
_FORMATS = ["float32", "bfloat16"]


def _option(help: str, default=None, **more) -> dict:
    """The argparse arguments of an option: a flag if the default is False, else a value of the default's type."""
    if default is False:
        return {"help": help, "action": "store_true"}
    typed = default[0] if isinstance(default, list) and default else default
    kind = {"type": type(typed)} if isinstance(typed, int | float) else {}
    return {"help": help, "default": default, **kind, **more}


OPTIONS: dict[str, dict] = {
    "--pair": _option(
        "target and drafter by name: tiny, small, smollm2, llama-3.1-8b, ..., a name registered with `specdec register`, or a "
        "folder or hub id (default: small; `specdec pairs` lists the names)"
    ),
    "--target": _option("instead of --pair: folder, hub id or GGUF file of any causal language model"),
    "--drafter": _option("folder or hub id of a drafter, or a kind such as suffix, instead of the pair's own"),
    "--dtype": _option("number format of weights and activations: auto, float32, bfloat16 or float16", "auto"),
    "--device": _option("where to run: auto, cpu or cuda", "auto"),
    "--tp": _option("shard the target over the processes of torchrun (tensor parallelism)", False),
    "--device-map": _option("spread the target's layers over several GPUs: auto, balanced or sequential"),
    "--max-new-tokens": _option("maximum number of new tokens per answer", 128),
    "--temperature": _option("sampling temperature; 0 decodes greedily", 0.0),
    "--seed": _option("random seed", 0),
    "--threads": _option("CPU threads to use (default: torch's choice)", type=int),
    "--on": _option(
        "where to run: local (several processes), ray, ray://host:port, slurm or slurm:local (default: this process)",
        metavar="PLACE",
    ),
    "--jobs": _option(
        "number of parallel jobs with --on (default: this machine's cores, or the cluster's capacity)", type=int
    ),
    "--cpu-time": _option("measure processor time instead of the wall clock (one thread; for busy machines)", False),
    "--notebooks": _option("folder of the notebooks (default: SPECDEC_NOTEBOOKS, or the checkout's)", metavar="FOLDER"),
    # prompts
    "--suites": _option(
        "suites of prompts such as laptop/gsm8k (default: embedded ones for the pair; see README)",
        nargs="+",
        metavar="SUITE",
    ),
    "--folder": _option("folder of JSONL files for suites that are not embedded (default: SPECDEC_DATA)"),
    "--limit": _option("maximum number of prompts per suite; 0 takes all", 4),
    "--part": _option("use only this split of each suite (default: all of it)", choices=["train", "tune", "test"]),
    "--repeats": _option("number of times to decode every prompt", 1),
    # doctor
    "--bench": _option("time more pairs in more rounds, and a pair of the reference shape", False),
    "--curve": _option("also measure the time of a cycle against verified nodes and context length", False),
    "--rounds": _option("rounds of --bench; in each, every method decodes every prompt", 5),
    # decode
    "prompt": _option("text to continue; sent as a user message if the pair has a chat template"),
    "--policy": _option(
        "how to draft: tuned (the tree tuned for the pair), autoregressive (no drafting), eagle3, "
        "static:total_tokens,depth,top_k[,beam,...], an engine's rule "
        "such as sglang_ema, the folder of a learned policy, or a shipped one such as small/ours-float32",
        "tuned",
        metavar="POLICY",
    ),
    "topic": _option("the command", nargs="*"),
    "--raw": _option("continue the text itself, without the chat template", False),
    # audit
    "--logs": _option("logs of another engine's plain and other answers (JSONL)", nargs=2, metavar=("PLAIN", "OTHER")),
    "--server": _option("OpenAI-compatible server of this target here, such as http://localhost:8000", metavar="URL"),
    "--draws": _option("sampled answers to draw from the server; 0 compares greedy texts alone", 200),
    "--any-host": _option("allow a server on another machine, which then sees the prompts", False),
    # evaluate and estimate
    "--methods": _option(
        "decoding methods to compare, written as for --policy of `specdec decode`",
        ["autoregressive", "eagle3", "eagle3-scripts"],
        nargs="+",
        metavar="METHOD",
    ),
    "--tuned": _option("add the fastest static tree on the tuning prompts; evaluate on the test prompts", False),
    "--name": _option("name of the run directory"),
    "--prompt-tok": _option("longest prompt to reserve memory for, in tokens", 1024),
    "--gpu": _option("compute from this GPU's data sheet instead of this machine: a100, h100, rtx3090 or t4"),
    "--plan": _option("estimate a whole grid of measurements, such as notebooks/papers_plan.yml", metavar="FILE"),
    # record and calibrate
    "--depth": _option("expansions (draft forwards after the first) of the deepest tree", 12),
    "--top-ks": _option("beam widths whose acceptance is recorded, but not the trees", [1, 2, 8, 16], nargs="*"),
    "--trees": _option("beam widths whose whole trees are recorded", [4, 10], nargs="*"),
    "--family": _option(
        "record every tree up to this many children per node and, after it, nodes expanded per level, such as 3 8",
        [],
        type=int,
        nargs="*",
    ),
    "--most-nodes": _option("largest number of verified nodes that can be replayed", 240),
    "--lengths": _option(
        "positions per turn with RADAR's exact distributions (default: 16 with trees of width 10 and depth 7)", type=int
    ),
    "--estimate": _option("only print the estimated time and space", False),
    "--seconds": _option("duration of the measurement in seconds", 45.0),
    # evidence
    "--only": _option("names of notebooks or beginnings of them (2: the twenties)", [], nargs="+", metavar="NAME"),
    "--policies": _option(
        "folders of learned policies to audit besides the shipped ones", [], nargs="*", metavar="FOLDER"
    ),
    # generate-data
    "policy": _option("folder of a policy, or a shipped one such as small/ours-float32"),
    "target": _option("a preset such as smollm2, or the folder or hub id of a chat model with its tokenizer"),
    "--tokens": _option("total number of answer tokens in the folder, such as 500k or 3M", "3M"),
    "--rows": _option("number of chats generated in parallel", 64),
    "--answer-tok": _option("maximum number of tokens per answer", 320),
    "--prompts": _option("file of prompts to answer first: one a line, or JSONL (default: the shipped ones)"),
    # train
    "--out": _option("folder for weights or policy, learning curve and checkpoints", required=True),
    "--restart": _option("start over instead of continuing a run", False),
    "--preset": _option("settings by name: tiny or small; for drafters also pretrained or paper", "small"),
    "--minutes": _option("stop after this many minutes instead of the preset's steps", type=float),
    "--steps": _option("optimiser steps (default: the preset's)", type=int),
    "--data": _option("conversations: a JSONL file or a folder of such files (default: the toy pair's corpus)"),
    "--set": _option(
        "change settings of the preset, such as passes=2 (repeatable)",
        [],
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
    ),
    "--objective": _option("what to optimise: ppow, cst, kl_only, distillspec-reverse, ...", "ppow"),
    "--fields": _option("change settings of the objective, such as beta=0.1", [], nargs="+", metavar="NAME=VALUE"),
    "--start-from": _option("folder of the drafter to continue from (default: the shipped one of the target)"),
    "--unroll": _option("draft steps that training unrolls (default: the preset's)", type=int),
    "--features": _option("folder for cached target features of a fixed text (default: the user's cache)"),
    "--features-gb": _option("disk budget for cached target features, in GB; 0 disables the cache (slower)", 20.0),
    "--fsdp": _option("shard the target's weights over several processes instead of copying them to each", False),
    # export
    "engine": _option("the engine that will serve the drafter", choices=["vllm", "sglang", "llama.cpp"]),
    "--gguf": _option("GGUF file of the target, needed for llama.cpp", metavar="FILE"),
    "--tree": _option(
        "tree whose settings become the engine's flags (default: the fastest one in the recording)",
        metavar="TOTAL_TOKENS,DEPTH,TOP_K",
    ),
    # schedule
    "--batches": _option("batch sizes to choose for", [1, 2, 4, 8, 16, 32, 64], nargs="+", metavar="TEXTS"),
    "--plugin": _option("also write a class for the engine's own hook, to change (vllm, sglang)", False),
    # card
    "name": _option("preset of the shipped drafter, such as smollm2"),
    "--trained": _option("output folder of a training (its --out): first copy its drafter into the package"),
    "--kind": _option("kind of the drafter: eagle3, block, eagle1, griffin, medusa or hydra", "eagle3"),
    # controllers
    "--trace": _option("folder of a recording (default: the newest one of the pair)", metavar="FOLDER"),
    "--costs": _option(
        "costs of a cycle: JSON file of `specdec calibrate`, or a hardware profile by name (default: its last result)"
    ),
    "--systems": _option(
        "controllers to train", ["resps", "ltd", "radar", "ours"], nargs="+", choices=["resps", "ltd", "radar", "ours"]
    ),
    "--seeds": _option("training seeds for each controller", [0], nargs="+", metavar="SEED"),
    "--variant": _option("variant of Re-SpS", "max_entropy", choices=["max_entropy", "standard"]),
    "--order": _option("section of LTD's paper whose order of rounds is used", "6.1", choices=["6.1", "4"]),
    # score
    "--machines": _option("hardware profiles to judge at as well (default: three GPUs)", nargs="*"),
    "--answer-ms": _option("time of one answer in milliseconds (default: measured)", type=float),
    "--budget": _option("training length in decisions: short, or the paper's", "laptop", choices=["laptop", "paper"]),
    # the book
    "--scale": _option("budgets of the notebooks", "laptop", choices=["laptop", "paper"]),
    "--full": _option("evaluate whole suites instead of a few prompts of each", False),
    "--all": _option("run every notebook of the book, not only the main ones", False),
    "--force": _option("start over instead of continuing or reusing a run", False),
    "--smoke": _option("run with the small settings of the tests", False),
    "-p": _option(
        "set a parameter of the notebooks (repeatable)", [], nargs=2, action="append", metavar=("NAME", "VALUE")
    ),
    "--check": _option("change nothing; only list notebooks that are not tidy", False),
    "--no-browser": _option("start JupyterLab without opening a browser", False),
    "--publish": _option("copy the items of the runs into figures/", False),
    "--replace": _option("with --publish: also replace items with more rows than these", False),
}
NAMED = "--pair --target --drafter"
PAIR = f"{NAMED} --dtype --device"
DECODING = f"{PAIR} --max-new-tokens --temperature --seed"
SUITES = "--suites --folder --limit --part --repeats"
WEIGHTS = "--preset --minutes --steps --threads --device --out --seed --restart"
CONTROLLER = f"{NAMED} --data --preset --trace --costs --budget --steps --set --out --seed --restart"
ELSEWHERE = "--on --jobs"
_ANY_DEVICE = {"device": dict(default=None, help="where to train: cpu or cuda (default: a GPU if there is one)")}
_LEARNER = _ANY_DEVICE | {
    "target": REQUIRED | {"help": "a preset such as smollm2, or folder or hub id of a causal LM with its tokenizer"},
    "out": "folder for the drafter, its learning curve and checkpoints",
    "start_from": "folder of a drafter of this kind to continue from (default: a fresh one)",
}
_OWN = "a file with one a line, or JSONL with `prompt` or `messages`, or a folder of such JSONL files"
_RECORDED = {
    "preset": dict(default="ours", choices=["paper", "official", "ours"], help="settings by name"),
    "steps": "number of decisions (resps, ltd), passes (radar) or steps (ours) (default: the preset's)",
    "out": dict(required=False, help="folder for policy, curve and checkpoints (default: one per pair and system)"),
    "set": "change any field of the preset, such as interval=3 or ppo.gamma=0.9 or state=text (repeatable)",
    "data": f"first record these prompts and calibrate: {_OWN} (default: use what was recorded before)",
}
_POLICIES = dict(nargs="+", default=[], dest="policies", help="learned policies to add, by folder or shipped name")

COMMANDS: dict[str, tuple] = {}  # name -> help, function, options, changes to them
TRAININGS: dict[str, tuple] = {}
BOOK: dict[str, tuple] = {}


def _command(name: str, options: str, /, table: dict = COMMANDS, **changes):
    """Add a function to a table of commands; its docstring is the help.

    changes: by option, its differences for this command; a string is its help.
    """

    def add(run):
        table[name] = (" ".join(run.__doc__.split()), run, options, changes)
        return run

    return add


@_command(
    "doctor",
    "--bench --curve --threads --dtype --rounds --cpu-time",
    dtype=_option("number formats to time", _FORMATS, nargs="+", choices=_FORMATS),
)
def _doctor(args) -> int:
    """report this machine's features, missing parts and bottlenecks"""
    checks = tools.doctor.checks(tools.doctor.facts())
    print(tables.markdown(checks))
    options = _pick(args, "threads", "cpu_time")
    if args.bench:
        options |= {"pairs": ("tiny", "small"), "reference": True, "rounds": args.rounds, "progress": True}
    print(f"\n{tables.markdown(tools.doctor.benchmark(tuple(args.dtype), **options))}")
    status, dtype = int((checks["state"] == tools.doctor.FAULT).any()), args.dtype[0]
    if not args.curve:
        return status
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = tools.doctor.curve(tools.doctor.reference_pair(getattr(torch, dtype)), cpu_time=args.cpu_time)
    table = tables.node_curve(rows, by="context")
    columns = ["context", "verified_tok", "draft_ms", "verify_ms", "commit_ms", "host_ms", "total_ms"]
    print(f"\n{tables.markdown(table[columns])}")
    title = f"a cycle of the reference shape, {dtype}, after so many tokens"
    figure = report.figures.node_curve(table, by="context", title=title)
    stem = runs.figure_path("doctor", f"cycle_{dtype}")
    facts = {"pair": "reference shape", "dtype": dtype, "device": "cpu", "machine": machine.hardware()["cpu"]}
    print(f"\nThe curve is drawn in {report.figures.save(figure, stem, sources=[facts], data=table)[0]}.")
    return status


@_command("help", "topic")
def _help(args) -> None:
    """show the options of a command, such as `specdec help train eagle3`"""
    parser().parse_args([*args.topic, "--help"])


@_command("pairs", "")
def _pairs(args) -> None:
    """list the pairs known by name to --pair and the notebooks"""
    rows = []
    for name in pairs.names():
        known = pairs.own_pair(name) or pairs.PRESETS.get(name, pairs.OwnPair("in the package", "in the package"))
        target = known.target if isinstance(known.target, str) else known.target.requirement
        kind = "yours" if pairs.own_pair(name) else "available" if load.at_hand(name) else "to be downloaded"
        rows.append({"pair": name, "target": target, "drafter": known.drafter or "none", "": kind})
    print(f"{tables.markdown(pandas.DataFrame(rows))}\n\nYours are in {pairs.registry()}; `specdec register` adds one.")


@_command(
    "register",
    "name --target --drafter --kind",
    name="name of the pair in every command and notebook",
    target="folder, hub id or GGUF file of its target, or a preset's name (default: the one its drafter names)",
    drafter="folder or hub id of its drafter, or a kind (default: the drafter/ beside the target)",
    kind=dict(default=None, help="kind of the drafter, if its config.json does not say it, or a kind without weights"),
)
def _register(args) -> None:
    """register a pair of your own under a name for all commands and notebooks"""
    path = load.register(**_pick(args, "name", "target", "drafter", "kind"))
    drafter = pairs.registered()[args.name].drafter or "none, so it decodes plainly or with --drafter"
    print(f"{path} knows {args.name}: target {pairs.registered()[args.name].target}, drafter {drafter}.")


@_command("decode", f"prompt --policy --raw {DECODING} --tp --device-map")
def _decode(args) -> None:
    """decode one prompt and print text, tau and tokens per second"""
    tuned = args.policy == "tuned"
    policy = None if tuned else tools.places.policy(args.policy, args.which.name)
    pair = _load(args)
    policy = core.policy.Static.of(pair.usual_tree) if tuned else policy
    options = _pick(args, "max_new_tokens", "temperature", "seed", "raw")
    if policy is None:
        out, name, tau = core.decode.autoregress(pair, args.prompt, **options), evaluation.methods.AUTOREGRESSIVE, ""
    else:
        out, name = core.decode.decode(pair, args.prompt, policy, **options), repr(policy)
        tau = f"tau {out.tau:.2f} in {len(out.rows)} cycles, "
    print(out.text if out.text is not None else out.tokens)
    print(f"[{name}: {out.new_tok} tokens, {tau}{out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)


@_command(
    "audit",
    f"{DECODING} {SUITES} --policy --logs --server --draws --any-host --tp --device-map",
    policy=_POLICIES,
    max_new_tokens=dict(default=32),
    temperature=dict(default=None, help="sampling temperature to audit (default: 0 and 1; of logs: 0)"),
)
def _audit(args) -> int:
    """check that no tree and no policy changes the text, or that another engine's logs or server did not"""
    if args.logs:
        return _audit_logs(args)
    own = {text: tools.places.policy(text, args.which.name) for text in args.policies}
    items = data.suites.gather(_suites(args), limit=args.limit or None, **_pick(args, "part", "folder", "seed"))
    pair = _load(args)
    prompts = data.suites.openings(pair, items)
    if args.server:
        return _audit_server(args, pair, prompts)
    options = _pick(args, "max_new_tokens", "seed")
    options |= {"policies": {**evaluation.lossless.default_policies(args.seed), **own}} if own else {}
    options["temperatures"] = (0.0, 1.0) if args.temperature is None else (args.temperature,)
    return _told(evaluation.lossless.audit(pair, prompts, **options))


def _audit_logs(args) -> int:
    pair = _load(args)
    plain, other = (logs.read_log(path, pair) for path in args.logs)
    if not args.temperature:
        return _told(logs.audit_texts(pair, plain, other, Path(args.logs[1]).name))
    laws = [logs.law_of_texts(pair, texts, args.temperature) for texts in (plain, other)]
    return max(_told_law(path, law) for path, law in zip(args.logs, laws, strict=True))


def _audit_server(args, pair, prompts) -> int:
    server, status = logs.Server(args.server, args.any_host), 0
    if not args.temperature:
        status = _told(logs.audit_server(pair, prompts, server, args.max_new_tokens))
    if args.temperature != 0.0 and args.draws:
        law = logs.law_of_server(pair, prompts[0], server, args.draws, args.temperature or 1.0)
        status = max(status, _told_law(args.server, law))
    return status


def _told_law(name: str, law) -> int:
    verdict, of = "are" if law.passed else "are not", f"(p {law.p_value:.2g}, {law.draws} tokens)"
    print(f"{name}: the sampled tokens {verdict} draws from the target's distribution {of}.")
    return int(not law.passed)


def _told(audit) -> int:
    print(tables.markdown(audit.table))
    if audit.unasked:
        print(f"\nNever asked, so not tested: {', '.join(audit.unasked)}; decode more or longer texts.")
    if len(audit.failures) or not (audit.passed or audit.unasked):
        print(f"\nNot lossless; the first of the texts that differ:\n\n{tables.markdown(audit.failures.head())}")
    return int(not audit.passed)


@_command(
    "evaluate",
    f"{DECODING} {SUITES} --methods --policy --tuned --name --force --device-map {ELSEWHERE}",
    policy=_POLICIES,
    name=dict(default="evaluate"),
)
def _evaluate(args) -> None:
    """measure the speed of methods on suites"""
    methods = {text: tools.places.policy(text, args.which.name) for text in (*args.methods, *args.policies)}
    if args.tuned and args.part not in (None, "test"):
        raise SpecdecError(f"--tuned evaluates on the test part of the suites, not on --part {args.part}.")
    if not args.device_map:  # the estimate assumes one device
        _estimate(args)
    pair, options = _load(args), _pick(args, "max_new_tokens", "temperature", "seed", "folder")
    if args.tuned:
        methods["tuned"], args.part = evaluation.tuning.tune_static(pair, _suites(args), **options).policy, "test"
        print(f"The fastest static tree on the tuning prompts is {methods['tuned']!r}.", file=sys.stderr)
    options |= _pick(args, "part", "repeats", "name", "force", "on", "jobs") | {"limit": args.limit or None}
    run = evaluation.bench.evaluate(methods, _suites(args), pair, **options)
    table = evaluation.bench.summary(run)
    shown = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau", "tok_per_s", "same_frac"]
    shown += ["accuracy_frac"]
    print(tables.markdown(table[[name for name in shown if name in table]]))
    print(f"\nEvery row is in {run.directory}.")


@_command(
    "estimate",
    f"{DECODING} {SUITES} --policy --prompt-tok --gpu --plan",
    policy=dict(default=None, help="policy whose largest tree to count, written as for `specdec decode`"),
)
def _estimate(args) -> None:
    """estimate memory and time of a run before it runs"""
    if args.command == "estimate" and args.plan:
        plan = tools.estimate.price(tools.estimate.read_plan(args.plan))  # a row per pair, then the total as a sentence
        return print(f"{tables.markdown(plan.table)}\n\n{plan.sentence}")
    options = _pick(args, "prompt_tok", "gpu") if args.command == "estimate" else {"probe": False}
    options |= _pick(args, "dtype", "device", "max_new_tokens", "folder", "part", "repeats", "drafter")
    if args.command == "estimate" and args.policy:
        largest = tools.places.policy(args.policy, args.which.name)
        options["tree"] = core.tree_config.TreeConfig(1, 0, 1) if largest is None else largest.limits
    needed = tools.estimate.estimate(args.which.base, _suites(args), limit=args.limit or None, **options)
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    print(needed.sentence, file=sys.stderr)


@_command(
    "record",
    f"{DECODING} --suites --data --folder --limit --depth --top-ks --trees --family --most-nodes --lengths --name --estimate "
    f"--device-map {ELSEWHERE}",
    data=f"your own prompts in place of suites, split for training, tuning and testing: {_OWN}",
    limit=dict(default=40),
    name=dict(default="record"),
)
def _record(args) -> None:
    """record what every tree would accept, so that any policy can be replayed"""
    pair, suites = _load(args), _own_prompts(Path(args.data)) if args.data else _suites(args)
    if args.lengths is None:
        args.lengths = replays.record.usual_lengths(pair, (*args.top_ks, *args.trees), args.depth)
    settings = _pick(args, "max_new_tokens", "depth", "top_ks", "trees", "family", "most_nodes", "lengths")
    settings |= _pick(args, "temperature", "seed", "folder", "name", "on", "jobs") | {"limit": args.limit or None}
    settings |= {"part": replays.record.SPLIT} if args.data else {}
    needed = tools.estimate.estimate_record(pair, suites, **settings)
    print(needed.sentence, file=sys.stderr)
    if args.estimate:
        return
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    trace = replays.record.record(pair, suites, **settings)
    print(f"{trace!r}", file=sys.stderr)
    folder = next(run.directory for run in runs.find(args.name) if run.key == trace.header["key"])
    if args.name == tools.places.RECORDINGS:
        tools.places.leave_recording(folder, trace)
    print(folder)


@_command("check-recording", "name", name=dict(metavar="FOLDER", help="folder of a recording"))
def _check_recording(args) -> int:
    """check a recording against its form (specdec/replays/FORMAT.md) and print what it holds"""
    trace, faults = replays.form.check_recording(args.name)
    print("\n".join(faults or [f"{trace!r}: every file is as the form says."]))
    if trace is not None and not faults:
        kinds = {column.kind for column in replays.form.stored_columns(trace)}
        columns = replays.form.form("column")
        counted = trace.turns.groupby(["suite", "part"], sort=False)["positions"].agg(turns="size", positions="sum")
        print(f"\n{tables.markdown(counted.reset_index())}\n\n{tables.markdown(columns[columns.index.isin(kinds)])}")
    return int(bool(faults))


@_command(
    "generate-data",
    "target --out --tokens --minutes --rows --answer-tok --prompts --folder --seed --dtype --device --threads --estimate "
    f"--device-map {ELSEWHERE}",
    out="folder for the chats; existing chats are continued",
    minutes="stop after this many minutes",
    folder="folder of real suites whose prompts and answers are excluded (default: SPECDEC_DATA)",
)
def _generate_data(args) -> None:
    """let a chat model write prompts and answers to train its drafter on"""
    if args.threads:
        torch.set_num_threads(args.threads)
    tokens = _amount(args.tokens)
    chosen = {"prompts": Path(args.prompts)} if args.prompts else {}
    config = drafting.generate_data.ChatConfig(**_pick(args, "seed", "rows", "answer_tok", "on", "jobs"), **chosen)
    pair = load.load_pair(target=args.target, dtype=args.dtype, device=args.device, spread=args.device_map)
    files = drafting.generate_data.open_chats(pair, config, args.out, args.folder)
    wanted = ranks.broadcast(tokens - files.answer_tok)
    if wanted > 0:
        print(drafting.generate_data.estimate_chats(pair, config, wanted), file=sys.stderr)
    if wanted > 0 and not args.estimate:
        options = dict(tokens=tokens, minutes=args.minutes, benchmarks=args.folder)
        files = drafting.generate_data.generate_chats(pair, config, args.out, **options)
    counts = ", ".join(f"{name} {count:,}" for name, count in files.counts.items())
    print(f"{args.out} holds {files.answer_tok:,} answer tokens ({counts}).")


def _amount(text: str) -> int:
    """A count such as 300000, 300k or 3M."""
    number, unit = text.strip().rstrip("kKmM"), text.strip()[-1:].lower()
    try:
        count = int(float(number) * {"k": 1_000, "m": 1_000_000}.get(unit, 1))
    except (ValueError, OverflowError):
        raise SpecdecError(f"--tokens takes a number such as 500k or 3M, not {text!r}.") from None
    return check_integer("--tokens", count, 1)


@_command(
    "evidence",
    "--pair --drafter --only --limit --policies --cpu-time --seed --out --notebooks",
    pair=dict(default="small"),
    only=dict(metavar="PART", help="tau, lossless, speed, peers or accuracy (default: all)"),
    out="JSON file for the measurements; parts that are not measured stay in it",
    limit=dict(default=20, help="prompts of each suite for tokens per cycle"),
)
def _evidence(args) -> int:
    """measure the facts on a drafter's card: tokens per cycle, losslessness, speed, peers, answers (runs notebook 91)"""
    drafter = str(report.card.weights_file(Path(args.drafter)).parent.resolve()) if args.drafter else ""
    values = {"pair": args.pair, "drafter": drafter, "parts": args.only, "prompts": args.limit, "seed": args.seed}
    values |= {"policies": [str(Path(folder).resolve()) for folder in args.policies], "cpu_time": args.cpu_time}
    values["out"] = str(Path(args.out).resolve())
    # force: the notebook itself tracks which parts are up to date
    done = tools.book.run(tools.book.Book(), ["91_evidence"], parameters=values, force=True)
    return int((done["state"] != "done").any())


@_command(
    "score",
    "policy --all --trace --costs --machines --answer-ms --out",
    policy=dict(
        nargs="?", help="a Python file with a class, the name of an engine's rule, or as --policy of `specdec decode`"
    ),
    all="judge everything that ships instead",
    costs="prices: JSON file of `specdec calibrate` or a hardware profile (default: those beside the recording)",
    trace="folder of a recording (default: the one that ships)",
    out=dict(required=False, help="folder for page, figure and score (default: runs/scores/NAME)"),
)
def _score(args) -> None:
    """judge a controller by replay, in seconds: speed over plain decoding and the tuned tree, share of the headroom"""
    options = _pick(args, "trace", "costs") | {"policy_ms": args.answer_ms}
    options |= {} if args.machines is None else {"machines": args.machines}
    if args.all:
        return print(tables.markdown(runs.workbook_module("board").score_all(**options), digits=3))
    if not args.policy:
        raise SpecdecError("name a policy's file to score, or --all; `specdec new-policy NAME` writes one.")
    found = evaluation.score.score(args.policy, **options)
    print(f"{tables.markdown(found.table, digits=3)}\n\n{found.sentence}")
    folder = Path(args.out) if args.out else runs.home() / "runs" / "scores" / runs.safe_name(found.name)
    print(f"The page is {runs.workbook_module('board').write(found, folder)}.")


@_command("new-policy", "name", name="name of the policy; the file is NAME.py")
def _new_policy(args) -> None:
    """write a controller to begin with, which `specdec score` judges as it is"""
    path = evaluation.score.new_policy(args.name)
    print(f"{path} holds a controller; judge it with `specdec score {path}`.")


@_command(
    "calibrate",
    f"{PAIR} --seconds --seed --cpu-time --out --device-map",
    out=dict(required=False, help="JSON file for the costs (default: where training looks for them)"),
)
def _calibrate(args) -> None:
    """measure the time of every part of a cycle on this machine"""
    pair = _load(args)
    model = costs.calibrate.calibrate(pair, **_pick(args, "seconds", "seed", "cpu_time"))
    dtype = core.pair.dtype_name(pair.target.dtype)
    print(model.save(args.out or tools.places.costs_file(pair.name, dtype)))
    if not args.out and (tree := tools.places.keep_tree(pair.name, dtype)):
        print(f"The tree {tree.text} is the fastest with these costs; {pair.name} now decodes with it by default.")


@_command(
    "reprice",
    f"policy {PAIR} --suites --limit --trace --costs --seconds --cpu-time --out",
    pair="a preset (default: the policy's training pair)",
    trace="folder of a recording (default: record some tuning prompts now)",
    costs="JSON file of `specdec calibrate` (default: measure now)",
    out=dict(required=False, help="folder for policy and costs (default: that of `specdec train ours`)"),
    limit=dict(default=10),
)
def _reprice(args) -> None:
    """measure this machine, update a policy's costs and report the changes"""
    policy = tools.places.policy(args.policy, args.which.name if args.which.typed else None)
    if not args.which.typed:
        args.which = tools.places.which(getattr(policy, "trained_for", {}).get("pair", tools.places.USUAL))
    args.dtype = args.dtype if args.dtype != "auto" else "float32"
    pair = _load(args)
    options = _pick(args, "limit", "seconds", "cpu_time") | {"suites": _suites(args)}
    options |= {"costs": costs.profiles.prices(args.costs)} if args.costs else {}
    options |= {"trace": replays.trace.open_trace(Path(args.trace), pair.name)} if args.trace else {}
    found, measured = training.value.reprice_here(policy, pair, **options)
    print(tables.markdown(found.table.map(lambda cell: round(cell, 4) if isinstance(cell, float) else cell)))
    print(f"\nDifferences below {found.uncertainty_frac:.1%} are within the uncertainty of these costs.")
    out = args.out or tools.places.policy_folder(pair.name, "ours", core.pair.dtype_name(pair.target.dtype))
    measured.save(Path(out) / "costs.json")
    print(f"{found.policy.save(out)} holds the policy with these costs, and costs.json.")


@_command("target", WEIGHTS, table=TRAININGS, **_ANY_DEVICE)
def _train_target(args) -> None:
    """train a target of the shipped kind on the toy pair's corpus"""
    train_target = runs.workbook_module("toy_pretrain").train_target
    print(train_target(args.preset, args.out, _budget(args), resume=not args.restart))


def _budget(args, **more):
    return drafting.eagle3.Budget(**_pick(args, "minutes", "steps", "seed", "threads", "device"), **more)


_CONTINUED = {
    "preset": dict(default=None, help="continued, or continued-corpus (the default without --data)"),
    "start_from": OPTIONS["--start-from"],
}


def _train_drafter(args) -> None:
    given = vars(args)
    more = {name: given[name] for name in ("unroll", "fields", "objective") if name in given}
    more |= {"seed": args.seed, "own_text": bool(args.data)}
    names = (args.system, args.target, args.preset, args.set, args.start_from)
    settings, objective, start_from = drafting.presets.training_named(*names, **more)
    features = drafting.presets.CacheConfig(args.features and Path(args.features), args.features_gb)
    budget = _budget(args, features=features, fsdp=args.fsdp)
    conversations = drafting.chats.load_conversations(args.data) if args.data else data.toy_chats.CorpusChats()
    options = dict(out_dir=args.out, budget=budget, resume=not args.restart)
    options |= dict(settings=settings, objective=objective, start_from=start_from)
    print(drafting.eagle3.train_drafter(args.target, conversations, **options))
    if settings.passes and settings.held_out and ranks.leads():
        points = drafting.accuracy.learning_curve(args.out)
        print(f"\n{tables.markdown(points, digits=3)}")
        if args.system != "ppow":
            print(f"\n{tables.markdown(drafting.accuracy.fit_doubling(points), digits=3)}")


_OWN_TEXT = "on the target's own text"
for _name, _text in {
    "block": f"train a block drafter, which drafts all positions in one pass, {_OWN_TEXT}",
    "eagle1": f"train an EAGLE-1 drafter (also for EAGLE-2's trees) {_OWN_TEXT}",
    "hass": f"train an EAGLE-1 drafter by HASS {_OWN_TEXT}",
    "griffin": f"train a GRIFFIN drafter {_OWN_TEXT}",
    "medusa": f"train Medusa's heads {_OWN_TEXT}",
    "hydra": f"train Hydra's heads {_OWN_TEXT}",
    "hydra++": f"train Hydra's heads behind an extra layer {_OWN_TEXT}",
    "lm": f"train a small language model as drafter {_OWN_TEXT}",
    "eagle3": "train an EAGLE-3 drafter for any target, by the training-time test",
    "ppow": "continue training a drafter, with PPOW or another objective",
}.items():
    _own = {"eagle3": "--unroll", "ppow": "--objective --fields"}.get(_name, "--fields")
    _options = f"--target --data {_own} --start-from {WEIGHTS} --set --features --features-gb --fsdp"
    TRAININGS[_name] = (_text, _train_drafter, _options, _LEARNER | (_CONTINUED if _name == "ppow" else {}))


@_command(
    "export",
    f"engine {NAMED} --gguf --tree --trace --costs --dtype --out",
    dtype=dict(default="float32", help="number format of the costs used to choose the tree"),
    out="folder for the drafter's files",
)
def _export(args) -> None:
    """write a drafter in the format of vLLM, SGLang or llama.cpp, and print the command that serves it"""
    which = args.which
    source = models.drafters.kind_and_source(args.drafter)[1] if args.drafter else str(load.own_drafter(which.base))
    if not source or not args.drafter and not Path(source).is_dir():
        raise SpecdecError(f"there is no EAGLE-3 drafter to export for {which.name!r}; name one with --drafter FOLDER.")
    target = models.eagle_export.served_target(which.base, args.gguf)
    if args.tree:
        tree = core.tree_config.tree_from(args.tree)
    else:
        options = dict(chain=args.engine in models.eagle_export.CHAINS, trace_folder=args.trace, costs_file=args.costs)
        tree = tools.places.serving_tree(which.name, args.dtype, **options)
    print(models.eagle_export.export(load.drafter_folder(source), args.engine, Path(args.out), target, tree))


@_command(
    "schedule",
    "engine --pair --drafter --trace --costs --dtype --batches --plugin --out",
    engine=dict(choices=["vllm", "sglang", "tensorrt-llm", "llama.cpp"], help="the engine that will follow it"),
    pair="pair of the recording (default: small)",
    drafter=REQUIRED | {"help": "folder or hub id of the drafter as the engine will load it"},
    dtype=dict(default="float32", help="number format of the costs"),
    out="folder for the engine's file",
)
def _schedule(args) -> None:
    """write the fastest draft length for each batch size, by a recording and costs, in an engine's own form"""
    trace = tools.places.trace(args.trace, None if args.trace and not args.pair else args.pair or tools.places.USUAL)
    costs = tools.places.costs(args.costs, trace.header["pair"], args.dtype)
    found = evaluation.schedule.fit(trace, costs, args.batches)
    found = evaluation.schedule.fit_p_min(trace, costs, found) if args.engine == "llama.cpp" else found
    plugin = evaluation.schedule.write_plugin(args.engine, found, Path(args.out)) if args.plugin else None
    flags = evaluation.schedule.write(args.engine, found, Path(args.out), args.drafter)
    print(f"{tables.markdown(found.table, digits=3)}\n\n{flags}\n")
    if plugin:
        print(f"{plugin} holds a class to change.")
    print(f"By the costs {costs.name!r}; larger batches are computed, not measured. {evaluation.schedule.NOT_RUN}")


@_command(
    "card",
    "name --trained --kind --trace --costs --machines",
    trace="folder of a recording: also write speculation_profile.json, acceptance and tuned trees for servers",
    costs="costs of one more machine in the profile: JSON file of `specdec calibrate`",
    machines="hardware profiles in speculation_profile.json (default: three GPUs)",
)
def _card(args) -> None:
    """write the card of a shipped drafter from its training and measurements, and its profile for servers"""
    folder, pair = (load.shipped_folder(args.name), args.name if args.kind == "eagle3" else f"{args.name}+{args.kind}")
    trace = tools.places.trace(args.trace, pair) if args.trace else None
    print(report.card.ship(args.trained, folder, args.kind) if args.trained else report.card.write(folder, args.kind))
    if trace is not None:
        names = [*filter(None, [args.costs]), *(evaluation.score.MACHINES if args.machines is None else args.machines)]
        print(report.card.profile(folder, trace, [costs.profiles.prices(name) for name in names], args.kind))


def _record_and_calibrate(args) -> None:
    """What a controller learns from: --data, as `specdec record` records it, and prices as `specdec calibrate` finds them."""
    if args.trace:
        raise SpecdecError("give --data (prompts to record) or --trace (a recording), and not both.")
    pair = [f"--{name}={value}" for name in ("pair", "target", "drafter") if (value := getattr(args, name))]
    lines = ["record", *pair, f"--data={args.data}", "--limit=0"], ["calibrate", *pair]
    for line in lines[: 1 if args.costs else 2]:
        step = parser().parse_args(line)
        _check(step)
        step.run(step)


def _train_controller(args) -> None:
    if args.data:
        _record_and_calibrate(args)
    trace = tools.places.trace(args.trace, None if args.trace and not args.which.typed else args.which.name)
    pair, dtype = trace.header["pair"], trace.header["dtype"]
    costs = tools.places.costs(args.costs, pair, dtype)
    out_dir = Path(args.out or tools.places.policy_folder(pair, args.system, dtype))
    changes = dict(policies.base.setting("--set", "ppo.gamma=0.9", text) for text in args.set)
    if "order" in args:
        changes = {"rounds": policies.ltd.ORDERS[args.order]} | changes
    if changes.get("state") == "text" and "text_state" not in trace.header:
        which = args.which if args.which.typed else tools.places.which(pair)
        trace = runs.workbook_module("texts", "experiments").embedded(trace, lambda: tools.places.load(which, dtype))
    options = _pick(args, "preset", "steps", "seed", *(["variant"] if "variant" in args else []))
    options |= dict(out_dir=out_dir, resume=not args.restart, paper=args.budget == "paper", changes=changes)
    training.controllers.train_system(args.system, trace, costs, **options)
    print(out_dir)


for _name, _whose in {"resps": "Re-SpS's", "ltd": "LTD's", "radar": "RADAR's", "ours": "our"}.items():
    _options = CONTROLLER + {"resps": " --variant", "ltd": " --order"}.get(_name, "")
    TRAININGS[_name] = (f"train {_whose} controller on a recording", _train_controller, _options, _RECORDED)


@_command(
    "sweep",
    f"--systems --seeds {NAMED} --preset --trace --costs --budget --steps --out {ELSEWHERE}",
    table=TRAININGS,
    **_RECORDED | {"out": "folder with one subfolder for each controller and seed"},
)
def _train_sweep(args) -> None:
    """train several controllers with several seeds on a recording; existing ones are kept"""
    trace = tools.places.trace(args.trace, None if args.trace and not args.which.typed else args.which.name)
    costs = tools.places.costs(args.costs, trace.header["pair"], trace.header["dtype"])
    options = _pick(args, "preset", "steps", "on", "jobs")
    options |= {"out_dir": Path(args.out), "paper": args.budget == "paper"}
    print(tables.markdown(training.controllers.train_sweep(args.systems, trace, costs, args.seeds, **options)))


@_command(
    "reproduce",
    f"--scale --full --all --force --notebooks {ELSEWHERE}",
    force="also run notebooks whose results are up to date",
)
def _reproduce(args) -> int:
    """run the main notebooks of the book and write a page of all results"""
    opened = tools.book.Book(args.scale)
    names = [entry.name for entry in opened.choose((), args.all)]
    full = [name for name in names if args.full and name.startswith("30_evaluate")]
    reports = []
    for some, parameters in (([name for name in names if name not in full], {}), (full, {"limit": 0})):
        if some:
            reports.append(tools.book.run(opened, some, parameters=parameters, **_pick(args, "force", "on", "jobs")))
    tools.book.write_page(opened, [path for report in reports for path in report.attrs["headlines"]])
    return int(any(report["state"].isin(["failed", "skipped"]).any() for report in reports))


@_command("items", "--scale --publish --replace --notebooks")
def _items(args) -> int:
    """list the papers' tables and figures and the state of each"""
    claims, items, page, speeds = map(runs.workbook_module, ("claims", "items", "page", "speeds"))
    if args.publish:
        done = items.publish(args.scale, claims.sources(args.scale, richest=not args.replace), args.replace)
        if runs.home() == runs.workbook():  # its verdicts and its figure follow from the published rows
            speeds.write(items.figures_dir())
            page.write_verdicts(runs.home() / "README.md", items.figures_dir())
        nothing = f"The runs of scale {args.scale} hold no item; run make book first."
        print(tables.markdown(done) if len(done) else nothing)
        return int((done["state"] == "refused").any())
    table = items.status(args.scale)
    print(tables.markdown(table[["item", "state", "missing", "scale", "notebook"]]))
    counts = ", ".join(f"{count} {state}" for state, count in table["state"].value_counts().items())
    print(f"\n{counts}, of {len(table)}.")
    return 0


@_command(
    "run",
    f"--only --all --force --smoke -p --scale --notebooks {ELSEWHERE}",
    table=BOOK,
    jobs="number of notebooks in parallel; those that measure time run alone (default: one)",
    force="also run notebooks whose results are up to date",
)
def _book_run(args) -> int:
    """run the notebooks whose results are out of date"""
    opened = tools.book.Book(args.scale)
    values = {name: yaml.safe_load(text) for name, text in args.p}  # parsed as a number, flag or list
    options = _pick(args, "on", "jobs", "force", "smoke") | {"everything": args.all}
    report = tools.book.run(opened, args.only, parameters=values, **options)
    if not args.only:
        tools.book.write_page(opened, report.attrs["headlines"])
    return int(report["state"].isin(["failed", "skipped"]).any())


@_command("contents", "--scale --notebooks", table=BOOK)
def _book_contents(args) -> None:
    """print the table of contents with the state of each notebook"""
    print(tools.book.contents(args.scale))


@_command(
    "pages", "--only --scale --notebooks", table=BOOK, only="names of notebooks (default: all with an executed copy)"
)
def _book_pages(args) -> None:
    """write the executed notebooks as pages with pictures into figures/book"""
    print("\n".join(map(str, runs.workbook_module("executed").write_pages(tools.book.Book(args.scale), args.only))))


@_command(
    "student", "--out --notebooks", table=BOOK, out=dict(required=False, help="folder for them (default: runs/student)")
)
def _book_student(args) -> None:
    """write the teaching notebooks without their solutions"""
    written = tools.book.write_student_edition(Path(args.out) if args.out else runs.home() / "runs" / "student")
    print("\n".join(map(str, written)))


@_command("lab", "--no-browser --notebooks", table=BOOK)
def _book_lab(args) -> int:
    """open the book in JupyterLab, on working copies ignored by git (runs/lab)"""
    return tools.book.open_lab(["--no-browser"] if args.no_browser else [])


@_command("tidy", "--check --notebooks", table=BOOK)
def _book_tidy(args) -> int:
    """remove outputs from the notebooks and rewrite their first cells"""
    untidy = tools.book.tidy_all(check=args.check)
    print("\n".join(untidy) or "everything is tidy")
    return int(args.check and bool(untidy))


COMMANDS["train"] = ("train a target, a drafter or a controller", None, TRAININGS)
COMMANDS["book"] = ("the notebooks: run, contents, pages, lab, student (without solutions) or tidy", None, BOOK)

if __name__ == "__main__":
    sys.exit(main())
