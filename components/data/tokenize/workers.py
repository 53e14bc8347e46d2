"""Tokenise sources into token stores: in parallel if it pays, in constant memory, once per content."""

import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from components.contracts.data import SampleKind
from components.contracts.errors import FAILED, ConfigError
from components.data.audit import show_progress
from components.data.demo import SplitName, stdlib_records
from components.data.records.formats import KINDS, Format, detect
from components.data.records.samples import Sample
from components.data.records.sources import Record, read_records
from components.data.store.token_store import (
    CorruptTokenStore,
    StoreWriter,
    TokenChunk,
    TokenStore,
    digest,
    file_digest,
)
from components.data.tokenize.encoder import Encoder, EncoderInput, with_kl_completions

STAGES = {"text": "pt", "chat": "sft", "preference": "dpo", "unpaired": "kto"}

_BATCH = 64  # samples that a worker encodes at a time
_PATIENCE_S = 4.0  # seconds of encoding in this process before workers start; each needs 2 s to import


# Sources


class Source(Protocol):
    """A source of samples."""

    @property
    def option(self) -> str:
        """The name of the source before the number of a record."""

    @property
    def name(self) -> str:
        """The option and its value, for messages and the audit."""

    def content(self, cache: Path) -> list[str]:
        """Return digests that change with the content of the source."""

    def items(self, kind: SampleKind) -> tuple[Format | None, Iterator[tuple[Record | Sample, str]]]:
        """Return records and their format, or finished samples and None.

        Raises:
            ConfigError: if they are of another kind.
        """


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
        read_records(self.path)  # raises if the path is missing; no record is read
        path = Path(self.path).expanduser().resolve()
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        try:
            digests = [f"{file.relative_to(path)} {file_digest(file, cache)}" for file in files]
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror}). Check the file.") from error
        return [self.format, path.suffix, *digests]

    def items(self, kind: SampleKind) -> tuple[Format | None, Iterator[tuple[Record | Sample, str]]]:
        records = read_records(self.path)
        first = next(records)
        format = detect(*first) if self.format == "auto" else self.format
        if KINDS[format] != kind:
            remedy = "give every record a 'label', " if kind == "unpaired" else ""
            raise ConfigError(
                f"{self.name}: its format is {format}, and stage={STAGES[kind]} does not train on that.\n"
                f"Use stage={STAGES[KINDS[format]]}, {remedy}or name another format in data.format."
            )
        return format, chain([first], records)


@dataclass(frozen=True)
class StdlibSource:
    """The embedded data."""

    split: SplitName
    option: str = "stdlib"

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

    def items(self, kind: SampleKind) -> tuple[Format | None, Iterator[tuple[Record | Sample, str]]]:
        return None, stdlib_records(kind, self.split)


# Samples to tokens


def encode_all(
    items: Iterable[EncoderInput], encoder: Encoder, num_workers: int, *, patience_s: float = _PATIENCE_S
) -> Iterator[TokenChunk]:
    """Yield chunks in the order of ``items``, which are read only a little ahead.

    Workers are started if more is left after ``patience_s`` seconds of encoding in this process.
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


def _batched(items: Iterator[EncoderInput]) -> Iterator[list[EncoderInput]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


def _encode_in_workers(
    batches: Iterator[list[EncoderInput]], encoder: Encoder, num_workers: int
) -> Iterator[TokenChunk]:
    # Spawned, not forked: the parent may have threads (those of the tokenizer, of a logger).
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(encoder,)
    )
    waiting: deque[Future[TokenChunk]] = deque()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends.

    A worker holds both ends of the pool's queue, so it would wait forever if the parent was killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(FAILED)


def _encode_in_worker(batch: list[EncoderInput]) -> TokenChunk:
    return _worker_encoder(batch)


# The cache


def build_store(source: Source, encoder: Encoder, cache: Path, num_workers: int) -> tuple[TokenStore, str]:
    """Return the token store of ``source``, written unless it is complete, and its content's identity.

    Raises:
        ConfigError: if a record is invalid, the source is of another kind, or no sample is left.
    """
    settings = [encoder.kind, encoder.max_length, encoder.long_samples, encoder.train_on_prompt]
    identity = digest([source.content(cache), _tokenizer_digest(encoder.tokenizer), settings])
    path = cache / "tokens" / digest([identity, _code()])
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        try:
            return TokenStore.open(path), identity
        except CorruptTokenStore:
            _write_store(path, source, encoder, num_workers)
            return TokenStore.open(path), identity


def _write_store(path: Path, source: Source, encoder: Encoder, num_workers: int) -> None:
    format, records = source.items(encoder.kind)
    items = with_kl_completions(records) if encoder.kind == "unpaired" else records
    writer = StoreWriter(
        path,
        vocab_size=encoder.vocab_size(),
        sequences_per_sample=2 if encoder.kind in ("preference", "unpaired") else 1,
        masked=encoder.kind != "text" and not encoder.train_on_prompt,
        format=format or "embedded",
    )
    with writer, show_progress(f"tokenising {source.name}") as advance:
        for chunk in encode_all(items, replace(encoder, format=format), num_workers):
            writer.append(chunk)
            advance(len(chunk.truncated) + chunk.dropped + chunk.unsupervised + chunk.identical)
        if not writer.num_samples:
            same = f", {writer.identical} with the same answer twice" if writer.identical else ""
            raise ConfigError(
                f"{source.name}: no sample is left ({writer.dropped} longer than data.max_length="
                f"{encoder.max_length}, {writer.unsupervised} without a token to train on{same}).\n"
                "Raise data.max_length, or check the answers in the file."
            )


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    model = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    # The model does not include all tokens put around a text: several classes add tokens in Python.
    return digest([model, tokenizer.chat_template, special, tokenizer("a")["input_ids"]])


@cache
def _code() -> list[str]:
    """Return digests of the code that makes tokens, so that no version number has to be maintained."""
    own = (
        *(
            "records/preference_records",
            "tokenize/chat",
            "tokenize/encoder",
            "tokenize/truncation",
            "records/formats",
            "records/messages",
            "records/samples",
        ),
        *("records/sources", "demo", "store/token_store", "tokenize/workers", "tokenize/assistant_mask"),
    )
    files = [(Path(__file__).parents[1] / f"{name}.py").read_text() for name in own]
    return [digest(files), version("transformers"), version("tokenizers")]
