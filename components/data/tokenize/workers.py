"""Tokenise sources into token stores in the cache, in constant memory, and in parallel if sources are large.

A source whose content and options have not changed since an earlier run is not tokenised again.
"""

import ast
import ctypes
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import is_dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from components.contracts.data import PAIRS, SampleKind
from components.contracts.errors import FAILED, ConfigError
from components.data.data_sources import RecordSource, Source
from components.data.progress import show_progress
from components.data.records.formats import normalize
from components.data.records.options import RecordError
from components.data.records.record_files import Unreadable
from components.data.store.digests import digest
from components.data.store.token_store import (
    CorruptTokenStore,
    StoreWriter,
    TokenChunk,
    TokenStore,
    WorkerLost,
)
from components.data.tokenize.encoder import Encoder, EncoderInput, encoder_inputs

log = logging.getLogger(__name__)

_BATCH = 64  # samples that a worker encodes at a time, at most
_BATCH_CHARS = 2**20  # characters after which a batch ends
_WAITING_CHARS = 2**26  # characters that all workers together have in memory, unless one sample has more
_COUNTED = 100_000  # records in which the bad ones are counted
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_PATIENCE_S = 4.0  # seconds of encoding in this process before workers start; each needs 2 s to import


# Samples to tokens


def encode_batches(
    batches: Iterator[list[EncoderInput]],
    encoder: Encoder,
    num_workers: int,
    *,
    patience_s: float = _PATIENCE_S,
) -> Generator[TokenChunk]:
    """Yield one ``TokenChunk`` per batch, in order.

    Batches are read only a little ahead. If batches are left after ``patience_s`` seconds of encoding in this
    process, and ``num_workers`` is above 1, worker processes encode them.
    """
    spent = 0.0
    for batch in batches:
        if num_workers > 1 and spent >= patience_s:
            yield from _encode_in_workers(chain([batch], batches), encoder, num_workers)
            return
        began = time.perf_counter()
        chunk = encoder(batch)
        spent += time.perf_counter() - began
        yield chunk


def batched(items: Iterator[EncoderInput]) -> Iterator[list[EncoderInput]]:
    """Group items into batches of at most ``_BATCH`` items.

    A batch also ends after ``_BATCH_CHARS`` characters, so that it has at most one long item.
    """
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
    end_with_parent()


def end_with_parent() -> None:
    """Make this process end when its parent process ends, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # ends the worker even while a tokenizer holds the lock of the interpreter
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends.

    A worker holds both ends of the pool's queue, so it would wait forever if the parent were killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(FAILED)


def _encode_in_worker(batch: list[EncoderInput]) -> TokenChunk:
    return _worker_encoder(batch)


# The cache


def build_store(source: Source, encoder: Encoder, cache: Path, num_workers: int) -> tuple[TokenStore, str]:
    """Return the token store of ``source``, and a digest of its content, the tokenizer and the options.

    The store is written unless it is complete. The digest of a stream, whose files are not read as a whole,
    also covers the tokens of its first chunk.

    Raises:
        ConfigError: if a record is invalid, the source is of another kind, or no sample is left.
    """
    settings = [encoder.kind, encoder.max_length, encoder.long_samples, encoder.train_on_prompt]
    identity = digest([source.content(cache), _tokenizer_digest(encoder.tokenizer), settings])
    records = source if isinstance(source, RecordSource) else None
    stream = records if records is not None and records.streaming else None
    version = [] if stream is None else stream.version()
    bad = None if records is None else records.options.on_bad_record
    path = cache / "tokens" / digest([identity, _code(), _own_code(source), version, bad])
    store = _open_or_write(path, source, encoder, num_workers)
    if stream is not None:
        identity = digest([identity, store.meta.checksums])
    return store, identity


def _open_or_write(path: Path, source: Source, encoder: Encoder, num_workers: int) -> TokenStore:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return TokenStore.open(path).verified()
    except CorruptTokenStore:
        pass
    with FileLock(f"{path}.lock"):
        try:
            return TokenStore.open(path).verified()  # another process may have written it by now
        except CorruptTokenStore as error:
            if path.exists():
                log.warning("%s: is damaged; tokenised again.", error)
            _write_store(path, source, encoder, num_workers)
            return TokenStore.open(path)


def _write_store(path: Path, source: Source, encoder: Encoder, num_workers: int) -> None:
    found = source.items(encoder.kind)
    items = encoder_inputs(found.items, encoder.kind, found.options, split=found.splits_pairs)
    with new_writer(path, encoder, found.format) as writer:
        if done := writer.meta.records:
            log.info("tokenising %s: continues after %s rows", source.name, f"{done:,}")
        for _ in islice(items, done):  # before the clock of the progress starts
            pass
        chunks = encode_batches(batched(items), replace(encoder, options=found.options), num_workers)
        progress = show_progress(f"tokenising {source.name}", "rows", found.fraction)
        with progress as advance, closing(chunks):
            try:
                for chunk in chunks:
                    writer.append(chunk)
                    advance(chunk.num_records)
            except RecordError as error:
                raise _with_count(error, source, encoder.kind) from error
        if not writer.num_samples:
            left_out, bad = writer.meta.left_out, writer.meta.bad
            same = f", {left_out['identical']} with the same answer twice" if left_out["identical"] else ""
            same += f", {bad} that cannot be read" if bad else ""
            raise ConfigError(
                f"{source.name}: no sample is left ({left_out['dropped']} longer than data.max_length="
                f"{encoder.max_length}, {left_out['unsupervised']} without a token to train on{same}).\n"
                "Raise data.max_length, or check the answers in the file."
            )


def new_writer(path: Path, encoder: Encoder, format: str) -> StoreWriter:
    """Return a writer of a token store for the chunks of ``encoder``."""
    return StoreWriter(
        path,
        vocab_size=encoder.vocab_size(),
        sequences_per_sample=2 if encoder.kind in (*PAIRS, "unpaired") else 1,
        masked=encoder.kind != "text" and not encoder.train_on_prompt,
        format=format,
        ranked=encoder.kind == "ranked",
    )


def _with_count(error: RecordError, source: Source, kind: SampleKind) -> ConfigError:
    """Return the error with the number of unreadable records among the first ``_COUNTED`` ones."""
    found, bad, total = source.items(kind), 0, 0
    with suppress(ConfigError):  # a later fault may end the reading; the first one is reported
        for item, origin in islice(found.items, _COUNTED):
            total += 1
            try:
                if isinstance(item, Unreadable):
                    raise item.error
                if isinstance(item, dict):
                    normalize(item, found.options, origin)
            except RecordError:
                bad += 1
    if bad < 2:
        return error
    of = f"of the first {total:,}" if total == _COUNTED else f"of {total:,}"
    return ConfigError(
        f"{error}\n{bad:,} {of} records cannot be read; correct them, or set data.on_bad_record=skip."
    )


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    model = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    # The model does not include all tokens put around a text: several classes add tokens in Python.
    return digest([model, tokenizer.chat_template, special, tokenizer("a")["input_ids"]])


def _own_code(source: Source) -> str:
    """Return the source code of the user's modules on which the samples of a source depend.

    These are the modules of its class and of its ``convert``, and those that they import, unless they are
    installed packages.
    """
    names = [type(source).__module__]
    if isinstance(source, RecordSource) and source.convert is not None:
        names.append(source.convert.__module__)
    found: dict[str, str] = {}
    while names:
        name = names.pop()
        if name in found or not _is_users(name):
            continue
        module, found[name] = sys.modules[name], ""
        with suppress(OSError):  # a module without a file of Python
            found[name] = inspect.getsource(module)
        names += _imports(found[name], module.__package__ or "")
    return "".join(text for _, text in sorted(found.items()))


def _imports(text: str, package: str) -> Iterator[str]:
    """Yield the dotted names of all that a module of ``package`` with the source ``text`` imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def _is_users(module: str) -> bool:
    """Return whether a module is the user's: not of this package, an installed package or Python itself."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return False
    stdlib = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not installed and not any(Path(file).is_relative_to(folder) for folder in stdlib)


@cache
def _code() -> list[str]:
    """Return a digest of the code that makes tokens, and the versions of its libraries.

    The name of a store depends on them, so no version number has to be maintained.
    """
    folder = Path(__file__).parents[1]
    own = [folder / name for name in ("data_sources.py", "demo.py", "store/token_store.py")]
    own += [*(folder / "records").glob("*.py"), *(folder / "tokenize").glob("*.py")]
    files = [file.read_text() for file in sorted(own)]
    return [digest(files), version("transformers"), version("tokenizers")]
