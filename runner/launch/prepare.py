"""Second part of a launch: create and fill the folder of a run that passed all checks."""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from components.atomic_write import write_atomic
from components.checkpoint.folder import complete_checkpoints
from components.contracts.configs import AdapterConfig, Prepared
from components.contracts.errors import CompletedError, ConfigError
from components.contracts.json_types import Config
from components.preflight.checks import steps_done
from components.preflight.forecast_report import survey
from components.preflight.search.memory_advice import check_fits
from runner.launch import slurm_env
from runner.launch.checks import PreparedRun, RunPreparation, inspect
from runner.launch.run_lock import locked
from runner.records.failures import clear_failure_reports
from runner.records.run_dir import (
    MODEL_PATHS,
    create_run_folder,
    git_commit,
    read_run_config,
    reopen_run_folder,
    versions,
    write_code_diff,
    write_config,
)
from runner.records.run_record import (
    METRICS,
    PeakMemory,
    ReferenceCache,
    RunRecord,
    SweepPlace,
    logged_results,
)


def prepare(launch: RunPreparation) -> Path:
    """Run all checks that need no ranks, prepare the data, and create, fill and return the run folder.

    The lock of the folder is held until ``launch.resources`` is closed.

    Raises:
        CompletedError: if the run to resume has no steps left, with ``same_config``.
        ConfigError: if another check fails, the run does not fit into memory, or another process uses the
            folder.
    """
    chooses_size = launch.experiment.run.micro_batch_size == "auto"
    try:
        launch, found = inspect(launch)
    except CompletedError as error:
        with_settings = with_adapter_settings(launch.config, launch.experiment.adapter)
        # Runs of earlier versions did not record these settings.
        error.same_config = any(is_recorded(each, error.folder) for each in (with_settings, launch.config))
        raise
    point, console = launch.where.sweep_job, launch.console
    evaluates = launch.experiment.run.evaluate_only
    if found.candidate is not None:
        check_fits(found.candidate, evaluates=evaluates)
    forecast = survey(found.candidate, launch.config)
    folder, record = open_folder(launch, found)
    if point is not None:
        point.mark_running(folder)
    reference = reference_cache(launch, found.data)
    config = with_adapter_settings(launch.config, launch.experiment.adapter)
    write_config(folder, with_absolute_paths(with_recorded_init_from(config, folder)))
    describe(launch, found, record, reference, chooses_size=chooses_size).write(folder)
    write_code_diff(folder)
    audit = found.data.audit.to_json()
    write_atomic(folder / "audit.json", audit)
    found.data.write_bad_records(folder)
    found.data.write_samples(folder, launch.experiment.model.load_tokenizer())
    write_atomic(folder / "preflight.json", forecast.to_json())
    shown = point is None or point.is_first_with(audit)
    table = found.data.audit.render(evaluates=evaluates)
    data = table if shown else "data        as in an earlier job of the sweep: audit.json"
    console.print(data, forecast.render(), sep="\n")
    console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)
    return folder


def describe(
    launch: RunPreparation,
    found: PreparedRun,
    before: RunRecord,
    reference: ReferenceCache | None,
    *,
    chooses_size: bool,
) -> RunRecord:
    """Return the record of the run that is about to start; ``before`` is that of the run it resumes."""
    run, point = launch.experiment.run, launch.where.sweep_job
    return RunRecord(
        command=list(launch.command),
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=versions(),
        git_commit=git_commit(),
        began=launch.began,
        world_size=launch.world_size,
        device=launch.device,
        overrides=list(launch.where.overrides),
        resumed_from=None if found.resume is None else str(found.resume.absolute()),
        sweep=None if point is None else SweepPlace(str(point.sweep), point.number, [*point.swept]),
        slurm=slurm_env.job_facts(os.environ),
        identity=vars(found.identity),
        reference=reference,
        auto_micro_batch_size=run.rows_per_microbatch if chooses_size else None,
        peak_memory=PeakMemory(
            None if run.evaluate_only or found.candidate is None else found.candidate.peak.total
        ),
        data=found.data.to_json(),
        results=before.results,
        engine_facts=before.engine_facts,
    )


def open_folder(launch: RunPreparation, found: PreparedRun) -> tuple[Path, RunRecord]:
    """Create and lock the run folder, or reopen that of the resumed run; return the folder and its record.

    Raises:
        ConfigError: if the folder cannot be created, is damaged, or is used by another process.
    """
    run, own = launch.experiment.run, found.previous_run_dir
    continues = launch.experiment.checkpoint.resume == "auto" and not run.evaluate_only
    if own is None and continues and found.resume is not None:
        own = found.resume.parent.parent
    if own is None:
        if continues:
            runs = Path(run.output_dir, run.name)
            message = f"checkpoint.resume=auto: no run with a checkpoint in {runs}; a new run begins"
            launch.console.print(message, soft_wrap=True, highlight=False)
        folder = create_run_folder(run.output_dir, run.name)
        launch.resources.enter_context(locked(folder))
        return folder, RunRecord()
    launch.resources.enter_context(locked(own.absolute()))
    written = complete_checkpoints(own.absolute() / "checkpoints")
    if continues and written and found.resume is not None and written[-1] != found.resume.absolute():
        raise ConfigError(
            f"checkpoint.resume=auto: another process has just written {written[-1]}; give the command again."
        )
    step = steps_done(found.resume)
    folder = reopen_run_folder(own.absolute(), step)
    clear_failure_reports(folder)
    recorded = (folder / "run.json").exists()  # perhaps only its checkpoints were copied
    record = RunRecord.read(folder) if recorded else RunRecord()
    # A killed run did not record its results, and later rows are removed.
    results = logged_results(folder) if (folder / METRICS).exists() else record.results.up_to(step)
    return folder, replace(record, results=results)


def with_recorded_init_from(config: Config, folder: Path) -> Config:
    """Return ``config`` with the ``checkpoint.init_from`` that ``folder`` already records, if it does.

    The run began with the recorded one. A resumed run may leave it out or name a newer checkpoint. A recorded
    checkpoint that does not exist any more is not taken over: ranks could not read it.
    """
    if not (folder / "config.yaml").exists():
        return config
    recorded = read_run_config(folder)["checkpoint"].get("init_from")
    if recorded is not None and not Path(recorded).is_dir():
        return config
    return {**config, "checkpoint": {**config["checkpoint"], "init_from": recorded}}


def with_adapter_settings(config: Config, adapter: AdapterConfig | None) -> Config:
    """Return ``config`` with the settings that ``adapter`` has read from the folder ``adapter.path``, if any.

    Exports of the run's checkpoints then do not need that folder.
    """
    if adapter is None or adapter.path is None:
        return config
    own = config["adapter"]
    read = {key: getattr(adapter, key, None) for key, value in own.items() if value is None}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in read.items()}
    return {**config, "adapter": {**own, **plain}}


def with_absolute_paths(config: Config) -> Config:
    """Return ``config`` with absolute paths of local models, which are then found from every directory."""
    found = {group: dict(value) if isinstance(value, Mapping) else value for group, value in config.items()}
    for group, key in (name.split(".") for name in MODEL_PATHS):
        value = (found[group] or {}).get(key)
        if isinstance(value, str) and os.path.exists(value):
            found[group][key] = os.path.abspath(value)
    return found


def is_recorded(config: Config, folder: Path) -> bool:
    """Return whether the run in ``folder`` records the same ``config``."""
    expected, found = with_absolute_paths(with_recorded_init_from(config, folder)), read_run_config(folder)
    if expected["run"]["micro_batch_size"] == "auto":  # the chosen size is recorded
        found["run"]["micro_batch_size"] = "auto"
    return expected == found


def reference_cache(launch: RunPreparation, data: Prepared) -> ReferenceCache | None:
    """Find the cache of the reference model's log-probabilities. None means that the run needs none."""
    run, source = launch.experiment.run, launch.reference
    if source.choice != "precomputed":
        return None
    recipe = getattr(launch.experiment.parallelism, "fp8_recipe", "") if run.dtype == "fp8" else ""
    folder = source.folder(launch.experiment.data.cache(), run.seed, run.dtype + recipe)
    lacking: bool = data.missing_reference_logps(folder)
    how = "computed now, once, into" if lacking else "read from"
    launch.console.print(f"reference: {how} {folder}", soft_wrap=True, highlight=False)
    return ReferenceCache(str(folder), compute=lacking)
