"""A GPU on a CPU: attention particular about addresses, and a device apart from the host."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

plain_attention = F.scaled_dot_product_attention
attended = []


def particular_attention(query, key, value, attn_mask=None, *args, **kwargs):
    """The same result with heads after rows in memory, or a misaligned address."""
    # transformers' own masks are bool, which torch converts itself
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    for tensor in (query, key, value, *[attn_mask] * additive):
        sizes = zip(tensor.stride(), tensor.shape, strict=True)
        steps = [step for step, size in sizes if size > 1 and step != 1]
        # rows that do not begin at multiples of 16 bytes
        places = [place * tensor.element_size() % 16 for place in (tensor.storage_offset(), *steps)]
        if any(places) or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            raise RuntimeError(f"misaligned address: {tuple(tensor.shape)}")
    attended.append(query.shape)
    result = plain_attention(query, key, value, attn_mask, *args, **kwargs)
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def stand_in(monkeypatch):
    """Attention as on a GPU, for our own layers and those of transformers."""
    from specdec.models import kv_cache

    monkeypatch.setattr(F, "scaled_dot_product_attention", particular_attention)
    monkeypatch.setattr(kv_cache, "STACKING", ())


@pytest.fixture(scope="session", autouse=True)
def attention_as_on_a_gpu():
    """In all tests of a run with `-p fakes.gpu`."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield
    assert attended


_setup_privateuseone_for_python_backend()
DEVICE = torch.device("privateuseone", 0)
MODULE = torch.get_device_module(DEVICE)
MODULE.synchronize = lambda device: None
MODULE.is_available = lambda: False  # other tests of this process see no accelerator
MOVES = ("to", "_to_copy", "copy_")
# what the host waits for: values, and results whose size depends on values
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")


class OnDevice(torch.Tensor):
    """A tensor of the device; `plain` holds its values."""

    @staticmethod
    def __new__(cls, plain):
        layout = {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
        layout |= {"dtype": plain.dtype, "device": DEVICE}
        with torch.inference_mode(plain.is_inference()):
            tensor = torch.Tensor._make_wrapper_subclass(cls, plain.shape, **layout)
        tensor.plain = plain
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} without the device")

    def tolist(self):
        return self.cpu().tolist()

    def new_tensor(self, values):
        return torch.tensor(values, dtype=self.dtype, device=DEVICE)


def mapped(function, value):
    """The same lists and tuples with `function` of every leaf."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, part) for part in value)
    return function(value)


class FakeDevice(TorchDispatchMode):
    """Runs what is asked of the device, refuses tensors of the host there, counts the traffic."""

    reads = uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # 1. what it is asked of
        name = func._schema.name.removeprefix("aten::")
        tensors, places = [], []

        def plain(leaf):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            if isinstance(leaf, torch.device):
                places.append(leaf)
                return torch.device("cpu") if leaf == DEVICE else leaf
            return leaf.plain if isinstance(leaf, OnDevice) else leaf

        values = mapped(plain, args)
        options = {key: mapped(plain, value) for key, value in (kwargs or {}).items()}
        owners = {id(tensor.plain): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
        here = places[0] == DEVICE if places else bool(owners)

        # 2. moves between host and device; nothing else takes tensors of both
        if name in MOVES:
            here = isinstance(tensors[0], OnDevice) if name == "copy_" else here
            source = isinstance(tensors[-1], OnDevice)
            self.reads += source and not here
            self.uploads += here and not source
        elif owners and name == "_has_compatible_shallow_copy_type":
            return False
        elif owners:
            if any(tensor.ndim for tensor in tensors if not isinstance(tensor, OnDevice)):
                raise RuntimeError(f"{func} of the device with a tensor of the host")
            by_mask = any(tensor.dtype == torch.bool for tensor in tensors[1:])
            self.reads += name in READS or (by_mask and name.startswith("index"))

        # 3. the operation on the values
        def owned(leaf):
            if not here or not isinstance(leaf, torch.Tensor):
                return leaf
            return owners[id(leaf)] if id(leaf) in owners else OnDevice(leaf)

        return mapped(owned, func(*values, **options))


class HostNoise(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls)


def fake_device(monkeypatch):
    """A fixture: the device, which takes tensors for the length of a test."""
    monkeypatch.setattr(torch, "Generator", HostNoise)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is an upload
    with FakeDevice() as device:
        yield device
    torch._C._set_only_lift_cpu_tensors(False)
