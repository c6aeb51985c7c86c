"""`generate`: the cycle as transformers' `custom_generate`, with its processors and criteria."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from specdec.core.decode import check_lengths, turn
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static, checked_policy
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_integer
from specdec.models.families import setting

# the model's arguments that `generate` follows or checks, and those that cannot change a text
READ = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
    "cache_params",
    "cache_position",
}
READ |= {"inputs_embeds", "use_cache", "logits_to_keep", "synced_gpus", "return_dict"}


def generate(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    drafter: Any = None,
    policy: Policy | None = None,
    seed: int | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(ids, custom_generate=specdec.generate, drafter=..., policy=...)`.

    Uses transformers' prepared processors, stopping criteria and GenerationConfig.
    drafter: from `specdec.load_drafter(path, model)`.
    seed: by default drawn from torch's generator, so that `torch.manual_seed` reproduces a call.
    streamer: transformers keeps its own `streamer=` from custom functions. Bind it to this one:
    `custom_generate=functools.partial(specdec.generate, streamer=streamer)`.
    Stop strings: `stopping_criteria=[StopStringCriteria(tokenizer, ["stop"])]`, for transformers
    keeps the tokenizer from custom functions as well.
    Sampled text equals `specdec.autoregress` with that seed. It has the distribution of plain
    `generate`, with other random numbers.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> model, ids = pair.target.model, torch.tensor([pair.ids_of("Hello")])
    >>> greedy = dict(max_new_tokens=8, do_sample=False)
    >>> text = model.generate(ids, custom_generate=generate, drafter=pair.drafter, **greedy)
    >>> bool((text == model.generate(ids, **greedy)).all())
    True
    """
    if setting(setting(drafter, "target"), "model") is not model:
        raise SpecdecError(
            "generate needs drafter=specdec.load_drafter(path, model) made for this very model."
        )
    _refuse(generation_config, model_kwargs)
    ids = _one_row(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    sampled = generation_config.do_sample
    drawn = int(torch.randint(1 << 62, ())) if sampled and seed is None else 0
    picker = Picker(
        logits_processor, sampled, drawn if seed is None else check_integer("seed", seed)
    )
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    pair = Pair(drafter.target, drafter)
    check_lengths(len(pair.ids_of(ids)), max_new_tokens, drafter.target.position_limit)

    stop_tokens, stop_early = _stops(stopping_criteria)
    policy = Static.of(pair.usual_tree) if policy is None else checked_policy(policy)
    engine = LiveEngine(
        pair, ids, max_new_tokens, policy.limits, picker, stop_tokens, stop_early=stop_early
    )
    if streamer is not None:
        # as transformers does, so that a streamer can leave the prompt out
        streamer.put(input_ids.cpu())
    with engine.inference():
        for tokens in turn(engine, policy):
            if streamer is not None:
                for token in tokens:
                    streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    sequences = torch.cat(
        (input_ids, torch.tensor([engine.tokens], device=input_ids.device)), dim=1
    )
    if generation_config.return_dict_in_generate:
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _stops(criteria: Any) -> tuple[tuple[int, ...], Callable[[Tensor], bool] | None]:
    """Stop tokens, and a function for the criteria that the engine does not handle itself."""
    tokens: list[int] = []
    further = StoppingCriteriaList()
    for criterion in criteria or ():
        if type(criterion) is EosTokenCriteria:
            tokens += criterion.eos_token_id.tolist()
        elif type(criterion) is not MaxLengthCriteria:
            further.append(criterion)
    if not further:
        return tuple(tokens), None

    def stop_early(so_far: Tensor) -> bool:
        return bool(further(so_far[None], _NoScores()).all())

    return tuple(tokens), stop_early


class _NoScores:
    """In place of the scores, which the cycle does not keep: reading them raises an error."""

    @classmethod
    def _refuse(cls, *args: Any, **kwargs: Any) -> Any:
        why = "a stopping criterion reads the scores, which speculative decoding does not keep"
        raise SpecdecError(f"{why}; leave it out.")

    __getattr__ = __getitem__ = __len__ = __iter__ = __torch_function__ = _refuse


def _refuse(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """SpecdecError for settings that the cycle would not follow."""
    if generation_config.num_beams > 1 or generation_config.num_return_sequences > 1:
        why = "speculative decoding returns one sequence without beams"
        raise SpecdecError(f"{why}; set num_beams and num_return_sequences to 1.")
    mode = generation_config.get_generation_mode()
    if mode not in (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.ASSISTED_GENERATION,
    ):
        raise SpecdecError(
            f"speculative decoding is greedy or samples; leave the settings of {mode.value} out."
        )
    if generation_config.guidance_scale not in (None, 1):
        why = "guidance runs the model on a second prompt"
        raise SpecdecError(f"{why}; leave guidance_scale and negative_prompt_ids out.")
    outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    if wanted := [name for name in outputs if setting(generation_config, name)]:
        raise SpecdecError(
            f"speculative decoding keeps no {wanted[0].removeprefix('output_')}; "
            f"leave {wanted[0]} out."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise SpecdecError(
            "speculative decoding reads token ids, not inputs_embeds; give input_ids alone."
        )
    for name in ("past_key_values", "cache"):
        if (cache := model_kwargs.get(name)) is not None and cache.get_seq_length():
            why = "speculative decoding fills a cache of its own"
            raise SpecdecError(f"{why}; leave {name} out and give all input_ids.")
    given = [
        name for name, value in model_kwargs.items() if value is not None and value is not False
    ]
    if unread := sorted(set(given) - READ):
        raise SpecdecError(
            f"speculative decoding reads token ids alone; leave {', '.join(unread)} out."
        )


def _one_row(input_ids: Tensor, attention_mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """The single prompt [T] without left padding. positions: must count its tokens from 0."""
    if input_ids.shape[0] != 1:
        why = (
            f"speculative decoding takes one prompt at a time, got a batch of {input_ids.shape[0]}"
        )
        raise SpecdecError(f"{why}; loop over it.")
    kept = torch.ones_like(input_ids[0], dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            shapes = tuple(attention_mask.shape), tuple(input_ids.shape)
            why = f"attention_mask has shape {shapes[0]}, but input_ids has {shapes[1]}"
            raise SpecdecError(f"{why}; give a flag per token.")
        kept = attention_mask[0].bool()
    if not kept.any():
        raise SpecdecError(
            "the prompt is empty, or attention_mask hides all of it; give at least one token."
        )
    if not bool(kept[kept.nonzero()[0, 0] :].all()):
        raise SpecdecError(
            "attention_mask hides tokens after the first one; "
            "only padding on the left can be left out."
        )
    ids = input_ids[0][kept]
    if positions is not None:
        rows = positions.reshape(-1, positions.shape[-1])  # some families count in several rows
        usual = torch.arange(len(ids), device=rows.device)
        if rows.shape[1] != len(kept):
            why = "attention_mask and position_ids have a number for each token of input_ids"
            raise SpecdecError(f"{why}; leave them out.")
        if not bool((rows[:, kept] == usual).all()):
            raise SpecdecError(
                "speculative decoding counts positions itself, from 0; leave position_ids out."
            )
    return ids
