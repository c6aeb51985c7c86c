"""Trains a drafter for any transformers causal LM.

The target runs frozen beside the drafter and is never written. The caller gives the objective to
minimise (`objective.Objective`); EAGLE-3's training-time test is the default. Writes
out_dir/drafter in the official layout (config.json, model.safetensors) and
out_dir/drafter_training: plan, curve, checkpoint, and the target's own answers to the training
prompts.

Online speculative decoding (`OnlineDrafter`): a drafter that keeps learning while it serves (OSD,
and any other objective). Weights change only between cycles, and no drafter can change the text: it
stays the target's own. Keys and values computed earlier in a turn keep the values of the older
weights. The learned weights are lost with the pair unless its owner saves them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.records import Generation
from specdec.errors import SpecdecError, check_integer
from specdec.models.eagle_network import EagleNetwork, network_of
from specdec.models.heads import HeadsNetwork, heads_network
from specdec.models.small_lm import LMNetwork, SmallLM
from specdec.models.target import Target
from specdec.training.drafter.accuracy import draft_accuracy
from specdec.training.drafter.chats import ChatList, ChatSource
from specdec.training.drafter.networks import begun, check_start, load_target, save_trained
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch
from specdec.training.drafter.presets import Budget, Continued, Settings, objective_named, preset
from specdec.training.drafter.texts import Text, training_text
from specdec.training.drafter.ttt import LossRules, Supervised, TrainingTimeTest
from specdec.training.loop import Best, TrainingRun, compute_dtype


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

    target: as in `load_pair`, or (model, tokenizer). conversations: lists of chat messages
    (chats.load_conversations), or a source of them. objective: default the preset's, or the
    training-time test with our rules. settings: a Settings or the name of one of PRESETS. budget:
    of time; writing the target's answers may take a quarter of it more.
    start_from: folder of a drafter to continue from.
    A finished run returns at once; an interrupted one continues to the same weights with `resume`.

    >>> import specdec, tempfile
    >>> question = {"role": "user", "content": "What is 2 + 3?"}
    >>> chat = [question, {"role": "assistant", "content": "5."}]
    >>> few = Settings(256, steps=1, batch=1, length=32)
    >>> folder = train_drafter("tiny", [chat], out_dir=tempfile.mkdtemp(), settings=few)
    >>> specdec.load_pair("tiny", drafter=folder).drafter is not None
    True
    """
    # 1. what is trained, and how
    if isinstance(settings, str):
        settings, preset_objective = preset(settings)
        objective = objective or preset_objective
    objective = objective or TrainingTimeTest()
    check_start(start_from)
    budget = budget or Budget()
    device = budget.place()
    source = conversations
    if isinstance(conversations, list | tuple):
        source = ChatList(conversations)
    # 2. the run on disk; out_dir may hold the target and its own plan too
    out_dir = Path(out_dir)
    state_dir = out_dir / "drafter_training"
    described = {
        "settings": settings,
        "objective": objective,
        "start_from": start_from,
        "seed": budget.seed,
        "target": type(target[0]).__name__ if isinstance(target, tuple) else str(target),
        "conversations": source.key,
        "minutes": budget.minutes,
        "steps": budget.steps_of(settings),
    }
    training = TrainingRun(state_dir, described, resume)
    if training.finished:
        return out_dir / "drafter"
    # 3. the target, its text, and the drafter before its first step
    model, tokenizer = load_target(target, device)
    text = training_text(model, tokenizer, source, settings, state_dir, budget)
    run = prepared(model, tokenizer, text, objective, settings, budget, start_from)
    training.track(run.parts, run.optimizers)
    training.end_at(text.steps)
    run.begin(training)
    # 4. the steps, and the result with its last measurement
    training.run(run.step, "drafter", settings.rate_factor)
    run.consider(training.step)
    save_trained(run.result, out_dir / "drafter", model)
    results = run.measure(training.step)
    results["rate_frac"] = settings.rate_factor(training.step, training.plan["last_step"])
    training.finish(draft_vocab_size=run.network.config.draft_vocab_size, **results)
    return out_dir / "drafter"


def prepared(
    model, tokenizer, text, objective: Objective, settings: Settings, budget: Budget, start_from
) -> DrafterRun:
    """The run before its first step, with the target's features of the text.

    Its drafter is fresh, or that of `start_from`.
    """
    counts = text.answer_counts(len(model.get_input_embeddings().weight))
    network = begun(start_from, model, settings, counts, budget.seed, objective.network)
    frozen = FrozenTarget(
        model, network.config.taps, compute_dtype(torch.device(model.device)), tokenizer
    )
    text.prepare(frozen, budget.features)
    return DrafterRun(frozen, network.to(model.device), text, objective, settings)


def optimizers(network: EagleNetwork, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of the layer and fc beside it.

    Parameter groups store their peak rate.
    """
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
        rest, lr=settings.head_rate or rate, betas=settings.betas, weight_decay=0.0, fused=True
    )
    result: list[torch.optim.Optimizer] = [adamw]
    if settings.muon:
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        result.append(muon)
    for optimizer in result:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return result


# batches for an objective's measurements before the first step
MEASURED_BATCHES = 8
# shorter fresh trainings skip the two timing steps
ESTIMATED_STEPS = 100


class DrafterRun:
    """One run: the frozen target, the text, the optimisers, the objective, and `step` for the loop.

    network: the trained float32 weights. working: a copy in the compute dtype, used by the
    objective.
    result: what is written: the average of the weights or the best ones, if the settings ask for
    them.
    """

    def __init__(
        self,
        target: FrozenTarget,
        network: EagleNetwork,
        text: Text,
        objective: Objective,
        settings: Settings,
    ):
        self.target = target
        self.network = network
        self.text = text
        self.settings = settings
        self.working = copy.deepcopy(network).to(target.dtype)
        objective.prepare(self.working, target)
        batches = map(text.batch, range(MEASURED_BATCHES))
        self.objective = objective.measured(self.working, target, batches)
        self.best = None
        self.average = None
        if isinstance(settings, Continued) and text.held_out:
            self.best = Best(network, torch.float32)
        elif settings.average_frac:
            self.average = copy.deepcopy(network)
        self.optimizers = optimizers(network, settings)

    @property
    def parts(self) -> dict[str, EagleNetwork | Best]:
        """The parts of a checkpoint."""
        parts = {"drafter": self.network}
        if self.best is not None:
            parts["best"] = self.best
        if self.average is not None:
            parts["average"] = self.average
        return parts

    @property
    def result(self) -> EagleNetwork:
        if self.best is not None:
            return self.best.load_into(copy.deepcopy(self.network))
        return self.network if self.average is None else self.average

    def refresh(self, source: EagleNetwork | None = None) -> None:
        """Copy the float32 weights into the working copy, which computes as in decoding."""
        copy_weights(source or self.network, self.working)

    @torch.no_grad()
    def _add_to_average(self, number: int) -> None:
        if self.average is not None:
            share = 1 / max(1.0, self.settings.average_frac * (number + 1))
            for mean, weight in _both(self.average, self.network):
                mean.lerp_(weight, share)

    def step(self, number: int, factor: float) -> dict:
        """One optimiser step; returns the row of the training curve.

        The row has the loss and the objective's measurements. At intervals the drafter is measured
        before the step, on held-out text.
        """
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

    def begin(self, training: TrainingRun) -> None:
        """Restore the checkpoint, and print how long a fresh training will take.

        Two steps are timed, which change nothing.
        """
        self.refresh()
        training.stopped = self.ended
        last_step = training.plan["last_step"]
        short = self.best is None and last_step is not None and last_step < ESTIMATED_STEPS
        if training.step or not last_step or short:
            return
        for _ in range(2):
            began_s = time.perf_counter()
            self.gradients(self.objective.collect(self.working, self.target, self.text.batch(0)))
        for weight in self.network.parameters():
            weight.grad = None
        step_s = (time.perf_counter() - began_s) * self.objective.updates
        minutes = step_s * last_step / 60
        beside = ""
        if self.text.held_out:
            count = 1 + sum(map(self.settings.is_measured, range(last_step)))
            beside = f" beside {count} measurements"
        print(f"{last_step} steps take about {minutes:.1f} min{beside}.", file=sys.stderr)

    def ended(self) -> bool:
        """Whether the best weights are too many measurements old."""
        return self.best is not None and 0 < self.settings.patience <= self.best.misses

    def consider(self, step: int) -> dict:
        """Measure the newest weights and keep them if they are the best so far.

        Nothing is measured if the best weights are not kept.
        """
        if self.best is None:
            return {}
        measured = self.measure(step, self.network)
        if measured:
            score = measured["held_out_tau_chain"]
            self.best.consider(self.network.state_dict(), score, step)
        return measured

    def measure(self, step: int, network: EagleNetwork | None = None) -> dict:
        """Accuracy on the held-out texts after `step` steps, with the answer tokens read.

        network: default the result. {} without held-out texts.
        """
        if not self.text.held_out:
            return {}
        self.refresh(network or self.result)
        accuracy = draft_accuracy(self.working, self.target, self.text.held_out_texts())
        self.refresh()
        return {
            **self.text.progress(step),
            "held_out_top1_frac": float(accuracy["table"]["top1_frac"][0]),
            "held_out_tau_chain": accuracy["tau_chain"],
        }


@dataclass(frozen=True)
class OnlineConfig:
    """How a drafter learns while it serves.

    every: cycles between two steps. learning_rate: OSD's own is 1e-5. longest: number of newest
    tokens that a step reads.
    """

    every: int = 8
    learning_rate: float = 1e-5
    longest: int = 256


class OnlineDrafter:
    """A pair whose drafter learns from the texts it helps to write.

    It has EAGLE's layers, heads, or is a small language model. objective: default OSD's rule, which
    learns only where the drafter was corrected.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> out = OnlineDrafter(pair).decode("What is 2 + 3?", max_new_tokens=16)
    >>> out.tokens == specdec.autoregress(pair, "What is 2 + 3?", max_new_tokens=16).tokens
    True
    """

    def __init__(
        self, pair: Pair, objective: Objective | None = None, config: OnlineConfig = OnlineConfig()
    ):
        check_integer("every", config.every, 1)
        self.pair = pair
        self.config = config
        self.steps = 0
        self._served: TokenBatch | None = None
        taps = pair.drafter.taps or (pair.target.num_layers,)
        network = copy_of(learned_by(pair.drafter), pair.target)
        self.network = serve_plainly(pair, network)
        frozen = FrozenTarget(pair.target.model, taps)
        settings = Settings(muon=False, learning_rate=config.learning_rate)
        if objective is None:
            objective = _osd_for(network)
        self.run = DrafterRun(frozen, network, self, objective, settings)

    # for DrafterRun, whose text this is: nothing is held out
    held_out = ()

    def batch(self, number: int) -> TokenBatch:
        """The newest served text."""
        return self._served

    def decode(
        self, prompt, policy: Policy | None = None, max_new_tokens: int = 128, **settings
    ) -> Generation:
        """`specdec.decode` with its settings, and a learning step every few cycles."""
        engine, policy = opened(self.pair, prompt, policy, max_new_tokens, **settings)
        generation = Generation(engine.tokens, engine.prompt_tok, finish_reason="unfinished")
        cycles = turn(engine, policy, generation)
        ids = self.pair.ids_of(prompt)
        while not engine.finished:
            with engine.inference():
                next(cycles)
            if engine.cycles and engine.cycles % self.config.every == 0:
                self.learn([*ids, *engine.tokens], len(ids))
        for _ in cycles:
            pass
        generation.text = self.pair.text_of(engine.tokens)
        return generation

    def learn(self, ids: list[int], prompt_tok: int) -> dict:
        """One step on a text whose tokens after `prompt_tok` the target wrote.

        Returns the objective's measures.
        """
        first = max(0, len(ids) - self.config.longest)
        tokens = torch.tensor([ids[first:]], device=self.pair.target.device)
        written = torch.arange(first, len(ids), device=tokens.device)[None] >= prompt_tok
        self._served = TokenBatch(tokens, written.long(), torch.zeros_like(tokens), step=self.steps)
        measures = self.run.step(self.steps, 1.0)
        self.steps += 1
        copy_weights(self.run.network, self.network)
        return measures


def _osd_for(network: nn.Module) -> Objective:
    """OSD's rule; windows are drafted by EAGLE-3 drafters only, others learn along the text."""
    if network.config.generation == 3:
        return objective_named("osd")
    levels = min(4, getattr(network.config, "num_heads", 4))
    return Supervised(LossRules(levels), labels="soft", errors_only=True)


def _both(first: nn.Module, second: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of two equal networks, side by side."""
    return zip(first.parameters(), second.parameters(), strict=True)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give one network the weights of another."""
    for weight, other in _both(target, source):
        weight.copy_(other)


def learned_by(drafter) -> nn.Module:
    """The trainable network of a drafter. SpecdecError if it has none."""
    network = drafter.network if drafter is not None else None
    if isinstance(drafter, SmallLM):
        return LMNetwork(network, (drafter.target.num_layers,))
    if not isinstance(network, EagleNetwork | HeadsNetwork) or network.config.own_embedding:
        what = "EAGLE's layers, heads and small language models"
        raise SpecdecError(f"only {what} can learn while they serve.")
    return network


def serve_plainly(pair: Pair, network: nn.Module) -> nn.Module:
    """A copy of the trained network that drafts from now on: a packed one cannot change."""
    if isinstance(network, LMNetwork):
        return pair.drafter.network
    served = copy_of(network, pair.target).requires_grad_(False).eval()
    pair.drafter.network = served
    return served


def copy_of(network: nn.Module, target: Target) -> nn.Module:
    """The same weights in a trainable network, without anything prepared for drafting."""
    if isinstance(network, LMNetwork):
        return copy.deepcopy(network).requires_grad_(True)
    fresh = network_of if isinstance(network, EagleNetwork) else heads_network
    trained = fresh(network.config).to(target.device)
    trained.load_state_dict(network.state_dict())
    if not hasattr(trained, "lm_head"):
        trained.use_head(target.model.get_output_embeddings())
    return trained
