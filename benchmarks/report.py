"""Time and memory of a report on a large sweep: ``python -m benchmarks.report [--runs 200 --steps 10000]``.

The runs are synthetic, with the keys and the noise of real ones. The time to create them is not counted.
"""

import argparse
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import yaml

from runner.commands.report import report

RESULTS = Path(__file__).parent / "results" / "report.json"


def make_sweep(folder: Path, *, runs: int, steps: int) -> Path:
    """Write the files of a sweep over learning rate and seed below ``folder``, and return its folder."""
    sweep = folder / "sweeps" / "lr_seed"
    (sweep / "jobs").mkdir(parents=True)
    for number in range(runs):
        lr, seed = 10 ** (-4 + 2 * (number % 20) / 19), number // 20
        run = folder / "pt_tiny" / f"stamp_{number:04d}"
        make_run(run, steps=steps, lr=lr, seed=seed)
        overrides = (f"optimizer.lr={lr:.2e}", f"run.seed={seed}", "stage=pt")
        record = {"number": number, "overrides": overrides, "status": "completed", "folder": str(run)}
        (sweep / "jobs" / f"{number}.json").write_text(json.dumps(record | {"loss": None, "seconds": 60.0}))
    return sweep


def make_run(folder: Path, *, steps: int, lr: float, seed: int) -> None:
    folder.mkdir(parents=True)
    rng, step = np.random.default_rng(seed), np.arange(1, steps + 1)
    losses = 2 + 7 * np.exp(-step * lr * 20 / steps * 50) + 0.05 * rng.standard_normal(steps)
    norms = 1 + rng.gamma(2.0, 0.5, steps)
    rates = 5000 + 200 * rng.standard_normal(steps)
    with (folder / "metrics.jsonl").open("w") as file:
        for at, loss, norm, rate in zip(
            step.tolist(), losses.tolist(), norms.tolist(), rates.tolist(), strict=True
        ):
            row = {"step": at, "train/loss": loss, "train/grad_norm": norm, "train/lr": lr * (1 - at / steps)}
            row |= {"train/num_tokens": 2048, "train/num_labels": 1999, "train/total_samples": 8 * at}
            row |= {"train/total_skipped": 0, "train/seqlen_mean": 64.5, "train/seqlen_max": 128}
            row |= {
                "perf/tokens_per_s": rate,
                "perf/step_ms": 2048e3 / rate,
                "perf/mfu": None,
                "perf/rss_gib": 1.5,
            }
            file.write(json.dumps(row) + "\n")
            if at % 500 == 0:
                file.write(json.dumps({"step": at, "eval/loss": loss + 0.1}) + "\n")
    config = {"optimizer": {"lr": lr}, "run": {"seed": seed, "max_steps": steps}, "stage": {"kind": "text"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"command": ["runner"], "ended": "completed"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sweep = make_sweep(Path(folder), runs=asked.runs, steps=asked.steps)
        rows = sum(path.stat().st_size for path in Path(folder).rglob("metrics.jsonl"))
        began, computed = time.perf_counter(), time.process_time()
        report([str(sweep)])
        facts = {
            "command": " ".join(["python -m benchmarks.report", *sys.argv[1:]]),
            "date": date.today().isoformat(),
            "runs": asked.runs,
            "steps": asked.steps,
            "rows_mb": round(rows / 1e6),
            "seconds": round(time.perf_counter() - began, 1),
            "processor_seconds": round(time.process_time() - computed, 1),
            "peak_mib": getrusage(RUSAGE_SELF).ru_maxrss // 1024,
            "page_mb": round((sweep / "report.html").stat().st_size / 1e6, 1),
        }
    print(facts)
    RESULTS.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
