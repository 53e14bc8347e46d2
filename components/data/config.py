"""The ``data`` group. ``prepare`` runs in the parent process; every rank opens the files that it wrote."""

import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from components.contracts.data import PAIRS, BatchShard, SampleKind
from components.contracts.errors import ConfigError, check_at_least_one
from components.contracts.json_types import Json
from components.data.audit import Audit
from components.data.data_sources import STAGES, FileSource, RecordSource, Source, StdlibSource
from components.data.global_batch import Collation
from components.data.loader import PreparedData, StoreFiles
from components.data.mixture import Shares
from components.data.packing import Packing, PlanOptions
from components.data.plans import count_steps
from components.data.progress import show_progress
from components.data.records.record_files import matching_files
from components.data.splits import SourceTokens, Split, held_out, indexed_source, plan_eval
from components.data.store.digests import digest
from components.data.store.indexed import indexed_prefix
from components.data.store.token_sequences import Bools, Ints
from components.data.stream.chunks import Stream
from components.data.stream.producer import Producer, StreamReader
from components.data.stream.stream_loader import StreamLoader
from components.data.tokenize.encoder import Encoder
from components.data.tokenize.truncation import LongSamples
from components.data.tokenize.workers import build_store
from components.home import expand_home
from components.json_text import as_type
from components.rank_info import num_cores
from components.rounding import whole_steps

log = logging.getLogger(__name__)

_MAX_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Data(ABC):
    """The options that all kinds of data have; conf/data describes them."""

    max_length: int = 1024
    packing: Literal["auto", "bfd", "concat", "none"] = "auto"
    shuffle: bool = True
    long_samples: LongSamples = "truncate"
    drop_last: bool = False
    train_on_prompt: bool = False
    share_prompt: bool = False
    max_samples: int | None = None
    max_eval_samples: int | None = None
    num_workers: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(
                f"data.max_length: must be at least 2, got {self.max_length}; "
                "the first token of a sample is not trained on."
            )
        check_at_least_one("data", self, "num_workers", "max_samples", "max_eval_samples")

    @abstractmethod
    def train_sources(self) -> Sequence[tuple[Source, float]]:
        """Return each source with the number of times that an epoch contains its samples."""

    def streamed_sources(self) -> Sequence[RecordSource]:
        """Return the sources of an endless stream. An empty list means that the data is not a stream."""
        return []

    def records_per_chunk(self) -> tuple[float, ...]:
        """Return the mean number of records per chunk for each source of a stream; empty without a stream."""
        return ()

    @abstractmethod
    def eval_sources(self) -> Mapping[str, Source]:
        """Return the evaluation sets by the prefix of their metrics, ``eval`` or ``eval/NAME``."""

    def mixture(self) -> Shares | None:
        """Return the share of each training source in an epoch.

        None means that the numbers of repetitions that ``train_sources`` returns apply instead.
        """
        return None

    def held_out_fraction(self) -> float:
        """Return the fraction of the training samples that is held out for evaluation."""
        return 0.0

    def resolve_packing(self, kind: SampleKind) -> Packing:
        """Return the packing for samples of ``kind``, with ``auto`` resolved.

        Raises:
            ConfigError: if packing is concat and the samples cannot be cut.
        """
        if self.packing == "auto":
            return "concat" if kind == "text" else "bfd"
        if self.packing == "concat" and kind != "text":
            raise ConfigError(
                f"data.packing: concat cuts samples across rows, which stage={STAGES[kind]} does not "
                "support; use data.packing=bfd."
            )
        return self.packing

    def prepare(
        self,
        kind: SampleKind,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        global_batch_size: int,
        max_steps: int | None,
        epochs: float | None,
    ) -> PreparedData:
        """Tokenise and plan everything that is not in the cache.

        ``max_steps`` takes precedence over ``epochs``.

        Raises:
            ConfigError: if an option or a record is invalid, or if no sample or no step is left.
        """
        self.check_kind(kind)
        cache, packing = self.cache(), self.resolve_packing(kind)
        if packing == "concat" and self.long_samples != "truncate":
            raise ConfigError(
                f"data.long_samples: is {self.long_samples}, but data.packing=concat cuts documents across "
                "rows, and none is too long; leave it out, or use data.packing=bfd."
            )
        self._check_share_prompt(kind, packing)
        self._check_sources(max_steps)
        encoder = self._encoder(kind, tokenizer)
        split_of = partial(Split, cache, packing, self.max_length, seed, self.share_prompt)
        train, held = self._train_split(encoder, cache, seed, split_of)
        num_steps = self._count_steps(train, global_batch_size, max_steps, epochs)
        evaluated = self._eval_splits(encoder, cache, split_of) if held is None else {"eval": held}
        splits = (train, *evaluated.values())
        self.check_formats({part.outcome.format for split in splits for part in split.parts})
        audit = Audit(
            train=train.audit(),
            eval={name: split.audit(with_left_out=held is None) for name, split in evaluated.items()},
        )
        for warning in audit.warnings():
            log.warning(warning)
        collation = Collation(packing != "none", _pad_id(tokenizer))
        stream = self._stream(train.options, collation)
        # drop_last changes which rows belong to a step, and so do the chunks of a stream.
        limits = [source.max_samples for source in self.streamed_sources()]
        of_stream = "all" if stream is None else digest([asdict(stream), limits])
        batching = "whole" if self.drop_last else of_stream
        return PreparedData(
            train=train.files(num_steps, drop_last=self.drop_last),
            eval={name: plan_eval(split, global_batch_size) for name, split in evaluated.items()},
            packing=packing,
            pad_id=collation.pad_id,
            global_batch_size=global_batch_size,
            identity=f"{train.identity}-{batching}",
            audit=audit,
            stream=stream,
            commits=tuple(source.commit() for source in self.streamed_sources()),
        )

    def open_stream(
        self,
        prepared: Json,
        shard: BatchShard,
        kind: SampleKind,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        *,
        step: int,
        position: Sequence[int],
        main: bool,
        beat: Callable[[], object],
    ) -> StreamLoader:
        """Return a loader of a stream whose first global batch is that of ``step``.

        Every rank calls this method; ``main`` is True only on rank 0.

        Args:
            folder: the folder for chunks of the stream, the same on every rank.
            position: the position of ``step`` in the stream, as ``advance`` of a loader returned it. Empty at
                the start of the stream.
            beat: called whenever more of the records before ``position`` have been skipped.
        """
        restored = self.restore(prepared)
        stream, num_steps = restored.stream, restored.num_steps
        assert stream is not None
        producer = None
        if main:
            pairs = zip(self.streamed_sources(), restored.commits, strict=True)
            sources = tuple(source.at(commit) for source, commit in pairs)
            encoder = self._encoder(kind, tokenizer)
            producer = Producer(StreamReader(stream, sources, encoder, self._workers()), folder)
        return StreamLoader(
            stream, shard, folder, producer, num_steps=num_steps, step=step, position=position, beat=beat
        )

    def _stream(self, plan: PlanOptions, collation: Collation) -> Stream | None:
        sources = self.streamed_sources()
        if not sources:
            return None
        options = tuple(source.option for source in sources)
        return Stream(options, self.records_per_chunk(), plan, self.share_prompt, collation)

    def _encoder(self, kind: SampleKind, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        # Documents that are cut across rows may have any length.
        limit = None if self.resolve_packing(kind) == "concat" else self.max_length
        return Encoder(tokenizer, kind, limit, self.long_samples, self.train_on_prompt)

    def _workers(self) -> int:
        return self.num_workers or min(_MAX_WORKERS, num_cores())

    def check_kind(self, kind: SampleKind) -> None:
        """Raise ConfigError if an option is given that has no effect on samples of ``kind``."""
        if kind == "text" and self.train_on_prompt:
            raise ConfigError("data.train_on_prompt: a document has no prompt; leave it out with stage=pt.")
        if kind == "ranked" and self.train_on_prompt:
            raise ConfigError(
                "data.train_on_prompt: a score is that of a whole text; leave it out with stage=rm."
            )

    def check_formats(self, formats: Collection[str]) -> None:  # noqa: B027  most data has no such option
        """Raise ConfigError if an option is given that no source of these formats reads."""

    def cache(self) -> Path:
        """Create and return the cache folder: ``cache_dir``, else $RUNNER_CACHE, else ~/.cache/runner.

        Raises:
            ConfigError: if the folder cannot be created or written to.
        """
        given = self.cache_dir or os.environ.get("RUNNER_CACHE") or "~/.cache/runner"
        folder = Path(expand_home("data.cache_dir" if self.cache_dir else "RUNNER_CACHE", given)).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"data.cache_dir: cannot make {folder} ({error.strerror}); name another."
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"data.cache_dir: cannot write to {folder}; name another.")
        return folder

    def _check_share_prompt(self, kind: SampleKind, packing: Packing) -> None:
        if not self.share_prompt:
            return
        if kind not in PAIRS:
            raise ConfigError(
                f"data.share_prompt: only the two sides of a pair have one prompt; leave it out with "
                f"stage={STAGES[kind]}."
            )
        if packing == "none":
            raise ConfigError(
                "data.share_prompt: data.packing=none gives every sequence its own row, so that none "
                "attends to another; use data.packing=bfd, or data.share_prompt=false."
            )
        if self.train_on_prompt:
            raise ConfigError(
                "data.share_prompt: data.train_on_prompt=true trains on the prompt of either side; "
                "set one of the two to false."
            )

    def _check_sources(self, max_steps: int | None) -> None:
        """Log files that are both trained and evaluated on.

        Raises:
            ConfigError: if a stream has no end, or a file is missing, before any record is read.
        """
        if self.streamed_sources() and max_steps is None:
            raise ConfigError(
                "run.max_steps: is null, but a stream (data.streaming) has no end; give a number."
            )
        if evaluated := list(self.eval_sources().values()):
            _warn_of_shared_files([source for source, _ in self.train_sources()], evaluated)

    def restore(self, prepared: Json) -> PreparedData:
        """Restore the result of ``prepare`` from the output of its ``to_json``."""
        return as_type(PreparedData, prepared)

    def _train_split(
        self, encoder: Encoder, cache: Path, seed: int, split_of: partial[Split]
    ) -> tuple[Split, Split | None]:
        """Return the training split and the split held out of it. None means that nothing is held out.

        Raises:
            ConfigError: if no sample is left to train on.
        """
        parts: Sequence[SourceTokens]
        parts = [self._part(source, encoder, cache, repeats) for source, repeats in self.train_sources()]
        kept = np.concatenate([part.outcome.kept for part in parts])
        drawn = held_out(parts, self.held_out_fraction(), seed)
        held = _flags(drawn, len(kept))
        parts = self._mixed(parts, kept & ~held, encoder.kind)
        train = split_of(parts, kept & ~held, self.shuffle)
        if not train.selected.any():
            remedy = "lower it" if kept.sum() > 1 else "leave it out, or give more samples"
            raise ConfigError(
                f"data.eval_fraction: {self.held_out_fraction()} of {int(kept.sum())} sample(s) leaves none "
                f"to train on; {remedy}."
            )
        if not held.any():
            return train, None
        return train, split_of(parts, _flags(drawn[: self.max_eval_samples], len(kept)))

    def _mixed(
        self, parts: Sequence[SourceTokens], selected: Bools, kind: SampleKind
    ) -> Sequence[SourceTokens]:
        """Return ``parts`` with the repeats that follow from the shares, or unchanged if there are no shares.

        Shares of documents are measured in tokens, as in Megatron, and those of other samples in samples.

        Raises:
            ConfigError: if a source with a share has no sample left.
        """
        shares = self.mixture()
        if shares is None:
            return parts
        ends = np.cumsum([len(part.outcome.kept) for part in parts])
        chosen = np.split(selected, ends[:-1])
        sizes = [
            int(part.tokens.lengths[mine].sum() if kind == "text" else mine.sum())
            for part, mine in zip(parts, chosen, strict=True)
        ]
        if 0 in sizes:
            raise ConfigError(
                f"data.eval_fraction: leaves no sample of {parts[sizes.index(0)].name}; lower it, or remove "
                "the source."
            )
        return [replace(part, repeats=each) for part, each in zip(parts, shares.repeats(sizes), strict=True)]

    def _eval_splits(self, encoder: Encoder, cache: Path, split_of: partial[Split]) -> Mapping[str, Split]:
        parts = {name: self._part(source, encoder, cache) for name, source in self.eval_sources().items()}
        return {name: split_of([part], part.outcome.kept) for name, part in parts.items()}

    def _part(self, source: Source, encoder: Encoder, cache: Path, repeats: float = 1.0) -> SourceTokens:
        if isinstance(source, FileSource) and (prefix := indexed_prefix(source.path)) is not None:
            return indexed_source(source, prefix, encoder, cache, repeats)
        store, identity = build_store(source, encoder, cache, self._workers())
        files = StoreFiles(str(store.path), name=source.option)
        return SourceTokens(source.name, repeats, identity, files, store, store.outcome())

    def _count_steps(
        self, train: Split, global_batch_size: int, max_steps: int | None, epochs: float | None
    ) -> int:
        """Return the number of steps of the run, planning no more epochs than necessary.

        Raises:
            ConfigError: if an epoch that was planned has no step.
        """
        plans = train.plans
        if max_steps is None and not plans.same_number_of_rows:
            assert epochs is not None
            with show_progress("counting steps", "epochs") as advance:
                rows = plans.count_rows(math.ceil(epochs), advance)
        else:  # later epochs have as many steps, or, if they have none, are passed over
            rows = [plans.rows(0)]
        steps = [count_steps(number, global_batch_size, drop_last=self.drop_last) for number in rows]
        if 0 in steps:
            empty = steps.index(0)
            raise _no_step(rows[empty], empty, global_batch_size)
        if max_steps is not None:
            return max_steps
        assert epochs is not None
        if len(steps) == 1:
            return whole_steps(steps[0] * epochs)  # a fraction is rounded up, as in transformers
        last = epochs - (len(steps) - 1)
        return sum(steps[:-1]) + whole_steps(steps[-1] * last)


@dataclass(frozen=True, kw_only=True)
class StdlibData(Data):
    """The embedded data: the Python standard library."""

    max_length: int = 512

    def train_sources(self) -> Sequence[tuple[Source, float]]:
        return [(StdlibSource("train", self.max_samples), 1.0)]

    def eval_sources(self) -> Mapping[str, Source]:
        return {"eval": StdlibSource("eval", self.max_eval_samples)}


def _warn_of_shared_files(trained: Sequence[Source], evaluated: Sequence[Source]) -> None:
    """Log one file of each evaluation set that is trained on, too."""

    def files(source: Source) -> set[Path]:
        if not isinstance(source, FileSource) or indexed_prefix(source.path) is not None:
            return set()
        return {file.resolve() for file in matching_files(source.path)}

    known = set().union(*map(files, trained))
    for source in evaluated:
        if shared := sorted(files(source) & known):
            log.warning("%s: %s is also in the training data", source.option, shared[0])


def _flags(chosen: Ints, number: int) -> Bools:
    """Return for each of ``number`` samples whether ``chosen`` has its index."""
    flags = np.zeros(number, np.bool_)
    flags[chosen] = True
    return flags


def _no_step(num_rows: int, epoch: int, global_batch_size: int) -> ConfigError:
    if not num_rows:
        return ConfigError(
            f"data.sources: no sample is drawn in epoch {epoch}; raise their repeats, or add data."
        )
    return ConfigError(
        f"run.global_batch_size: {global_batch_size} is more than the {num_rows} row(s) of epoch {epoch}, "
        "and data.drop_last leaves out a smaller batch; lower it, or add data."
    )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a padding token.

    Any token can serve as padding, which is neither attended to nor trained on.
    """
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in known if token is not None))
