"""The training and evaluation splits: their samples, their plans in the cache, and their audit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from components.contracts.errors import ConfigError
from components.data import packing as packing_module
from components.data import shared_prefix as prompts_module
from components.data.audit import SplitAudit, audit_source
from components.data.data_sources import FileSource
from components.data.loader import SplitFiles, StoreFiles
from components.data.packing import Packing, PlanOptions, hold_out
from components.data.plans import CachedPlans, count_steps
from components.data.store.concat_store import ConcatTokens
from components.data.store.digests import digest, file_digest
from components.data.store.indexed import IndexedTokens
from components.data.store.token_sequences import Bools, Ints, TokenSequences
from components.data.store.token_store import FilterResult
from components.data.tokenize.encoder import Encoder


@dataclass(frozen=True)
class SourceTokens:
    """One tokenised source."""

    name: str
    repeats: float
    identity: str
    files: StoreFiles
    tokens: TokenSequences
    outcome: FilterResult


def indexed_source(
    source: FileSource, prefix: Path, encoder: Encoder, cache: Path, repeats: float
) -> SourceTokens:
    if encoder.kind != "text" or source.options.format not in ("auto", "text"):
        raise ConfigError(f"{source.name}: an indexed data set is text; use stage=pt and data.format=auto.")
    if source.max_samples is not None:
        option = "max_eval_samples" if source.option.startswith("data.eval") else "max_samples"
        raise ConfigError(
            f"{source.name}: an indexed data set is read as a whole; set data.{option}=null"
            f"{', and leave it out of the entry' if source.option.startswith('data.sources') else ''}."
        )
    tokens = IndexedTokens.open(prefix, max_length=encoder.max_length)
    tokens.check_vocabulary(encoder.vocab_size())
    record = tokens.outcome(drop=encoder.long_samples == "drop")
    if not record.kept.any():
        raise ConfigError(
            f"{source.name}: no sequence is left ({record.left_out['dropped']} longer than data.max_length="
            f"{encoder.max_length}, {record.left_out['unsupervised']} of a single token)."
        )
    # A plan depends only on the lengths, so there is no need to read the whole corpus.
    index = file_digest(prefix.with_name(f"{prefix.name}.idx").resolve(), cache)
    identity = digest([index, encoder.max_length, encoder.long_samples])
    files = StoreFiles(
        str(prefix.absolute()), indexed=True, max_length=encoder.max_length, name=source.option
    )
    return SourceTokens(source.name, repeats, identity, files, tokens, record)


def held_out(parts: Sequence[SourceTokens], fraction: float, seed: int) -> Ints:
    """Return the indices of the samples to hold out of training, in the order of the draw."""
    outcomes = [part.outcome for part in parts]
    if not fraction:
        return np.zeros(0, np.int64)
    starts = np.cumsum([0, *(outcome.num_records for outcome in outcomes)])
    records = np.concatenate([start + records_of(one) for start, one in zip(starts, outcomes, strict=False)])
    kept = np.zeros(starts[-1], np.bool_)
    kept[records] = np.concatenate([outcome.kept for outcome in outcomes])
    drawn = hold_out(kept, fraction, seed)
    places = np.full(len(kept), len(drawn))
    places[drawn] = np.arange(len(drawn))
    found = np.flatnonzero(places[records] < len(drawn))
    return found[np.argsort(places[records[found]], kind="stable")]


def records_of(outcome: FilterResult) -> Ints:
    """Return the index of each sample's record in its source, int64 per sample."""
    return np.arange(outcome.num_records) if outcome.records is None else outcome.records


@dataclass(frozen=True)
class Split:
    """A selection of samples from some sources, and its plans in the cache."""

    cache: Path
    packing: Packing
    max_length: int
    seed: int
    share_prompt: bool
    """Whether the prompt of a pair is computed only in the chosen sequence."""
    parts: Sequence[SourceTokens]
    selected: Bools = field(repr=False)
    """bool, per sample of all parts: whether the split contains it."""
    shuffle: bool | None = None
    """Whether samples are shuffled. None means evaluation: every sample once and in order."""

    @cached_property
    def tokens(self) -> ConcatTokens:
        return ConcatTokens([part.tokens for part in self.parts])

    @cached_property
    def identity(self) -> str:
        sources = [[part.identity, part.repeats] for part in self.parts]
        chosen = digest(np.packbits(self.selected).tobytes().hex())
        more = ["share_prompt"] if self.share_prompt else []
        fractions = [part.repeats % 1 for part in self.parts if part.repeats % 1]
        if self.shuffle is not None and len({*fractions}) < len(fractions):
            more.append("drawn by source")  # an older checkpoint has drawn such sources as one
        return digest([sources, chosen, self.packing, self.max_length, self.seed, self.shuffle, *more])

    @cached_property
    def folder(self) -> Path:
        stores = [part.files.path for part in self.parts]
        code = [Path(str(module.__file__)).read_text() for module in (packing_module, prompts_module)]
        return self.cache / "plans" / digest([self.identity, stores, code])

    @cached_property
    def plans(self) -> CachedPlans:
        counts = [len(part.outcome.kept) for part in self.parts]
        repeats = [1.0 if self.shuffle is None else part.repeats for part in self.parts]
        chosen = np.repeat(repeats, counts) * self.selected
        firsts = self.tokens.first_samples
        return CachedPlans(self.folder, self.tokens, self.options, chosen, self.share_prompt, firsts)

    @property
    def options(self) -> PlanOptions:
        return PlanOptions(self.packing, self.max_length, bool(self.shuffle), self.seed)

    def files(self, num_steps: int, *, drop_last: bool) -> SplitFiles:
        """Save ``repeats``, and return the description from which all ranks make the same plans."""
        self.plans.save_repeats()
        stores = tuple(part.files for part in self.parts)
        return SplitFiles(stores, str(self.folder), self.options, self.share_prompt, num_steps, drop_last)

    def audit(self, *, with_left_out: bool = True) -> SplitAudit:
        sources, start = [], 0
        for part in self.parts:
            selected = self.selected[start : start + len(part.outcome.kept)]
            start += len(selected)
            sources.append(
                audit_source(part.name, part.tokens, part.outcome, selected, with_left_out=with_left_out)
            )
        plan = self.plans.plan(0)
        tokens = int((plan.segments[:, 2] - plan.segments[:, 1]).sum())
        capacity = plan.num_rows * self.max_length * self.tokens.sequences_per_sample
        fill = None if self.packing == "none" else tokens / capacity
        return SplitAudit(tuple(sources), self.packing, plan.num_rows, fill)


def plan_eval(split: Split, global_batch_size: int) -> SplitFiles:
    steps = count_steps(split.plans.rows(0), global_batch_size, drop_last=False)
    return split.files(steps, drop_last=False)
