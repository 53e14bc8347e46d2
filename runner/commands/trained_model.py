"""The model that a run trained, from its checkpoint or from a folder that transformers or peft reads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from components.accelerator import inference_device
from components.adapters.merge import base_of
from components.checkpoint import resolve_checkpoint
from components.checkpoint.reader import StoredTensors
from components.checkpoint.to_hf import CheckpointModel
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.records.options import RESERVED, RecordOptions
from components.models.config import has_tokenizer
from components.models.generate import load_model, use_plain_decoding
from components.models.scalar_head import SCORE, is_classifier
from runner.commands.arguments import UNREAD_TRUST, trusted_modules
from runner.config.instantiate import build_component
from runner.config.sources import ConfigSources
from runner.records.run_dir import read_run_config
from runner.training.assembly import DTYPES


def read_checkpoint(given: Mapping[str, str]) -> tuple[CheckpointModel, torch.dtype]:
    """Return the model in the checkpoint that ``given`` names, and the dtype of its run.

    Raises:
        ConfigError: if there is no such checkpoint, its run has no config, a value in the config is wrong, or
            the config names code that is not trusted.
    """
    point = resolve_checkpoint("checkpoint", given["checkpoint"])
    run = point.parent.parent
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"checkpoint: {run} has no config.yaml, which describes the model; give one in a run's folder."
        )
    config = read_run_config(run)
    seed, stored = config["run"].get("seed"), DTYPES.get(str(config["run"].get("dtype")))
    if not isinstance(seed, int) or stored is None:
        raise ConfigError(
            f"{run / 'config.yaml'}: run.seed or run.dtype has no value of its kind; restore it."
        )
    where = ConfigSources(run_folder=run, trusted=trusted_modules(given.get("trust", "[]")))
    model, adapter = (build_component(group, config[group], where) for group in ("model", "adapter"))
    if model.trust_remote_code and given.get("trust_remote_code") != "true":
        raise ConfigError(
            f"model.trust_remote_code ({where.of('model')}): is true, so {model.path} may bring code of its "
            "own; read it if it does, then give trust_remote_code=true."
        )
    # A checkpoint without this file is reported when its weights are read.
    if (point / ".metadata").is_file() and f"{SCORE}.weight" in StoredTensors(point).shapes("model"):
        model = replace(model, scalar_head=True)
    return CheckpointModel(model, adapter, point, run, seed, config["checkpoint"].get("init_from")), stored


def record_options(given: Mapping[str, str]) -> RecordOptions:
    """Return the default system turn and the variables of the chat template for prompts.

    If ``given`` does not have them, they are those of the run whose checkpoint it names.

    Raises:
        ConfigError: if ``chat_template_kwargs`` is not an object of variables, or the checkpoint does not
            exist.
    """
    variables = None
    if (text := given.get("chat_template_kwargs")) is not None:
        try:
            variables = yaml.safe_load(text)
        except yaml.YAMLError:
            variables = text
        if not isinstance(variables, dict) or any(name in RESERVED for name in variables):
            raise ConfigError(
                f"chat_template_kwargs: is {text!r}; give variables, such as '{{enable_thinking: false}}'."
            )
    data: Json = {}
    if not is_exported(Path(given["checkpoint"])):
        run = resolve_checkpoint("checkpoint", given["checkpoint"]).parent.parent
        data = read_run_config(run)["data"] if (run / "config.yaml").is_file() else {}
    return RecordOptions(
        default_system=given.get("system", data.get("default_system")),
        chat_template_kwargs=(data.get("chat_template_kwargs") or {}) if variables is None else variables,
    )


def is_exported(folder: Path) -> bool:
    """Return whether transformers or peft can read ``folder``."""
    return any((folder / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME))


def open_model(given: Mapping[str, str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that ``given["checkpoint"]`` names, for text generation, with its tokenizer.

    That is a folder that transformers or peft reads, such as an export or an adapter, or a checkpoint or run
    folder of this program. The model is moved to the GPU if it takes less than half of the GPU's free memory.

    Raises:
        ConfigError: if the model cannot be read, is a reward model, or needs code that is not trusted; or
            if modules are trusted for a folder that names none.
    """
    folder = Path(given["checkpoint"])
    logging.disable_progress_bar()
    if is_exported(folder):
        if "trust" in given:
            raise ConfigError(UNREAD_TRUST)
        if is_classifier(folder):
            raise _no_text(folder)
        model, tokenizer = _load(folder, given.get("trust_remote_code") == "true")
    else:
        trained, stored = read_checkpoint(given)
        if trained.model.scalar_head:
            raise _no_text(folder)
        with _naming(folder):
            model, tokenizer = trained.load_model(stored)
    use_plain_decoding(model, tokenizer)
    return model.to(inference_device(model)).eval(), tokenizer


def _no_text(folder: Path) -> ConfigError:
    return ConfigError(
        f"checkpoint: {folder} is a reward model, which gives scores instead of text; name another."
    )


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raise ConfigError for what transformers raises in the context about the files of ``folder``."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        reason, _, _ = str(error).partition("\n")
        remedy = "export it again, or free memory if there is too little"
        raise ConfigError(f"checkpoint: cannot load {folder} ({reason}); {remedy}.") from error


def _tokenizer_of_base(adapter: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return base_of(str(adapter), None, trust_remote_code=trust_remote_code).load_tokenizer()
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint: {adapter} has no tokenizer, and that of its base model cannot be read ({error}) "
            f"Correct base_model_name_or_path in its {ADAPTER_CONFIG_NAME}, or copy a tokenizer there."
        ) from error


def _load(folder: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with _naming(folder):
        if (folder / ADAPTER_CONFIG_NAME).is_file() and not has_tokenizer(folder):
            tokenizer = _tokenizer_of_base(folder, trust_remote_code)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = load_model(folder, trust_remote_code)
    if not len(tokenizer):  # without its files, transformers builds an empty one
        raise ConfigError(f"checkpoint: {folder} has no tokenizer; copy the tokenizer's files into it.")
    return model, tokenizer
