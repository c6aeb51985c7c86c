"""A target over several GPUs, with transformers and accelerate: loading, and keeping its processes in step.

       "tp"        each process of torchrun holds a shard of every layer, and they compute each forward together
       "fsdp"      the weights are sharded, and every process gathers what its own forward needs (training)
    "auto" ...  one process, the layers one after the other on its GPUs: accelerate's device_map

Sharding is left to these libraries; bad input is refused here. With "tp" all processes take the same steps (`InStep`): every
rank drafts with its own copy of the drafter and computes its share of the target's forward; rank 0's drafts, policy answers
and picked tokens hold for all; a lap takes as long as on the slowest rank. So all ranks walk the same tree even if their
GPUs round differently.

Knows nothing about drafters' kinds or files of weights.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdec import ranks
from specdec.core.clock import Clock
from specdec.core.cycle import answer_of, begin_turn
from specdec.core.engine import LiveEngine
from specdec.core.policy import Policy
from specdec.core.protocols import Step
from specdec.core.records import Cycle
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_name
from specdec.models.families import setting

TP, FSDP = "tp", "fsdp"
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_spread(spread: str, device: str) -> None:
    """Refuse an unknown or unsupported kind of spread before anything is loaded."""
    if spread != FSDP:
        check_name("way to spread a target", spread, (TP, *MAPS))
    if spread in MAPS:
        if ranks.world() > 1:
            raise SpecdecError("a device map serves one process; start it without torchrun, or use tensor parallelism.")
        if device != "auto":
            raise SpecdecError(f"a device map chooses the devices by itself; leave out device={device!r}.")
    elif ranks.world() == 1:
        why = f"{spread} needs several processes"
        raise SpecdecError(f"{why}; start them with torchrun --nproc-per-node 2 -m specdec ...")
    elif device == "cpu" and torch.cuda.is_available():
        why = "transformers shares a target among GPUs where there are some"
        raise SpecdecError(f"{why}; hide them for {spread} on a CPU.")
    if importlib.util.find_spec("accelerate") is None:
        raise SpecdecError(f"spread={spread!r} needs the package accelerate; pip install accelerate.")


def check_heads(config) -> None:
    """Refuse attention heads that do not divide among the ranks. config: of the target's text part."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = setting(config, name)
        if isinstance(heads, int) and heads % ranks.world():
            kind = "key-value heads" if "key" in name else "attention heads"
            fitting = [str(count) for count in range(1, heads + 1) if heads % count == 0]
            why = f"the target's {heads} {kind} do not divide among {ranks.world()} processes"
            raise SpecdecError(f"{why}; start a number that divides them ({', '.join(fitting)}).")


def loading_arguments(spread: str, device: torch.device) -> dict:
    """The arguments for `from_pretrained`. Joins the other ranks, if any."""
    if spread in MAPS:
        return {"device_map": spread}
    ranks.join(device.type)
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        why = f"this transformers shares no target ({error})"
        raise SpecdecError(f"{why}; install transformers 5.23 or newer.") from error
    size = {f"{spread}_size": ranks.world()}
    if not size.keys() <= inspect.signature(DistributedConfig).parameters.keys():
        raise SpecdecError(f"this transformers knows no {spread} of a target; install transformers 5.23 or newer.")
    return {"distributed_config": DistributedConfig(**size)}


def whole_head(model: nn.Module) -> nn.Module:
    """The model's own head, gathered on every rank if it is sharded."""
    head = model.get_output_embeddings()
    weight = setting(head, "weight")
    if not hasattr(weight, "full_tensor"):
        return head
    copy = nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None, device="meta")
    for name, share in head.named_parameters():
        copy.register_parameter(name, nn.Parameter(ranks.whole(share.detach()), requires_grad=False))
    return copy


def check_weights(model: nn.Module) -> None:
    """Refuse a model that accelerate keeps partly on disk or on the host."""
    if away := sum(weight.device.type == "meta" for weight in model.parameters()):
        raise SpecdecError(
            f"{away} weights of the target do not fit on the devices here, and decoding from disk or from the host is not "
            "supported; use a smaller dtype, more GPUs or a smaller target."
        )


def prepare_for_drafters(model: nn.Module, spread: str) -> nn.Module:
    """The loaded model with all weights on devices and, with tp, its whole embedding on every rank, as drafters need it."""
    check_weights(model)
    if spread == TP:
        embedding = model.get_input_embeddings()  # every drafter reads it, token by token
        embedding.weight = nn.Parameter(ranks.whole(embedding.weight.detach()), requires_grad=False)
        embedding.__dict__.pop("forward", None)
    return model.eval()


class InStep:
    """Implements `Pair.in_step`: makes the picker, engine and policy of a turn common to all ranks."""

    def picker(self, picker: Picker) -> Picker:
        return RankZeroPicker(picker.warpers, picker.sample, picker.seed)

    def turn(self, engine: LiveEngine, policy: Policy) -> tuple[LiveEngine, Policy]:
        engine.clock = SlowestClock(engine.target.device)
        engine.root, engine.expand = (
            functools.partial(_rank_zero_children, step) for step in (engine.root, engine.expand)
        )
        return engine, RankZeroPolicy(policy) if policy.asks else policy


class RankZeroPicker(Picker):
    """Rank 0's picks."""

    def pick_tree(self, tree, logits: Tensor, committed: Tensor) -> Tensor | None:
        picks = super().pick_tree(tree, logits, committed)
        return None if picks is None else ranks.broadcast_tensor(picks)

    def pick(self, logits: Tensor, ids: Tensor) -> int:
        return int(ranks.broadcast_tensor(torch.tensor(super().pick(logits, ids))))


class RankZeroPolicy(Policy):
    """A policy asked only on rank 0. Its exceptions end the decoding on all ranks."""

    def __init__(self, policy: Policy):
        self.policy, self.asks, self.limits, self.plan = policy, policy.asks, policy.limits, policy.plan

    def reset(self) -> None:
        ranks.on_rank_zero(lambda: begin_turn(self.policy))

    def reseed(self, number: int) -> None:
        ranks.on_rank_zero(lambda: self.policy.reseed(number))

    def answer(self, question):
        return ranks.on_rank_zero(lambda: answer_of(self.policy, question))

    def observe(self, cycle: Cycle) -> None:
        ranks.on_rank_zero(lambda: self.policy.observe(cycle))


class SlowestClock(Clock):
    """Every lap takes as long as on the slowest rank, and a cycle as long as its laps."""

    def stop(self) -> dict[str, float]:
        laps = super().stop()
        laps.pop("total_ms")
        laps = dict(zip(laps, ranks.slowest([*laps.values()]), strict=True))
        return {**laps, "total_ms": sum(laps.values())}


def _rank_zero_children(step: Callable[..., Step], *args) -> Step:
    """A step of the drafter with rank 0's children: tokens int64 and log-probabilities float32, [W, k] each."""
    steps = step(*args)
    try:
        forward = next(steps)
        while True:
            tokens, log_probs = yield forward
            exact = torch.stack((tokens.double(), log_probs.double()))  # ids are below 2**53
            both = ranks.broadcast_tensor(exact)
            forward = steps.send((both[0].to(tokens.dtype), both[1].to(log_probs.dtype)))
    except StopIteration as finished:
        return finished.value
