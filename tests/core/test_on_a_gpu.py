"""What a GPU would refuse, found without one."""

import pytest
from fakes.gpu import stand_in

import specdec

PROMPTS = [list(range(5, 25)), list(range(40, 71)), [7, 8, 9]]
SETTINGS = {"max_new_tokens": 40, "stop_tokens": ()}
SAMPLED = {"temperature": 1.0, "seed": 3, "top_p": 0.95}


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_attention_as_on_a_gpu_gives_the_same_texts(name, dtype, sampling, monkeypatch):
    pair = specdec.load_pair(name, dtype=dtype, device="cpu")
    options = SETTINGS | sampling
    tree = specdec.Static(12, 4, 3)
    texts = [specdec.decode(pair, prompt, tree, **options).tokens for prompt in PROMPTS]
    stand_in(monkeypatch)
    single = [specdec.decode(pair, prompt, tree, **options).tokens for prompt in PROMPTS]
    plain = [specdec.autoregress(pair, prompt, **options).tokens for prompt in PROMPTS]
    many = specdec.decode_many(pair, PROMPTS, tree, **options)
    together = [generation.tokens for generation in many]
    # bfloat16 rounds other orders of sums differently, so near-ties may fall either way
    if dtype == "float32":
        assert single == plain == together == texts
    assert [len(text) for text in single + plain + together] == [40] * 9
