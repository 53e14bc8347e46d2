"""``runner.export`` of somebody else's run folder: nothing runs that its config.yaml names."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from components.checkpoint.folder import CheckpointMeta, commit, step_folder
from components.contracts.errors import ConfigError
from runner.commands.export import export

GOLDEN = Path(__file__).parents[3] / "conf/golden/default.yaml"
CASES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a function": (
        {"adapter": {"_target_": "os.system", "command": "touch {tmp}/ran"}},
        [],
        r"adapter\._target_ \(.*config\.yaml\): os\.system is not a class of this program",
    ),
    "a function of a trusted module": (
        {"adapter": {"_target_": "os.system", "command": "touch {tmp}/ran"}},
        ["trust=[os,posix]"],
        r"adapter\._target_ \(.*config\.yaml\): os\.system is not a class;",
    ),
    "a module of the folder": (
        {"model": {"_target_": "evil.Model"}},
        [],
        r"model\._target_ \(.*config\.yaml\): evil\.Model is not a class of this program",
    ),
    "a function of ours": (
        {"adapter": {"_target_": "components.checkpoint.folder.remove", "checkpoint": "{tmp}/run"}},
        [],
        r"adapter\._target_ \(.*config\.yaml\): .*remove returns NoneType",
    ),
    "code of a model": (
        {"model": {"path": "{tmp}/model", "architecture": None, "trust_remote_code": True}},
        [],
        r"model\.trust_remote_code \(.*config\.yaml\): is true.*give trust_remote_code=true",
    ),
    "code of a model, allowed": (
        {"model": {"path": "{tmp}/model", "architecture": None, "trust_remote_code": True}},
        ["trust_remote_code=true"],
        r"^model\.path",  # there is none
    ),
    "no name": ({}, ["trust=[../x]"], r"^trust: '\.\./x' is not the name of a module"),
}


def strings_of(node: Any, tmp: Path) -> Any:
    if isinstance(node, dict):
        return {key: strings_of(value, tmp) for key, value in node.items()}
    return node.format(tmp=tmp) if isinstance(node, str) else node


@pytest.mark.parametrize("case", CASES)
def test_nothing_runs_that_a_run_folder_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    changes, arguments, message = CASES[case]
    run = tmp_path / "run"
    point = step_folder(run / "checkpoints", 3)
    point.mkdir(parents=True)
    commit(point, CheckpointMeta({"step": 3}, {}, model_only=False, files={}))
    config = yaml.safe_load(GOLDEN.read_text())
    for group, change in strings_of(changes, tmp_path).items():
        config[group] = change if "_target_" in change else config[group] | change
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(run)
    with pytest.raises(ConfigError, match=message) as caught:
        export([f"checkpoint={run}", f"output={tmp_path / 'out'}", *arguments])
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "ran").exists()
    assert point.exists()


def test_trust_has_no_meaning_without_a_run() -> None:
    with pytest.raises(ConfigError, match=r"^trust: is not read with adapter"):
        export(["adapter=x", "merge=true", "output=y", "trust=[x]"])


@pytest.mark.parametrize("option", ["checkpoint", "output"])
def test_the_home_of_nobody_is_no_folder(option: str) -> None:
    given = {"checkpoint": "x", "output": "y"} | {option: "~nobody-at-all/x"}
    with pytest.raises(ConfigError, match=f"^{option}=~nobody-at-all/x: there is no user"):
        export([f"{key}={value}" for key, value in given.items()])


GOLDEN_TEXT = GOLDEN.read_text()
BROKEN = {
    "a list": b"- 1\n",
    "empty": b"",
    "not UTF-8": b"run: \xff\n",
    "too deep": b"[" * 1500,
    "without model": GOLDEN_TEXT.replace("\nmodel:", "\nmodels:").encode(),
    "without run": GOLDEN_TEXT.replace("run:", "runs:", 1).encode(),
    "unknown dtype": GOLDEN_TEXT.replace("dtype: fp32", "dtype: fp4").encode(),
    "text for seed": GOLDEN_TEXT.replace("seed: 0", "seed: zero").encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_configuration_is_named(content: bytes, tmp_path: Path) -> None:
    point = step_folder(tmp_path / "run" / "checkpoints", 3)
    point.mkdir(parents=True)
    commit(point, CheckpointMeta({"step": 3}, {}, model_only=False, files={}))
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    assert content != GOLDEN_TEXT.encode()
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/run/config\.yaml: .*restore it\.$"):
        export([f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'out'}"])
