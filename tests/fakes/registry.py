"""Tiny random models of every causal LM that transformers registers.

They are made by the names of their configs' fields.

`verdict(name)` says how one of them decodes.
"""

from __future__ import annotations

import inspect

import torch
import transformers as hf
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import specdec

NAMES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, LAYERS, NEW = 160, 4, 12
FIELDS = {
    VOCAB: """
        vocab_size vocab_size_per_layer_input unpadded_vocab_size output_vocab_size n_words
    """,
    32: """
        hidden_size d_model n_embd embedding_size word_embed_proj_dim backbone_hidden_size
        emb_dim attention_hidden_size
    """,
    48: """
        intermediate_size ffn_dim d_ff d_inner decoder_ffn_dim encoder_ffn_dim n_inner
        ffn_hidden_size dff dim_ff intermediate_size_mlp prefix_dense_intermediate_size
    """,
    LAYERS: """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers
        num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads swa_num_attention_heads num_local_experts num_experts
        n_routed_experts moe_num_experts
    """,
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk
        top_k_experts moe_k
    """,
    8: """
        head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim rotary_dim kv_channels
        swa_head_dim query_pre_attn_scalar attention_head_dim hidden_size_per_layer_input
        laurel_rank dim_head sliding_window sliding_window_size
    """,
    16: """
        q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size
        shared_intermediate_size
    """,
    1: """
        n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts
        num_kv_shared_layers
    """,
    256: """
        max_position_embeddings n_positions n_ctx max_seq_len
    """,
    False: """
        tie_word_embeddings
    """,
}
SIZES = {name: size for size, names in FIELDS.items() for name in names.split()}
IDS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=0)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16)
OWN = {  # what the names of fields do not tell
    "bamba": MAMBA,
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_v2": dict(num_experts_per_tok=2, n_routed_experts=4),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "granitemoehybrid": MAMBA,
    "mamba2": dict(num_heads=4, head_dim=16),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=8),
    "lfm2_moe": dict(layer_types=["full_attention"] * LAYERS),
    "reformer": dict(axial_pos_embds=False),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1),
}


def config_of(kind: type, **own):
    """A config with small sizes. Fields that list something per layer keep their kinds in turn."""
    usual, settings = kind().to_dict(), {}
    parts = {
        name: part for name, part in vars(kind()).items() if isinstance(part, hf.PreTrainedConfig)
    }
    for name in inspect.signature(kind.__init__).parameters:
        value = usual.get(name)
        if name in parts:
            settings[name] = config_of(type(parts[name])).to_dict()
        elif (
            isinstance(value, list | tuple)
            and value
            and len(value) == usual.get("num_hidden_layers")
        ):
            kinds = list({str(one): one for one in value}.values())
            settings[name] = (kinds * LAYERS)[:LAYERS]
        elif name in IDS:
            settings[name] = IDS[name]
        elif name in SIZES and (
            value is not None or name in ("head_dim", "num_key_value_heads", "kv_channels")
        ):
            settings[name] = SIZES[name]
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return kind(**settings | own)


def model_of(name: str) -> nn.Module:
    """The family's model with random weights, so wide that texts do not repeat one token."""
    kind = CONFIG_MAPPING[name]
    made = CLASSES[kind][0] if isinstance(CLASSES[kind], tuple) else CLASSES[kind]
    config = config_of(made.config_class or kind, **OWN.get(name, {}))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = made(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape)
            weight.copy_(0.25 * noise if weight.ndim > 1 else weight + 0.1 * noise)
    return model


def verdict(name: str) -> tuple[str, str]:
    """("right" | "wrong" | "refused" | "not made", what was wrong or missing) of a family."""
    try:
        model = model_of(name)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()}"
    generator, policy = torch.Generator().manual_seed(1), specdec.Static(6, 2, 2)
    prompts = [torch.randint(2, VOCAB, (1, count), generator=generator) for count in (27, 3)]
    ids, settings = [prompt[0].tolist() for prompt in prompts], dict(max_new_tokens=NEW)
    settings |= dict(stop_tokens=())
    try:
        pair = specdec.load_pair(target=model, drafter="suffix")
        greedy = {
            "text": [specdec.decode(pair, prompt, policy, **settings) for prompt in ids],
            "text in a batch": specdec.decode_many(pair, ids, policy, **settings),
            "plain text in a batch": specdec.decode_many(pair, ids, plain=True, **settings),
        }
        sampled = specdec.decode(pair, ids[1], policy, temperature=1.0, **settings).tokens
        plain = specdec.autoregress(pair, ids[1], temperature=1.0, **settings).tokens
    except specdec.SpecdecError as error:
        return "refused", str(error)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    truth = []
    for prompt in prompts:
        text = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        truth.append(text[0, prompt.shape[1] :].tolist())
    for what, texts in greedy.items():
        if [text.tokens for text in texts] != truth:
            return "wrong", what
    return ("right", "") if sampled == plain else ("wrong", "sampled text")
