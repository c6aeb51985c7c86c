"""What a tree, a cache, a drafter or a policy would take, in bytes, and one refusal of what does not fit, before it is made.

A tree's size follows from its numbers alone, so it is refused wherever those are written down: by a TreeConfig.
Knows nothing about models and files.
"""

from __future__ import annotations

from pathlib import Path

from specdec.errors import SpecdecError

GIB = 1 << 30
MOST_TREE_BYTES = 4 * GIB  # more than this no cycle can handle in a reasonable time on any machine
SMALL_BYTES = 64 << 20  # not worth asking the system for
ADVICE = "lower max_new_tokens, shorten the prompt or use a smaller tree"
NODE_BYTES = 40  # token, parent, depth, score and rank of a candidate


def tree_bytes(total_tokens: int, candidates: int) -> int:
    """The candidates, and the mask [N, N] of the verified nodes, as flags and as float32."""
    return NODE_BYTES * candidates + 5 * total_tokens**2


def refuse_tree(total_tokens: int, candidates: int) -> None:
    """SpecdecError for a tree that no machine should be asked for."""
    if (size := tree_bytes(total_tokens, candidates)) > MOST_TREE_BYTES:
        raise SpecdecError(
            f"a tree of total_tokens={total_tokens} out of {candidates} candidates takes {size / GIB:,.0f} GiB per text; "
            "lower total_tokens, depth, top_k or beam."
        )


def refuse(what: str, size: int, device="cpu", advice=ADVICE) -> None:
    """SpecdecError where `size` bytes for `what` are more than `device` has free."""
    free = free_bytes(device) if size > SMALL_BYTES else None
    if free is not None and size > free:
        raise SpecdecError(f"{what} takes {size / GIB:,.1f} GiB and {free / GIB:,.1f} GiB are free; {advice}.")


def free_bytes(device="cpu") -> int | None:
    """Memory that can be taken without swapping; None where the system does not say."""
    if getattr(device, "type", device) == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
