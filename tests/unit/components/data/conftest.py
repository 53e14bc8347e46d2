"""The tokenizer of the embedded data, for the tests in this folder."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.data.tokenizer import PATH


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(PATH)
    return tokenizer
