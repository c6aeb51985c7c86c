"""Trains a drafter of any kind for any transformers causal LM, and measures it.

The target runs frozen beside the drafter. Writes out_dir/drafter in the official layout
(config.json, model.safetensors) and out_dir/drafter_training: plan, curve, checkpoint, and the
target's own answers to the training prompts.

`OnlineDrafter` keeps learning while it serves (OSD). Weights change only between cycles; keys and
values computed earlier in a turn keep the values of the older weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.errors import SpecdecError
from specdec.models import load, pairs
from specdec.models.eagle_drafter import check_fit
from specdec.models.eagle_files import read_network, save_drafter
from specdec.models.eagle_network import (
    EagleNetwork,
    default_taps,
    layer_like,
    network_of,
    vocabulary_ids,
)
from specdec.models.heads import HeadsConfig, HeadsNetwork, read_heads, save_heads
from specdec.models.small_lm import LMNetwork, fresh_lm, save_small_lm
from specdec.models.target import Target
from specdec.training.drafter.chats import ChatList, training_text
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch
from specdec.training.drafter.presets import OBJECTIVES, Budget, Continued, Settings, preset
from specdec.training.drafter.ttt import Supervised, draft_vocabulary, unroll
from specdec.training.loop import Best, TrainingRun, compute_dtype, undisturbed

# batches for an objective's measurements before the first step
MEASURED_BATCHES = 8
KINDS = ("eagle3", "block", "eagle1", "griffin", "medusa", "hydra", "lm")
LM_LAYERS = 2  # of a fresh language model
BLOCK = 8  # positions of a fresh block drafter, whose mask is token 0
# divides weights of an EAGLE-3 drafter that a block drafter begins as: each head reads one token
TEMPERED = 8


@undisturbed()
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
    usual: Objective = Supervised()
    if isinstance(settings, str):
        settings, usual = preset(settings)
    objective = objective or usual
    budget = budget or Budget()
    source = ChatList(conversations) if isinstance(conversations, list) else conversations
    # 2. the run on disk; out_dir may hold the target and its own plan too
    folder = Path(out_dir) / "drafter"
    state_dir = Path(out_dir) / "drafter_training"
    if start_from:
        check_start(start_from, objective.network)
    described = {"settings": settings, "objective": objective, "conversations": source.key}
    described |= {"start_from": start_from, "seed": budget.seed, "minutes": budget.minutes}
    described["steps"] = budget.steps_of(settings)
    described["target"] = type(target[0]).__name__ if isinstance(target, tuple) else str(target)
    training = TrainingRun(state_dir, described, resume)
    if training.plan["finished"]:
        return folder
    # 3. the target, its text, and the drafter before its first step: fresh, or that of start_from
    model, tokenizer = load_target(target, budget.place())
    text = training_text(model, tokenizer, source, settings, state_dir, budget)
    counts = text.answer_counts(len(model.get_input_embeddings().weight))
    network = begun(start_from, model, settings, counts, budget.seed, objective.network)
    frozen = FrozenTarget(model, network.config.taps, compute_dtype(torch.device(model.device)))
    run = DrafterRun(frozen, network.to(model.device), text, objective, settings)
    training.track(run.parts, run.optimizers)
    training.end_at(text.steps)
    run.working.load_state_dict(network.state_dict())
    # 4. the steps
    training.run(run.step, "drafter", settings.rate_factor)
    # 5. the result with its last measurement
    run.consider(training.step)
    save_trained(run.result, folder, model)
    training.finish(draft_vocab_size=network.config.draft_vocab_size, **run.measure(run.result))
    return folder


def new_network(model, settings, answer_counts: np.ndarray, seed: int, kind: str) -> nn.Module:
    """A fresh drafter of one of KINDS in float32 with the target's hidden size and heads.

    answer_counts [V]: how often each token occurs in the answers; the draft vocabulary is the most
    frequent. "eagle3" and "block" have three taps and their own head; all others read only the last
    state. "eagle1" and "griffin" use the target's head, restricted to the draft vocabulary. "lm" is
    a model of the target's family with the target's embedding and head.
    """
    assert kind in KINDS, kind
    text = model.config.get_text_config()
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    torch.manual_seed(seed)
    last_tap = (text.num_hidden_layers,)
    if kind == "lm":
        return LMNetwork(fresh_lm(model, LM_LAYERS), last_tap)
    # 1. a layer like the target's own, over its taps
    sizes = {"hidden_size": hidden, "head_dim": None}
    if settings.intermediate_size:
        sizes["intermediate_size"] = settings.intermediate_size
    drafted = min(settings.draft_vocab_size or vocabulary, vocabulary)
    config = layer_like(text, vocabulary, draft_vocab_size=drafted, **sizes)
    last = replace(config, generation=1, num_taps=1, taps=last_tap, fc_bias=True)
    if kind in ("eagle3", "block"):
        taps = default_taps(text.num_hidden_layers)
        config = replace(config, taps=taps, fc_norm=settings.fc_norm)
        network = network_of(replace(config, block=BLOCK) if kind == "block" else config)
    elif kind in ("eagle1", "griffin"):
        network = network_of(replace(last, griffin=kind == "griffin"))
    else:
        heads = HeadsConfig(hidden, vocabulary, drafted, hydra=kind == "hydra", taps=last_tap)
        network = HeadsNetwork(heads)
    # 2. the draft vocabulary
    if hasattr(network, "d2t"):
        offsets, membership = draft_vocabulary(torch.from_numpy(answer_counts), drafted)
        network.d2t.copy_(offsets)
        network.t2d.copy_(membership)
    # 3. the head: the target's, or a copy of its rows to begin with
    head = model.get_output_embeddings()
    if not hasattr(network, "lm_head"):
        network.use_head(head)
    elif head.weight.shape[1] == hidden:
        rows = head.weight[network.t2d.to(head.weight.device)]
        network.lm_head.weight.data.copy_(rows.detach().float())
    return network


def load_network(folder: Path, model) -> nn.Module:
    """The drafter of a folder in float32, with its taps set; SpecdecError for another target's."""
    target = Target(model)
    kind = pairs.kind_of(Path(folder))
    if kind in ("medusa", "hydra"):
        return read_heads(folder, target).float().requires_grad_(True)
    last = (target.num_layers,)
    if kind == "lm":
        model = load.load_model(folder, "the drafter", dtype=torch.float32)
        return LMNetwork(model, last).requires_grad_(True)
    network = read_network(folder).float().requires_grad_(True)
    usual = default_taps(target.num_layers) if network.config.generation == 3 else last
    network.config = replace(network.config, taps=network.config.taps or usual)
    check_fit(network.config, network.config.taps, target)
    if network.config.generation != 3:
        network.use_head(model.get_output_embeddings())
    if network.config.own_embedding:
        raise SpecdecError(f"the drafter in {folder} has its own embedding; take another.")
    return network


def begun(
    start_from: Path | None, model, settings, answer_counts: np.ndarray, seed: int, kind: str
) -> nn.Module:
    """The drafter in `start_from` (an EAGLE-3 one for a block drafter too), or `new_network`."""
    if not start_from:
        return new_network(model, settings, answer_counts, seed, kind)
    network = load_network(start_from, model)
    if kind != "block" or network.config.block:
        return network
    torch.manual_seed(seed)
    block = network_of(replace(network.config, block=BLOCK))
    block.load_state_dict(network.state_dict(), strict=False)
    attention, mlp = block.midlayer.self_attn, block.midlayer.mlp
    for part in (attention.q_proj, attention.k_proj, attention.o_proj, block.fc, mlp.down_proj):
        part.weight.data /= TEMPERED
    return block


def save_trained(network: nn.Module, folder: Path, model) -> Path:
    """Save in bfloat16 under the official names, with its target's token ids and context length."""
    if isinstance(network, HeadsNetwork):
        return save_heads(network, folder, torch.bfloat16)
    if isinstance(network, LMNetwork):
        return save_small_lm(network, folder, torch.bfloat16)
    text = model.config.get_text_config()
    fields = {"max_position_embeddings": getattr(text, "max_position_embeddings", 2048)}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[name] = getattr(text, name, None)
    return save_drafter(network, folder, torch.bfloat16, **fields)


def check_start(folder: Path, network: str) -> None:
    """SpecdecError if the folder holds no drafter, or one that cannot become of kind `network`."""
    if not (Path(folder) / "config.json").is_file():
        raise SpecdecError(f"there is no drafter in {folder}; correct --start-from.")
    # some kinds have no mark of their own in config.json
    expected = network if pairs.KINDS[network].mark else "eagle3"
    kind = pairs.kind_of(Path(folder))
    # a block drafter can begin as an EAGLE-3 drafter
    if kind != expected and (kind, expected) != ("eagle3", "block"):
        raise SpecdecError(f"{folder} holds a drafter of kind {kind!r}, not {expected!r}.")


def load_target(target, device: torch.device):
    """(model, tokenizer) of any target that `load_pair` accepts; a pair of them is returned."""
    if isinstance(target, tuple):
        return target
    place = load.target_place(target)
    tokenizer = load.load_tokenizer(place)
    if tokenizer is None:
        raise SpecdecError(f"{target} has no tokenizer; put its tokenizer.json beside it.")
    return load.load_model(place, "the target", device, dtype=compute_dtype(device)), tokenizer


def optimizers(network: EagleNetwork, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for matrices of the layer and fc beside it; with peak rates."""
    matrices, rest = [], []
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
    """One run: float32 weights `network`, and `working`, their copy in the compute dtype.

    result: what is written, the newest weights, their average or the best ones.
    """

    def __init__(self, target: FrozenTarget, network, text, objective: Objective, settings):
        self.target = target
        self.network = network
        self.text = text
        self.settings = settings
        self.working = copy.deepcopy(network).to(target.dtype)
        batches = map(text.batch, range(MEASURED_BATCHES))
        self.objective = objective.prepare(self.working, target, batches)
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

    def step(self, number: int, factor: float = 1.0) -> dict:
        """One optimiser step, before which the drafter may be measured; a row of the curve."""
        # 1. the measurement
        measured = {}
        if number % self.settings.measure_every == 0:
            measured = self.consider(number) or self.measure(self.result)
        # 2. the gradients, moved from the working copy to the float32 weights
        batch = self.objective.collect(self.working, self.target, self.text.batch(number))
        loss, measures = self.objective(self.working, self.target, batch)
        loss.backward()
        weights, masters = list(self.working.parameters()), list(self.network.parameters())
        for weight, master in zip(weights, masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        # 3. the step
        norm = torch.nn.utils.clip_grad_norm_(masters, self.settings.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.working.load_state_dict(self.network.state_dict())
        if self.average is not None:
            share = 1 / max(1.0, self.settings.average_frac * (number + 1))
            for mean, weight in zip(self.average.parameters(), masters, strict=True):
                mean.data.lerp_(weight.data, share)
        row = {"loss": float(loss.detach()), "grad_norm": float(norm)}
        row["batch_tok"] = int((batch.documents >= 0).sum())
        return row | measures | measured

    def consider(self, step: int) -> dict:
        """Measure the newest weights and keep them if they are the best, where that is asked."""
        if self.best is None:
            return {}
        measured = self.measure(self.network)
        self.best.consider(self.network.state_dict(), measured["held_out_tau_chain"], step)
        return measured

    def measure(self, network: EagleNetwork) -> dict:
        """Accuracy of a network on the held-out texts."""
        if not self.text.held_out:
            return {}
        # measured in the compute dtype, as it decodes
        self.working.load_state_dict(network.state_dict())
        accuracy = draft_accuracy(self.working, self.target, self.text.held_out_texts())
        self.working.load_state_dict(self.network.state_dict())
        return {f"held_out_{name}": accuracy[name] for name in ("top1_frac", "tau_chain")}


@torch.no_grad()
def draft_accuracy(
    network: EagleNetwork, target: FrozenTarget, texts: Iterable[TokenBatch], drafts: int = 8
) -> dict:
    """Agreement of a drafter with its target on `texts` of one row each, without decoding.

    Exact if the target wrote the answers greedily. drafts: the longest chain. tau_chain: tokens
    per cycle of greedy chain drafting, bonus token included. top1_frac: how often the first
    drafted token is the text's.
    """
    positions = correct_tok = cycles = emitted = 0
    for text in texts:
        # 1. what counts: the drafted token and all tokens between are in one answer
        answer = text.loss_mask[0].bool().cpu().numpy()
        accepted = _first_choices(network, target, text, drafts)
        for step, row in enumerate(accepted):
            places = max(0, len(answer) - step - 2)
            row[places:] = False
            row[:places] &= answer[1 : places + 1] & answer[step + 2 :]
        positions += int((answer[1:-1] & answer[2:]).sum())
        correct_tok += int(accepted[0].sum())
        # 2. the cycles of a chain along each answer, whose first token the prompt's forward gave
        lengths = np.logical_and.accumulate(accepted).sum(0)
        edges = np.flatnonzero(np.diff(answer.astype(int), prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2):
            root = begin
            while root < end - 1:
                # the slot that reads the root is the one before it
                root += lengths[root - 1] + 1
                cycles += 1
            emitted += int(end - begin - 1)
    assert cycles, "no answer of two tokens or more to measure on"
    result = {"tau_chain": emitted / cycles, "cycles": cycles, "emitted_tok": emitted}
    return result | {"top1_frac": correct_tok / max(1, positions)}


def _first_choices(network, target: FrozenTarget, text: TokenBatch, drafts: int) -> np.ndarray:
    """Whether slot i's first choice at a step is token i + step + 2 of the text. [drafts, T]"""
    length = text.ids.shape[1]
    # the first slot that reads a token of an answer
    first = max(0, int(text.loss_mask[0].int().argmax()) - 1)
    ids = vocabulary_ids(network)
    correct = np.zeros((drafts, length), dtype=bool)
    features = target(text).features.to(target.embedding.dtype)
    states = unroll(network, target.embedding, features, TokenBatch(text.ids), drafts)
    for step, hidden in enumerate(states):
        end = length - step - 2
        if end <= first:
            break
        best = ids[network.head(hidden[0, first:end], step).argmax(-1)]
        correct[step, first:end] = (best == text.ids[0, first + step + 2 :]).cpu().numpy()
    return correct


@dataclass(frozen=True)
class OnlineConfig:
    every: int = 8  # cycles between two steps
    learning_rate: float = 1e-5  # OSD's own
    longest: int = 256  # newest tokens that a step reads


class OnlineDrafter:
    """A pair whose drafter learns from the texts it helps to write.

    The objective is OSD's rule, which learns only where the drafter was corrected.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> out = OnlineDrafter(pair).decode("What is 2 + 3?", max_new_tokens=16)
    >>> out.tokens == specdec.autoregress(pair, "What is 2 + 3?", max_new_tokens=16).tokens
    True
    """

    # for DrafterRun, whose text this is: nothing is held out
    held_out = ()

    def __init__(self, pair: Pair, config: OnlineConfig = OnlineConfig()):
        self.pair = pair
        self.config = config
        self.steps = 0
        self._served: TokenBatch | None = None
        network = trainable(pair)
        # one copy decodes, since a packed network cannot change
        self.network = trainable(pair).requires_grad_(False).eval()
        frozen = FrozenTarget(pair.target.model, pair.drafter.taps)
        pair.drafter.network = self.network
        settings = Settings(muon=False, learning_rate=config.learning_rate)
        self.run = DrafterRun(frozen, network, self, OBJECTIVES["osd"], settings)

    def batch(self, number: int) -> TokenBatch:
        """The newest served text."""
        return self._served

    def decode(self, prompt, policy: Policy | None = None, max_new_tokens=128, **settings):
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
        measures = self.run.step(self.steps)
        self.steps += 1
        self.network.load_state_dict(self.run.network.state_dict())
        return measures


def trainable(pair: Pair) -> EagleNetwork:
    """A copy of the pair's EAGLE-3 network, with its own weights. SpecdecError for others."""
    network = getattr(pair.drafter, "network", None)
    is_eagle = isinstance(network, EagleNetwork) and network.config.generation == 3
    if not is_eagle or network.config.own_embedding:
        raise SpecdecError("only EAGLE-3 drafters can learn while they serve; use another drafter.")
    copied = network_of(network.config).to(pair.target.device)
    copied.load_state_dict(network.state_dict())
    return copied
