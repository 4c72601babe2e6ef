"""The cache with room to grow holds exactly what transformers' own holds, through growth, selection and copies."""

import pytest
import torch
from transformers import DynamicCache

from nlhf.generation.kv_cache import RoomyLayer, new_cache
from nlhf.generation.prefill import read, select
from nlhf.models import ModelConfig, load_config, load_model


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_model(ModelConfig(tiny_model), device="cpu")


def states(rows, new, seed):
    torch.manual_seed(seed)
    return torch.randn(rows, 2, new, 4), torch.randn(rows, 2, new, 4)


def test_appended_is_what_was_given_beyond_any_room():
    """Steps of one token over two regrowths, after a prompt longer than the room."""
    layer, keys, values = RoomyLayer(), [], []
    for n, new in enumerate([100, *[1] * 150]):
        key, value = states(3, new, seed=n)
        keys.append(key)
        values.append(value)
        found = layer.update(key, value)
    assert layer.get_seq_length() == 250
    assert torch.equal(found[0], torch.cat(keys, dim=-2))
    assert torch.equal(found[1], torch.cat(values, dim=-2))


def test_a_token_is_written_and_nothing_is_copied():
    layer = RoomyLayer()
    before, _ = layer.update(*states(2, 5, seed=0))
    after, _ = layer.update(*states(2, 1, seed=1))
    assert after.data_ptr() == before.data_ptr()


def test_selected_rows_and_those_they_came_from_do_not_write_into_each_other(model):
    cache = new_cache(model.config)
    for i in range(len(cache.layers)):
        cache.update(*states(3, 5, seed=i), i)
    chosen = select(cache, torch.tensor([0, 1, 2]))
    expected = cache.layers[0].keys.clone()
    new = [states(3, 1, seed=s) for s in (7, 8)]
    for one, (key, value) in zip((cache, chosen), new, strict=True):
        one.update(key, value, 0)
    for one, (key, _) in zip((cache, chosen), new, strict=True):
        assert torch.equal(one.layers[0].keys, torch.cat([expected, key], dim=-2))


def test_the_model_computes_the_same_with_either_cache(model):
    """A prompt with padding, tokens one by one, rows dropped on the way."""
    ids = torch.randint(0, 255, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 30, dtype=torch.long)
    mask[1, :7] = 0

    def logits(cache):
        with torch.no_grad():
            found = [read(model, ids[:, :20], mask[:, :20], cache)]
            for n in range(20, 25):
                found.append(read(model, ids[:, n : n + 1], mask[:, : n + 1], cache))
            cache.batch_select_indices(torch.tensor([1, 3]))
            for n in range(25, 30):
                found.append(read(model, ids[[1, 3], n : n + 1], mask[[1, 3], : n + 1], cache))
        return found

    for one, other in zip(logits(new_cache(model.config)), logits(DynamicCache(config=model.config)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_layers_with_a_window_are_left_to_transformers(tiny_model):
    config = load_config(tiny_model)
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window, config.use_sliding_window = 4, True
    kinds = [type(layer) for layer in new_cache(config).layers]
    assert kinds[0] is not RoomyLayer
    assert kinds[1] is RoomyLayer
