"""`generate`: the cycle as transformers' `custom_generate`, with its processors and criteria."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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

# the model's arguments that cannot change a text
HARMLESS = "attention_mask position_ids cache_position use_cache logits_to_keep return_dict".split()
# settings of a GenerationConfig that the cycle would not follow, by their values without effect
UNFOLLOWED = {"num_beams": 1, "num_return_sequences": 1, "guidance_scale": 1, "penalty_alpha": 0}
UNFOLLOWED |= {"dola_layers": 0, "constraints": 0, "return_dict_in_generate": 0}


def generate(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    drafter: Any = None,
    policy: Policy | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """For `model.generate(ids, custom_generate=specdec.generate, drafter=..., policy=...)`.

    Uses transformers' processors, stopping criteria and GenerationConfig. drafter: from
    `specdec.load_drafter(path, model)`. seed: by default from torch's generator; sampled text
    equals `specdec.autoregress` with that seed. Stop strings do not reach custom functions: give
    `stopping_criteria=[StopStringCriteria(tokenizer, ["stop"])]`; for a stream `specdec.stream`.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> model, ids = pair.target.model, torch.tensor([pair.ids_of("Hello")])
    >>> greedy = dict(max_new_tokens=8, do_sample=False)
    >>> text = model.generate(ids, custom_generate=generate, drafter=pair.drafter, **greedy)
    >>> bool((text == model.generate(ids, **greedy)).all())
    True
    """
    # 1. what the cycle can follow
    if getattr(getattr(drafter, "target", None), "model", None) is not model:
        raise SpecdecError("generate needs drafter=specdec.load_drafter(path, this very model).")
    _refuse(generation_config, model_kwargs)
    ids = _one_row(input_ids, model_kwargs.get("attention_mask"))
    pair = Pair(drafter.target, drafter)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    check_lengths(len(pair.ids_of(ids)), max_new_tokens, drafter.target.position_limit)

    # 2. an engine with transformers' processors and criteria
    sampled = generation_config.do_sample
    if seed is None:
        seed = int(torch.randint(1 << 62, ())) if sampled else 0
    picker = Picker(logits_processor, sampled, check_integer("seed", seed))
    picker = picker.of_text(pair.ids_of(ids))
    stop_tokens: list[int] = []
    further = StoppingCriteriaList()
    for criterion in stopping_criteria or ():
        # the engine handles an end of text and a length by itself
        if type(criterion) is EosTokenCriteria:
            stop_tokens += criterion.eos_token_id.tolist()
        elif type(criterion) is not MaxLengthCriteria:
            further.append(criterion)
    policy = Static.of(pair.usual_tree) if policy is None else checked_policy(policy)
    engine = LiveEngine(pair, ids, max_new_tokens, policy.limits, picker, tuple(stop_tokens))
    if further:
        # the cycle keeps no scores: a criterion that reads them fails
        engine.stop_early = lambda so_far: bool(further(so_far[None], None).all())

    # 3. the text
    with engine.inference():
        for _ in turn(engine, policy):
            pass
    return torch.cat((input_ids, input_ids.new_tensor([engine.tokens])), dim=1)


def _refuse(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """SpecdecError for settings and inputs that the cycle would not follow."""
    names = []
    for name, without_effect in UNFOLLOWED.items():
        if getattr(generation_config, name, None) not in (None, without_effect):
            names.append(name)
    for name, value in model_kwargs.items():
        # an empty cache, as transformers makes one
        is_empty = hasattr(value, "get_seq_length") and not value.get_seq_length()
        if name not in HARMLESS and value is not None and value is not False and not is_empty:
            names.append(name)
    if names:
        raise SpecdecError(f"specdec.generate does not follow {', '.join(sorted(names))}.")


def _one_row(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The single prompt [T] without padding on the left."""
    if input_ids.shape[0] != 1:
        raise SpecdecError("speculative decoding takes one prompt at a time; loop over them.")
    ids = input_ids[0]
    if attention_mask is None:
        return ids
    visible = attention_mask[0].bool()
    if not visible[-int(visible.sum()) :].all():
        raise SpecdecError("attention_mask hides more than padding on the left; leave it out.")
    return ids[visible]
