"""Trains a drafter for any transformers causal LM.

The target runs frozen beside the drafter. Writes out_dir/drafter in the official layout
(config.json, model.safetensors) and out_dir/drafter_training: plan, curve, checkpoint, and the
target's own answers to the training prompts.

`OnlineDrafter` keeps learning while it serves (OSD). Weights change only between cycles; keys and
values computed earlier in a turn keep the values of the older weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.records import Generation
from specdec.errors import SpecdecError
from specdec.models.eagle_network import EagleNetwork, network_of
from specdec.training.drafter.accuracy import draft_accuracy
from specdec.training.drafter.chats import ChatList, print_estimate
from specdec.training.drafter.networks import begun, check_start, load_target, save_trained
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch
from specdec.training.drafter.presets import Budget, Continued, Settings, objective_named, preset
from specdec.training.drafter.texts import training_text
from specdec.training.drafter.ttt import TrainingTimeTest
from specdec.training.loop import Best, TrainingRun, compute_dtype

# batches for an objective's measurements before the first step
MEASURED_BATCHES = 8
TIMED_STEPS = 4  # before the time of a training is estimated


def train_drafter(
    target,
    conversations,
    *,
    out_dir: Path,
    objective: Objective | None = None,
    settings: str | Settings = "small",
    budget: Budget | None = None,
    start_from: Path | None = None,
    resume: bool = True,
) -> Path:
    """Train a drafter and return out_dir/drafter.

    target: as in `load_pair`, or (model, tokenizer). conversations: lists of chat messages, or a
    source such as `chats.ChatList`. objective: default the preset's, or the training-time test.
    budget: writing the target's answers may take a quarter more. start_from: folder of a drafter to
    continue. A finished run returns at once; an interrupted one continues to the same weights.

    >>> import tempfile
    >>> chat = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5."}]
    >>> few = Settings(256, steps=1, batch=1, length=32)
    >>> train_drafter("tiny", [chat], out_dir=tempfile.mkdtemp(), settings=few).name
    'drafter'
    """
    # 1. what is trained, and how
    usual = TrainingTimeTest()
    if isinstance(settings, str):
        settings, usual = preset(settings)
    objective = objective or usual
    budget = budget or Budget()
    source = ChatList(conversations) if isinstance(conversations, list) else conversations
    # 2. the run on disk; out_dir may hold the target and its own plan too
    folder = Path(out_dir) / "drafter"
    state_dir = Path(out_dir) / "drafter_training"
    described = {"settings": settings, "objective": objective, "conversations": source.key}
    described["start_from"] = check_start(start_from, objective.network)
    described["target"] = type(target[0]).__name__ if isinstance(target, tuple) else str(target)
    described |= {"seed": budget.seed, "minutes": budget.minutes}
    described["steps"] = budget.steps_of(settings)
    training = TrainingRun(state_dir, described, resume)
    if training.finished:
        return folder
    # 3. the target, its text, and the drafter before its first step
    model, tokenizer = load_target(target, budget.place())
    text = training_text(model, tokenizer, source, settings, state_dir, budget)
    run = prepared(model, text, objective, settings, budget, start_from)
    training.track(run.parts, run.optimizers)
    training.end_at(text.steps)
    run.refresh()
    # 4. the steps
    training.run(_timed(run.step, training), "drafter", settings.rate_factor)
    # 5. the result with its last measurement
    run.consider(training.step)
    save_trained(run.result, folder, model)
    results = {"draft_vocab_size": run.network.config.draft_vocab_size}
    results |= run.measure(training.step)
    results["rate_frac"] = settings.rate_factor(training.step, training.plan["last_step"])
    training.finish(**results)
    return folder


def _timed(step: Callable[[int, float], dict], training: TrainingRun) -> Callable:
    """`step`, the first calls of which tell how long the others take."""
    began_s = time.monotonic()
    timed = training.step + TIMED_STEPS

    def timed_step(number: int, factor: float) -> dict:
        if number == timed and training.plan["last_step"]:
            left = training.plan["last_step"] - number
            print_estimate("training", left, (time.monotonic() - began_s) / TIMED_STEPS)
        return step(number, factor)

    return timed_step


def prepared(model, text, objective: Objective, settings, budget: Budget, start_from) -> DrafterRun:
    """The run before its first step. Its drafter is fresh, or that of `start_from`."""
    counts = text.answer_counts(len(model.get_input_embeddings().weight))
    network = begun(start_from, model, settings, counts, budget.seed, objective.network)
    frozen = FrozenTarget(model, network.config.taps, compute_dtype(torch.device(model.device)))
    return DrafterRun(frozen, network.to(model.device), text, objective, settings)


def optimizers(network: EagleNetwork, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for matrices of the layer and fc beside it; with peak rates."""
    matrices = []
    rest = []
    for name, weight in network.named_parameters():
        vocabulary = "lm_head" in name or "embed" in name
        if settings.muon and weight.ndim == 2 and not vocabulary:
            matrices.append(weight)
        else:
            rest.append(weight)
    rate = settings.learning_rate
    adamw = torch.optim.AdamW(
        rest, lr=settings.head_rate or rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    result: list[torch.optim.Optimizer] = [adamw]
    if settings.muon:
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        result.append(muon)
    for optimizer in result:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return result


class DrafterRun:
    """One run, and `step` for the loop.

    network: the trained float32 weights. working: a copy in the compute dtype, used by the
    objective. result: what is written: the newest weights, their average or the best ones.
    """

    def __init__(self, target: FrozenTarget, network, text, objective: Objective, settings):
        self.target = target
        self.network = network
        self.text = text
        self.settings = settings
        self.working = copy.deepcopy(network).to(target.dtype)
        objective.prepare(self.working, target)
        batches = map(text.batch, range(MEASURED_BATCHES))
        self.objective = objective.measured(self.working, target, batches)
        self.optimizers = optimizers(network, settings)
        # the parts of a checkpoint
        self.parts: dict[str, nn.Module | Best] = {"drafter": network}
        self.best = None
        self.average = None
        if isinstance(settings, Continued) and text.held_out:
            self.best = self.parts["best"] = Best(network, torch.float32)
        elif settings.average_frac:
            self.average = self.parts["average"] = copy.deepcopy(network)

    @property
    def result(self) -> EagleNetwork:
        if self.best is not None:
            return self.best.load_into(copy.deepcopy(self.network))
        return self.network if self.average is None else self.average

    def refresh(self, source: EagleNetwork | None = None) -> None:
        """Copy the float32 weights into the working copy, which computes as in decoding."""
        copy_weights(source or self.network, self.working)

    def step(self, number: int, factor: float) -> dict:
        """One optimiser step, before which the drafter may be measured; a row of the curve."""
        measured = {}
        if self.settings.is_measured(number):
            measured = self.consider(number) or self.measure(number)
            measured["rate_frac"] = factor
        batch = self.text.batch(number)
        batch = self.objective.collect(self.working, self.target, batch)
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
        tokens = int((batch.documents >= 0).sum())
        return {"loss": float(loss), "grad_norm": float(norm), "batch_tok": tokens, **measures}

    def gradients(self, batch: TokenBatch) -> tuple[Tensor, dict]:
        """Set the float32 weights' gradients on a collected batch; returns loss and measures."""
        loss, measures = self.objective(self.working, self.target, batch)
        loss.backward()
        for weight, master in _both(self.working, self.network):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        return loss.detach(), measures

    @torch.no_grad()
    def _add_to_average(self, number: int) -> None:
        if self.average is not None:
            share = 1 / max(1.0, self.settings.average_frac * (number + 1))
            for mean, weight in _both(self.average, self.network):
                mean.lerp_(weight, share)

    def consider(self, step: int) -> dict:
        """Measure the newest weights and keep them if they are the best, where that is asked."""
        if self.best is None:
            return {}
        measured = self.measure(step, self.network)
        self.best.consider(self.network.state_dict(), measured["held_out_tau_chain"], step)
        return measured

    def measure(self, step: int, network: EagleNetwork | None = None) -> dict:
        """Accuracy of the network (default: the result) on the held-out texts."""
        if not self.text.held_out:
            return {}
        self.refresh(network or self.result)
        accuracy = draft_accuracy(self.working, self.target, self.text.held_out_texts())
        self.refresh()
        return {
            **self.text.progress(step),
            "held_out_top1_frac": float(accuracy["rank_frac"][0, 0]),
            "held_out_tau_chain": accuracy["tau_chain"],
        }


@dataclass(frozen=True)
class OnlineConfig:
    """How a drafter learns while it serves."""

    every: int = 8  # cycles between two steps
    learning_rate: float = 1e-5  # OSD's own
    longest: int = 256  # newest tokens that a step reads


class OnlineDrafter:
    """A pair whose drafter learns from the texts it helps to write.

    objective: default OSD's rule, which learns only where the drafter was corrected.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> out = OnlineDrafter(pair).decode("What is 2 + 3?", max_new_tokens=16)
    >>> out.tokens == specdec.autoregress(pair, "What is 2 + 3?", max_new_tokens=16).tokens
    True
    """

    # for DrafterRun, whose text this is: nothing is held out
    held_out = ()

    def __init__(
        self, pair: Pair, objective: Objective | None = None, config: OnlineConfig = OnlineConfig()
    ):
        self.pair = pair
        self.config = config
        self.steps = 0
        self._served: TokenBatch | None = None
        network = trainable(pair)
        # a packed network cannot change
        self.network = trainable(pair).requires_grad_(False).eval()
        frozen = FrozenTarget(pair.target.model, pair.drafter.taps)
        pair.drafter.network = self.network
        settings = Settings(muon=False, learning_rate=config.learning_rate)
        objective = objective or objective_named("osd")
        self.run = DrafterRun(frozen, network, self, objective, settings)

    def batch(self, number: int) -> TokenBatch:
        """The newest served text."""
        return self._served

    def decode(
        self, prompt, policy: Policy | None = None, max_new_tokens: int = 128, **settings
    ) -> Generation:
        """`specdec.decode` with its settings, and a learning step every few cycles."""
        engine, policy = opened(self.pair, prompt, policy, max_new_tokens, **settings)
        cycles = turn(engine, policy)
        ids = self.pair.ids_of(prompt)
        while not engine.finished:
            with engine.inference():
                next(cycles)
            if engine.cycles and engine.cycles % self.config.every == 0:
                self.learn([*ids, *engine.tokens], len(ids))
        for _ in cycles:
            pass
        engine.generation.text = self.pair.text_of(engine.tokens)
        return engine.generation

    def learn(self, ids: list[int], prompt_tok: int) -> dict:
        """One step on a text whose tokens after `prompt_tok` the target wrote; its measures."""
        first = max(0, len(ids) - self.config.longest)
        tokens = torch.tensor([ids[first:]], device=self.pair.target.device)
        written = torch.arange(first, len(ids), device=tokens.device)[None] >= prompt_tok
        self._served = TokenBatch(tokens, written.long(), torch.zeros_like(tokens), step=self.steps)
        measures = self.run.step(self.steps, 1.0)
        self.steps += 1
        copy_weights(self.run.network, self.network)
        return measures


def _both(first: nn.Module, second: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(first.parameters(), second.parameters(), strict=True)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give one network the weights of another."""
    for weight, value in _both(target, source):
        weight.copy_(value)


def trainable(pair: Pair) -> EagleNetwork:
    """A copy of the pair's EAGLE-3 network, with its own weights. SpecdecError for others."""
    network = None if pair.drafter is None else pair.drafter.network
    is_eagle = isinstance(network, EagleNetwork) and network.config.generation == 3
    if not is_eagle or network.config.own_embedding:
        raise SpecdecError("only EAGLE-3 drafters can learn while they serve; use another drafter.")
    copied = network_of(network.config).to(pair.target.device)
    copied.load_state_dict(network.state_dict())
    return copied
