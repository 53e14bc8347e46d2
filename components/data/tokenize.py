"""Sources to token stores: in parallel where it pays, in constant memory, and once for the same content."""

import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from components.data.audit import show_progress
from components.data.chat import Encoded, encode
from components.data.formats import KINDS, Format, Sample, detect, normalize
from components.data.sources import Record, read_records
from components.data.stdlib import Split, stdlib_records
from components.data.store import Chunk, StoreWriter, TokenStore, TornStore, digest, file_digest
from runner.errors import ConfigError
from runner.protocols import SampleKind

Item = tuple[Record | Sample, str]
Overlong = Literal["truncate", "drop"]
STAGES = {"text": "pt", "chat": "sft", "preference": "dpo"}

_BATCH = 64  # samples a worker takes at a time
_PATIENCE_S = 4.0  # of work in this process before workers are started: each needs two seconds to import


# Sources


class Source(Protocol):
    """Where samples come from."""

    @property
    def name(self) -> str:
        """The option and its value, for messages and the audit."""

    def content(self, cache: Path) -> list[str]:
        """Digests that change with what is in it."""

    def items(self, kind: SampleKind) -> tuple[Format | None, Iterator[Item]]:
        """Records and their format, or ready samples and None. ConfigError: of another kind."""


@dataclass(frozen=True)
class FileSource:
    """``data.train``, ``data.eval`` or an entry of ``data.sources``."""

    option: str
    path: str
    format: Format | Literal["auto"]

    @property
    def name(self) -> str:
        return f"{self.option}={self.path}"

    def content(self, cache: Path) -> list[str]:
        read_records(self.path)  # a path that is missing is an error before a reader is asked for anything
        path = Path(self.path).expanduser().resolve()
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        try:
            digests = [f"{file.relative_to(path)} {file_digest(file, cache)}" for file in files]
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror}). Check the file.") from error
        return [self.format, path.suffix, *digests]

    def items(self, kind: SampleKind) -> tuple[Format | None, Iterator[Item]]:
        records = read_records(self.path)
        first = next(records)
        format = detect(*first) if self.format == "auto" else self.format
        if KINDS[format] != kind:
            raise ConfigError(
                f"{self.name}: its format is {format}, and stage={STAGES[kind]} does not train on that.\n"
                f"Use stage={STAGES[KINDS[format]]}, or name another format in data.format."
            )
        return format, chain([first], records)


@dataclass(frozen=True)
class StdlibSource:
    """The embedded data."""

    split: Split

    @property
    def name(self) -> str:
        return f"stdlib ({self.split})"

    def content(self, cache: Path) -> list[str]:  # noqa: ARG002
        root = Path(sysconfig.get_path("stdlib"))
        listing = []
        for folder, names, files in os.walk(root):
            names[:] = sorted(set(names) - {"site-packages", "dist-packages", "__pycache__"})
            sources = sorted(name for name in files if name.endswith(".py"))
            listing += [f"{folder}/{name} {os.path.getsize(f'{folder}/{name}')}" for name in sources]
        return [self.split, sys.version, digest(listing)]

    def items(self, kind: SampleKind) -> tuple[Format | None, Iterator[Item]]:
        return None, stdlib_records(kind, self.split)


# Samples to tokens


@dataclass(frozen=True)
class Encoder:
    """Turns batches of items into chunks of tokens, in this process or in a worker."""

    tokenizer: PreTrainedTokenizerBase
    kind: SampleKind
    max_length: int | None
    """None: of any length."""
    overlong: Overlong
    train_on_prompt: bool
    format: Format | None = None
    """That of the records; None: the items are samples."""

    def __call__(self, items: Sequence[Item]) -> Chunk:
        samples: list[tuple[list[Encoded], bool]] = []
        dropped = unsupervised = 0
        for item, origin in items:
            encoded = self._encode(item, origin)
            fitted = fit(encoded, self.max_length, self.overlong)
            if fitted is None:
                dropped += 1
            elif all(any(one.mask[1:]) for one in fitted):
                samples.append((fitted, fitted is not encoded))
            else:
                unsupervised += 1
        sequences = [one for fitted, _ in samples for one in fitted]
        return Chunk(
            tokens=np.fromiter(chain.from_iterable(one.input_ids for one in sequences), np.uint32),
            mask=np.fromiter(chain.from_iterable(one.mask for one in sequences), np.bool_),
            lengths=np.array([len(one.input_ids) for one in sequences], np.int64),
            truncated=np.array([cut for _, cut in samples], np.bool_),
            stop_trained=np.array(
                [all(one.stop_trained for one in fitted) for fitted, _ in samples], np.bool_
            ),
            dropped=dropped,
            unsupervised=unsupervised,
        )

    def vocab_size(self) -> int:
        """Past the largest id; ``len(tokenizer)`` is less where ids have gaps."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def _encode(self, item: Record | Sample, origin: str) -> list[Encoded]:
        if isinstance(item, dict):
            assert self.format is not None
            item = normalize(item, self.format, origin)
        return encode(item, self.tokenizer, train_on_prompt=self.train_on_prompt, origin=origin)


def fit(encoded: list[Encoded], max_length: int | None, overlong: Overlong) -> list[Encoded] | None:
    """The sequences of one sample within ``max_length`` (the same list where they are); None: dropped.

    A document or a conversation keeps its beginning. A pair keeps its answers and the end of its prompt: the
    prompt loses as much as the longer answer needs, in both alike, but for its last token; an answer that is
    still too long loses its end.
    """
    if max_length is None or all(len(one.input_ids) <= max_length for one in encoded):
        return encoded
    if overlong == "drop":
        return None
    if len(encoded) == 1:
        return [_cut(encoded[0], 0, max_length)]
    prompt = encoded[0].prompt_length
    answer = max(len(one.input_ids) - prompt for one in encoded)
    kept = min(prompt, max(1, max_length - answer))
    return [_cut(one, prompt - kept, max_length) for one in encoded]


def _cut(one: Encoded, start: int, max_length: int) -> Encoded:
    stop = start + max_length
    return replace(
        one,
        input_ids=one.input_ids[start:stop],
        mask=one.mask[start:stop],
        prompt_length=one.prompt_length - start,
        stop_trained=one.stop_trained and not any(one.mask[stop:]),
    )


def encode_all(
    items: Iterable[Item], encoder: Encoder, num_workers: int, *, patience_s: float = _PATIENCE_S
) -> Iterator[Chunk]:
    """Chunks in the order of ``items``, which are read only a little ahead.

    Workers are started once ``patience_s`` seconds of encoding have not been enough.
    """
    batches, spent = _batched(iter(items)), 0.0
    for batch in batches:
        if num_workers > 1 and spent >= patience_s:
            yield from _encode_in_workers(chain([batch], batches), encoder, num_workers)
            return
        began = time.perf_counter()
        chunk = encoder(batch)
        spent += time.perf_counter() - began
        yield chunk


def _batched(items: Iterator[Item]) -> Iterator[list[Item]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


def _encode_in_workers(batches: Iterator[list[Item]], encoder: Encoder, num_workers: int) -> Iterator[Chunk]:
    # Spawned, not forked: the parent may have threads (those of the tokenizer, of a logger).
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(encoder,)
    )
    waiting: deque[Future[Chunk]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) >= 4 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "data.num_workers: a tokenising process died (out of memory, or its tokenizer cannot be sent to "
            "another process);\nlower it, or use data.num_workers=1."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker holds both ends of the pool's queue: it would wait for ever for a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: list[Item]) -> Chunk:
    return _worker_encoder(batch)


# The cache


def build_store(source: Source, encoder: Encoder, cache: Path, num_workers: int) -> tuple[TokenStore, str]:
    """The token store of ``source``, written where there is no whole one, and the identity of its content.

    ConfigError: what is wrong with a record, a source of another kind, or one of which nothing is left.
    """
    settings = [encoder.kind, encoder.max_length, encoder.overlong, encoder.train_on_prompt]
    identity = digest([source.content(cache), _tokenizer_digest(encoder.tokenizer), settings])
    path = cache / "tokens" / digest([identity, _code()])
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        try:
            return TokenStore.open(path), identity
        except TornStore:
            _write_store(path, source, encoder, num_workers)
            return TokenStore.open(path), identity


def _write_store(path: Path, source: Source, encoder: Encoder, num_workers: int) -> None:
    format, items = source.items(encoder.kind)
    writer = StoreWriter(
        path,
        vocab_size=encoder.vocab_size(),
        sequences_per_sample=2 if encoder.kind == "preference" else 1,
        masked=encoder.kind != "text" and not encoder.train_on_prompt,
        format=format or "embedded",
    )
    with writer, show_progress(f"tokenising {source.name}") as advance:
        for chunk in encode_all(items, replace(encoder, format=format), num_workers):
            writer.append(chunk)
            advance(len(chunk.truncated) + chunk.dropped + chunk.unsupervised)
        if not writer.num_samples:
            raise ConfigError(
                f"{source.name}: no sample is left ({writer.dropped} longer than data.max_length="
                f"{encoder.max_length}, {writer.unsupervised} without a token to train on).\n"
                "Raise data.max_length, or check the answers in the file."
            )


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    model = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    # What it puts around a text is not all in the model: several classes add tokens in Python.
    return digest([model, tokenizer.chat_template, special, tokenizer("a")["input_ids"]])


@cache
def _code() -> list[str]:
    """Changes with the programs that make tokens; so nobody has to remember to count a version up."""
    own = ("chat", "formats", "sources", "stdlib", "store", "tokenize", "turns")
    files = [(Path(__file__).parent / f"{name}.py").read_text() for name in own]
    return [digest(files), version("transformers"), version("tokenizers")]
