"""The functions that the files of ``conf/adapter`` name as ``_target_``."""

from pathlib import Path
from typing import Literal

from components.adapters.lora_config import Init, LoRA
from components.adapters.peft_folder import read_settings
from components.adapters.target_modules import Targets
from components.contracts.configs import NoAdapter
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from components.models import nf4

MODULES = ("target_modules", "modules_to_save")
"""Settings that select modules."""


def none() -> NoAdapter:
    """Return None for ``adapter=none``: no adapter is trained."""


def lora(
    *,
    path: str | None,
    r: int | None,
    alpha: float | None,
    target_modules: Targets | None,
    rslora: bool | None,
    modules_to_save: tuple[str, ...] | None,
    dropout: float,
    init_lora_weights: Init | None,
    pissa_niter: int | None,
    dora: bool,
    quantize: Literal["nf4"] | None,
) -> LoRA:
    """Return the adapter with these settings; with ``path``, those that are None are read from that folder.

    The config of a run has all settings, so that its checkpoints can be read after the folder was removed.

    Raises:
        ConfigError: if a setting is missing, out of range or differs from that of the folder, if
            ``init_lora_weights`` is given with ``path``, if the adapter in the folder was trained on a base
            model in 4 bits and ``quantize`` is None, or if the folder cannot be read.
    """
    asked: Json = {
        "r": r,
        "alpha": alpha,
        "target_modules": target_modules,
        "rslora": rslora,
        "modules_to_save": modules_to_save,
        "dora": dora,
    }
    if path is not None:
        if init_lora_weights is not None:
            raise ConfigError(
                "adapter.init_lora_weights: is not read with adapter.path, which gives the values; leave it "
                "out."
            )
        if None in asked.values() or Path(path).expanduser().is_dir():
            asked = agreed_setting(asked, read_settings(path), path)
        if quantize is None and nf4.has_config(Path(path).expanduser()):
            raise ConfigError(
                f"adapter.path: {path} was trained on a base model in 4 bits; use adapter=qlora, which has "
                "adapter.quantize=nf4."
            )
    elif modules_to_save is None:
        asked["modules_to_save"] = ()
    for name, value in (asked if path else asked | {"init_lora_weights": init_lora_weights}).items():
        if value is None:
            raise ConfigError(f"adapter.{name}: is null; set it, or give an adapter.path to read it from.")
    return LoRA(
        **asked,
        dropout=dropout,
        init_lora_weights=init_lora_weights,
        pissa_niter=pissa_niter,
        quantize=quantize,
        path=path,
    )


def agreed_setting(asked: Config, stored: Config, path: str) -> Json:
    """Return ``stored``, the settings of the adapter at ``path``, but with the modules in ``asked``.

    Names of modules depend on the model: ``LoRA.check`` compares them with the folder.

    Raises:
        ConfigError: if another setting in ``asked`` that is not None differs from the stored one.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if name not in MODULES and value != stored[name]:
            remedy = f"use adapter={'dora' if stored[name] else 'lora'}" if name == "dora" else "leave it out"
            raise ConfigError(
                f"adapter.{name}: is {value}, but the adapter at adapter.path={path} has {stored[name]}; "
                f"{remedy}."
            )
    return {**stored, **given}
