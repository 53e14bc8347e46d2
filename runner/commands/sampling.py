"""How text is generated: the options that ``runner.generate`` and ``runner.chat`` have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from runner.commands.arguments import Keys, number, whole_number

KEYS: Keys = {
    "max_new_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "seed": None,
    "trust": None,
    "trust_remote_code": ("true", "false"),
}


@dataclass(frozen=True)
class Sampling:
    """Options of transformers' ``generate``. A temperature of 0 takes the most probable token each time."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Self:
        """Read the options, or raise ConfigError if a value is invalid or not read."""
        sampling = cls(
            whole_number(given, "max_new_tokens", 256, least=1),
            number(given, "temperature", 0.0, least=0.0),
            number(given, "top_p", 1.0, least=0.0),
            whole_number(given, "top_k", 0, least=0),
            whole_number(given, "seed", 0, least=0),
        )
        if not 0 < sampling.top_p <= 1:
            raise ConfigError(f"top_p: must be above 0 and at most 1, got {sampling.top_p:g}.")
        for key in ("top_p", "top_k", "seed"):
            if key in given and not sampling.temperature:
                raise ConfigError(f"{key}: is not read with temperature=0; set temperature, or remove it.")
        return sampling

    def options(self) -> Json:
        """Return the arguments of ``generate``."""
        if not self.temperature:
            # Values of the model's own generation config would be reported as unused.
            unset = {"temperature": None, "top_p": None, "top_k": None}
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False, **unset}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def set_seed(seed: int) -> None:
    """Seed the random numbers of the draws."""
    import torch

    torch.manual_seed(seed)
