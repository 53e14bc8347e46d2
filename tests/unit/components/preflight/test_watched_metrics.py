"""Names of metrics, which may have slashes, and of evaluation sets."""

import pytest

from components.contracts.errors import ConfigError
from components.losses import DPO
from components.preflight.eval_metrics import check_watched_metric, check_watched_set

LOSS = DPO()
SETS = ("eval", "eval/code")


@pytest.mark.parametrize(
    "metric",
    ["eval/loss", "eval/code/loss", "eval/rewards/accuracies", "eval/code/rewards/accuracies"],
)
def test_a_metric_of_a_set_or_of_all(metric: str) -> None:
    check_watched_metric(metric, LOSS, "checkpoint.keep_best")
    check_watched_set(metric, LOSS, SETS, "checkpoint.keep_best")


@pytest.mark.parametrize(
    "metric", ["eval/rewards", "eval/a/b/loss", "train/loss", "loss", "eval/accuracies/loss/x"]
)
def test_no_metric(metric: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best: evaluations do not report"):
        check_watched_metric(metric, LOSS, "checkpoint.keep_best")


def test_no_set() -> None:
    check_watched_metric("eval/chat/rewards/accuracies", LOSS, "checkpoint.keep_best")
    with pytest.raises(ConfigError, match=r"is of an evaluation set .* use a metric of eval, eval/code"):
        check_watched_set("eval/chat/rewards/accuracies", LOSS, SETS, "checkpoint.keep_best")
