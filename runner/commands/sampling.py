"""Options of text generation that ``runner.generate`` and ``runner.chat`` have in common."""

from collections.abc import Mapping

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from runner.commands.arguments import Keys, number_option, whole_number

KEYS: Keys = {
    **dict.fromkeys(("max_new_tokens", "temperature", "top_p", "top_k", "seed", "trust")),
    **dict.fromkeys(("system", "chat_template_kwargs")),
    "trust_remote_code": ("true", "false"),
}


def read_sampling(given: Mapping[str, str]) -> tuple[Json, int]:
    """Return the arguments of transformers' ``generate``, and the seed of the sampling.

    A temperature of 0 takes the most probable token each time.

    Raises:
        ConfigError: if a value is invalid or not read.
    """
    max_new_tokens = whole_number(given, "max_new_tokens", 256, least=1)
    temperature = number_option(given, "temperature", 0.0, least=0.0)
    top_p = number_option(given, "top_p", 1.0, least=0.0)
    top_k = whole_number(given, "top_k", 0, least=0)
    seed = whole_number(given, "seed", 0, least=0)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p: must be above 0 and at most 1, got {top_p:g}.")
    for key in ("top_p", "top_k", "seed"):
        if key in given and not temperature:
            raise ConfigError(f"{key}: is not read with temperature=0; set temperature, or remove it.")
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen = {"do_sample": True, **drawn} if temperature else {"do_sample": False}
    return {"max_new_tokens": max_new_tokens, **chosen}, seed
