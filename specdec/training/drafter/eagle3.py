"""Train a drafter for any transformers causal LM.

The target runs frozen beside the drafter and is never written. What is minimised is an objective that the caller hands
in (`objective.Objective`); EAGLE-3's training-time test is the default. Writes out_dir/drafter in the official layout
(config.json, model.safetensors) and out_dir/drafter_training: plan, curve, checkpoint, and the target's own answers to
the training prompts. Knows nothing about trees, policies or the decode cycle.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec import ranks, runs
from specdec.errors import SpecdecError, check_fields, nearest_name_error
from specdec.models import load, spread
from specdec.models.eagle.network import EagleNetwork
from specdec.models.load import placement
from specdec.training.drafter.accuracy import draft_accuracy
from specdec.training.drafter.chats import (
    ChatList,
    ChatSource,
    Regeneration,
    Rows,
    conversation_document,
    mixed_documents,
    regenerate,
)
from specdec.training.drafter.features import CacheConfig
from specdec.training.drafter.networks import load_network, new_network, save_trained
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch
from specdec.training.drafter.objectives import OBJECTIVES
from specdec.training.drafter.texts import FixedText, StreamedText
from specdec.training.drafter.ttt import RULES, LossRules, TrainingTimeTest
from specdec.training.loop import Best, TrainingRun, compute_dtype, rate_factor


@dataclass(frozen=True)
class Settings:
    """How one drafter is trained, whatever its objective. `PRESETS` holds some.

    draft_vocab_size, intermediate_size: None takes the target's.
    fc_norm: "each" norms every tap by itself before fc; targets whose taps differ in size by far need it.
    steps, batch, length: optimiser steps of `batch` rows of `length` packed tokens.
    passes: read a fixed text so often, and no longer, with features from the disk; steps is None then.
    linear_end: see loop.rate_factor.
    muon: Muon for the matrices, AdamW for head and norms. head_rate: AdamW's rate then, default learning_rate.
    warm_start: the head begins as the target's own rows instead of at random.
    average_frac: measure and write the mean of the weights over about this last part of the steps so far; 0: the newest.
        It is at every moment about what a falling rate would have made of them, so the rate stays at its peak.
    held_out, held_out_frac: this share of the conversations is never learned from, and the drafter measured on at most
    so many of them from time to time (of a fixed text only).
    regenerate_chats: how many training conversations the target answers anew, with at most max_new_tokens an answer.
    regenerated_frac: their share of the training text; the rest is as given.
    """

    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    fc_norm: str | None = None
    learning_rate: float = 0.015
    head_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 40
    linear_end: int | None = None
    clip_norm: float = 0.5
    muon: bool = True
    warm_start: bool = True
    average_frac: float = 0.0
    batch: int = 8
    length: int = 256
    steps: int | None = 1000
    passes: int | None = None
    held_out: int = 0
    held_out_frac: float = 0.02
    regenerate_chats: int = 0
    regenerated_frac: float = 0.75
    max_new_tokens: int = 256

    def __post_init__(self):
        counts = ("batch", "length", "steps", "passes", "measure_every")
        check_fields(self, betas=(0.0, 1.0), **dict.fromkeys(counts, (1, math.inf)))

    @property
    def grows(self) -> bool:
        """Whether the text is a list of conversations to which more can be added."""
        return self.passes is not None and not self.regenerate_chats

    def rate_factor(self, step: int, last_step: int | None) -> float:
        """The learning rate as a fraction of its peak."""
        last_step = None if self.average_frac else last_step
        return rate_factor(step, last_step, self.warmup_steps, self.linear_end)

    def is_measured(self, step: int) -> bool:
        """Whether the drafter is measured before this step: 64, 91, 128, .. steps, two for each doubling."""
        if step < 64:
            return False
        now, before = (math.floor(2 * math.log2(place / 64)) for place in (step, step - 1))
        return now > before


@dataclass(frozen=True)
class Continued(Settings):
    """How a drafter that has learned already goes on: measured evenly from the start, the best weights kept.

    measure_every: steps between two measurements on held-out text. patience: so many measurements in a row without a
    better one end the run; 0 never does. The rate rises over 3 % of the steps, then falls as a cosine to zero.
    """

    learning_rate: float = 1e-4  # ours; for 8B targets about 1e-5
    muon: bool = False
    batch: int = 4
    steps: int | None = 300
    passes: int | None = 1
    held_out: int = 24
    held_out_frac: float = 0.1
    measure_every: int = 25
    patience: int = 0

    def rate_factor(self, step: int, last_step: int | None) -> float:
        if last_step is None:
            return 1.0
        rise = min(1.0, (step + 1) / max(1.0, 0.03 * last_step))
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / last_step)))

    def is_measured(self, step: int) -> bool:
        return step % self.measure_every == 0


@dataclass(frozen=True)
class Budget:
    """How long and where a training runs.

    minutes: stop on time. steps: stop on steps; without either, the preset's number. threads: CPU threads, for the
    whole process. device: default a GPU where there is one. features: where those of a fixed text are kept.
    fsdp: of several ranks each holds a share of the target's weights; else each has a target of its own.
    """

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    threads: int | None = None
    device: str | None = None
    features: CacheConfig = CacheConfig()
    fsdp: bool = False

    def __post_init__(self):
        check_fields(self, steps=(1, math.inf), seed=(0, 2**63 - 1))  # torch's own end

    def steps_of(self, preset) -> int | None:
        """The number of steps, or None where time or the text decides."""
        return self.steps or (None if self.minutes is not None else preset.steps)

    def place(self, settings: Settings | None = None) -> torch.device:
        """The device to train on. Sets the number of threads, and meets the other ranks where there are some.

        settings: of a drafter, refused where several ranks cannot train it.
        """
        if settings is not None:
            self._check(settings)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = placement("auto", self.device or "auto")[1]
        if self.fsdp:
            spread.check(spread.FSDP, device.type)
        ranks.join(device.type)
        return device

    def _check(self, settings: Settings) -> None:
        ranks.share(range(settings.batch))
        if self.fsdp and settings.regenerate_chats:
            raise SpecdecError(
                "a target in shares (fsdp) does not write its answers while it trains; write them first with "
                "generate-data, give them with --data, and --set regenerate_chats=0."
            )


PAPER = Settings(
    draft_vocab_size=32000,
    learning_rate=5e-5,
    warmup_steps=12_000,
    linear_end=800_000,
    muon=False,
    warm_start=False,
    batch=2,
    length=2048,
    steps=800_000,
)  # EAGLE-3's trainer: sheet section 8; the text must already be the target's own
TINY = Settings(256, steps=240, batch=4, regenerate_chats=192)
SMALL = Settings(1024, 1024, learning_rate=0.01, steps=1200, regenerate_chats=2000, regenerated_frac=0.5)
PRETRAINED = Settings(
    8192,
    fc_norm="each",
    learning_rate=0.004,
    head_rate=0.0015,
    average_frac=0.3,
    batch=1,
    length=1024,
    steps=None,
    passes=1,
    held_out=48,
)  # for a pretrained target, on text of its own
PRESETS: dict[str, tuple[Settings, Objective]] = {
    "paper": (PAPER, TrainingTimeTest(RULES["official"])),
    "tiny": (TINY, TrainingTimeTest()),
    "small": (SMALL, TrainingTimeTest()),
    "pretrained": (PRETRAINED, TrainingTimeTest(LossRules(steps=4))),
    "continued": (Continued(), OBJECTIVES["ppow"]),
    "continued-corpus": (Continued(regenerate_chats=600), OBJECTIVES["ppow"]),
}
# At the preset's rates the loss of these networks grows without end.
OF_NETWORK = {("pretrained", "griffin"): {"learning_rate": 0.001, "head_rate": 0.0005}}


def preset(
    name: str, changes: dict | None = None, unroll: int | None = None, network: str = "eagle3"
) -> tuple[Settings, Objective]:
    """Settings and objective of one of PRESETS, with some settings changed, or another number of unrolled draft steps.

    network: what is trained; some need rates of their own (OF_NETWORK), which `changes` goes before.
    """
    if name not in PRESETS:
        raise nearest_name_error("drafter preset", name, PRESETS)
    settings, objective = PRESETS[name]
    if unroll is not None:
        objective = replace(objective, rules=replace(objective.rules, steps=unroll))
    own = OF_NETWORK.get((name, network), {})
    return runs.configured(settings, type(settings), own | (changes or {})), objective


def train_drafter(
    target,
    conversations: Sequence[list[dict]] | ChatSource,
    *,
    out_dir: Path,
    objective: Objective | None = None,
    settings: str | Settings = "small",
    budget: Budget | None = None,
    start_from: Path | None = None,
    resume: bool = True,
) -> Path:
    """Train a drafter and return out_dir/drafter.

    target: what `load_pair` takes, or (model, tokenizer). conversations: lists of chat messages (chats.load_conversations),
    or a source of them. objective: default that of the preset, or the training-time test with our rules. settings: a
    Settings or the name of one of PRESETS. budget: on time, writing the target's answers may take a quarter of it more.
    start_from: folder of a drafter to go on from.
    A finished run returns at once; an interrupted one continues to the same weights when `resume`. A run on a fixed text
    goes on where that has grown: with more conversations behind the old ones, it reads the new ones and those alone, from
    where it ended, measured on the same held-out ones. Several ranks share each batch: one process's training.
    """
    if isinstance(settings, str):
        settings, usual = preset(settings)
        objective = objective or usual
    objective = objective or TrainingTimeTest()
    check_start(start_from)
    budget, out_dir = budget or Budget(), Path(out_dir)
    device = budget.place(settings)
    source = ChatList(conversations) if isinstance(conversations, list | tuple) else conversations
    state_dir = out_dir / "drafter_training"  # out_dir may hold the target and its own plan too
    described = {
        "settings": settings,
        "objective": objective,
        "target": str(target) if not isinstance(target, tuple) else type(target[0]).__name__,
        "start_from": start_from,
        "conversations": None if settings.grows else source.key,
        "minutes": budget.minutes,
        "steps": budget.steps_of(settings),
        "seed": budget.seed,
    }
    training = TrainingRun(state_dir, described, resume)
    stages = training.grown(source.conversations) if settings.grows and isinstance(source, ChatList) else []
    if training.finished:
        return out_dir / "drafter"
    model, tokenizer = load_target(target, device, budget.fsdp)
    text = training_text(model, tokenizer, source, settings, state_dir, budget, stages)
    run = prepared(model, tokenizer, text, objective, settings, budget, start_from)
    training.track(run.parts, run.optimizers)
    training.end_at(text.steps)
    run.begin(training)
    training.run(run.step, "drafter", settings.rate_factor)
    run.consider(training.step)
    save_trained(run.result, out_dir / "drafter", model)
    final = run.measure(training.step) | {"rate_frac": settings.rate_factor(training.step, training.plan["last_step"])}
    training.finish(draft_vocab_size=run.network.config.draft_vocab_size, **final)
    return out_dir / "drafter"


def check_start(folder: Path | None) -> Path | None:
    """The folder of a drafter to go on from; SpecdecError where none lies there, before anything is read or written."""
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise SpecdecError(f"there is no drafter in {folder} to go on from; name one with --start-from FOLDER.")
    return folder


def prepared(
    model, tokenizer, text, objective: Objective, settings: Settings, budget: Budget, start_from
) -> DrafterRun:
    """The run before its first step: a fresh drafter or that of `start_from`, and what the target makes of the text."""
    counts = text.answer_counts(len(model.get_input_embeddings().weight))
    fresh = model, settings, counts, budget.seed, objective.network
    network = load_network(start_from, model) if start_from else new_network(*fresh)
    frozen = FrozenTarget(model, network.config.taps, compute_dtype(torch.device(model.device)), tokenizer)
    text.prepare(frozen, budget.features)
    return DrafterRun(frozen, network.to(model.device), text, objective, settings)


def load_target(target, device: torch.device, fsdp: bool = False):
    """(model, tokenizer) of whatever `load_pair` takes as a target; a (model, tokenizer) pair is passed through."""
    if isinstance(target, tuple):
        return target
    place = load.target_place(target)
    tokenizer = load.load_tokenizer(place)
    if tokenizer is None:
        raise SpecdecError(f"{target} has no tokenizer to read conversations with; put its tokenizer.json beside it.")
    return load.load_model(place, compute_dtype(device), device, spread=spread.FSDP if fsdp else None), tokenizer


def training_text(
    model, tokenizer, source: ChatSource, settings: Settings, state_dir: Path, budget: Budget, stages: Sequence[int]
) -> FixedText | StreamedText:
    """What a drafter learns from: the target's own answers, written first where settings ask for it, and given text.

    stages: how many conversations each stage of a text that grows ends with. Measured is on those that the first held out.
    """
    seed, own, device = budget.seed, [], torch.device(model.device)
    if settings.regenerate_chats:
        prompts = source.prompts(seed, settings.regenerate_chats)
        key = runs.content_key(prompts=prompts, seed=seed, most=settings.max_new_tokens)[:12]
        begun = (state_dir / "checkpoint.safetensors").is_file()  # then its text is fixed: a resumed run adds none
        minutes = None if budget.minutes is None else 0 if begun else budget.minutes / 4
        how = Regeneration(max_new_tokens=settings.max_new_tokens)
        folder = state_dir / f"regenerated-{key}"
        own = ranks.led(lambda: regenerate(model, tokenizer, prompts, how, folder=folder, minutes=minutes, seed=seed))
    if settings.passes is None:
        chats = mixed_documents(tokenizer, source, own, settings.regenerated_frac)
        rows = Rows(chats, [], seed=seed, length=settings.length, block_rows=32 * settings.batch)
        return StreamedText(rows, settings.batch, device)
    if not own and not isinstance(source, ChatList):
        raise SpecdecError(
            "text that is read in passes must be a list of conversations; give --data FILE, or no passes."
        )
    chats = own or source.conversations
    sides = [split(chats[:end], settings) for end in stages or [len(chats)]]
    learned, held_out = sides[-1][0], sides[0][1]
    documents = ([conversation_document(tokenizer, chat) for chat in chats] for chats in (learned, held_out))
    shape = dict(length=settings.length, size=settings.batch, passes=settings.passes)
    shape["stages"] = [len(side[0]) for side in sides]
    return FixedText(*documents, **shape, seed=seed, device=device)


def split(conversations: Sequence[list[dict]], settings: Settings) -> tuple[list[list[dict]], list[list[dict]]]:
    """(learned from, held out): the side of a conversation follows from its prompt alone, whatever else is there.

    Where a conversation says which part it belongs to, that counts. Where answers say how they were sampled, greedy ones
    alone are measured on.
    """
    learned, held_out = [], []
    for chat in conversations:
        prompt = "\n".join(message["content"] for message in chat if message["role"] != "assistant")
        share = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) / 16**8
        part = chat[-1].get("part", "held-out" if settings.held_out and share < settings.held_out_frac else "train")
        (held_out if part == "held-out" else learned).append(chat)
    if not learned:
        raise SpecdecError(f"all {len(held_out)} conversations are held out; give more of them.")
    greedy = [chat for chat in held_out if not chat[-1].get("temperature")]
    if settings.held_out and not greedy:
        raise SpecdecError(
            f"no greedy answer among {len(conversations)} conversations is held out; give more of them, raise "
            "held_out_frac, or set held_out to 0."
        )
    return learned, greedy[: settings.held_out]


ESTIMATED_STEPS = 100  # a fresh training of fewer is not worth two steps of measuring


# --- the run ----------------------------------------------------------------------------------------------------------


def optimizers(network: EagleNetwork, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layer's and fc's matrices beside it; groups carry their peak rate."""
    by_muon: dict[bool, list] = {False: [], True: []}
    for name, weight in network.named_parameters():
        words = "lm_head" in name or "embed" in name
        by_muon[settings.muon and weight.ndim == 2 and not words].append(weight)
    head_rate = settings.head_rate or settings.learning_rate
    made = [torch.optim.AdamW(by_muon[False], lr=head_rate, betas=settings.betas, weight_decay=0.0, fused=True)]
    if settings.muon:
        rate = settings.learning_rate
        made.append(torch.optim.Muon(by_muon[True], lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return made


def of_all_ranks(row: dict) -> dict:
    """A step's row of the whole batch: counts are summed over the ranks, all else is their mean."""
    if ranks.world() == 1:
        return row
    means = zip(row.items(), ranks.mean([*map(float, row.values())]), strict=True)
    return {name: round(mean * ranks.world()) if isinstance(value, int) else mean for (name, value), mean in means}


class DrafterRun:
    """One run: the frozen target, the text, the optimisers, the objective, and `step` for the loop.

    network: the float32 weights that are trained. working: a copy in the compute dtype, which the objective sees.
    result: what is written: the average of the weights or the best ones, where the settings ask for them.
    """

    def __init__(
        self,
        target: FrozenTarget,
        network: EagleNetwork,
        text: FixedText | StreamedText,
        objective: Objective,
        settings: Settings,
    ):
        self.target, self.network, self.text = target, network, text
        self.objective, self.settings = objective, settings
        self.working = copy.deepcopy(network).to(target.dtype)
        objective.prepare(self.working, target)
        keeps_best = isinstance(settings, Continued) and text.held_out
        self.best = Best(network, torch.float32) if keeps_best else None
        self.average = copy.deepcopy(network) if settings.average_frac and not keeps_best else None
        self.optimizers = optimizers(network, settings)

    @property
    def parts(self) -> dict[str, EagleNetwork | Best]:
        """What a checkpoint holds."""
        parts = {"drafter": self.network, "best": self.best, "average": self.average}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def result(self) -> EagleNetwork:
        if self.best is not None:
            return self.best.load_into(copy.deepcopy(self.network))
        return self.network if self.average is None else self.average

    @torch.no_grad()
    def refresh(self, source: EagleNetwork | None = None) -> None:
        """Copy the float32 weights into the working copy, which computes as the drafter will when it drafts."""
        for weight, master in zip(self.working.parameters(), (source or self.network).parameters(), strict=True):
            weight.copy_(master)

    @torch.no_grad()
    def _add_to_average(self, number: int) -> None:
        if self.average is not None:
            share = 1 / max(1.0, self.settings.average_frac * (number + 1))
            for mean, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
                mean.lerp_(weight, share)

    def step(self, number: int, factor: float) -> dict:
        """One optimiser step; returns the row of the training curve: the loss and what the objective measured.

        Now and then the drafter is measured before the step, on text that it never learns from.
        """
        due = self.settings.is_measured(number) or number and number in self.text.begins
        measured = (self.consider(number) or self.measure(number)) | {"rate_frac": factor} if due else {}
        batch = self.objective.collect(self.working, self.target, self.text.batch(number))
        for _ in range(self.objective.updates):
            row = self._update(batch)
        self._add_to_average(number)
        return row | measured

    def _update(self, batch: TokenBatch) -> dict:
        loss, measures = self.gradients(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.refresh()
        row = {"loss": float(loss), "grad_norm": float(norm), "batch_tok": int((batch.documents >= 0).sum())}
        return of_all_ranks(row | measures)

    def gradients(self, batch: TokenBatch) -> tuple[Tensor, dict]:
        """Put the gradients of the objective on a collected batch into the float32 weights; returns what it says."""
        loss, measures = self.objective(self.working, self.target, batch)
        loss.backward()
        for weight, master in zip(self.working.parameters(), self.network.parameters(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        if ranks.world() > 1:
            for master in self.network.parameters():  # what a rank's rows do not reach has no gradient there
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            ranks.average([master.grad for master in self.network.parameters()])
        return loss.detach(), measures

    def begin(self, training: TrainingRun) -> None:
        """Take up what the checkpoint held, and say what a fresh training will take: two steps that change nothing."""
        self.refresh()
        training.stopped = self.ended
        last_step = training.plan["last_step"]
        if training.step or not last_step or self.best is None and last_step < ESTIMATED_STEPS:
            return
        for _ in range(2):
            begin = time.perf_counter()
            self.gradients(self.objective.collect(self.working, self.target, self.text.batch(0)))
        for weight in self.network.parameters():
            weight.grad = None
        needed_s = (time.perf_counter() - begin) * last_step * self.objective.updates
        needed = f"{needed_s:.0f} s" if needed_s < 90 else f"{needed_s / 60:.0f} min"
        beside = f" beside {self.measurements(last_step)} measurements" if self.text.held_out else ""
        if ranks.leads():
            print(f"{last_step} steps take about {needed}{beside}.", file=sys.stderr)

    def measurements(self, last_step: int) -> int:
        """How many there will be until the last step."""
        return 1 + sum(map(self.settings.is_measured, range(last_step)))

    def ended(self) -> bool:
        """Whether the best weights are too many measurements old."""
        return self.best is not None and 0 < self.settings.patience <= self.best.misses

    def consider(self, step: int) -> dict:
        """Measure the newest weights and keep them where they are the best so far; nothing where the best are not kept."""
        found = {} if self.best is None else self.measure(step, self.network)
        if found:
            self.best.consider(self.network.state_dict(), found["held_out_tau_chain"], step)
        return found

    def measure(self, step: int, network: EagleNetwork | None = None) -> dict:
        """Accuracy on the held-out texts after `step` steps, with the answer tokens seen; nothing where none are held out.

        network: default what is written.
        """
        if not self.text.held_out:
            return {}
        self.refresh(network or self.result)
        found = ranks.told(draft_accuracy(self.working, self.target, self.text.held_out_texts()))
        self.refresh()
        return {
            **self.text.progress(step),
            "held_out_top1_frac": float(found["table"]["top1_frac"][0]),
            "held_out_tau_chain": found["tau_chain"],
        }
