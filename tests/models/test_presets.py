"""The papers' pairs as far as no download is needed: shapes on the meta device.

What config.json of a drafter says is written down from its publishers' training configurations, and
the weights' shapes from EAGLE-3's description, not from our network.
"""

import json

import pytest
import torch
import transformers

from specdec.models import eagle_files
from specdec.models.eagle_drafter import check_fit
from specdec.models.eagle_network import default_taps, network_of
from specdec.models.pairs import PRESETS
from specdec.models.target import Target
from specdec.tools.estimate import shapes_of

HUB = [name for name, preset in PRESETS.items() if "/" in preset.drafter]
OFFICIAL = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
SGLANG = {"architectures": ["Eagle3LlamaForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000}
SGLANG |= {"rope_scaling": None, "attention_bias": False, "head_dim": 128}


def published(name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and tensors of a preset's drafter, as wide as its target."""
    _, hidden, inner, _, heads, kv, head, vocab = PRESETS[name].shape.values()
    drafted = 32000
    raw = SGLANG if PRESETS[name].drafter.startswith("AngelSlim") else OFFICIAL
    raw = {**raw, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    raw |= {"num_key_value_heads": kv, "vocab_size": vocab, "draft_vocab_size": drafted}
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (drafted, hidden),
        "norm": (hidden,),
        "midlayer.self_attn.q_proj": (heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv * head, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv * head, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
    }
    tensors = {}
    for part, shape in shapes.items():
        tensors[f"{part}.weight"] = torch.empty(shape, device="meta")
    tensors["d2t"] = torch.empty(drafted, device="meta")
    tensors["t2d"] = torch.empty(vocab, device="meta")
    return raw, tensors


@pytest.mark.parametrize("name", HUB)
def test_target_and_drafter_fit(name, tmp_path, monkeypatch):
    config, counted = shapes_of(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    target = Target(model)
    raw, tensors = published(name)
    official = {part.replace("midlayer.", "layers.0."): value for part, value in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(eagle_files, "read_tensors", lambda folder: official)
    shape, renamed = eagle_files.read_checkpoint(tmp_path)
    assert renamed == tensors
    with torch.device("meta"):
        expected = network_of(shape).state_dict()
    shapes = {part: value.shape for part, value in expected.items()}
    assert {part: value.shape for part, value in tensors.items()} == shapes
    check_fit(shape, default_taps(target.num_layers), target)
    # what an estimate counts where no weights are at hand
    assert {part: value.shape for part, value in counted.state_dict().items()} == shapes
