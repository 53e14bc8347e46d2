"""Building of components from a composed config, whose keys are checked against the signatures."""

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from hydra.utils import get_object
from pydantic import ValidationError
from typing_extensions import is_protocol

from components.checkpoint import resolve_checkpoint
from components.contracts.configs import AdapterConfig, DataConfig, ModelConfig, OptimizerConfig
from components.contracts.errors import ConfigError
from components.contracts.hook import Hook
from components.contracts.json_types import Config, Json
from components.contracts.loss import Loss
from components.contracts.parallelism import ParallelismSpec
from components.contracts.scheduler import SchedulerSpec
from components.json_text import one_line, validator
from components.loggers import LoggerSpec
from components.reference.source import ReferenceSource, resolve_reference
from components.targets import described
from runner.config.run_config import (
    CheckpointConfig,
    EarlyStoppingConfig,
    PreflightConfig,
    ProfilerConfig,
    RunConfig,
    check_restart_source,
)
from runner.config.sources import ConfigSources, is_trusted
from runner.config.target_checks import objection
from runner.config.unknown_keys import hint_for_value, unknown_key

T = TypeVar("T")

GROUPS: Mapping[str, type] = {
    "model": ModelConfig,
    "adapter": AdapterConfig,
    "parallelism": ParallelismSpec,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerSpec,
    "stage": Loss,
    "data": DataConfig,
}
"""Group with one component -> the contract that the component implements."""
NODES: Mapping[str, type] = {
    "run": RunConfig,
    "checkpoint": CheckpointConfig,
    "early_stopping": EarlyStoppingConfig,
    "profiler": ProfilerConfig,
    "preflight": PreflightConfig,
}
"""Top-level node that is not a group -> the class that checks its keys."""

NAMED: Mapping[str, type] = {"hook": Hook, "logger": LoggerSpec}
"""Group with any number of named components -> the contract that each of them implements."""
EXAMPLES = {"hook": "ema.decay", "logger": "wandb.mode"}
"""Group of ``NAMED`` -> an example, COMPONENT.KEY, for messages."""


@dataclass(frozen=True)
class Experiment:
    """The checked configuration of every component, before any model or data is built."""

    run: RunConfig
    checkpoint: CheckpointConfig
    early_stopping: EarlyStoppingConfig
    profiler: ProfilerConfig
    preflight: PreflightConfig
    model: ModelConfig
    adapter: AdapterConfig | None
    """The adapter to train. None means that the model itself is trained."""
    parallelism: ParallelismSpec
    optimizer: OptimizerConfig
    scheduler: SchedulerSpec
    stage: Loss
    data: DataConfig
    logger: Mapping[str, LoggerSpec]
    """Any number of loggers, by name."""
    hook: Mapping[str, Hook]
    """Any number of hooks, by name, in the order of their calls."""

    @cached_property
    def reference(self) -> ReferenceSource:
        """The reference model. Raises ConfigError if its options contradict each other or the rest."""
        return resolve_reference(self.stage, self.model, self.adapter)


def build_experiment(config: Config, where: ConfigSources) -> Experiment:
    """Build the configuration objects of all groups and nodes.

    Raises:
        ConfigError: if a key is unknown, a value is missing or invalid, or a component rejects it.
    """
    known = {field.name for field in fields(Experiment)}
    for key in config:
        if key not in known:
            raise unknown_key(key, where.of(key), known)
    for group in (*GROUPS, *NODES, "logger"):
        if group not in config:
            raise ConfigError(f"{group} (the command line): is missing; choose one of its options.")
    for field, key in {"initial_checkpoint": "checkpoint.init_from", "scalar_head": "stage"}.items():
        if field in config["model"]:
            name = f"model.{field}"
            raise ConfigError(f"{name} ({where.of(name)}): is set from {key}; use that key.")
    parts: Json = {group: build_component(group, config[group], where) for group in GROUPS}
    parts |= {group: build_named(group, config.get(group, {}), where) for group in NAMED}
    nodes: Json = {name: construct(kind, name, config[name], where) for name, kind in NODES.items()}
    if "values" in parts["stage"].requires:
        parts["model"] = replace(parts["model"], scalar_head=True)
    experiment = Experiment(**nodes, **parts)
    check_restart_source(experiment.run, experiment.checkpoint)
    if experiment.checkpoint.init_from is None:
        return experiment
    point = resolve_checkpoint("checkpoint.init_from", experiment.checkpoint.init_from)  # the newest now
    return replace(
        experiment,
        checkpoint=replace(experiment.checkpoint, init_from=str(point)),
        model=replace(experiment.model, initial_checkpoint=point),
    )


def build_named(group: str, nodes: object, where: ConfigSources) -> dict[str, Any]:
    """Build each component of a group from its node ``GROUP.NAME``; return them by name.

    Raises:
        ConfigError: if ``nodes`` or a node is not a mapping, or a component is wrong.
    """
    if not isinstance(nodes, Mapping):
        example, _, _ = EXAMPLES[group].partition(".")
        raise ConfigError(
            f"{group} ({where.of(group)}): must be a mapping of {group}s, got {nodes!r}; use "
            f"{group}=[{example}]."
        )
    for name, node in nodes.items():
        if not isinstance(node, Mapping):
            raise ConfigError(
                f"{group}.{name} ({where.of(f'{group}.{name}')}): must be a {group} of that name, with "
                f"_target_ and its keys, got {node!r}; its options have names such as "
                f"{group}.{EXAMPLES[group]}."
            )
    return {name: build_component(f"{group}.{name}", node, where) for name, node in nodes.items()}


def build_component(group: str, node: Config, where: ConfigSources) -> Any:
    """Import the class ``node['_target_']``, check it, and call it with the other keys.

    Raises:
        ConfigError: before the class is called, if it cannot be imported, does not implement the contract of
            its group, or is named in the config of a run folder and comes from a module that is not trusted;
            also if a key is wrong (see ``construct``).
    """
    path = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(path, str):
        raise ConfigError(f"{group}._target_ ({where.of(group)}): must name the class that reads this group.")
    name = f"{group}._target_"
    check_trusted(name, path, path, where)
    try:
        found = get_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        cause = error.__cause__ or error
        lacking = cause.name if isinstance(cause, ModuleNotFoundError) and not where.chosen(name) else None
        remedy = "name an installed class" if lacking is None else f"pip install {lacking}"
        raise ConfigError(
            f"{name} ({where.of(name)}): cannot import {path} ({type(cause).__name__}: {one_line(cause)}); "
            f"{remedy}."
        ) from error
    target, contract = described(found), {**GROUPS, **NAMED}[group.partition(".")[0]]
    if (reason := objection(target, contract)) is not None:
        wanted = "class with all members" if is_protocol(contract) else "subclass"
        raise ConfigError(
            f"{name} ({where.of(name)}): {path} {reason}; name a {wanted} of "
            f"{contract.__module__}.{contract.__name__}."
        )
    check_trusted(name, path, str(getattr(target, "__module__", "")), where)
    return construct(target, group, {k: v for k, v in node.items() if k != "_target_"}, where)


def check_trusted(name: str, path: str, module: str, where: ConfigSources) -> None:
    """Raise ConfigError if the config was read from a run folder, and ``module`` is not trusted.

    ``path`` is the value of the key ``name``. It is checked before the import, because an import runs code;
    the module that defines the imported class is checked afterwards.
    """
    if where.run_folder is not None and not is_trusted(module, where.trusted):
        source = path if module == path else f"{path}, which is defined in {module},"
        raise ConfigError(
            f"{name} ({where.of(name)}): {source} is not a class of this program, and a folder may not name "
            "others; if you know the code, give trust=[MODULE]."
        )


def construct(target: Callable[..., T], group: str, values: Config, where: ConfigSources) -> T:
    """Return ``target(**values)`` after checking every key and type against the signature.

    Raises:
        ConfigError: if ``values`` is not a mapping, a key is unknown or missing, or a value has another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{group} ({where.of(group)}): must be a mapping of keys, got {values!r}.")
    parameters = inspect.signature(target).parameters
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in values:
        if key not in parameters and not open_ended:
            name = f"{group}.{key}"
            raise unknown_key(name, where.of(name), (f"{group}.{p}" for p in parameters))
    required = [k for k, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [f"{group}.{key}" for key in required if key not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        remedy = " ".join(f"+{name}=VALUE" for name in missing)  # without "+" Hydra accepts no new key
        raise ConfigError(f"{', '.join(missing)} ({where.of(group)}): {verb} missing; give {remedy}.")
    return target(**{k: coerce(f"{group}.{k}", v, hints.get(k, object), where) for k, v in values.items()})


def coerce(name: str, value: object, annotation: Any, where: ConfigSources) -> Any:
    """Return ``value`` validated as the type ``annotation``.

    Validation is strict: a string is not accepted as a number, for example. A list may become a tuple.

    Raises:
        ConfigError: if ``value`` is not of this type.
    """
    if isinstance(annotation, type) and is_dataclass(annotation) and isinstance(value, Mapping):
        return construct(annotation, name, value, where)
    try:
        return validator(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "unexpected_keyword_argument":
            key = ".".join(map(str, (name, *first["loc"])))
            raise ConfigError(f"{key} ({where.of(name)}): nothing reads this key; leave it out.") from error
        reason = hint_for_value(name, value) or f"{first['msg'][:1].lower()}{first['msg'][1:]}."
        raise ConfigError(f"{name} ({where.of(name)}): got {value!r}; {reason}") from error
