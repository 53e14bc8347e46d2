"""Adding a tokenizer to an exported model folder, and generating text with models."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, GENERATION_CONFIG_NAME, logging

from components.accelerator import inference_device
from components.atomic_write import write_atomic
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.tokenize.chat import turn_end
from components.json_text import as_type, read_json
from components.models import nf4
from components.models.scalar_head import is_classifier

BATCH_SIZE = 8
"""Default number of prompts that are completed at once; their caches of keys and values need memory."""


@dataclass(frozen=True)
class StopTokens:
    """The only field of generation_config.json that this program reads; other fields are kept as they are."""

    eos_token_id: int | list[int] | None = None


def read_generation_config(folder: Path) -> Json:
    """Return the generation config in ``folder``, empty if there is none.

    Raises:
        ConfigError: if it is damaged, or its stop tokens are not numbers.
    """
    path = folder / GENERATION_CONFIG_NAME
    found = read_json(path) if path.is_file() else {}
    try:
        as_type(StopTokens, found)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; correct it, or copy the file again.") from error
    return found


def add_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, foreign: Set[int] = frozenset()) -> None:
    """Save ``tokenizer`` next to the weights and set the bos, eos and pad ids in the configurations.

    If config.json has a list of stop tokens, or there is a generation config, their stop tokens are kept, and
    those of the tokenizer are added; the generation config also keeps its other values. The pad id is written
    to config.json only for classifiers, because transformers does not train the embedding of a pad id there.
    The ids in ``foreign`` belong to another tokenizer; bos, eos and pad ids among them are not kept.
    """

    def kept(found: list[int] | int | None) -> list[int] | int | None:
        if isinstance(found, list):
            return [token for token in found if token not in foreign]
        return None if found in foreign else found

    tokenizer.save_pretrained(folder)
    config = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids = config | {"pad_token_id": tokenizer.pad_token_id}
    found = read_json(folder / CONFIG_NAME)
    if is_classifier(folder):
        config = ids
    elif found.get("pad_token_id") in foreign:
        config = config | {"pad_token_id": None}
    stops = found.get("eos_token_id")
    several = kept(stops) if isinstance(stops, list) else None
    if several is not None:
        config = config | {"eos_token_id": with_stops(several, {tokenizer.eos_token_id})}
    amend(folder / CONFIG_NAME, config)
    brought = read_generation_config(folder) or {"eos_token_id": several}
    if not (folder / GENERATION_CONFIG_NAME).is_file():
        GenerationConfig().save_pretrained(folder)
    stops = with_stops(kept(brought.get("eos_token_id")), end_tokens(tokenizer))
    brought = {key: value for key, value in brought.items() if key not in ids or kept(value) == value}
    amend(folder / GENERATION_CONFIG_NAME, ids | brought | {"eos_token_id": stops})


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the end-of-sequence token, and that with which the chat template ends an assistant turn."""
    return {token for token in (tokenizer.eos_token_id, turn_end(tokenizer)) if token is not None}


def with_stops(found: list[int] | int | None, others: Iterable[int | None]) -> list[int] | int | None:
    """Return ``found``, the stop tokens of a configuration, preceded by those of ``others`` that it lacks.

    A single token is a number, as in transformers, unless ``found`` is a list.
    """
    stops = found if isinstance(found, list) else [] if found is None else [found]
    every = [*sorted({token for token in others if token is not None} - {*stops}), *stops]
    return every if len(every) > 1 or (every and isinstance(found, list)) else next(iter(every), None)


def amend(path: Path, fields: dict[str, object]) -> None:
    """Update fields of a JSON file, without transformers, which refuses to write some files that it reads."""
    write_atomic(path, json.dumps({**read_json(path), **fields}, indent=2) + "\n")


def generate(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    max_new_tokens: int,
    *,
    trust_remote_code: bool,
) -> list[int]:
    """Return the greedy continuation of ``prompt`` by the model exported to ``folder``."""
    logging.disable_progress_bar()
    model = load_model(folder, trust_remote_code)
    use_plain_decoding(model, tokenizer)
    device = inference_device(model)
    ids = torch.tensor([prompt], device=device)
    with torch.no_grad():
        answer = model.to(device).eval().generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
    continuation: list[int] = answer[0, len(prompt) :].tolist()
    return continuation


def complete_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> Iterator[dict[str, str]]:
    """Yield the result of ``complete`` for each prompt, computed for ``batch_size`` prompts at a time."""
    for start in range(0, len(prompts), batch_size):
        yield from complete(model, tokenizer, prompts[start : start + batch_size], **options)


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    **options: Any,
) -> list[dict[str, str]]:
    """Return the ``completion`` of each prompt (token ids), and its ``finish``: ``stop`` or ``length``.

    The prompts are padded on the left, and attention ignores the padding. ``options`` are those of
    transformers' ``generate``.
    """
    width = max(map(len, prompts))
    check_positions(model.config, width, options["max_new_tokens"])
    pad = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        whole = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), pad_token_id=pad, **options
        )
    found = []
    stops = stop_ids(model)
    for row in whole[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), None)
        text = tokenizer.decode(row[:end], skip_special_tokens=True)
        found.append({"completion": text, "finish": "length" if end is None else "stop"})
    return found


def check_positions(config: PreTrainedConfig, length: int, max_new_tokens: int) -> None:
    """Raise ConfigError if a prompt of ``length`` tokens and its completion exceed learned positions."""
    positions = getattr(config, "max_position_embeddings", None)
    is_rotary = getattr(config, "rope_parameters", None) is not None
    if positions is not None and not is_rotary and length + max_new_tokens > positions:
        raise ConfigError(
            f"max_new_tokens: a prompt of {length} tokens and {max_new_tokens} more are over the model's "
            f"{positions} positions (max_position_embeddings); use {max(positions - length, 0)} or less, or "
            "a shorter prompt."
        )


def stop_ids(model: PreTrainedModel) -> set[int]:
    """Return the tokens that end a text of this model."""
    config = model.generation_config
    named = None if config is None else config.eos_token_id
    return set(named) if isinstance(named, list) else set() if named is None else {named}


def use_plain_decoding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Replace the generation config of ``model``, except its bos and pad ids, by only the stop tokens.

    Stop tokens are those of the model and of the tokenizer. The model's own config may have a repetition
    penalty, and that of an adapter's base model lacks the stop token with which the adapter was trained.
    """
    own = model.generation_config
    stops = stop_ids(model) | end_tokens(tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=sorted(stops) or None,
        bos_token_id=None if own is None else own.bos_token_id,
        pad_token_id=None if own is None else own.pad_token_id,
    )


def load_model(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model in ``folder``; for an adapter folder, this is its base model with the adapter."""
    if not (folder / ADAPTER_CONFIG_NAME).is_file():
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 uses a deprecated name of transformers
        return load_adapted(folder, trust_remote_code)


def load_with_weights(
    folder: Path, trust_remote_code: bool, weights: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Return the model of which ``folder`` has everything but the weights, by their names in files."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):  # from_pretrained of the Auto classes takes weights only from files
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    generation = GenerationConfig.from_pretrained(folder)
    return kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=config.dtype, generation_config=generation
    )


def load_adapted(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Load the adapter in ``folder`` and its base model with peft.

    transformers' own loading of adapters (5.23) ignores the magnitudes of DoRA. The class is that of language
    models even if the adapter names no task, because only this class generates with its own config.

    Raises:
        ConfigError: if the adapter names no base model.
    """
    from peft import PeftModelForCausalLM  # slow to import

    named = read_json(folder / ADAPTER_CONFIG_NAME)
    if not (path := named.get("base_model_name_or_path")):
        raise ConfigError(
            f"checkpoint: {folder}/{ADAPTER_CONFIG_NAME} names no base model (base_model_name_or_path); "
            "name its folder or hub id there."
        )
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, revision=named.get("revision"), trust_remote_code=trust_remote_code
    )
    if nf4.has_config(folder):
        nf4.check_installed()
        nf4.round_linears(base)
    return PeftModelForCausalLM.from_pretrained(base, folder)
