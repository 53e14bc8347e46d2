"""Statistics of the data, printed and saved with every run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np
from rich.markup import escape
from rich.table import Table

from components.data.records.formats import KINDS
from components.data.store.token_sequences import Bools, TokenSequences
from components.data.store.token_store import BadRecord, FilterResult

LISTED = 10
"""Number of bad records of a source that the audit lists."""
_FEW_STOPS = 0.1
_MANY_LEFT_OUT = 0.5
_CHATS = [name for name, kind in KINDS.items() if kind == "chat"]


@dataclass(frozen=True)
class SourceAudit:
    """Statistics of the samples of one source that belong to a split.

    ``tokens`` and lengths are counted after truncation, without the mismatched answers of unpaired data.
    """

    name: str
    format: str
    samples: int
    tokens: int
    supervised: int
    """Number of tokens that are targets of the loss."""
    truncated: int
    """Number of samples truncated to ``data.max_length``."""
    dropped: int
    """Number of samples left out because they are longer than ``data.max_length``."""
    unsupervised: int
    """Number of samples left out because they have no target."""
    identical: int
    """Number of pairs left out because both answers are the same."""
    bad: int
    """Number of records left out because they cannot be read (``data.on_bad_record=skip``)."""
    first_bad: tuple[str, ...]
    """The place and the fault of the first ``LISTED`` of these records."""
    unread: Mapping[str, int] = field(hash=False)
    """Number of records of the whole source with a value in a field that is not read, by the field's name."""
    unusual: Mapping[str, int] = field(hash=False)
    """Number of samples of the whole source, by what is unusual in their turns."""
    long_prompts: int
    """Number of samples, kept or left out, whose prompt without the answer exceeds ``data.max_length``."""
    cut_prompts: int
    """Number of truncated samples that keep less than half of their prompt, for example because their answer
    is long."""
    desirable: float | None
    """Share of desirable samples in unpaired data. None means other data."""
    stop_token_trained: float | None
    """Share of samples whose last stop token is a target. None means not known, as in an indexed data set."""
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    """Sequence lengths in tokens: percentiles 50, 90 and 99, and the maximum."""


@dataclass(frozen=True)
class SplitAudit:
    """Statistics of the training or evaluation split."""

    sources: tuple[SourceAudit, ...]
    packing: str
    rows: int
    """Number of rows of the first epoch."""
    fill_rate: float | None
    """Ratio of the tokens in the rows to the tokens that fit into them. None means padded rows."""


@dataclass(frozen=True)
class Audit:
    train: SplitAudit
    eval: Mapping[str, SplitAudit] = field(hash=False)
    """The evaluation sets by the prefix of their metrics: ``eval``, or ``eval/NAME`` for a named set."""

    def to_json(self) -> str:
        splits = {name: asdict(split) for name, split in self._splits().items()}
        return json.dumps(splits, indent=2) + "\n"

    def _splits(self) -> dict[str, SplitAudit]:
        return {"train": self.train, **self.eval}

    def warnings(self) -> list[str]:
        """Return the warnings to show before the run, one line each."""
        counts = {
            "{:,} pair(s) with the same answer twice are left out.": "identical",
            "{:,} sample(s) keep less than half of their prompt; raise data.max_length, or use "
            "data.long_samples=drop.": "cut_prompts",
            "{:,} record(s) that cannot be read are left out; bad_records.jsonl names them.": "bad",
        }
        found = [
            f"{source.name}: {text.format(getattr(source, count))}"
            for split in self._splits().values()
            for source in split.sources
            for text, count in counts.items()
            if getattr(source, count)
        ]
        found += [
            f"{source.name}: {left:,} sample(s) without a target, or too long, are left out, and "
            f"{source.samples:,} are kept; raise data.max_length if that is not meant."
            for source in self.train.sources
            if (left := source.unsupervised + source.dropped) > _MANY_LEFT_OUT * (left + source.samples)
        ]
        return found + [
            f"{source.name}: {source.stop_token_trained:.1%} of the samples end with a stop token that is "
            "trained on, so the model may not learn to end its answers; end them with the tokenizer's "
            "eos_token, and raise data.max_length if they are truncated."
            for source in self.train.sources
            if source.format in _CHATS
            and source.stop_token_trained is not None
            and source.stop_token_trained < _FEW_STOPS
        ]

    def render(self, *, evaluates: bool = False) -> Table:
        """Return a table for a terminal, with one column per source.

        Counts that are 0 for every source are only in audit.json. With ``evaluates``, there are no columns
        for the training data, which an evaluation does not use.
        """
        table = Table(title="Data", title_justify="left")
        table.add_column()
        splits = self.eval if evaluates else self._splits()
        columns = [(name, split, source) for name, split in splits.items() for source in split.sources]
        for name, _, source in columns:
            table.add_column(escape(f"{name}: {source.name}"), justify="right", overflow="fold")
        for row in (one for one in fields(SourceAudit)[1:] if one.name != "first_bad"):
            cells = [_cell(getattr(source, row.name)) for _, _, source in columns]
            if {*cells} - {"0", "-"}:
                table.add_row(row.name.replace("_", " "), *cells)
        for row in fields(SplitAudit)[1:]:
            table.add_row(
                row.name.replace("_", " "), *(_cell(getattr(split, row.name)) for _, split, _ in columns)
            )
        return table


def audit_source(
    name: str, tokens: TokenSequences, record: FilterResult, selected: Bools, *, with_left_out: bool = True
) -> SourceAudit:
    """Return the statistics of the ``selected`` samples (bool per sample).

    With ``with_left_out``, also count the samples of the source that were left out. If two splits divide a
    source, only one of them reports these.
    """
    sequences = np.repeat(selected, tokens.sequences_per_sample)
    if tokens.desirable is not None:
        sequences[1::2] = False  # mismatched answers are not trained on
    lengths = tokens.lengths[sequences]
    # A small share of several sources may contain no sample of this one.
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="nearest") if len(lengths) else (0, 0, 0)
    return SourceAudit(
        name=name,
        format=record.format,
        samples=int(selected.sum()),
        tokens=int(lengths.sum()),
        supervised=int(record.num_supervised[sequences].sum()),
        truncated=int(record.truncated[selected].sum()),
        dropped=record.left_out["dropped"] if with_left_out else 0,
        unsupervised=record.left_out["unsupervised"] if with_left_out else 0,
        identical=record.left_out["identical"] if with_left_out else 0,
        bad=len(record.bad) if with_left_out else 0,
        first_bad=first_bad_records(record.bad) if with_left_out else (),
        unread=dict(sorted(record.unread.items())),
        unusual=dict(sorted(record.unusual.items())),
        long_prompts=record.long_prompts if with_left_out else 0,
        cut_prompts=record.cut_prompts if with_left_out else 0,
        desirable=_share(tokens.desirable, selected),
        stop_token_trained=_share(record.stop_trained, selected),
        length_p50=int(p50),
        length_p90=int(p90),
        length_p99=int(p99),
        length_max=int(lengths.max(initial=0)),
    )


def first_bad_records(records: Sequence[BadRecord]) -> tuple[str, ...]:
    return tuple(f"{bad.origin}: {bad.reason}" for bad in records[:LISTED])


def _share(flags: Bools | None, selected: Bools) -> float | None:
    """Return the share of True among the ``selected`` flags. None means no flags or no selected sample."""
    return None if flags is None or not selected.any() else float(flags[selected].mean())


def _cell(value: str | float | Mapping[str, int] | None) -> str:
    if isinstance(value, Mapping):
        return escape(", ".join(f"{name} ({count:,})" for name, count in value.items())) or "-"
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}"
    return value if isinstance(value, str) else f"{value:,}"
