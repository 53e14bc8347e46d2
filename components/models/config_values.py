"""Find values in a model's configuration with which the model cannot be built or trained."""

import copy
import re
from collections.abc import Callable
from contextlib import suppress

from transformers import PreTrainedConfig

from components.contracts.errors import ConfigError
from components.json_text import leaves
from components.models.hf_config import INVALID, reads_sliding_window

UNBUILDABLE = (*INVALID, AssertionError, ImportError, IndexError, RuntimeError, ZeroDivisionError)
"""Exceptions of transformers and torch for models that they cannot build."""

RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (r".*", lambda x: abs(x) < 2**63, "a finite number"),
    (r"num_(hidden_layers|attention_heads|key_value_heads)", lambda x: x >= 1, "1 or more"),
    (r"max_position_embeddings|(?!shared_)\w+_(size|dim|rank)", lambda x: x >= 1, "1 or more"),
    (r"\w*(dropout|pdrop)", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    (r"\w*(eps|epsilon)|initializer_range|\w+_std", lambda x: x >= 0, "0 or more"),
    (r"(.*\.)?(rope_theta|factor|partial_rotary_factor)", lambda x: x > 0, "above 0"),
)
"""Pattern of a field's name, condition on the field's value, and the same condition in words."""


def check_values(config: PreTrainedConfig, prefix: str) -> None:
    """Raise ConfigError if a number in ``config`` is out of range, naming it with ``prefix`` in front."""
    names = {own: common for common, own in config.attribute_map.items()}
    for name, value in leaves(config.to_dict()):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        for pattern, holds, words in RANGES:
            if re.fullmatch(pattern, names.get(name, name)) and not holds(value):
                raise ConfigError(f"{prefix}{name}: is {value}; use a value that is {words}.")
    window = getattr(config, "sliding_window", None) if reads_sliding_window(config) else None
    if window is not None and window < 1:
        raise ConfigError(f"{prefix}sliding_window: is {window}; use 1 or more, or null for no window.")
    # torch takes a negative one for a token at the end of the vocabulary, and does not train its embedding.
    pad, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if pad is not None and size is not None and not 0 <= pad < size:
        raise ConfigError(
            f"{prefix}pad_token_id: is {pad}, but the tokens are 0 to {size - 1}; use one of them, or null."
        )


def wrong_field(config: PreTrainedConfig, build: Callable[[PreTrainedConfig], object]) -> str | None:
    """Return the first field whose default value makes ``build`` succeed. None means that there is none."""
    for name in config.to_diff_dict():
        other = copy.deepcopy(config)
        with suppress(*UNBUILDABLE):
            setattr(other, name, getattr(type(config)(), name))
            build(other)
            return name
    return None
