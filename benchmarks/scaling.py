"""Speed of two ranks against one, with one thread each: ``python -m benchmarks.scaling --data DIR``.

The work is the sft item of ``benchmarks.baselines`` in fp32 on FSDP2 over gloo. Wall time is measured, so
each rank needs a free core.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.baselines.arguments import ROWS
from benchmarks.baselines.programs import Work, overrides
from benchmarks.baselines.samples import make_samples
from benchmarks.throughput import RESULTS, report, run

WARM_UP = 2
RANKS = (1, 2)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="LLaMA-Factory's demo files, as they are")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=Path("outputs", "peers").absolute(), help="kept")
    asked = parser.parse_args(arguments)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    data = asked.cache / "data"
    data.mkdir(parents=True, exist_ok=True)
    make_samples(asked.data, data)
    experiment = overrides(Work("sft", "fp32"), data, asked.steps)
    speeds: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(asked.turns):
        for ranks in RANKS:
            speeds[ranks] += run([*experiment, *layout(ranks)], WARM_UP)
    medians = {f"{ranks} ranks": round(median(values)) for ranks, values in speeds.items()}
    ratio = median(speeds[2]) / median(speeds[1])
    print(f"tokens/s: {medians}; {ratio:.2f} x")
    experiment = [option.replace(str(asked.cache), "CACHE") for option in experiment]
    facts = report("benchmarks.scaling", arguments, "cpu, one thread a rank", experiment, medians)
    (RESULTS / "scaling.json").write_text(json.dumps(facts | {"ratio": ratio}, indent=2) + "\n")


def layout(ranks: int) -> list[str]:
    """Return the options of a layout with one forward pass per rank and step."""
    share = f"run.micro_batch_size={ROWS // ranks}"
    return ["parallelism=fsdp2", f"parallelism.dp={ranks}", "parallelism.reshard_after_forward=false", share]


if __name__ == "__main__":
    main(sys.argv[1:])
