import pytest

from nlhf.budget import Workload, activation_elements, count_parameters, estimate, format_bytes
from nlhf.errors import UserError
from nlhf.models import ModelConfig, load_config, load_model

GIB = 2**30


def qwen3(**options):
    from transformers import Qwen3Config

    return Qwen3Config(vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, **options)


@pytest.fixture
def qwen3_4b():
    return qwen3(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    )


@pytest.fixture
def small():
    """Hidden 8, one layer, 2 heads of 4, 1 key/value head, MLP 16, 10 tokens, tied embedding."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


SMALL_PARAMETERS = 10 * 8 + (8 * 8 + 2 * 8 * 4 + 8 * 8) + 2 * 4 + 3 * 8 * 16 + 2 * 8 + 8
"""Embedding; queries, keys and values, output; norms of queries and keys; MLP; two norms; last norm."""


def test_parameters_by_hand(small):
    assert count_parameters(small) == SMALL_PARAMETERS == 688


def test_parameters_of_qwen3_4b(qwen3_4b):
    assert count_parameters(qwen3_4b) == pytest.approx(4.02e9, rel=0.01)


def test_parameters_of_qwen3_32b():
    config = qwen3(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        tie_word_embeddings=False,
    )
    assert count_parameters(config) == pytest.approx(32.8e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-4B-Instruct-2507", 4.02),
        ("Qwen/Qwen3-32B", 32.8),
        ("Qwen/Qwen3-30B-A3B", 30.5),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7.62),
    ],
)
def test_architectures_on_board_have_their_published_size(name, billions):
    from transformers import AutoConfig

    from nlhf.models import _known_configs

    config = AutoConfig.for_model(**_known_configs()[name])
    assert count_parameters(config) == pytest.approx(billions * 1e9, rel=0.01)


def test_parameters_of_a_real_model(tiny_model):
    assert count_parameters(load_config(tiny_model)) == load_model(ModelConfig(tiny_model), "cpu").num_parameters()


def test_bytes_by_hand(small):
    """3 rows of 5 + 7 tokens, two passes a step, float32 weights, bfloat16 activations, with reference.

    A layer keeps 5 x 8 + 3 x 8 + 3 x 4 + 4 x 16 = 140 numbers a token; the cache 2 x 1 layer x 1 head x 4 = 8.
    """
    work = Workload(5, 7, per_device_batch=3, gradient_accumulation=2, steps=10, reference=True)
    work.gradient_checkpointing = False
    budget = estimate(small, work)
    n = SMALL_PARAMETERS
    assert (budget.weights, budget.gradients, budget.optimiser, budget.reference) == (4 * n, 4 * n, 8 * n, 2 * n)
    assert budget.activations == 3 * 12 * 140 * 2
    assert budget.logits == 3 * 7 * 10 * 4 * 2
    assert budget.kv_cache == 6 * 12 * 8 * 2
    assert budget.total == 18 * n + budget.activations + budget.logits
    assert (budget.tokens_per_step, budget.generated_per_step) == (6 * 12, 6 * 7)
    assert (budget.tokens_per_run, budget.generated_per_run) == (720, 420)


def test_checkpointing_keeps_layer_inputs_and_one_whole_layer(small):
    small.num_hidden_layers = 4
    assert activation_elements(small, checkpointing=False) == 4 * 140
    assert activation_elements(small, checkpointing=True) == 4 * 8 + 140


def test_experts_count_once_for_each_that_a_token_uses():
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=8,
        moe_intermediate_size=3,
        intermediate_size=99,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    assert activation_elements(config, checkpointing=False) == 5 * 8 + 3 * 8 + 3 * 4 + 4 * 3 * 2


def test_architecture_with_other_names_for_its_sizes():
    from transformers import GPT2Config

    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=10)
    work = Workload(2, 3, weights_dtype="float32", compute_dtype="float32", gradient_checkpointing=False)
    budget = estimate(config, work)
    assert budget.activations == 5 * 4 * 2 * (5 * 8 + 3 * 8 + 3 * 8 + 4 * 32)
    assert budget.kv_cache == 5 * 4 * 2 * 2 * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_takes_sixteen_bytes_a_parameter_in_either_format(small, dtype):
    budget = estimate(small, Workload(1, 1, weights_dtype=dtype, compute_dtype="bfloat16"))
    assert budget.fixed == 16 * SMALL_PARAMETERS


@pytest.mark.parametrize(
    ("sharding", "divided"),
    [
        ("none", set()),
        ("zero2", {"gradients", "optimiser"}),
        ("full", {"weights", "gradients", "optimiser", "reference"}),
    ],
)
def test_sharding_divides_what_it_should(small, sharding, divided):
    alone = estimate(small, Workload(1, 1, reference=True))
    shared = estimate(small, Workload(1, 1, reference=True, processes=4, sharding=sharding))
    for name in ("weights", "gradients", "optimiser", "reference", "activations", "logits", "kv_cache"):
        assert getattr(shared, name) == getattr(alone, name) // (4 if name in divided else 1), name
    assert shared.tokens_per_step == 4 * alone.tokens_per_step


def test_supervised_training_needs_no_cache_and_generates_nothing(small):
    budget = estimate(small, Workload(0, 12, generates=False))
    assert (budget.kv_cache, budget.generated_per_step, budget.generated_per_run) == (0, 0, 0)


def test_peak_is_the_larger_of_training_and_generation(small):
    budget = estimate(small, Workload(5, 7, gradient_accumulation=1000))
    assert budget.kv_cache > budget.activations + budget.logits
    assert budget.total == budget.fixed + budget.kv_cache


def test_warnings_name_the_problem_and_the_way_out(qwen3_4b):
    fine = Workload(4000, 1000, weights_dtype="bfloat16", device_memory=80 * GIB)
    assert estimate(qwen3_4b, fine).warnings == []
    work = Workload(40000, 1000, per_device_batch=8, device_memory=24 * GIB)
    logits, window, memory = estimate(qwen3_4b, work).warnings
    assert "9.06 GiB" in logits  # 8 x 1,000 x 151,936 x 8 bytes
    assert "41000 tokens exceed the model's context of 40960" in window
    assert "a device has 24.00 GiB" in memory


def test_text_says_it_is_an_estimate_and_shows_totals_and_warnings(qwen3_4b):
    budget = estimate(qwen3_4b, Workload(4000, 1000, per_device_batch=8, steps=100))
    text = str(budget)
    assert "estimate" in text
    assert format_bytes(budget.total) in text
    assert "4,022,468,096" in text
    assert "4,000,000 (800,000 generated)" in text
    assert "warning: the logits alone" in text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**19, "1.50 MiB"), (GIB, "1.00 GiB")]
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"completion_tokens": 0}, "completion_tokens"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"processes": 0}, "processes"),
        ({"sharding": "zero9"}, "sharding"),
        ({"weights_dtype": "int8"}, "weights_dtype"),
    ],
)
def test_bad_workload_names_the_field(options, name):
    with pytest.raises(UserError, match=name):
        Workload(**{"prompt_tokens": 1, "completion_tokens": 1, **options})
