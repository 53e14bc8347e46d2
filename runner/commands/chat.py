"""``python -m runner.chat checkpoint=DIR``: talk to a model in the terminal.

checkpoint=DIR     a run or checkpoint folder, an export, an adapter folder or any Hugging Face folder
system=TEXT        a system turn before the conversation; default: data.default_system of the run
chat_template_kwargs={NAME: VALUE}  variables of the chat template; default: those of the run
max_new_tokens=256
temperature=0      0 takes the most probable token each time; above 0 also top_p=1 top_k=0 seed=0
trust=[MODULE]     further modules whose classes the run's config.yaml may name
trust_remote_code=true  run the code that the model brings with it

/clear begins a new conversation, /quit or the end of the input ends the program.
"""

import io
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from runner.cli import announce_loading, run_or_answer
from runner.commands import sampling
from runner.commands.arguments import Keys, parse_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.data.tokenize.rendered_chat import Template

KEYS: Keys = {"checkpoint": None, **sampling.KEYS}


def chat(arguments: Sequence[str]) -> None:
    """Answer the lines of standard input until it ends.

    Raises:
        ConfigError: if an argument is wrong, the model cannot be read, or its chat template is missing, or
            refuses or ignores a part of the conversation.
    """
    given = parse_pairs(arguments, KEYS, "checkpoint", usage=__doc__)
    options, seed = sampling.read_sampling(given)
    announce_loading()
    import torch

    from components.data.records.messages import with_default_system
    from components.data.tokenize.rendered_chat import open_template
    from runner.commands.trained_model import open_model, record_options

    templating = record_options(given)
    model, tokenizer = open_model(given)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"checkpoint: {given['checkpoint']} has no chat template; train with model.chat_template, or use "
            "runner.generate."
        )
    torch.manual_seed(seed)
    template = open_template(tokenizer, None, templating.chat_template_kwargs, "the conversation")
    begin = with_default_system([], templating)
    messages: list[Json] = [*begin]
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    for line in asked():
        if line == "/clear":
            messages = [*begin]
            continue
        messages.append({"role": "user", "content": line})
        reply = answer(model, template, messages, options)
        messages.append({"role": "assistant", "content": reply})


def asked() -> Iterator[str]:
    """Yield the lines that the user writes, without empty ones, until /quit or the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line:
            yield line


def answer(model: "PreTrainedModel", template: "Template", messages: list[Json], options: Json) -> str:
    """Print the answer to the messages while it is generated, and return it."""
    import torch
    from transformers import TextStreamer

    from components.models.generate import check_positions

    tokenizer, text = template.tokenizer, template.render(messages, prompt=True)
    template.check_renders_all(messages, text, prompt=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    check_positions(model.config, length, options["max_new_tokens"])
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.no_grad():
        whole = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            streamer=streamer,
            pad_token_id=tokenizer.pad_token_id or 0,
            **options,
        )
    reply: str = tokenizer.decode(whole[0, length:], skip_special_tokens=True)
    return reply


def main() -> NoReturn:
    sys.exit(run_or_answer(chat, __doc__))
