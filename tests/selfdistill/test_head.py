import pytest
import torch
import transformers

from nlhf.errors import UserError
from selfdistill.head import Head

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS = {
    "qwen3": ("Qwen3", {}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2_softcap": ("Gemma2", {"final_logit_softcapping": 0.05, "sliding_window": 8}),
    "cohere_scale": ("Cohere", {"logit_scale": 0.0625}),
    "granite_scaling": ("Granite", {"logits_scaling": 8.0}),
    "phi_bias": ("Phi", {}),
}


def tiny(name, **options):
    family, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY | own | options)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_models_own(name):
    model = tiny(name)
    if name == "phi_bias":
        torch.nn.init.normal_(model.lm_head.bias)
    ids = torch.randint(3, 40, (2, 7))
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        expected = model(ids).logits
        torch.testing.assert_close(Head.of(model).logits(hidden), expected)
        torch.testing.assert_close(Head.of(model, temperature=0.7).logits(hidden), expected / 0.7)


def test_the_weight_is_the_models_and_not_a_copy():
    model = tiny("qwen3_tied")
    assert Head.of(model).weight is model.get_input_embeddings().weight


def test_an_adapter_elsewhere_is_welcome_and_on_the_head_is_refused():
    import peft

    adapted = peft.get_peft_model(tiny("qwen3"), peft.LoraConfig(target_modules=["q_proj"]))
    assert Head.of(adapted).weight.shape == (40, 16)
    with pytest.raises(UserError, match="target_modules"):
        Head.of(peft.get_peft_model(tiny("qwen3"), peft.LoraConfig(target_modules=["lm_head"])))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UserError, match="causal language model"):
        Head.of(tiny("qwen3").base_model)
