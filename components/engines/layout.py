"""How many ranks a layout takes, and sizes to suggest instead."""

from collections.abc import Iterable, Mapping

from runner.errors import ConfigError


def world_size(
    *, dp: int | None, default_dp: int, model_ranks: int, environ: Mapping[str, str], num_gpus: int
) -> int:
    """Ranks of the run: ``model_ranks`` (tp x pp x cp) times dp.

    Where dp is unset it fills WORLD_SIZE, else the visible GPUs, else it is ``default_dp``.

    Raises:
        ConfigError: the sizes do not fit WORLD_SIZE.
    """
    joined = int(environ["WORLD_SIZE"]) if "WORLD_SIZE" in environ else None
    if dp is None:
        available = joined or num_gpus
        ranks = max(available // model_ranks, 1) * model_ranks if available else default_dp * model_ranks
    else:
        ranks = dp * model_ranks
    if joined is not None and ranks != joined:
        takes = f"{ranks} ranks" if dp is not None else f"a multiple of {model_ranks} ranks"
        raise ConfigError(
            f"parallelism.dp: this layout takes {takes} but the launcher started WORLD_SIZE={joined}; "
            f"start so many processes, or choose sizes whose product tp x pp x cp x dp is {joined}."
        )
    return ranks


def nearest(size: int, fitting: Iterable[int]) -> str:
    """The one or two of ``fitting`` that are nearest to ``size``, in words."""
    return " or ".join(str(other) for other in sorted(sorted(fitting, key=lambda n: abs(n - size))[:2]))
