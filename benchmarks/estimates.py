"""Preflight's memory estimates against the peaks of rehearsals: ``python -m benchmarks.estimates``.

Every row is one rank of a large model in bf16, whose real engine takes two steps on fake CUDA tensors
(``preflight.mode=rehearse``); no GPU is needed. Models of more than 16 layers are cut to 8, so that a row
takes 20 seconds of a CPU. Rows whose peak is below 1 GiB do not count. ``--only WORD`` takes the rows whose
name contains WORD, and writes no file.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compose import composed
from benchmarks.throughput import RESULTS, report
from components.preflight.checks import next_batch

GIB = 2**30
COMMON = (
    "preflight.mode=rehearse",
    "preflight.device_memory=400GiB",
    "run.dtype=bf16",
    "data.max_length=2048",
)
FULL, SELECTIVE = (f"parallelism.activation_checkpointing={kind}" for kind in ("full", "selective"))
CUT = "model.architecture.num_hidden_layers=8"
TWO_EACH = "run.global_batch_size=32"  # two micro-batches on each of 8 ranks
SP, DO = "parallelism.sequence_parallel=true", "parallelism.distributed_optimizer=true"

ONE_CARD = {
    "single": "",
    "single full": FULL,
    "single selective": SELECTIVE,
    "single dpo": f"stage=dpo {FULL}",
    "single kto": f"stage=kto {FULL}",
    "single pt": f"stage=pt {FULL}",
    "single padded": f"data.packing=none {FULL}",
    "single lora": f"adapter=lora {FULL}",
    "single dora": f"adapter=dora {FULL}",
    "single lora dpo": f"adapter=lora stage=dpo {FULL}",
    "single four rows": f"run.micro_batch_size=4 {FULL}",
    "single sgd": f"optimizer=sgd {FULL}",
    "single freeze": 'model.freeze=["model.embed_tokens.*","model.layers.[0-7].*"] ' + FULL,
}
FSDP2 = {
    "dp8": "parallelism.dp=8",
    "dp8 full": f"parallelism.dp=8 {FULL}",
    "dp8 selective": f"parallelism.dp=8 {SELECTIVE}",
    "dp8 dpo": f"parallelism.dp=8 stage=dpo {FULL}",
    "dp8 lora": f"parallelism.dp=8 adapter=lora {FULL}",
    "dp8 lora dpo": f"parallelism.dp=8 adapter=lora stage=dpo {FULL}",
    "dp8 last": f"parallelism.dp=8 parallelism.reduce_gradients=last {TWO_EACH} {FULL}",
    "dp8 every": f"parallelism.dp=8 parallelism.reduce_gradients=every {TWO_EACH} {FULL}",
    "dp8 no reshard": f"parallelism.dp=8 parallelism.reshard_after_forward=false {FULL}",
    "dp8 offload": f"parallelism.dp=8 parallelism.cpu_offload=true {FULL}",
    "dp64": f"parallelism.dp=64 {FULL}",
    "tp8 dp8": f"parallelism.tp=8 parallelism.dp=8 {FULL}",
    "tp8 dp8 dpo": f"parallelism.tp=8 parallelism.dp=8 stage=dpo {FULL}",
    "tp2 dp4": f"parallelism.tp=2 parallelism.dp=4 {FULL}",
    "cp4 dp2": f"parallelism.cp=4 parallelism.dp=2 data.max_length=8192 {FULL}",
    "muon dp8": f"parallelism.dp=8 optimizer=muon {FULL}",
}
MEGATRON = {
    "tp2 dp4": f"parallelism.tp=2 parallelism.dp=4 {SP} {DO} {FULL}",
    "tp2 dp4 none": f"parallelism.tp=2 parallelism.dp=4 {SP} {DO}",
    "tp2 dp4 selective": f"parallelism.tp=2 parallelism.dp=4 {SP} {DO} {SELECTIVE}",
    "tp4": f"parallelism.tp=4 {SP} {FULL}",
    "tp4 dpo": f"parallelism.tp=4 stage=dpo {SP} {FULL}",
    "tp4 lora": f"parallelism.tp=4 adapter=lora {SP} {FULL}",
    "pp4 first": f"parallelism.pp=4 parallelism.dp=2 {DO} {FULL} preflight.rank=0",
    "pp4 last": f"parallelism.pp=4 parallelism.dp=2 {DO} {FULL} preflight.rank=7",
    "tp2 pp2 dp2": f"parallelism.tp=2 parallelism.pp=2 parallelism.dp=2 {SP} {DO} {FULL}",
    "tp2 pp2 vpp2": f"parallelism.tp=2 parallelism.pp=2 parallelism.vpp=2 {SP} {FULL}",
    "cp2 dp4": f"parallelism.cp=2 parallelism.dp=4 {DO} data.max_length=8192 {FULL}",
    "dp8 offload": f"parallelism.dp=8 {DO} parallelism.optimizer_cpu_offload=true {FULL}",
    "muon tp2 dp4": f"parallelism.tp=2 parallelism.dp=4 {SP} {DO} optimizer=muon {FULL}",
}
LARGE = {
    "llama3_70b fsdp2 tp8 dp8": f"model=llama3_70b {CUT} parallelism=fsdp2 "
    f"parallelism.tp=8 parallelism.dp=8 {FULL}",
    "llama3_70b megatron tp8 pp4 dp16": f"model=llama3_70b {CUT} parallelism=megatron parallelism.tp=8 "
    f"parallelism.pp=4 parallelism.dp=16 {SP} {DO} {FULL}",
    "qwen3_8b fsdp2 dp8": f"model=qwen3_8b {CUT} parallelism=fsdp2 parallelism.dp=8 {FULL}",
    "qwen3_8b megatron tp4": f"model=qwen3_8b {CUT} parallelism=megatron parallelism.tp=4 {SP} {FULL}",
    "qwen3_1_7b single": f"model=qwen3_1_7b {CUT} parallelism=single {FULL}",
    "qwen3_30b_a3b megatron ep8": f"model=qwen3_30b_a3b {CUT} parallelism=megatron parallelism.ep=8 "
    f"parallelism.dp=8 {DO} {FULL}",
}
ROWS = (
    {f"llama3_1b {name}": f"model=llama3_1b parallelism=single {words}" for name, words in ONE_CARD.items()}
    | {
        f"llama3_8b fsdp2 {name}": f"model=llama3_8b {CUT} parallelism=fsdp2 {words}"
        for name, words in FSDP2.items()
    }
    | {
        f"llama3_8b megatron {name}": f"model=llama3_8b {CUT} parallelism=megatron {words}"
        for name, words in MEGATRON.items()
    }
    | LARGE
)


def check_distinct(rows: Mapping[str, str]) -> None:
    """Assert that no two rows rehearse the same run."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, words in rows.items():
        facts = rehearsed_facts(words)
        same = [other for other, its_facts in found if its_facts == facts]
        assert not same, f"{name!r} is the same run as {same[0]!r}"
        found.append((name, facts))


def rehearsed_facts(words: str) -> dict[str, Any]:
    """Return the resolved configuration of a row, without an option that has no effect on its run.

    The global batch is that of the rehearsal, which rounds it up to one micro-batch per rank. The time at
    which gradients are reduced has an effect only if a rank has several micro-batches.
    """
    facts = composed([*COMMON, "run.name=row", *words.split()])
    run, layout = facts["run"], facts["parallelism"]
    unit = run["micro_batch_size"] * (layout.get("dp") or 1)
    run["global_batch_size"] = next_batch(run["global_batch_size"], unit)
    if run["global_batch_size"] == unit:
        layout.pop("reduce_gradients", None)
    return facts


def rehearse(words: str) -> dict[str, float]:
    """Return the estimate and the peak of the rehearsal, in bytes, and the relative error of the estimate.

    Raises:
        SystemExit: with the output of the rehearsal if it fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="estimates-"))
    command = [sys.executable, "-m", "runner", *COMMON, *words.split(), f"run.output_dir={folder}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{answer.stderr}")
    (made,) = (folder / "preflight").iterdir()
    peak = json.loads((made / "rehearsal.json").read_text())["memory"]["peak"]
    estimate = json.loads((made / "preflight.json").read_text())["rehearsal"]["estimated_bytes"]
    shutil.rmtree(folder)
    return {"estimate": estimate, "peak": peak, "error": round(estimate / peak - 1, 4)}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimates", description=__doc__)
    parser.add_argument("--only", default="")
    asked = parser.parse_args(arguments)
    check_distinct(ROWS)
    found: dict[str, dict[str, float]] = {}
    for name, words in ROWS.items():
        if asked.only in name:
            row = found[name] = rehearse(words)
            peak, estimate = row["peak"] / GIB, row["estimate"] / GIB
            print(
                f"{name:45} peak {peak:7.2f} GiB  estimate {estimate:7.2f} GiB  {row['error']:+.1%}",
                flush=True,
            )
    errors = [abs(row["error"]) for row in found.values() if row["peak"] > GIB]
    near = sum(error <= 0.03 for error in errors)
    print(f"{near} of {len(errors)} within 3 %, the furthest {max(errors):.1%}")
    if not asked.only:
        about = report("benchmarks.estimates", arguments, "fake CUDA tensors on a CPU", COMMON, {})
        facts = {key: about[key] for key in ("command", "date", "device", "experiment", "versions")}
        (RESULTS / "estimates.json").write_text(json.dumps(facts | {"rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
