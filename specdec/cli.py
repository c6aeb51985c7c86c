"""The command line: `specdec doctor | decode | evaluate | estimate | train | reproduce`.

Parses, calls the library, prints. Everything heavy is imported when a command needs it, so that `--help` is instant.
Bad input is one sentence and status 2, Ctrl-C one sentence and status 130; --debug shows where it happened instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from specdec.config import SpecdecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    given = _parser().parse_args(arguments)
    try:
        return given.run(given) or 0
    except KeyboardInterrupt:
        if given.debug:
            raise
        print("\nspecdec: stopped; what was written is kept, and the same command continues.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        return 0
    except SpecdecError as error:
        if given.debug:
            raise
        print(f"specdec: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Speculative decoding, measured and reproduced.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (text, options, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        options(command)
        command.set_defaults(run=run)
    return parser


# --- doctor -----------------------------------------------------------------------------------------------------------


def _doctor_options(parser) -> None:
    parser.add_argument("--bench", action="store_true", help="also measure the engine against transformers' generate")
    parser.add_argument("--curve", action="store_true", help="also measure cycle time against nodes and context")
    parser.add_argument("--threads", type=int, help="CPU threads while measuring (default: torch's)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the bench")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time (one thread, busy machines)")


def _doctor(given) -> int:
    from specdec import doctor

    _at_least("--rounds", given.rounds, 1)
    _at_least("--threads", given.threads, 1)
    _quiet()
    found = doctor.facts()
    print(doctor.report(found))
    if given.bench:
        _bench(given)
    if given.curve:
        _curve(given)
    return int(any(kind == doctor.FAULT for kind, _ in doctor.findings(found)))


def _bench(given) -> None:
    from specdec import doctor, speed, tables

    options = dict(count=given.rounds, threads=given.threads, cpu_time=given.cpu_time)
    table = speed.benchmark(tuple(given.dtype), **options)
    print(f"\n{tables.markdown(doctor.figures(table))}")
    print("\nMedians of ratios within a round [smallest .. largest round]; transformers' generate runs under sdpa.")


def _curve(given) -> None:
    import torch

    from specdec import plots, runs, speed, tables

    if given.threads:
        torch.set_num_threads(given.threads)
    rows = speed.curve(speed.reference_pair(getattr(torch, given.dtype[0])), cpu_time=given.cpu_time)
    table = tables.node_curve(rows, by="context")
    columns = ["context", "verified_tok", "draft_ms", "verify_ms", "commit_ms", "host_ms", "total_ms"]
    print(f"\n{tables.markdown(table[columns])}")
    figure = plots.node_curve(table, by="context", title=f"a cycle of the reference shape, {given.dtype[0]}")
    written = plots.save(figure, runs.figure_path("doctor", f"cycle_{given.dtype[0]}"), scale="laptop", data=table)
    print(f"\nThe curve is drawn in {written[0]}.")


# --- decode -----------------------------------------------------------------------------------------------------------


def _pair_options(parser) -> None:
    parser.add_argument("--pair", default="small", help="a preset such as tiny, small or llama-3.1-8b")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)


def _decode_options(parser) -> None:
    parser.add_argument("prompt", help="what to continue; a user message where the pair knows chat")
    parser.add_argument("--policy", default="eagle3", help="autoregressive, eagle3, static:total_tokens,depth,top_k")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    _pair_options(parser)


def _quiet() -> None:
    """Without transformers' own progress bars: loading a shipped pair takes a moment."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _load(given):
    from specdec.hub import load_pair

    _quiet()
    return load_pair(given.pair, dtype=given.dtype, device=given.device)


def _decode(given) -> int:
    from specdec.decoding import autoregress, decode
    from specdec.methods import AUTOREGRESSIVE, method_from

    policy = method_from(given.policy)
    pair = _load(given)
    chats = getattr(pair.tokenizer, "chat_template", None) and not given.raw
    prompt = [{"role": "user", "content": given.prompt}] if chats and given.prompt else given.prompt
    options = dict(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    if policy is None:
        out, name = autoregress(pair, prompt, **options), AUTOREGRESSIVE
    else:
        out, name = decode(pair, prompt, policy, **options), repr(policy)
    print(out.text if out.text is not None else out.tokens)
    tau = "" if policy is None else f"tau {out.tau:.2f} in {len(out.rows)} cycles, "
    print(f"[{name}: {out.new_tok} tokens, {tau}{out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)
    return 0


# --- evaluate and estimate --------------------------------------------------------------------------------------------

DEFAULT_SUITES = ["laptop/gsm8k", "laptop/humaneval", "laptop/mt_bench"]


def _suite_options(parser) -> None:
    parser.add_argument(
        "--suites", nargs="+", default=DEFAULT_SUITES, metavar="SUITE", help="names such as laptop/gsm8k"
    )
    parser.add_argument("--folder", help="folder of JSONL files for suites that are not embedded")
    parser.add_argument("--limit", type=int, default=4, help="prompts per suite; 0 for all")
    parser.add_argument("--part", choices=["train", "tune", "test"], help="part of each suite (default: all of it)")
    parser.add_argument("--repeats", type=int, default=1)


def _evaluate_options(parser) -> None:
    _pair_options(parser)
    _suite_options(parser)
    parser.add_argument(
        "--methods", nargs="+", default=["autoregressive", "eagle3", "eagle3-scripts"], metavar="METHOD"
    )
    parser.add_argument("--name", default="evaluate", help="of the run directory")
    parser.add_argument("--force", action="store_true", help="start over instead of continuing or reusing a run")


def _evaluate(given) -> int:
    from specdec import bench, tables
    from specdec.methods import method_from

    methods = {text: method_from(text) for text in given.methods}
    _refuse_or_print(_estimated(given, probe=False))
    pair = _load(given)
    options = dict(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed, name=given.name)
    options |= dict(limit=given.limit or None, part=given.part, folder=given.folder, repeats=given.repeats)
    run = bench.evaluate(methods, given.suites, pair, force=given.force, **options)
    table = bench.summary(run)
    shown = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau", "tok_per_s", "same_frac"]
    print(tables.markdown(table[[name for name in shown if name in table]]))
    print(f"\nEvery row is in {run.directory}.")
    return 0


def _estimate_options(parser) -> None:
    _pair_options(parser)
    _suite_options(parser)
    parser.add_argument("--prompt-tok", type=int, default=1024, help="longest prompt to reserve memory for")


def _estimate(given) -> int:
    _refuse_or_print(_estimated(given, prompt_tok=given.prompt_tok))
    return 0


def _estimated(given, **options):
    from specdec.estimate import estimate

    _at_least("--limit", given.limit, 0)
    _at_least("--repeats", given.repeats, 1)
    _at_least("--max-new-tokens", given.max_new_tokens, 1)
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


def _train_options(parser) -> None:
    systems = parser.add_subparsers(dest="system", required=True, metavar="target|eagle3")
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


def _train(given) -> int:
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


def _reproduce_options(parser) -> None:
    parser.add_argument("--scale", default="laptop", choices=["laptop", "paper"])
    parser.add_argument("--full", action="store_true", help="whole suites instead of a few prompts of each")
    parser.add_argument("--all", action="store_true", help="every notebook of the book, not only the main ones")
    parser.add_argument("--force", action="store_true", help="run notebooks that are fresh, too")


def _reproduce(given) -> int:
    from specdec import book

    chosen = book.Book(given.scale).choose((), given.all)
    whole = [entry.name for entry in chosen if given.full and entry.name.startswith("30_evaluate")]
    reports = []
    for names, parameters in (([e.name for e in chosen if e.name not in whole], {}), (whole, {"limit": 0})):
        if names:
            reports.append(book.run(given.scale, names, force=given.force, parameters=parameters))
    return int(any(report["state"].isin(["failed", "skipped"]).any() for report in reports))


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise SpecdecError(f"{name} must be at least {low}, got {value}.")


COMMANDS: dict[str, tuple[str, Callable, Callable]] = {
    "doctor": ("say what this machine has, what is missing or slow, and why", _doctor_options, _doctor),
    "decode": ("decode one prompt and print text, tau and tokens per second", _decode_options, _decode),
    "evaluate": ("measure methods on suites", _evaluate_options, _evaluate),
    "estimate": ("memory and time of a run before it runs", _estimate_options, _estimate),
    "train": ("train a target or an EAGLE-3 drafter", _train_options, _train),
    "reproduce": ("run the main notebooks of the book", _reproduce_options, _reproduce),
}

if __name__ == "__main__":
    sys.exit(main())
