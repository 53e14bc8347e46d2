"""``model.chat_template``: a template instead of the tokenizer's own, as for a base model that has none."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.home import expand_home

FOLDER = Path(__file__).parent / "chat_templates"
_TOKENS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
}
"""The templates of ``FOLDER``, each with the special tokens that it writes."""


def with_chat_template(tokenizer: PreTrainedTokenizerBase, given: str) -> PreTrainedTokenizerBase:
    """Give the tokenizer a chat template: one of ``FOLDER`` by its name, or a file of Jinja.

    Raises:
        ConfigError: if there is no such file, or the tokenizer lacks a token that the template writes.
    """
    known = given in _TOKENS
    path = FOLDER / f"{given}.jinja" if known else Path(expand_home("model.chat_template", given))
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template={given}: cannot be read; give a file, or one of {', '.join(_TOKENS)}."
        ) from error
    words = tokenizer.get_vocab()
    missing = [token for token in _TOKENS.get(given, ()) if token not in words]
    if missing or (known and tokenizer.eos_token is None):
        raise ConfigError(
            f"model.chat_template={given}: the tokenizer has no {' and no '.join(missing or ['eos token'])}; "
            "use model.chat_template=plain, or a template that writes tokens that it has."
        )
    return tokenizer
