"""The papers' pairs as far as no download is needed: shapes on the meta device.

What config.json of a drafter says is written down from its publishers' training configurations, and
the weights' shapes from EAGLE-3's description, not from our network.
"""

import pytest
import torch

from specdec.core.tree_config import TREES
from specdec.models import drafters
from specdec.models import eagle_files as checkpoints
from specdec.models.eagle_drafter import check_fit
from specdec.models.eagle_network import default_taps, network_of
from specdec.models.load import PRESETS, SHIPPED, is_hub_id
from specdec.models.target import Target
from specdec.tools.estimate import shapes_of

HUB = [name for name, preset in PRESETS.items() if "/" in preset.drafter]
OFFICIAL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
SGLANG = OFFICIAL | {
    "architectures": ["Eagle3LlamaForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
SGLANG |= {"rope_scaling": None, "attention_bias": False, "head_dim": 128}
# a drafter narrower than its target, as the one of the 70B is
NARROW = {"hidden": 6144, "inner": 16384, "heads": 48}


def published(name: str, **narrow) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and tensors of a preset's drafter, as wide as its target unless `narrow`."""
    _, target_hidden, inner, _, heads, kv, head, vocab = PRESETS[name].shape.values()
    hidden, inner = narrow.get("hidden", target_hidden), narrow.get("inner", inner)
    heads, drafted = narrow.get("heads", heads), 32000
    raw = SGLANG if PRESETS[name].drafter.startswith("AngelSlim") else OFFICIAL
    raw = raw | {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    raw |= {"num_key_value_heads": kv, "vocab_size": vocab, "draft_vocab_size": drafted}
    shapes = {"fc": (hidden, 3 * target_hidden), "lm_head": (drafted, hidden), "norm": (hidden,)}
    shapes |= {f"midlayer.self_attn.{part}_proj": (kv * head, 2 * hidden) for part in "kv"}
    shapes |= {"midlayer.self_attn.q_proj": (heads * head, 2 * hidden)}
    shapes |= {"midlayer.self_attn.o_proj": (hidden, heads * head)}
    shapes |= {f"midlayer.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
    shapes |= {"midlayer.mlp.down_proj": (hidden, inner)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{norm}": (hidden,) for norm in norms}
    if narrow:
        raw["target_hidden_size"], shapes["embed_tokens"] = target_hidden, (vocab, hidden)
    tensors = {
        f"{part}.weight": torch.empty(shape, device="meta") for part, shape in shapes.items()
    }
    return raw, tensors | {
        "d2t": torch.empty(drafted, device="meta"),
        "t2d": torch.empty(vocab, device="meta"),
    }


def test_the_papers_pairs_are_there():
    llama, qwen = (
        "llama-3.1-8b llama-3.3-70b vicuna-13b deepseek-r1-8b",
        "qwen3-8b qwen3-14b qwen3-32b",
    )
    assert set(HUB) == {*llama.split(), *qwen.split()}
    assert not set(SHIPPED) & set(PRESETS)
    for preset in PRESETS.values():
        assert preset.tree in TREES
        for place in (preset.target, preset.drafter):
            assert place == PRESETS["smollm2"].target or place == "smollm2" or is_hub_id(place)


@pytest.mark.parametrize(
    ("name", "narrow"), [*((name, {}) for name in HUB), ("llama-3.3-70b", NARROW)]
)
def test_target_and_drafter_fit(name, narrow, tmp_path):
    config, counted = shapes_of(name)
    target = Target(drafters.on_meta(config))
    raw, tensors = published(name, **narrow)
    fields = checkpoints.Fields(tmp_path, raw)
    named = {part.replace("midlayer.", "layers.0."): tensor for part, tensor in tensors.items()}
    for given in (tensors, named):
        read = checkpoints._official_names(tmp_path, given)
        layout = checkpoints._layout(fields, read)
        shape = checkpoints._eagle_config(fields, layout, read)
        with torch.device("meta"):
            expected = network_of(shape).state_dict()
        assert {part: tensor.shape for part, tensor in read.items()} == {
            p: t.shape for p, t in expected.items()
        }
        check_fit(shape, default_taps(target.num_layers), target)
        assert layout == "official"
    if not narrow:  # what an estimate counts where no weights are at hand
        assert {p: t.shape for p, t in counted.state_dict().items()} == {
            p: t.shape for p, t in expected.items()
        }
    else:
        weights = sum(
            tensor.numel() for part, tensor in tensors.items() if part not in ("d2t", "t2d")
        )
        own = tensors["embed_tokens.weight"].numel()
        assert weights - own < sum(weight.numel() for weight in counted.parameters()), (
            "an upper bound is counted"
        )
