"""A hook that completes prompts while a model is trained."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from transformers.utils import logging

from components.accelerator import inference_device
from components.atomic_write import write_atomic
from components.contracts.configs import ModelConfig
from components.contracts.errors import ConfigError, check_at_least_one
from components.contracts.hook import Hook, HookRun
from components.contracts.json_types import Json
from components.data.records.options import RecordOptions
from components.data.tokenize.prompts import Prompt, read_prompts
from components.models.generate import check_positions, complete_all, load_model, use_plain_decoding


@dataclass(kw_only=True)
class Samples(Hook):
    """Completes prompts greedily after every evaluation, and writes ``completions/step_XXXXXXXX.jsonl``.

    A hook of another name than ``samples`` writes to a folder of its name in ``completions``.

    The model is exported to a temporary folder, and rank 0 generates with transformers, on the GPU if a copy
    fits in its memory. This works in every layout, at the cost of an export.
    """

    generates_text: ClassVar[bool] = True
    needs_evaluations: ClassVar[bool] = True

    prompts: str
    """Path of a file or folder, or a pattern of paths; records have ``messages``, ``prompt`` or ``text``."""
    max_new_tokens: int = 64
    strings: Literal["plain", "chat"] = "plain"
    default_system: str | None = None
    chat_template_kwargs: Json | None = None

    def check(self, name: str) -> None:  # noqa: ARG002
        """Raise ConfigError if the prompts cannot be read or ``max_new_tokens`` is below 1."""
        check_at_least_one("hook.samples", self, "max_new_tokens")
        self.read()

    def read(self) -> list[Prompt]:
        kwargs = self.chat_template_kwargs or {}
        options = RecordOptions(
            strings=self.strings, default_system=self.default_system, chat_template_kwargs=kwargs
        )
        return read_prompts(self.prompts, options)

    def check_model(self, name: str, model: ModelConfig) -> None:
        """Raise ConfigError if the chat template refuses a prompt, or a prompt is too long."""
        tokenizer, config = model.load_tokenizer(), model.config()
        try:
            for prompt in self.read():
                check_positions(config, len(prompt.token_ids(tokenizer)), self.max_new_tokens)
        except ConfigError as error:
            raise ConfigError(f"hook.{name}: {error}") from error

    def begin(self, run: HookRun) -> None:
        if run.is_main:
            shutil.rmtree(self._scratch(run), ignore_errors=True)  # of a run that was killed

    def after_evaluation(self, run: HookRun, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        scratch = self._scratch(run)
        run.engine.export(scratch)
        try:
            # Loading an adapter draws random numbers, which would change rank 0's next attention dropout.
            with run.engine.keeping_random_streams():
                if run.is_main:
                    self._write(run, scratch)
        finally:  # also if it fails: the other ranks wait there
            run.engine.barrier()

    def _scratch(self, run: HookRun) -> Path:
        """Return the folder for an export, which is next to the files of completions."""
        folder = run.folder / "completions"
        return (folder if run.name == "samples" else folder / run.name) / "export"

    def _write(self, run: HookRun, export: Path) -> None:
        """Complete the prompts with the model in the folder ``export``, and remove the folder."""
        if run.adapter is None:
            tokenizer = run.model.add_tokenizer(export)
        else:
            tokenizer = run.adapter.finish_export(run.model, export, export / "base", run.seed, run.dtype)
        logging.disable_progress_bar()
        model = load_model(export, run.model.trust_remote_code).eval()
        use_plain_decoding(model, tokenizer)
        records = self.read()
        found = complete_all(
            model.to(inference_device(model)),
            tokenizer,
            [prompt.token_ids(tokenizer) for prompt in records],
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
        )
        rows = [prompt.completed(completion) for prompt, completion in zip(records, found, strict=True)]
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        write_atomic(export.parent / f"step_{run.state.step:08}.jsonl", "".join(lines))
        run.log_table(run.name, [{key: as_text(value) for key, value in row.items()} for row in rows])
        shutil.rmtree(export)


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
