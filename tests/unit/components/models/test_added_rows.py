"""Rows of added tokens, and the options that cannot add any."""

import pytest
import torch

from components.contracts.errors import ConfigError
from components.models import ModelSpec
from components.models.added_tokens import with_added_rows


def test_a_new_row_is_the_mean_of_the_stored_ones() -> None:
    tensors = {"embed": torch.randn(7, 4, dtype=torch.bfloat16), "norm": torch.randn(4)}
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    read = with_added_rows(
        lambda name, index=(): tensors[name][index], stored, stored | {"embed": torch.Size((9, 4))}
    )
    whole = read("embed")
    assert whole.dtype == torch.bfloat16
    torch.testing.assert_close(whole[:7], tensors["embed"], rtol=0, atol=0)
    mean = tensors["embed"].float().mean(0).bfloat16()
    torch.testing.assert_close(whole[7:], mean.expand(2, 4), rtol=0, atol=0)
    torch.testing.assert_close(read("embed", (slice(6, 9), slice(1, 3))), whole[6:9, 1:3], rtol=0, atol=0)
    torch.testing.assert_close(read("norm", (slice(1, 2),)), tensors["norm"][1:2], rtol=0, atol=0)


def test_only_lacking_tokens_are_added() -> None:
    words = ModelSpec(
        architecture={"model_type": "llama"}, add_tokens=("<|im_end|>", "<new>")
    ).load_tokenizer()
    assert len(words) == 8193
    assert words.tokenize("a<new>")[-1] == "<new>"


@pytest.mark.parametrize("template", [None, "own.jinja"])
def test_tokens_of_an_unknown_template(template: str | None) -> None:
    with pytest.raises(ConfigError, match=r"model.add_tokens: is true.*\(chatml, llama3, plain\); name one"):
        ModelSpec(architecture={"model_type": "llama"}, chat_template=template, add_tokens=True)
