"""Tokenise sources into token stores: in parallel if it pays, in constant memory, once per content."""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from components.contracts.data import SampleKind
from components.contracts.errors import FAILED, ConfigError
from components.data.demo import SplitName, stdlib_records
from components.data.progress import show_progress
from components.data.records.formats import KINDS, Format, detect
from components.data.records.record_files import Record, data_files, read_records
from components.data.records.samples import Sample
from components.data.store.token_store import (
    CorruptTokenStore,
    StoreWriter,
    TokenChunk,
    TokenStore,
    WorkerLost,
    digest,
    file_digest,
)
from components.data.tokenize.encoder import Encoder, EncoderInput, with_kl_completions

log = logging.getLogger(__name__)

STAGES = {"text": "pt", "chat": "sft", "preference": "dpo", "unpaired": "kto"}

_BATCH = 64  # samples that a worker encodes at a time, at most
_BATCH_CHARS = 2**20  # characters after which a batch ends
_WAITING_CHARS = 2**26  # characters that all workers together have in memory, unless one sample has more
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_PATIENCE_S = 4.0  # seconds of encoding in this process before workers start; each needs 2 s to import


# Sources


@dataclass(frozen=True)
class SourceItems:
    """The content of a source."""

    format: Format | None
    """Format of the records. None means that the items are finished samples."""
    items: Iterator[tuple[Record | Sample, str]]
    fraction: Callable[[], float | None] = lambda: None
    """Returns the share of the source that has been read. None means not known."""


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

    def items(self, kind: SampleKind) -> SourceItems:
        """Return the content of the source.

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
        files = data_files(path)
        try:
            digests = [f"{file.relative_to(path)} {file_digest(file, cache)}" for file in files]
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror}). Check the file.") from error
        return [self.format, path.suffix, *digests]

    def items(self, kind: SampleKind) -> SourceItems:
        records = read_records(self.path)
        first = next(records)
        format = detect(*first) if self.format == "auto" else self.format
        if KINDS[format] != kind:
            remedy = "give every record a 'label', " if kind == "unpaired" else ""
            raise ConfigError(
                f"{self.name}: its format is {format}, and stage={STAGES[kind]} does not train on that.\n"
                f"Use stage={STAGES[KINDS[format]]}, {remedy}or name another format in data.format."
            )
        return SourceItems(format, chain([first], records), records.reading.fraction)


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

    def items(self, kind: SampleKind) -> SourceItems:
        return SourceItems(None, stdlib_records(kind, self.split))


# Samples to tokens


def encode_all(
    items: Iterable[EncoderInput], encoder: Encoder, num_workers: int, *, patience_s: float = _PATIENCE_S
) -> Generator[TokenChunk]:
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
    """Group items by their number and, such that only one long item is in memory, by their text."""
    batch: list[EncoderInput] = []
    num_chars = 0
    for item in items:
        batch.append(item)
        num_chars += _num_chars(item)
        if len(batch) == _BATCH or num_chars > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _num_chars(value: object) -> int:
    """Return the number of characters of all strings in a record or a sample."""
    if isinstance(value, str):
        return len(value)
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0


def _encode_in_workers(
    batches: Iterator[list[EncoderInput]], encoder: Encoder, num_workers: int
) -> Iterator[TokenChunk]:
    others = set(multiprocessing.active_children())
    # Spawned, not forked: the parent may have threads (those of the tokenizer, of a logger).
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(encoder,)
    )
    waiting: deque[tuple[Future[TokenChunk], int]] = deque()
    try:
        for batch in batches:
            waiting.append((pool.submit(_encode_in_worker, batch), _num_chars(batch)))
            while len(waiting) >= 4 * num_workers or sum(size for _, size in waiting) > _WAITING_CHARS:
                yield waiting.popleft()[0].result()
        while waiting:
            yield waiting.popleft()[0].result()
    except BaseException as error:
        # A signal, or a mistake in a record. A worker may have minutes of work left in a long text.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        if isinstance(error, BrokenProcessPool):
            raise WorkerLost(
                "data.num_workers: a tokenising process died (out of memory, or its tokenizer cannot be sent "
                "to another process);\nlower it, or use data.num_workers=1."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":  # ends the worker even while a tokenizer holds the lock of the interpreter
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
    try:
        return TokenStore.open(path).verified(), identity
    except CorruptTokenStore:
        pass
    with FileLock(f"{path}.lock"):
        try:
            return TokenStore.open(path).verified(), identity  # another process may have written it by now
        except CorruptTokenStore as error:
            if path.exists():
                log.warning("%s: is damaged; tokenised again.", error)
            _write_store(path, source, encoder, num_workers)
            return TokenStore.open(path), identity


def _write_store(path: Path, source: Source, encoder: Encoder, num_workers: int) -> None:
    found = source.items(encoder.kind)
    items = with_kl_completions(found.items) if encoder.kind == "unpaired" else found.items
    writer = StoreWriter(
        path,
        vocab_size=encoder.vocab_size(),
        sequences_per_sample=2 if encoder.kind in ("preference", "unpaired") else 1,
        masked=encoder.kind != "text" and not encoder.train_on_prompt,
        format=found.format or "embedded",
    )
    with writer:
        if writer.num_records:
            log.info("tokenising %s: continues after %s rows", source.name, f"{writer.num_records:,}")
        for _ in islice(items, writer.num_records):  # before the clock of the progress starts
            pass
        chunks = encode_all(items, replace(encoder, format=found.format), num_workers)
        progress = show_progress(f"tokenising {source.name}", "rows", found.fraction)
        with progress as advance, closing(chunks):
            for chunk in chunks:
                writer.append(chunk)
                advance(chunk.num_records)
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
        *("records/record_files", "demo", "store/token_store", "tokenize/workers", "tokenize/assistant_mask"),
    )
    files = [(Path(__file__).parents[1] / f"{name}.py").read_text() for name in own]
    return [digest(files), version("transformers"), version("tokenizers")]
