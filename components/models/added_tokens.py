"""``model.add_tokens``: special tokens for a tokenizer, and their rows in the embedding and the head."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from components.contracts.configs import WeightSource


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add those of the special ``tokens`` that the tokenizer lacks."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in tokens if token not in known], special_tokens=True)


def grow_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise the vocabulary size in ``config`` to the number of the tokenizer's tokens, if it is smaller."""
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, len(tokenizer))


def with_added_rows(
    weights: WeightSource, stored: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]
) -> WeightSource:
    """Return ``weights``, which have the shapes ``stored``, with rows added to reach the shapes ``wanted``.

    A new row is the mean of the stored rows, in their dtype. Such a row changes the model's distribution over
    the other tokens least (Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    """
    grown = {name: shape[0] for name, shape in wanted.items() if shape != stored[name]}

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        if name not in grown:
            return weights(name, index)
        rows = weights(name)
        mean = rows.float().mean(dim=0, keepdim=True).to(rows.dtype)
        added = mean.expand(grown[name] - len(rows), *mean.shape[1:])
        return torch.cat([rows, added])[index]

    return read
