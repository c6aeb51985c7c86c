"""A GPU on a CPU: attention that is particular about addresses, and a device apart from the host."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
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
MOVES = ("to", "_to_copy", "copy_")
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

    def new_tensor(self, values):
        return torch.tensor(values, dtype=self.dtype, device=DEVICE)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of the device's mode")


def mapped(function, value):
    """The same arguments with `function` of every leaf."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, part) for part in value)
    return function(value)


class FakeDevice(TorchDispatchMode):
    """Runs what is asked of the device, refuses tensors of the host there, counts the traffic."""

    def __init__(self):
        super().__init__()
        self.reads = self.uploads = 0

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is an upload
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # 1. what it is asked of
        name = func._schema.name.removeprefix("aten::")
        tensors, places = [], []

        def plain(leaf):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                return leaf.plain if isinstance(leaf, OnDevice) else leaf
            if isinstance(leaf, torch.device):
                places.append(leaf)
                return torch.device("cpu") if leaf == DEVICE else leaf
            return leaf

        values = mapped(plain, args)
        options = {key: mapped(plain, value) for key, value in (kwargs or {}).items()}
        apart = [isinstance(tensor, OnDevice) for tensor in tensors]
        here = places[0] == DEVICE if places else any(apart)

        # 2. moves between host and device; nothing else takes tensors of both
        if name in MOVES:
            here = apart[0] if name == "copy_" else here
            self.reads += apart[-1] and not here
            self.uploads += here and not apart[-1]
        elif any(apart) and name == "_has_compatible_shallow_copy_type":
            return False
        elif any(apart):
            host = [tensor for tensor, on in zip(tensors, apart, strict=True) if not on]
            if any(tensor.ndim for tensor in host):
                raise RuntimeError(f"{func} of the device with {host} of the host")
            by_mask = any(tensor.dtype == torch.bool for tensor in tensors[1:])
            self.reads += name in READS or (by_mask and name.startswith("index"))

        # 3. the operation on the values
        result = func(*values, **options)
        owners = {id(tensor.plain): tensor for tensor, on in zip(tensors, apart, strict=True) if on}

        def owned(leaf):
            if not here or not isinstance(leaf, torch.Tensor):
                return leaf
            return owners[id(leaf)] if id(leaf) in owners else OnDevice(leaf)

        return mapped(owned, result)


class HostNoise(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls)


@pytest.fixture
def device(monkeypatch):
    """A device that takes tensors for the length of a test."""
    monkeypatch.setattr(torch, "Generator", HostNoise)
    with FakeDevice() as device:
        yield device
