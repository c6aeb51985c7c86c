"""A GPU's attention on a CPU: particular about addresses, with a memory order of its own."""

import torch.nn.functional as F

from specdec.models import kv_cache

BYTES = 16
plain_attention = F.scaled_dot_product_attention


def misaligned(tensor):
    """Whether a row of [..., M] begins where a GPU's kernels cannot read it."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return True
    rows = [step * tensor.element_size() % BYTES for step in steps if step != 1]
    return any(rows) or tensor.data_ptr() % BYTES != 0


def particular_attention(query, key, value, attn_mask=None, *args, **kwargs):
    """The same result with heads after rows in memory, or a misaligned address."""
    tensors = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        tensors["mask"] = attn_mask
    for name, tensor in tensors.items():
        if misaligned(tensor):
            raise RuntimeError(f"misaligned address: {name} {tuple(tensor.shape)}")
    attended = plain_attention(query, key, value, attn_mask, *args, **kwargs)
    return attended.transpose(1, 2).contiguous().transpose(1, 2)


def stand_in(monkeypatch):
    """Attention as on a GPU, for our own layers and those of transformers."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", particular_attention)
    monkeypatch.setattr(kv_cache, "STACKING", ())
