"""The number of ranks of a layout, checks that its sizes fit a model, and suggestions of sizes that do."""

from collections.abc import Iterable, Mapping

from transformers import PreTrainedConfig

from components.contracts.errors import ConfigError
from components.rank_info import RankInfo


def world_size(
    *, dp: int | None, default_dp: int, model_ranks: int, environ: Mapping[str, str], num_gpus: int
) -> int:
    """Return the number of ranks of the run: ``model_ranks`` (tp x pp x cp) times dp.

    If ``dp`` is None, it is the largest dp, at least 1, that fits WORLD_SIZE if a launcher started this
    process, or otherwise the number of visible GPUs. Without a launcher and GPUs, it is ``default_dp``.

    Raises:
        ConfigError: if a launcher started another number of processes than this number of ranks.
    """
    place = RankInfo.read(environ)
    joined = place.world_size if place.launched else None
    if dp is None:
        available = joined or num_gpus
        ranks = max(available // model_ranks, 1) * model_ranks if available else default_dp * model_ranks
    else:
        ranks = dp * model_ranks
    if joined is not None and ranks != joined:
        takes = f"{ranks} ranks" if dp is not None else f"a multiple of {model_ranks} ranks"
        raise ConfigError(
            f"parallelism.dp: this layout takes {takes} but the launcher started WORLD_SIZE={joined}; "
            f"start that many processes, or choose sizes whose product tp x pp x cp x dp is {joined}."
        )
    return ranks


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def suggest_sizes(size: int, fitting: Iterable[int]) -> str:
    """Return the one or two numbers of ``fitting`` that are nearest to ``size``, joined by "or"."""
    return " or ".join(str(other) for other in sorted(sorted(fitting, key=lambda n: abs(n - size))[:2]))


def check_tp(tp: int, config: PreTrainedConfig) -> None:
    """Check that ``tp`` ranks can split the heads, the MLP and the vocabulary.

    ``tp`` must divide the heads and the MLP width, and every rank must get at least one row of the
    vocabulary.

    Raises:
        ConfigError: if ``tp`` does not fit the model.
    """
    keys = ("num_key_value_heads", "num_attention_heads", "intermediate_size")
    counts = {key: getattr(config, key) for key in keys}

    def lacking(tp: int) -> str | None:
        for key, count in counts.items():
            if count % tp:
                return f"does not divide {key} = {count} of this model"
        rows = -(-config.vocab_size // tp)
        if rows * (tp - 1) >= config.vocab_size:
            return (
                f"leaves a rank without a row of the vocabulary, which has vocab_size = {config.vocab_size}"
            )
        return None

    if reason := lacking(tp):
        fitting = [size for size in range(1, counts["num_key_value_heads"] + 1) if lacking(size) is None]
        raise ConfigError(f"parallelism.tp: {tp} {reason}; use {suggest_sizes(tp, fitting)}.")


def check_cp(cp: int, tp: int, config: PreTrainedConfig, *, instead: str = "") -> None:
    """Check that the all-to-all of context parallelism can split the heads of a tensor-parallel rank.

    Raises:
        ConfigError: if ``cp`` does not divide the number of these heads. The message suggests other sizes,
            and the remedy ``instead`` if it is given.
    """
    heads = config.num_attention_heads // tp
    if heads % cp:
        sizes = suggest_sizes(cp, divisors(heads))
        remedy = f"parallelism.cp={sizes}" + (f", or {instead}" if instead else "")
        raise ConfigError(
            f"parallelism.cp: {cp} does not divide the {heads} attention heads of a rank, which are shared "
            f"out over cp; use {remedy}."
        )
