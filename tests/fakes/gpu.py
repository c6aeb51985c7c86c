"""A GPU on a CPU: attention that is particular about addresses, and a device apart from the host."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

BYTES = 16
plain_attention = F.scaled_dot_product_attention
calls = []


def misaligned(tensor):
    """Whether a row of [..., M] begins where a GPU's kernels cannot read it."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return True
    rows = [step * tensor.element_size() % BYTES for step in steps if step != 1]
    return any(rows) or tensor.storage_offset() * tensor.element_size() % BYTES != 0


def particular_attention(query, key, value, attn_mask=None, *args, **kwargs):
    """The same result with heads after rows in memory, or a misaligned address."""
    tensors = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        tensors["mask"] = attn_mask
    for name, tensor in tensors.items():
        if misaligned(tensor):
            raise RuntimeError(f"misaligned address: {name} {tuple(tensor.shape)}")
    calls.append(tensors.keys())
    attended = plain_attention(query, key, value, attn_mask, *args, **kwargs)
    return attended.transpose(1, 2).contiguous().transpose(1, 2)


def stand_in(monkeypatch):
    """Attention as on a GPU, for our own layers and those of transformers."""
    from specdec.models import kv_cache

    monkeypatch.setattr(F, "scaled_dot_product_attention", particular_attention)
    monkeypatch.setattr(kv_cache, "STACKING", ())


@pytest.fixture(scope="session", autouse=True)
def attention_as_on_a_gpu():
    """With `-p fakes.gpu`, all tests of a run."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield
    assert calls


_setup_privateuseone_for_python_backend()
torch.privateuseone.synchronize = lambda device=None: None
DEVICE = torch.device("privateuseone", 0)
MOVES = ("aten::to", "aten::_to_copy", "aten::copy_")
# what makes the host wait: values, and results whose size depends on values
READS = "_local_scalar_dense equal is_nonzero item nonzero masked_select unique_dim _unique2".split()


class OnDevice(torch.Tensor):
    """A tensor of the device; `plain` holds its values."""

    @staticmethod
    def __new__(cls, plain):
        layout = {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
        with torch.inference_mode(plain.is_inference()):
            tensor = torch.Tensor._make_wrapper_subclass(
                cls, plain.shape, dtype=plain.dtype, device=DEVICE, **layout
            )
        tensor.plain = plain
        return tensor

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of the device's mode")


class FakeDevice(TorchDispatchMode):
    """Runs what is asked of the device, refuses tensors of the host there, counts the traffic."""

    def __init__(self):
        super().__init__()
        self.counts = {"reads": 0, "uploads": 0}

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is an upload
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        apart = [isinstance(tensor, OnDevice) for tensor in tensors]
        place = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        here = any(apart) if place is None else place == DEVICE

        # 1. moves between the two; nothing else takes tensors of both
        if schema.name in MOVES:
            here = apart[0] if schema.name == "aten::copy_" else here
            self.counts["reads"] += apart[-1] and not here
            self.counts["uploads"] += here and not apart[-1]
        elif any(apart):
            strange = [tensor.shape for tensor, on in zip(tensors, apart, strict=True) if not on]
            if any(map(len, strange)):
                raise RuntimeError(f"{schema.name} of the device with {strange} of the host")
            masks = [t for t in tensors[1:] if t.dtype == torch.bool and "index" in schema.name]
            waits = schema.name.removeprefix("aten::") in READS
            self.counts["reads"] += waits or any("::index" in schema.name for _ in masks)

        # 2. the operation on the values
        owners = {id(t.plain): t for t in tensors if isinstance(t, OnDevice)}
        plain = [leaf.plain if isinstance(leaf, OnDevice) else leaf for leaf in leaves]
        plain = [torch.device("cpu") if leaf == DEVICE else leaf for leaf in plain]
        args, kwargs = tree_unflatten(plain, form)
        result = func(*args, **kwargs)
        if not here:
            return result


        def owned(tensor):
            return owners[id(tensor)] if id(tensor) in owners else OnDevice(tensor)

        return tree_map_only(torch.Tensor, owned, result)
