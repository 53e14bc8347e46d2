"""Global batches from a plan: which rows belong to a step, and which of them to this rank."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from components.atomic_write import write_atomic
from components.contracts.batch import Batch
from components.contracts.data import BatchShard, BatchStats
from components.contracts.json_types import Json
from components.data.audit import Audit
from components.data.global_batch import Collation, GlobalBatch
from components.data.packing import Ints, PlanOptions
from components.data.plans import REPEATS, CachedPlans, StepIndex
from components.data.store.checked_files import load_array
from components.data.store.concat_store import ConcatTokens
from components.data.store.digests import digest
from components.data.store.indexed import IndexedTokens
from components.data.store.reference_logps import ReferenceLogps
from components.data.store.token_sequences import Bools, TokenSequences
from components.data.store.token_store import TokenStore, list_bad_records
from components.data.stream.chunks import Stream

SHOWN_SAMPLES, SHOWN_TOKENS = 3, 1000
"""Maximum number of samples in samples.json, and of tokens of each sample."""


class TokenDataLoader:
    """A ``components.contracts.data.DataLoader``; ``GlobalBatch.shares`` selects the rows of each rank."""

    def __init__(
        self,
        store: TokenSequences,
        plans: CachedPlans,
        shard: BatchShard,
        collate: Collation,
        *,
        drop_last: bool,
        num_steps: int,
        reference: ReferenceLogps | None = None,
    ) -> None:
        """Create a loader.

        ``reference`` has the ``ref_logps`` of the sequences of ``store``. None means that batches have none.
        """
        self._store, self._plans, self._shard, self._collate = store, plans, shard, collate
        self._reference, self.num_steps = reference, num_steps
        self._steps = StepIndex(plans, shard.global_batch_size, drop_last=drop_last)

    @property
    def sequences_per_sample(self) -> int:
        return self._store.sequences_per_sample

    def microbatches(self, step: int) -> list[Batch]:
        made = [(rows, self._collate(self._store, rows, step)) for rows in self.shares(step)]
        if self._reference is None:
            return [batch for _, batch in made]
        return [self._reference.attach(batch, np.concatenate(rows)) for rows, batch in made]

    def shares(self, step: int) -> list[list[Ints]]:
        """Return the rows of each micro-batch of this rank, each row as its segments, int64 ``[n, 3]``."""
        return self.batch(step).shares(self._shard)

    def stats(self, step: int) -> BatchStats:
        return self.batch(step).stats()

    def sample_ids(self, step: int) -> list[str]:
        return self.batch(step).sample_ids()

    def advance(self, step: int) -> list[int]:  # noqa: ARG002
        return []

    def close(self) -> None: ...

    def missing_reference_logps(self) -> bool:
        """Return whether the file of reference log-probabilities lacks a sequence of any step."""
        assert self._reference is not None
        holds = self._reference.has_all
        return not all(holds(self.segments(step)[:, 0]) for step, _ in self.steps_with_new_samples())

    def steps_with_new_samples(self) -> Iterator[tuple[int, Bools]]:
        """Yield each step that has new samples, with a mask of the sequences seen before it (bool ``[S]``).

        No more steps follow after every sample has been seen.
        """
        seen, left = np.zeros(len(self._store.lengths), np.bool_), self._plans.num_samples
        *_, epoch_end = self._steps.locate(0)
        for step in range(min(self.num_steps, epoch_end) if self._plans.same_rows else self.num_steps):
            sequences = np.unique(self.segments(step)[:, 0])
            if not seen[sequences].all():
                yield step, seen
                left -= len(np.unique(sequences[~seen[sequences]] // self.sequences_per_sample))
                seen[sequences] = True
            if not left:
                return

    def largest_microbatch(self) -> tuple[int, int]:
        rows, size = self._shard.global_batch_size, self._shard.micro_batch_size
        *_, end = self._steps.locate(0)
        steps = min(end, self.num_steps)
        lengths = self._plans.plan(0).microbatch_lengths(size, packed=self._collate.packed)
        step, place = divmod(int(lengths[: steps * rows // size].argmax()), rows // size)
        return step, place // self._shard.dp_size

    def epoch(self, step: int) -> float:
        """Return the number of epochs, including a fraction, that the first ``step`` steps make up."""
        if not step:
            return 0.0
        epoch, first, last = self._steps.locate(step - 1)
        return epoch + (step - first) / (last - first)

    def segments(self, step: int) -> Ints:
        """Return the segments of the whole global batch, int64 ``[n, 3]``."""
        return self.batch(step).segments

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``: its rows in the plan of its epoch."""
        assert 0 <= step < self.num_steps, (step, self.num_steps)
        epoch, first, _ = self._steps.locate(step)
        plan = self._plans.plan(epoch)
        start = (step - first) * self._shard.global_batch_size
        stop = min(start + self._shard.global_batch_size, plan.num_rows)
        return GlobalBatch(self._store, plan, start, stop)


@dataclass(frozen=True)
class StoreFiles:
    """The location of the tokens of one source."""

    path: str
    indexed: bool = False
    """Whether these are Megatron's .bin and .idx files; ``path`` is then their common prefix."""
    max_length: int | None = None
    """Number of tokens to which sequences of an indexed data set are truncated. Those of a token store were
    truncated when it was written."""
    name: str = ""
    """The option that names the source, or ``stdlib``."""

    def open(self) -> TokenSequences:
        if self.indexed:
            return IndexedTokens.open(Path(self.path), max_length=self.max_length, name=self.name)
        return TokenStore.open(Path(self.path), self.name)


@dataclass(frozen=True)
class SplitFiles:
    """The training or evaluation split: its tokens, and how each of its epochs is planned."""

    stores: tuple[StoreFiles, ...]
    plans: str
    """The folder of the plans, and of the array of ``repeats``."""
    options: PlanOptions
    share_prompt: bool
    num_steps: int
    drop_last: bool

    def open(self) -> tuple[TokenSequences, CachedPlans]:
        tokens, folder = ConcatTokens([store.open() for store in self.stores]), Path(self.plans)
        repeats, firsts = load_array(folder / REPEATS), tokens.first_samples
        return tokens, CachedPlans(folder, tokens, self.options, repeats, self.share_prompt, firsts)

    def reference(self, folder: Path) -> ReferenceLogps:
        """Return the log-probabilities of this split under one reference model, which are in ``folder``."""
        assert not any(store.indexed for store in self.stores), "only the name of a token store tells all"
        name = digest([Path(store.path).name for store in self.stores])
        return ReferenceLogps(
            folder / f"{name}.npy", ConcatTokens([store.open() for store in self.stores]).lengths
        )


@dataclass(frozen=True)
class PreparedData:
    """The data that the parent process prepared. Every rank receives it as JSON and opens it."""

    train: SplitFiles
    eval: Mapping[str, SplitFiles] = field(hash=False)
    """The evaluation sets by the prefix of their metrics: ``eval``, or ``eval/NAME`` for a named set."""
    packing: str
    pad_id: int
    global_batch_size: int
    identity: str
    """Digest of the data and of everything that determines global batches, except their size and this
    program's code."""
    audit: Audit
    stream: Stream | None = None
    """The stream that is trained on. ``train`` is then its first chunk, for checks and forecasts."""
    commits: tuple[str | None, ...] = ()
    """The commit of each source of the stream: a run reads the same one, even if its branch moves on."""

    @property
    def streamed(self) -> bool:
        return self.stream is not None

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the run."""
        return self.train.num_steps

    @property
    def splits(self) -> list[SplitFiles]:
        """The training split and the evaluation sets."""
        return [self.train, *self.eval.values()]

    def train_loader(self, shard: BatchShard, reference: Path | None = None) -> TokenDataLoader:
        """Return the loader of the training split.

        ``reference`` is the folder of the reference log-probabilities to attach to batches. None means that
        batches have no ``ref_logps``.
        """
        return self.loader(self.train, shard, reference)

    def eval_loaders(self, shard: BatchShard, reference: Path | None = None) -> dict[str, TokenDataLoader]:
        """Return loaders of the evaluation sets, each for one pass in order."""
        return {name: self.loader(split, shard, reference) for name, split in self.eval.items()}

    def loader(self, split: SplitFiles, shard: BatchShard, reference: Path | None = None) -> TokenDataLoader:
        assert shard.global_batch_size == self.global_batch_size, "planned for another size"
        return TokenDataLoader(
            *split.open(),
            shard,
            Collation(self.packing != "none", self.pad_id),
            drop_last=split.drop_last,
            num_steps=split.num_steps,
            reference=None if reference is None else split.reference(reference),
        )

    def missing_reference_logps(self, folder: Path) -> bool:
        """Return whether ``folder``, that of one reference model, lacks log-probabilities for this run."""
        whole = BatchShard(self.global_batch_size, micro_batch_size=1)
        loaders = (self.loader(split, whole, folder) for split in self.splits)
        return any(loader.missing_reference_logps() for loader in loaders)

    def prompt(self) -> list[int]:
        """Return the token ids of a prompt to complete: those of the first sample before its first target.

        The sample is from an evaluation set, if there is one. If its first token is already a target, the
        prompt is the first half of the sequence, at most 32 tokens.
        """
        tokens, plans = next(iter(self.eval.values()), self.train).open()
        sequence, _, stop = plans.plan(0).segments[0].tolist()
        mask = tokens.mask(sequence, 0, stop)
        length = min(32, stop // 2) if mask[0] else int(mask.argmax())
        return [int(token) for token in tokens.tokens(sequence, 0, length)]

    def write_bad_records(self, folder: Path) -> None:
        """Write bad_records.jsonl, with source, origin and reason of each bad record, if there are any."""
        paths = {
            store.path: store.name for split in self.splits for store in split.stores if not store.indexed
        }
        stores = ((name, TokenStore.open(Path(path))) for path, name in paths.items())
        list_bad_records(folder, ((name, bad) for name, store in stores for bad in store.outcome().bad))

    def write_samples(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write samples.json: the first training samples as pieces of text, each marked as target or not."""
        tokens, plans = self.train.open()
        samples = []
        segments = plans.plan(0).segments
        if tokens.desirable is not None:
            segments = segments[segments[:, 0] % 2 == 0]  # mismatched answers are not trained on
        for sequence, start, end in segments[:SHOWN_SAMPLES].tolist():
            stop = min(end, start + SHOWN_TOKENS)
            ids, mask = tokens.tokens(sequence, start, stop), tokens.mask(sequence, start, stop)
            ends = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
            pieces = zip([0, *ends], ends, strict=False)
            samples.append([(tokenizer.decode(ids[a:b].tolist()), bool(mask[a])) for a, b in pieces])
        write_atomic(folder / "samples.json", json.dumps(samples, indent=1) + "\n")

    def to_json(self) -> Json:
        return asdict(self)
