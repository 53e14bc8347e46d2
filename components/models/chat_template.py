"""``model.chat_template``: a template that replaces the tokenizer's own, or is added if there is none."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.home import expand_home

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATE_TOKENS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
}
"""The templates of ``FOLDER``, each with the special tokens that it writes; the last one ends a turn."""


def with_chat_template(tokenizer: PreTrainedTokenizerBase, given: str) -> PreTrainedTokenizerBase:
    """Set the tokenizer's chat template to one of ``FOLDER``, given by its name, or to a Jinja file.

    The token with which a template of ``FOLDER`` ends a turn becomes the end-of-sequence token, so that
    generation with the exported model stops there.

    Raises:
        ConfigError: if the file cannot be read, or the tokenizer lacks a token that the template writes.
    """
    known = given in TEMPLATE_TOKENS
    path = FOLDER / f"{given}.jinja" if known else Path(expand_home("model.chat_template", given))
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template={given}: cannot be read; give a file, or one of "
            f"{', '.join(TEMPLATE_TOKENS)}."
        ) from error
    words = tokenizer.get_vocab()
    needed = TEMPLATE_TOKENS.get(given, ())
    missing = [token for token in needed if token not in words]
    if missing or (known and not needed and tokenizer.eos_token is None):
        raise ConfigError(
            f"model.chat_template={given}: the tokenizer has no {' and no '.join(missing or ['eos token'])}; "
            "use model.chat_template=plain, or model.add_tokens=true."
        )
    if needed:
        tokenizer.eos_token = needed[-1]
    return tokenizer
