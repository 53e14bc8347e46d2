"""What ``_target_`` may name: a class that serves its group, and in a run folder one of this program."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from components.adapters import LoRA
from components.contracts.errors import ConfigError
from components.contracts.loss import Loss
from components.losses import NextToken
from components.schedulers import Constant
from runner.config.instantiate import GROUPS, build_component
from runner.config.sources import ConfigSources

HERE = __name__
OURS = ConfigSources(run_folder=Path("/runs/x"))


@dataclass(frozen=True)
class OwnLoss(Loss):
    """Inherits the contract itself."""


class OwnScheduler:
    """Serves the contract without inheriting anything of this program."""

    def lr(self, step: int, *, peak: float, total_steps: int) -> float:
        return peak * (step < total_steps)

    def check(self, *, peak: float, total_steps: int) -> None: ...

    @classmethod
    def made(cls) -> "OwnScheduler":
        return cls()


class OwnOptimizer:
    """Annotates what ``__init__`` sets."""

    lr: float
    kind: str
    moments: tuple[str, ...]

    def __init__(self) -> None:
        self.lr, self.kind, self.moments = 1e-3, "own", ()


def own_scheduler() -> OwnScheduler:
    return OwnScheduler()


def own_adapter() -> LoRA | None:
    raise AssertionError("is called")


def unannotated():  # type: ignore[no-untyped-def]
    raise AssertionError("is called")


def nothing() -> None:
    raise AssertionError("is called")


def mapping() -> Mapping[str, int]:
    raise AssertionError("is called")


def anything() -> Any:
    raise AssertionError("is called")


class Half(Protocol):
    def lr(self, step: int, *, peak: float, total_steps: int) -> float: ...
    def check(self, *, peak: float, total_steps: int) -> None: ...


REFUSED = [
    ("stage", "os.system", "is not a class"),
    ("stage", "os", "is not a class"),
    ("stage", "math.pi", "is not a class"),
    ("stage", "builtins.dict", "lacks __call__, counts, kind"),
    ("stage", "builtins.eval", "is not a class"),
    ("stage", "shutil.rmtree", "is not a class, nor a function with the annotation"),
    ("stage", "subprocess.Popen", "lacks __call__, counts, kind"),
    ("stage", "components.contracts.loss.Loss", "is an interface"),
    ("stage", "components.optimizers.AdamW", "lacks __call__, counts"),
    ("stage", f"{HERE}.unannotated", "nor a function with the annotation"),
    ("stage", f"{HERE}.nothing", "returns NoneType, which lacks"),
    ("stage", f"{HERE}.mapping", "returns Mapping, which is not a class"),
    ("stage", f"{HERE}.anything", "returns Any, which lacks"),
    ("adapter", f"{HERE}.nothing", "returns NoneType, which lacks"),
    ("adapter", f"{HERE}.own_adapter", "returns .*, which is not a class"),
    ("adapter", "components.checkpoint.folder.remove", "returns NoneType, which lacks"),
    ("stage", "components.adapters.none", "returns .*, which is not a class"),
    ("adapter", "asyncio.run", "nor a function"),
    ("scheduler", f"{HERE}.Half", "is an interface"),
    ("optimizer", "torch.optim.lr_scheduler.StepLR", "lacks kind, lr, moments"),
    ("logger.mine", "logging.Logger", "lacks check, open"),
    ("model", "transformers.LlamaConfig", "lacks"),
    ("data", "builtins.open", "is not a class"),
    ("parallelism", "collections.OrderedDict", "lacks build"),
]


@pytest.mark.parametrize(("group", "path", "reason"), REFUSED)
def test_what_serves_another_purpose_is_refused_before_it_is_called(
    group: str, path: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{group}\._target_ \(.*\): {path} .*({reason})") as caught:
        build_component(group, {"_target_": path}, ConfigSources())
    assert len(str(caught.value).splitlines()) == 1
    contract = GROUPS.get(group)
    assert contract is None or f"{contract.__module__}.{contract.__name__}." in str(caught.value)


ACCEPTED = [
    ("stage", OwnLoss),
    ("scheduler", OwnScheduler),
    ("scheduler", OwnScheduler.made),
    ("scheduler", own_scheduler),
    ("optimizer", OwnOptimizer),
]


@pytest.mark.parametrize(("group", "target"), ACCEPTED)
def test_a_class_of_ones_own_needs_nothing_of_this_program(group: str, target: Any) -> None:
    node = {"_target_": f"{HERE}.{target.__qualname__}"}
    kind = target if isinstance(target, type) else OwnScheduler
    assert isinstance(build_component(group, node, ConfigSources()), kind)
    assert isinstance(
        build_component(group, node, ConfigSources(run_folder=Path("x"), trusted=(HERE,))), kind
    )
    with pytest.raises(ConfigError, match=rf"^{group}\._target_ \(/runs/x/config\.yaml\): .*trust=\["):
        build_component(group, node, OURS)


FROM_FOLDERS = [
    ("adapter", "os.system", "not a class of this program"),
    ("adapter", "shutil.rmtree", "not a class of this program"),
    ("adapter", "componentsx.adapters.none", "not a class of this program"),
    ("adapter", "components.checkpoint.folder.shutil.rmtree", "not a class"),
    ("adapter", "components.checkpoint.folder.remove", "returns NoneType, which lacks"),
    ("scheduler", "components.schedulers.math", "not a class"),
    ("stage", "", "not a class of this program"),
]


@pytest.mark.parametrize(("group", "path", "reason"), FROM_FOLDERS)
def test_a_folder_names_classes_of_this_program_only(group: str, path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{group}\._target_ \(/runs/x/config\.yaml\): .*{reason}"):
        build_component(group, {"_target_": path, "command": "false"}, OURS)


def test_a_folder_names_classes_of_this_program() -> None:
    node = {"_target_": "components.adapters.none"}
    assert build_component("adapter", node, OURS) is None
    assert isinstance(
        build_component("scheduler", {"_target_": "components.schedulers.Constant"}, OURS), Constant
    )
    loss = {
        "_target_": "components.losses.NextToken",
        "kind": "text",
        "normalize": "token",
        "label_smoothing": 0.0,
        "z_loss": 0.0,
    }
    assert isinstance(build_component("stage", loss, OURS), NextToken)


def test_no_module_is_imported_that_a_folder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except trusted ones; what they have imported from elsewhere is not theirs."""
    imported = "from components.schedulers import Constant\n"
    (tmp_path / "own_schedules.py").write_text(f"{imported}from elsewhere import Other\n")
    (tmp_path / "elsewhere.py").write_text(f"{imported}class Other(Constant): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    trusting = ConfigSources(run_folder=Path("/runs/x"), trusted=("own_schedules",))
    with pytest.raises(ConfigError, match="not a class of this program"):
        build_component("scheduler", {"_target_": "own_schedules.Other"}, OURS)
    assert "own_schedules" not in sys.modules
    with pytest.raises(ConfigError, match=r"own_schedules\.Other, which is defined in elsewhere, is not"):
        build_component("scheduler", {"_target_": "own_schedules.Other"}, trusting)
    assert isinstance(
        build_component("scheduler", {"_target_": "own_schedules.Constant"}, trusting), Constant
    )
