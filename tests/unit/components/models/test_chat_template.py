"""``model.chat_template``: templates by name or from a file."""

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.data.records.options import RecordError
from components.data.records.samples import ChatSample
from components.data.tokenize.chat import encode_sample
from components.data.tokenizer import PATH
from components.models import ModelSpec
from components.models.chat_template import TEMPLATE_TOKENS, with_chat_template

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
LLAMA3 = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(PATH)
    made.add_tokens([AddedToken(token, special=True) for token in LLAMA3], special_tokens=True)
    return made


@pytest.mark.parametrize(
    ("name", "text", "stop"),
    [
        (
            "chatml",
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you.<|im_end|>\n",
            "<|im_end|>",
        ),
        (
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nSee you.<|eot_id|>",
            "<|eot_id|>",
        ),
        ("plain", "### Instruction:\nBye\n\n### Response:\nSee you.<|im_end|>\n", "<|im_end|>"),
    ],
)
def test_templates_by_name(name: str, text: str, stop: str) -> None:
    words = with_chat_template(tokenizer(), name)
    assert words.eos_token == stop
    rendered = words.apply_chat_template(CHAT, tokenize=False)
    assert rendered.endswith(text)
    assert rendered.index("Be kind.") < rendered.index("Hi")
    prompt = words.apply_chat_template(CHAT[:-1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)
    [encoded] = encode_sample(ChatSample(CHAT, None), words, train_on_prompt=False, origin="x:1")
    trained = [token for token, on in zip(encoded.input_ids, encoded.mask, strict=True) if on]
    assert words.decode(trained) == f"Hello.{stop}See you.{stop}"
    assert encoded.stop_trained


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_templates_by_name_refuse_tools_and_calls(name: str) -> None:
    words = with_chat_template(tokenizer(), name)
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    calling = [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    for sample, what in ((ChatSample(CHAT, [call]), "tools"), (ChatSample(calling, None), "tool_calls")):
        with pytest.raises(RecordError, match=f"does not render {what}.*\n.*use another template"):
            encode_sample(sample, words, train_on_prompt=False, origin="x:1")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0].content }}")
    spec = ModelSpec(architecture={"model_type": "llama"}, chat_template=str(path))
    assert spec.load_tokenizer().apply_chat_template(CHAT, tokenize=False) == "Be kind."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3", r"the tokenizer has no <\|start_header_id\|> and no .*; use model.chat_template=plain"),
        ("vicuna", "cannot be read; give a file, or one of chatml, llama3, plain"),
    ],
)
def test_mistakes(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_chat_template(AutoTokenizer.from_pretrained(PATH), name)
