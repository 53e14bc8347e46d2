"""The process that reads and tokenises the chunks of a stream ahead of training."""

import multiprocessing
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from multiprocessing.connection import Connection
from pathlib import Path

from components.contracts.errors import ConfigError
from components.data.data_sources import Source, SourceItem
from components.data.progress import EVERY_S
from components.data.store.checked_files import write_checked_json
from components.data.store.token_store import WorkerLost, is_transient
from components.data.stream.chunks import COMPLETE, Stream, chunk_name
from components.data.tokenize.encoder import Encoder, EncoderInput, encoder_inputs
from components.data.tokenize.workers import batched, encode_batches, end_with_parent, new_writer

AHEAD = 2
"""Number of chunks that are made before rank 0 needs them."""
FAILURE = "failure.json"
"""Name of the file that says why the process will write no further chunk."""
SKIPPED = "skipped.json"
"""Name of the file that says how many of the records used before a resume have been skipped so far."""
_PATIENCE_S = 10.0  # seconds in which the process may end by itself


@dataclass(frozen=True)
class StreamReader:
    """The sources of a stream, and the encoder of their records."""

    stream: Stream
    sources: tuple[Source, ...]
    encoder: Encoder
    num_workers: int


class StreamedTokens:
    """The tokens of one source of a stream, from chunk ``first`` on, without end."""

    def __init__(self, reader: StreamReader, source: int, first: int, folder: Path) -> None:
        """Create the reader of a source, which writes ``SKIPPED`` in ``folder`` while it skips records."""
        self._stream, self._source = reader.stream, source
        found = reader.sources[source].items(reader.encoder.kind)
        self._splits_pairs = found.splits_pairs
        self._format, self._encoder = found.format, replace(reader.encoder, options=found.options)
        start, _ = self._stream.records(source, first)
        items = _repeated(reader.sources[source], reader.encoder, start, folder / SKIPPED)
        # No batch for the encoder has records of two chunks.
        batches = chain.from_iterable(batched(self._piece(items, chunk)) for chunk in count(first))
        share = self._stream.records_per_chunk[source] / sum(self._stream.records_per_chunk)
        self._tokens = encode_batches(batches, self._encoder, max(1, round(reader.num_workers * share)))

    def _piece(self, items: Iterator[SourceItem], chunk: int) -> Iterator[EncoderInput]:
        piece = islice(items, self._stream.num_records(self._source, chunk))
        encoder = self._encoder
        return encoder_inputs(piece, encoder.kind, encoder.options, split=self._splits_pairs)

    def write(self, path: Path, chunk: int) -> bool:
        """Write this source's part of chunk ``chunk`` to ``path``; return whether the part has a sample.

        Chunks must be written in order, because each call continues to read where the last one ended.
        """
        with new_writer(path, self._encoder, self._format) as writer:
            number = self._stream.num_records(self._source, chunk) * (2 if self._splits_pairs else 1)
            while writer.meta.records < number:
                writer.append(next(self._tokens))
        return writer.num_samples > 0

    def close(self) -> None:
        self._tokens.close()


def _repeated(source: Source, encoder: Encoder, start: int, progress: Path) -> Iterator[SourceItem]:
    """Yield the items of ``source``, repeated without end, from number ``start`` on.

    ``progress`` is the file for the number of items that have been skipped.
    """
    while True:
        items = source.items(encoder.kind).items
        passed = _skip(items, start, source.option, progress)
        if passed < start:
            start = (start - passed) % passed
        else:
            start = 0
            yield from items


def _skip(items: Iterator[SourceItem], number: int, option: str, progress: Path) -> int:
    """Skip up to ``number`` items and return how many there were; now and then, write it to ``progress``."""
    passed, written = 0, time.monotonic()
    for passed, _ in enumerate(islice(items, number), start=1):
        if time.monotonic() - written >= EVERY_S:
            write_checked_json(progress, {"option": option, "skipped": passed, "of": number})
            written = time.monotonic()
    return passed


def write_chunk(parts: Sequence[StreamedTokens], place: Path, chunk: int) -> None:
    place.mkdir()
    sources = [source for source, part in enumerate(parts) if part.write(place / str(source), chunk)]
    if not sources:
        raise ConfigError(
            f"data.streaming: no record of chunk {chunk} can be trained on; raise data.max_length or "
            "data.buffer_size, or check the records."
        )
    write_checked_json(place / COMPLETE, {"sources": sources})


class Producer:
    """A process that writes chunks into ``folder`` until it is closed or the process that created it ends."""

    def __init__(self, reader: StreamReader, folder: Path) -> None:
        self._reader, self._folder = reader, folder
        self._process: multiprocessing.process.BaseProcess | None = None
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run left

    def start(self, first: int) -> None:
        """Start the process unless it is running, and request chunk ``first`` and ``AHEAD - 1`` more."""
        if self._process is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        spawn = multiprocessing.get_context("spawn")
        receiver, self._sender = spawn.Pipe(duplex=False)
        arguments = (self._reader, self._folder, first, receiver)
        self._process = spawn.Process(target=_produce, args=arguments, name="stream")
        self._process.start()
        receiver.close()
        for _ in range(AHEAD):
            self.request()

    def request(self) -> None:
        """Request one more chunk."""
        if self._process is not None and self._process.is_alive() and not self._sender.closed:
            self._sender.send(None)

    def check(self) -> None:
        """If the process has died, write ``FAILURE``, which every rank reads."""
        assert self._process is not None
        code = self._process.exitcode
        if code is not None and not (self._folder / FAILURE).exists():
            reason = f"the process that reads ahead has died (exit code {code}); train.log may say more"
            write_failure(self._folder, WorkerLost(f"data.streaming: {reason}."))

    def close(self) -> None:
        try:
            if self._process is not None:
                self._sender.close()  # ends the process after its current chunk, and its workers with it
                self._process.join(_PATIENCE_S)
        finally:  # also after Ctrl-C
            if self._process is not None:
                self._process.kill()
                self._process.join()
            shutil.rmtree(self._folder, ignore_errors=True)


def _produce(reader: StreamReader, folder: Path, first: int, requests: Connection) -> None:
    """Write a chunk for each request until the connection is closed, or write ``FAILURE`` after an error."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets this signal too, and ends this process
    with ExitStack() as stack:
        try:
            parts = [
                stack.enter_context(closing(StreamedTokens(reader, source, first, folder)))
                for source in range(len(reader.sources))
            ]
            for chunk in requested_chunks(requests, first):
                write_chunk(parts, folder / chunk_name(chunk), chunk)
        except Exception as error:
            write_failure(folder, error)
            if not isinstance(error, ConfigError | OSError):
                raise  # the traceback shows the place of a mistake in the code, perhaps that of the user


def requested_chunks(requests: Connection, first: int) -> Iterator[int]:
    """Yield numbers from ``first`` on, one for each request, until the connection is closed.

    Requests that are still in the connection when it is closed are dropped.
    """
    waiting = 0
    for chunk in count(first):
        try:
            while not waiting or requests.poll():
                requests.recv()
                waiting += 1
        except EOFError:
            return
        waiting -= 1
        yield chunk


def write_failure(folder: Path, error: Exception) -> None:
    """Write ``FAILURE``, which also says whether the error would recur after a restart of the run."""
    is_explained = isinstance(error, ConfigError | OSError)
    reason = str(error) if is_explained else f"data.streaming: {error!r}; standard error has the traceback."
    write_checked_json(folder / FAILURE, {"reason": reason, "final": not is_transient(error)})
