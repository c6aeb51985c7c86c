"""The copying start: a target that copies before any training, by position and content alone."""

import dataclasses
import random

import torch

from specdec.toy import pretrain
from specdec.toy.chats import copy_task
from specdec.training.drafter import chats


class _Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0


def _model(copying_start: bool):
    torch.manual_seed(0)
    shape = dataclasses.replace(pretrain.PRESETS["small"], copying_start=copying_start)
    return pretrain.build_model(shape, _Tokenizer).eval()


def _copied_frac(model) -> float:
    """How often the model's first choice is right where nothing but copying predicts the token."""
    rng, right, all = random.Random(0), 0, 0
    for _ in range(20):
        task = copy_task(rng, range(8, model.config.vocab_size), bos=1)
        chosen = model(torch.from_numpy(task.ids)[None]).logits[0, :-1].argmax(-1).numpy()
        counted = task.kind[1:] == chats.ANSWER
        right, all = right + (chosen == task.ids[1:])[counted].sum(), all + counted.sum()
    return right / all


@torch.no_grad()
def test_it_copies_untrained_and_a_random_start_does_not():
    assert _copied_frac(_model(copying_start=True)) > 0.7
    assert _copied_frac(_model(copying_start=False)) < 0.05


@torch.no_grad()
def test_it_copies_across_long_distances():
    model, generator = _model(copying_start=True), torch.Generator().manual_seed(0)
    ids = torch.randperm(2000, generator=generator)[:260] + 8
    text = torch.cat((ids, ids[20:40]))[None]  # seen 240 tokens ago, each once
    chosen = model(text).logits[0, 260:279].argmax(-1)
    assert (chosen == ids[21:40]).float().mean() > 0.7


@torch.no_grad()
def test_the_previous_token_head_looks_one_back_at_any_position():
    model = _model(copying_start=True)
    model.set_attn_implementation("eager")
    ids = torch.randint(8, 2000, (1, 300), generator=torch.Generator().manual_seed(0))
    weights = model(ids, output_attentions=True).attentions[0][0, 0]
    assert weights.diagonal(-1).mean() > 0.85 > 0.1 > weights.diagonal(0)[1:].mean()
