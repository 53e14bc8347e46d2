"""Chat encoding: the supervised tokens are the assistant's answers and stop tokens, in any template."""

from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.data.records.samples import ChatSample, PreferenceSample, SegmentsSample, TextSample
from components.data.tokenize import template_limits
from components.data.tokenize.chat import Encoded, encode_sample, turn_end
from components.data.tokenizer import PATH

NO_GENERATION_PROMPT = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
"""
ASK = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
CHATML = NO_GENERATION_PROMPT + ASK
LLAMA3 = """
{{- '<|begin|>' -}}
{%- for m in messages -%}
{{- '<|header|>' + m.role + '<|/header|>\\n\\n' + m.content | trim + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|/header|>\\n\\n' -}}{%- endif -%}
"""
MISTRAL = """
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system turn') -}}{%- endif -%}
{{- '<|begin|>' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST] ' + m.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + m.content + '<|eot|>' -}}{%- endif -%}
{%- endfor -%}
"""
# The stop token is outside of the generation marks.
MARKS_SHORT = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content -}}{%- endgeneration -%}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""
MARKS_SHORT += ASK
# The stop token and the line break after it are inside of the generation marks.
CLOSE = "{{- '<|im_end|>\\n' -}}\n"
MARKS_LONG = MARKS_SHORT.replace(CLOSE, "").replace("m.content", "m.content + '<|im_end|>\\n'")
# Reasoning is dropped from all turns except the last, which always has some (as in Qwen3).
DROPS_REASONING = """
{%- for m in messages -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- endfor -%}
"""
DROPS_REASONING += ASK
# The generation prompt opens the reasoning; a finished turn has none (as in DeepSeek R1).
OPENS_REASONING = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}
{%- elif m.role == 'assistant' -%}{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|eot|>' -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}
"""
COUNTS_TURNS = "{{- messages | length ~ ' turns\\n' -}}" + CHATML
COUNTS_CHARACTERS = (
    "{%- for m in messages -%}{{- loop.length ~ m.content | length ~ m.content -}}{%- endfor -%}"
)
ONLY_LAST_TURNS = CHATML.replace("in messages", "in messages[-2:]")
EOS_AT_END = """{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"""
NO_STOP = """{%- for m in messages -%}{{- '### ' + m.role + '\\n' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\\n' -}}{%- endif -%}"""
# The last turn ends with another stop token (as in gpt-oss), or with a further one (as in Phi-3).
OTHER_STOP_AT_END = CHATML.replace("'<|im_end|>\\n'", "('<|eot|>' if loop.last else '<|im_end|>\\n')")
EOS_AFTER_STOP = CHATML.replace("im_end", "eot").replace(
    "{%- endif -%}", "{%- else -%}{{- eos_token -}}{%- endif -%}"
)
# No stop token is between an answer and the header of the next message, which is one token or several.
HEADER_AFTER_ANSWER = """
{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""
LONG_HEADER_AFTER_ANSWER = HEADER_AFTER_ANSWER.replace(
    "<|' + m.role + '|>", "<|header|>' + m.role + '<|/header|>"
)
LONG_HEADER_AFTER_ANSWER = LONG_HEADER_AFTER_ANSWER.replace("<|assistant|>", "<|header|>assistant<|/header|>")
# Each role has a header of its own, of several tokens.
OTHER_HEADER_AFTER_ANSWER = HEADER_AFTER_ANSWER.replace("|>'", "|>\\nsays\\n'")
# The end-of-sequence token after the last turn has a mark of its own.
MARKS_EOS = MARKS_LONG.removesuffix(ASK) + "{%- generation -%}{{- eos_token -}}{%- endgeneration -%}"
FORGOTTEN_MARK = MARKS_LONG.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")

ADDED = ["<|system|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<|user|>", "<|assistant|>"]
ANSWERS = ["Hello, wörld! 你好 🙂", "<|assistant but no header\nassistant\n  - 42\n\n  - 43", "Bye."]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": ANSWERS[0]},
    {"role": "user", "content": ANSWERS[0] + " again?"},
    {"role": "assistant", "content": ANSWERS[1]},
    {"role": "user", "content": "Bye."},
    {"role": "assistant", "content": ANSWERS[2]},
]


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    """Return the embedded tokenizer, with ``template`` instead of its own if given."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ADDED})
        tokenizer.chat_template = template
    return tokenizer


def targets(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the decoded text of every run of supervised tokens."""
    runs = groupby(zip(encoded.input_ids, encoded.mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for on, run in runs if on]


def encode_chat(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> Encoded:
    [encoded] = encode_sample(
        ChatSample(messages, kwargs.pop("tools", None)),
        tokenizer,
        train_on_prompt=False,
        origin="data.json:7",
    )
    return encoded


def test_only_segments_with_a_label_are_trained_on() -> None:
    segments = (
        ("<|im_start|>user\nU<|im_end|>\n", False),
        ("A<|im_end|>", True),
        ("\nB", False),
        (" C", True),
    )
    tokenizer = make_tokenizer()
    [encoded] = encode_sample(SegmentsSample(segments), tokenizer, train_on_prompt=False, origin="a:1")
    assert targets(encoded, tokenizer) == ["A<|im_end|>", " C"]
    assert tokenizer.decode(encoded.input_ids) == "".join(text for text, _ in segments)
    assert encoded.prompt_length == len(tokenizer(segments[0][0], add_special_tokens=False)["input_ids"])


def with_stop(stop: str, before: str = "") -> list[str]:
    return [before + answer + stop for answer in ANSWERS]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(None, with_stop("<|im_end|>"), id="embedded"),
        pytest.param(CHATML, with_stop("<|im_end|>"), id="chatml"),
        pytest.param(NO_GENERATION_PROMPT, with_stop("<|im_end|>"), id="no-generation-prompt"),
        pytest.param(LLAMA3, with_stop("<|eot|>"), id="llama3"),
        pytest.param(MISTRAL, with_stop("<|eot|>", " "), id="mistral"),
        pytest.param(MARKS_SHORT, with_stop("<|im_end|>"), id="marks-without-stop"),
        pytest.param(MARKS_LONG, with_stop("<|im_end|>"), id="marks-beyond-stop"),
        pytest.param(
            DROPS_REASONING,
            [*with_stop("<|im_end|>")[:2], "<think>\n\n</think>\n\nBye.<|im_end|>"],
            id="drops-reasoning",
        ),
        pytest.param(OPENS_REASONING, with_stop("<|eot|>"), id="opens-reasoning"),
        pytest.param(COUNTS_TURNS, with_stop("<|im_end|>"), id="counts-turns"),
        pytest.param(EOS_AT_END, [" " + a for a in [*ANSWERS[:2], "Bye.\n<|im_end|>"]], id="eos-at-end"),
        pytest.param(NO_STOP, ANSWERS, id="no-stop"),
        pytest.param(
            OTHER_STOP_AT_END, [*with_stop("<|im_end|>")[:2], "Bye.<|eot|>"], id="other-stop-at-end"
        ),
        pytest.param(
            EOS_AFTER_STOP, [*with_stop("<|eot|>")[:2], "Bye.<|eot|>\n<|im_end|>"], id="eos-after-stop"
        ),
        pytest.param(HEADER_AFTER_ANSWER, [*ANSWERS[:2], "Bye.<|im_end|>"], id="header-after-answer"),
        pytest.param(
            LONG_HEADER_AFTER_ANSWER, [*ANSWERS[:2], "Bye.<|im_end|>"], id="long-header-after-answer"
        ),
        pytest.param(
            OTHER_HEADER_AFTER_ANSWER, [*ANSWERS[:2], "Bye.<|im_end|>"], id="other-header-after-answer"
        ),
        pytest.param(
            MARKS_EOS, [*with_stop("<|im_end|>")[:2], "Bye.<|im_end|>\n<|im_end|>"], id="marks-around-eos"
        ),
    ],
)
def test_targets_are_answers_and_their_stop_tokens(template: str | None, expected: list[str]) -> None:
    tokenizer = make_tokenizer(template)
    messages = CHAT[1:] if template == MISTRAL else CHAT
    encoded = encode_chat(messages, tokenizer)
    assert targets(encoded, tokenizer) == expected
    assert encoded.stop_trained == (template != NO_STOP)
    stop = turn_end(tokenizer)
    assert (stop is None) == (template == NO_STOP)
    assert stop is None or expected[-1].endswith(tokenizer.decode([stop]))
    assert encoded.prompt_length == encoded.mask.index(True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert encoded.input_ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "stop"), [(DROPS_REASONING, "<|im_end|>"), (OPENS_REASONING, "<|eot|>")]
)
def test_reasoning_of_an_earlier_turn_that_the_template_drops(template: str, stop: str) -> None:
    messages = [dict(message) for message in CHAT]
    messages[2]["content"] = "<think>hm</think>Hello"
    tokenizer = make_tokenizer(template)
    assert targets(encode_chat(messages, tokenizer), tokenizer)[0] == "Hello" + stop


def test_reasoning_that_the_generation_prompt_would_leave_empty() -> None:
    """As in the templates of Qwen3.5 that do not think by default."""
    reasoning = "'<think>\\n' + m.reasoning_content | default('') + '\\n</think>\\n\\n'"
    template = DROPS_REASONING.removesuffix(ASK).replace("'<think>\\n\\n</think>\\n\\n'", reasoning)
    tokenizer = make_tokenizer(
        template + ASK.replace("assistant\\n", "assistant\\n<think>\\n\\n</think>\\n\\n")
    )
    encoded = encode_chat([*CHAT[:-1], {**CHAT[-1], "reasoning_content": "hm"}], tokenizer)
    assert targets(encoded, tokenizer)[-1] == "hm\n</think>\n\nBye.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(COUNTS_CHARACTERS, "cannot be located", id="counts-characters"),
        pytest.param(ONLY_LAST_TURNS, "does not render message 0, of the role system", id="only-last-turns"),
        pytest.param(FORGOTTEN_MARK, "around 1 of 3 assistant turns", id="forgotten-mark"),
        pytest.param(MISTRAL, "no system turn", id="raises"),
        pytest.param("{{- messages[0].nothing.at_all -}}", "refuses this conversation", id="undefined"),
        pytest.param("{{- 1 / 0 -}}", "refuses this conversation .division by zero", id="zero"),
        pytest.param("{{- messages[9] ~ [][3].x -}}", "refuses this conversation", id="no-such-item"),
        pytest.param("{% for i in range(10**9) %}x{% endfor %}", "Range too big", id="huge-range"),
        pytest.param("{{ 'ab' * 10**10 }}", "more than 4 GiB", id="repeated-text"),
        pytest.param("{{ ([0] * 10**10) | length }}", "more than 4 GiB", id="repeated-list"),
        pytest.param("{{ 'a'.ljust(10**10) }}", "more than 4 GiB", id="padded-text"),
        pytest.param("{{ 'a' | center(10**10) }}", "more than 4 GiB", id="centred-text"),
        pytest.param("{{ '%10000000000d' % 5 }}", "more than 4 GiB", id="formatted-text"),
        pytest.param("{{ 9**(9**9) }}", "a number of more than 65536 bits", id="power"),
        pytest.param("{{ (10**9000) * (10**19000) }}", "a number of more than", id="product"),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 s for one",
            id="nested-loops",
        ),
        pytest.param("{% for", "refuses this conversation", id="syntax-error"),
        pytest.param("", "has no chat template", id="none"),
    ],
)
def test_template_that_cannot_be_masked_is_an_error(
    template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "RENDER_SECONDS", 1.0)
    with pytest.raises(ConfigError, match=message) as caught:
        encode_chat(CHAT, make_tokenizer(template))
    assert "model.tokenizer" in str(caught.value)
    assert "data.json:7" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_train_on_prompt_needs_no_turn_boundaries() -> None:
    tokenizer = make_tokenizer(COUNTS_CHARACTERS)
    [encoded] = encode_sample(ChatSample(CHAT, None), tokenizer, train_on_prompt=True, origin="")
    assert all(encoded.mask)
    assert encoded.prompt_length == 0


def test_answer_that_merges_with_the_header_leaves_the_merged_token_out() -> None:
    """A token that is partly in the prompt is not a target."""
    tokenizer = make_tokenizer(CHATML)
    messages = [CHAT[1], {"role": "assistant", "content": "\n\n        x = 1"}]
    encoded = encode_chat(messages, tokenizer)
    [text] = targets(encoded, tokenizer)
    assert "\n\n        x = 1<|im_end|>".endswith(text)
    assert text.endswith("x = 1<|im_end|>")


def test_answer_that_merges_with_the_next_header_leaves_the_merged_token_out() -> None:
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{{- '## ' + m.role + '\\n' + m.content -}}{%- endfor -%}"
    )
    messages = [CHAT[1], {"role": "assistant", "content": "C#"}, *CHAT[-2:]]
    encoded = encode_chat(messages, tokenizer)
    assert "C###" in tokenizer.decode(encoded.input_ids)
    assert targets(encoded, tokenizer) == ["C", "Bye."]


def test_padding_that_a_template_trims_before_it_rewrites_the_turn() -> None:
    """The probe that finds these turns is put inside of the padding; outside, it would change trimming."""
    tokenizer = make_tokenizer(COUNTS_TURNS.replace("m.content", "m.content | trim"))
    padded = [{**message, "content": f" \n{message['content']}\n\n "} for message in CHAT]
    assert targets(encode_chat(padded, tokenizer), tokenizer) == with_stop("<|im_end|>")


@pytest.mark.parametrize(
    ("template", "stop"), [(OTHER_STOP_AT_END, "<|im_end|>"), (EOS_AFTER_STOP, "<|eot|>"), (NO_STOP, "")]
)
def test_line_break_between_an_answer_and_its_stop_token(template: str, stop: str) -> None:
    tokenizer = make_tokenizer(template)
    messages = [CHAT[1], {"role": "assistant", "content": "Hello.\n"}, *CHAT[-2:]]
    answer = f"Hello.\n{stop}" if stop else "Hello."
    assert targets(encode_chat(messages, tokenizer), tokenizer)[0] == answer


def test_offsets_that_leave_out_spaces() -> None:
    """A space whose offsets cover no character, as in many byte-level tokenizers, is not in the answer."""
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{{- m.role + ': ' + m.content + eos_token -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    )
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    encoded = encode_chat([CHAT[1], {"role": "assistant", "content": "42"}], tokenizer)
    assert targets(encoded, tokenizer) == ["42<|im_end|>"]


def test_stop_token_that_swallows_the_line_break_after_it() -> None:
    tokenizer = make_tokenizer(CHATML.replace("im_end", "end"))
    tokenizer.add_tokens(AddedToken("<|end|>", rstrip=True, special=True), special_tokens=True)
    encoded = encode_chat(CHAT, tokenizer)
    assert targets(encoded, tokenizer) == with_stop("<|end|>")
    assert encoded.stop_trained


def test_tools_and_calls() -> None:
    tokenizer = make_tokenizer()
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    encoded = encode_chat(messages, tokenizer, tools=tools)
    assert targets(encoded, tokenizer) == [
        '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><|im_end|>',
        "Noon.<|im_end|>",
    ]
    assert tokenizer.decode(encoded.input_ids).startswith("<|im_start|>system\nTools:\n{")


@pytest.mark.parametrize("mark", [("", ""), ("{%- generation -%}", "{%- endgeneration -%}")])
def test_template_that_needs_the_arguments_of_a_call_as_text(mark: tuple[str, str]) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "東京"}}}
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}{%- if m.tool_calls -%}"
        f"{mark[0]}{{{{- m.tool_calls[0].function.arguments + '<|im_end|>' -}}}}{mark[1]}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}"
    )
    encoded = encode_chat([CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}], tokenizer)
    assert targets(encoded, tokenizer) == ['{"zone": "東京"}<|im_end|>']


@pytest.mark.parametrize("otherwise", ["", "{%- if args is string -%}{{- args -}}{%- else -%}"])
def test_a_value_that_a_template_cannot_write_does_not_change_the_form_of_the_arguments(
    otherwise: str,
) -> None:
    write = "{%- for k, v in args.items() -%}{{- '<' + k + '>' + v -}}{%- endfor -%}"
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}{%- for call in m.tool_calls -%}"
        f"{{%- set args = call.function.arguments -%}}{otherwise}{write}{'{%- endif -%}' * bool(otherwise)}"
        "{%- endfor -%}{{- '<|im_end|>' -}}{%- endfor -%}"
    )
    written, unwritten = (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": args}}]}
        for args in ({"n": "1"}, {"n": 1})
    )
    assert targets(encode_chat([CHAT[1], written], tokenizer), tokenizer) == ["<n>1<|im_end|>"]
    with pytest.raises(ConfigError, match=r'can only concatenate str .not "int"'):
        encode_chat([CHAT[1], written, CHAT[1], unwritten], tokenizer)


# Reasoning is written after the last question only, and calls begin a line (as in Qwen3.5).
DROPS_AND_CALLS = """
{%- for m in messages -%}
{%- set answer = m.content.split('</think>')[-1].strip() -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and 'user' not in messages[loop.index:] | map(attribute='role') -%}
{{- '<think>\\n' + (m.content.split('</think>')[0] if '</think>' in m.content else '') + '</think>\\n' -}}
{%- endif -%}
{{- answer -}}
{%- for call in m.tool_calls -%}{{- ('\\n' if answer) ~ call.function | tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
CALL = {"type": "function", "function": {"arguments": {}, "name": "now"}}


@pytest.mark.parametrize("content", ["", "Let me look.", "<think>hm</think>"])
def test_calls_of_an_earlier_turn_whose_reasoning_the_template_drops(content: str) -> None:
    tokenizer = make_tokenizer(DROPS_AND_CALLS)
    calls = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    turns = [calls, {"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "Noon."}]
    said = content.partition("</think>")[2] if "think" in content else content + "\n" * bool(content)
    call = said + '{"arguments": {}, "name": "now"}<|im_end|>'
    encoded = encode_chat([CHAT[1], *turns, CHAT[1], *turns], tokenizer)
    assert targets(encoded, tokenizer)[:2] == [call, "Noon.<|im_end|>"]
    assert targets(encoded, tokenizer)[2].endswith(f"</think>\n{call}")
    assert targets(encoded, tokenizer)[3] == "</think>\nNoon.<|im_end|>"


def test_a_turn_of_calls_whose_text_is_written_after_the_result_is_an_error() -> None:
    """As in Gemma 4. Everything up to this text would be trained on, including the result."""
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        "{{- '[' + m.content + ']' + messages[loop.index0 - 1].content + '<|im_end|>\\n' -}}"
        "{%- elif m.tool_calls -%}"
        "{{- m.tool_calls | tojson + (m.content + '<|im_end|>\\n' if loop.last else '') -}}"
        "{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}"
        "{%- endfor -%}"
    )
    calls = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}
    with pytest.raises(ConfigError, match="message 1, the assistant's, cannot be located"):
        encode_chat([CHAT[1], calls, {"role": "tool", "content": "12:00"}, CHAT[-1]], tokenizer)


def test_the_end_of_a_call_whose_name_is_written_again_with_the_result() -> None:
    """As in gpt-oss, which writes the text of a turn that calls tools only if no answer follows."""
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{%- if m.tool_calls -%}{%- set name = m.tool_calls[0].function.name -%}"
        "{{- '<|assistant|>' + (m.content if loop.last else '') + name + '()<|eot|>' -}}"
        "{%- elif m.role == 'tool' -%}"
        "{{- '<|user|>' + messages[loop.index0 - 1].tool_calls[0].function.name + m.content + '<|eot|>' -}}"
        "{%- else -%}{{- '<|' + m.role + '|>' + m.content + '<|eot|>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    calls = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}
    encoded = encode_chat([CHAT[1], calls, {"role": "tool", "content": "12:00"}, CHAT[-1]], tokenizer)
    assert targets(encoded, tokenizer) == ["now()<|eot|>", "Bye.<|eot|>"]


def test_marks_around_parts_of_turns_that_follow_each_other_are_an_error() -> None:
    """Joined, the last part of one answer and the next answer would be one turn."""
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- for part in m.content.split() -%}"
        "{{- '' if loop.first else ' / ' -}}{%- generation -%}{{- part -}}{%- endgeneration -%}"
        "{%- endfor -%}{%- else -%}{{- '<|user|>' + m.content -}}{%- endif -%}{%- endfor -%}"
    )
    parts = {"role": "assistant", "content": "Hello there."}
    with pytest.raises(ConfigError, match="marks around 3 of 2 assistant turns"):
        encode_chat([CHAT[1], parts, CHAT[-1]], tokenizer)


def test_marks_around_the_end_of_sequence_token_belong_to_the_last_turn() -> None:
    tokenizer = make_tokenizer(
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}{%- if m.role == 'assistant' -%}"
        "{%- generation -%}{{- m.content -}}{%- endgeneration -%}{%- else -%}{{- m.content -}}{%- endif -%}"
        "{%- endfor -%}{%- generation -%}{{- eos_token -}}{%- endgeneration -%}"
    )
    turns = [{"role": "assistant", "content": text} for text in ("Hello.", "Bye.")]
    encoded = encode_chat([CHAT[1], *turns], tokenizer)
    assert targets(encoded, tokenizer) == ["Hello.", f"Bye.{tokenizer.eos_token}"]


@pytest.mark.parametrize("key", ["tools", "tool_calls"])
def test_template_without_a_place_for_tools_is_an_error(key: str) -> None:
    call = {"type": "function", "function": {"name": "Bye", "arguments": {}}}  # a word of the text
    answer = {
        "role": "assistant",
        "content": "Bye",
        **({"tool_calls": [call]} if key == "tool_calls" else {}),
    }
    tokenizer = make_tokenizer("{# Neither tools nor tool_calls are written. #}" + CHATML)
    with pytest.raises(ConfigError, match=f"does not render {key}"):
        encode_chat([CHAT[1], answer], tokenizer, tools=[call] if key == "tools" else None)


def test_a_dropped_turn_whose_text_stands_elsewhere_is_an_error() -> None:
    template = CHATML.replace("'<|im_start|>' + m.role", "'' if loop.index == 3 else '<|im_start|>' + m.role")
    turns = [{"role": "user", "content": "Say Hello"}, {"role": "assistant", "content": "Yes"}]
    more = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Bye"}]
    with pytest.raises(ConfigError, match="does not render message 2, of the role user"):
        encode_chat([*turns, *more], make_tokenizer(template))


@pytest.mark.parametrize(("role", "content"), [("tool", "42"), ("system", "Paris")])
def test_a_dropped_turn_that_a_later_one_quotes_is_an_error(role: str, content: str) -> None:
    drops = f"'' if m.role == '{role}' else '<|im_start|>' + m.role"
    tokenizer = make_tokenizer(CHATML.replace("'<|im_start|>' + m.role", drops))
    answer = {"role": "assistant", "content": f"It is {content}."}
    question, called = {"role": "user", "content": "?"}, {"role": "assistant", "content": "Let me see."}
    quoted = {"role": role, "content": content}
    turns = [quoted, question, answer] if role == "system" else [question, called, quoted, answer]
    with pytest.raises(ConfigError, match=f"does not render message ., of the role {role}"):
        encode_chat(turns, tokenizer)
    encode_chat(turns, make_tokenizer(CHATML))


def test_reasoning_in_the_content_of_the_last_answer_must_be_rendered() -> None:
    """Templates such as DeepSeek-R1's remove it from all answers, Qwen3's only from earlier ones."""
    removed = make_tokenizer(CHATML.replace("m.content", "m.content.split('</think>')[-1]"))
    answer = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}
    question = {"role": "user", "content": "2 + 2?"}
    with pytest.raises(ConfigError, match="does not render the reasoning in the content of the last message"):
        encode_chat([question, answer], removed)
    encode_chat([question, answer, question, {"role": "assistant", "content": "4"}], removed)
    encode_chat([question, answer], make_tokenizer(CHATML))


def test_tools_are_no_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokenizer = make_tokenizer("{{- tools | tojson if tools -}}" + CHATML)
    with pytest.raises(ConfigError, match="does not render tool_calls"):
        encode_chat([CHAT[1], answer, CHAT[-1]], tokenizer, tools=[call])


def test_the_text_of_a_turn_that_calls_tools_may_be_left_out() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    answer = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    template = CHATML.replace("m.content", "(m.tool_calls | tojson if m.tool_calls else m.content)")
    encoded = encode_chat([CHAT[1], answer], make_tokenizer(template))
    assert "Let me look." not in make_tokenizer(template).decode(encoded.input_ids)


def test_a_turn_that_a_template_rewrites_is_rendered() -> None:
    tokenizer = make_tokenizer(CHATML.replace("m.content", "(m.content | upper)"))
    encoded = encode_chat([*CHAT[:2], {"role": "assistant", "content": "x = 1"}], tokenizer)
    assert "X = 1" in tokenizer.decode(encoded.input_ids)


def test_variables_are_known_by_their_whole_name() -> None:
    tokenizer = make_tokenizer(CHATML + "{%- if enable_thinking_aloud -%}{%- endif -%}")
    for name, known in {"enable_thinking_aloud": True, "enable_thinking": False}.items():
        sample = ChatSample(CHAT, None, template_kwargs={name: True})
        if known:
            encode_sample(sample, tokenizer, train_on_prompt=False, origin="")
        else:
            with pytest.raises(ConfigError, match="does not read enable_thinking"):
                encode_sample(sample, tokenizer, train_on_prompt=False, origin="")


@pytest.mark.parametrize("template", [CHATML, MARKS_SHORT])
def test_a_template_does_not_write_the_current_date(template: str) -> None:
    tokenizer = make_tokenizer("{{- strftime_now('%Y/%m/%d') -}}" + template)
    assert tokenizer.decode(encode_chat(CHAT, tokenizer).input_ids).startswith("2024/07/26<|im_start|>system")


@pytest.mark.parametrize("template", [None, CHATML, LLAMA3, MARKS_SHORT, DROPS_REASONING, OPENS_REASONING])
@pytest.mark.parametrize("rejected", ["No.", ANSWERS[2] + " Or not."])
def test_pair_shares_its_prompt_and_trains_on_the_answer_only(template: str | None, rejected: str) -> None:
    tokenizer = make_tokenizer(template)
    sample = PreferenceSample(CHAT[:-1], CHAT[-1:], [{"role": "assistant", "content": rejected}], None)
    chosen, other = encode_sample(sample, tokenizer, train_on_prompt=False, origin="")
    shared = chosen.prompt_length
    assert other.prompt_length == shared
    assert chosen.input_ids[:shared] == other.input_ids[:shared]
    for one, answer in ((chosen, ANSWERS[2]), (other, rejected)):
        [text] = targets(one, tokenizer)
        assert text.removeprefix("<think>\n\n</think>\n\n").startswith(answer + "<|")
        assert one.mask.index(True) == shared
        assert one.stop_trained


def test_pair_whose_answers_merge_with_the_header_shares_less() -> None:
    tokenizer = make_tokenizer(CHATML)
    answers = ([{"role": "assistant", "content": text}] for text in ("\n\n  x", "y"))
    chosen, rejected = encode_sample(
        PreferenceSample(CHAT[:2], *answers, None), tokenizer, train_on_prompt=False, origin=""
    )
    shared = chosen.prompt_length
    assert chosen.input_ids[:shared] == rejected.input_ids[:shared]
    assert not any(chosen.mask[:shared])
    assert not any(rejected.mask[:shared])


def test_pair_with_train_on_prompt() -> None:
    sample = PreferenceSample(CHAT[:-1], CHAT[-1:], [{"role": "assistant", "content": "No."}], None)
    plain = encode_sample(sample, make_tokenizer(), train_on_prompt=False, origin="")
    pair = encode_sample(sample, make_tokenizer(), train_on_prompt=True, origin="")
    assert all(all(one.mask) for one in pair)
    assert [one.prompt_length for one in pair] == [one.prompt_length for one in plain]


def add_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer put a BOS token before every text, as Llama's does."""
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    token = ("<|begin|>", tokenizer.bos_token_id)
    processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[token])
    tokenizer.backend_tokenizer.post_processor = processor


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
@pytest.mark.parametrize("begin", ["", "<|begin|>"])
def test_document_ends_with_one_stop_token(begin: str, end: str) -> None:
    tokenizer = make_tokenizer()
    if begin:
        add_bos(tokenizer)
    [encoded] = encode_sample(TextSample(f"import os\n{end}"), tokenizer, train_on_prompt=False, origin="")
    assert tokenizer.decode(encoded.input_ids) == begin + "import os\n<|im_end|>"
    assert all(encoded.mask)
    assert encoded.stop_trained
    assert encoded.prompt_length == 0


def test_chat_text_gets_no_second_bos() -> None:
    tokenizer = make_tokenizer(LLAMA3)
    add_bos(tokenizer)
    assert encode_chat(CHAT, tokenizer).input_ids.count(tokenizer.bos_token_id) == 1
