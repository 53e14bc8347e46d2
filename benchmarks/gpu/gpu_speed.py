"""One program that trains for a few steps, in a process of its own: ``python -m benchmarks.gpu.gpu_speed``.

All programs get the same micro-batches of packed rows and the same shape of model. The last line of the
output is a JSON object with the speed, in which the first steps are not counted.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.compose import composed
from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchShard, DataLoader
from components.preflight.estimates.flops import matmul_sizes, peak_flops, step_flops
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from runner.training.assembly import build_engine
from runner.training.prefetch import Prefetched

WARM_UP = 4
"""Number of first steps, not counted, in which kernels are chosen, blocks compiled and moments created."""
BETAS = (0.9, 0.95)


@dataclass
class Clock:
    """A clock that measures the steps of a program, which calls ``step`` after each of them.

    The clock waits for the device after each step of the warm-up and after the last step.
    """

    loader: DataLoader
    device: torch.device
    steps: int
    """Number of steps that the program will take."""
    ends: list[float] = field(default_factory=list)

    def step(self) -> None:
        if self.device.type == "cuda" and len(self.ends) < WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elif self.device.type == "cuda" and len(self.ends) == self.steps - 1:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def result(self, experiment: Experiment) -> dict[str, float]:
        """Return tokens/s, MFU, step times and peak memory, without the first steps.

        MFU counts the required FLOPs, as in a run. On a CPU, the peak memory is that of the whole process.
        """
        stats = [self.loader.stats(step) for step in range(WARM_UP, len(self.ends))]
        seconds = self.ends[-1] - self.ends[WARM_UP - 1]
        steps = sorted(after - before for before, after in pairwise(self.ends[WARM_UP - 1 :]))
        sizes = matmul_sizes(experiment.model.meta_model)
        peak = peak_flops(self.device, torch.bfloat16)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated()
        return {
            "tokens_per_s": round(sum(stat.num_tokens for stat in stats) / seconds, 1),
            "mfu": round(sum(step_flops(sizes, stat) for stat in stats) / seconds / peak, 4),
            "median_step_s": round(steps[len(steps) // 2], 4),
            "longest_step_s": round(steps[-1], 4),
            "peak_memory_gib": round(peak_bytes / 2**30, 2),
            "steps": len(stats),
        }


def ours(experiment: Experiment, loader: DataLoader, clock: Clock, steps: int) -> None:
    """Train with the engine of the layout, as the training loop calls it."""
    engine = build_engine(experiment, clock.device.type)
    loss, data = experiment.stage, Prefetched(loader, clock.device)
    for step in range(steps):
        microbatches = loss.prepare(data.microbatches(step), engine)
        engine.begin_train_step(microbatches, loss)
        engine.train_microbatches(microbatches, loss, last=True)
        engine.finish_train_step(1e-5)
        clock.step()
    engine.close()


def plain_loop(experiment: Experiment, loader: DataLoader, clock: Clock, steps: int) -> None:
    """Train a transformers model with a hand-written loop: autocast to bf16, and one fused AdamW in fp32."""
    model = plain_model(experiment, clock.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=BETAS, fused=True)
    for step in range(steps):
        microbatches = loader.microbatches(step)
        count = sum(int((batch.labels != IGNORE).sum()) for batch in microbatches)
        for batch in microbatches:
            here = batch.to(clock.device)
            with torch.autocast(clock.device.type, dtype=torch.bfloat16):
                logits = model(here.input_ids, position_ids=here.position_ids, use_cache=False).logits
            flat = logits.flatten(0, 1).float(), here.labels.flatten()
            (F.cross_entropy(*flat, ignore_index=IGNORE, reduction="sum") / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()


def hf_trainer(experiment: Experiment, loader: DataLoader, clock: Clock, steps: int) -> None:
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    options = trainer_options(experiment, clock, steps)
    train(Trainer(plain_model(experiment, clock.device), TrainingArguments(**options)), loader, clock, steps)


def trl(experiment: Experiment, loader: DataLoader, clock: Clock, steps: int) -> None:
    """Train with the SFTTrainer of TRL, which gets rows that are already tokenised and packed."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    options = SFTConfig(**trainer_options(experiment, clock, steps), **prepared)
    trainer = SFTTrainer(
        plain_model(experiment, clock.device),
        args=options,
        train_dataset=Dataset.from_list(rows(loader, 1)),
        processing_class=experiment.model.load_tokenizer(),
    )
    train(trainer, loader, clock, steps)


PROGRAMS: dict[str, Callable[[Experiment, DataLoader, Clock, int], None]] = {
    "ours": ours,
    "loop": plain_loop,
    "hf": hf_trainer,
    "trl": trl,
}


def plain_model(experiment: Experiment, device: torch.device) -> PreTrainedModel:
    """Build the model of transformers with random weights in fp32."""
    flash = device.type == "cuda" and find_spec("flash_attn") is not None
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            experiment.model.config(),
            dtype=torch.float32,
            attn_implementation="flash_attention_2" if flash else "sdpa",
        ).train()


def trainer_options(experiment: Experiment, clock: Clock, steps: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.gettempdir(),  # nothing is saved
        "max_steps": steps,
        "per_device_train_batch_size": 1,  # a micro-batch is one packed row
        "gradient_accumulation_steps": experiment.run.global_batch_size // experiment.run.micro_batch_size,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": clock.device.type == "cpu",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train(trainer: Any, loader: DataLoader, clock: Clock, steps: int) -> None:
    """Train on the rows of ``loader`` in their order, and measure each optimizer step."""
    from transformers import TrainerCallback, default_data_collator

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    data = torch.utils.data.DataLoader(rows(loader, steps), batch_size=1, collate_fn=default_data_collator)  # type: ignore[arg-type,var-annotated]
    trainer.get_train_dataloader = lambda: data
    trainer.add_callback(Steps())
    trainer.train()


def rows(loader: DataLoader, steps: int) -> list[dict[str, Any]]:
    """Return the packed rows with labels that are not shifted, as the trainers expect them."""
    batches = chain.from_iterable(loader.microbatches(step) for step in range(steps))
    return [row(batch) for batch in batches]


def row(batch: Batch) -> dict[str, Any]:
    labels = F.pad(batch.labels[0, :-1], (1, 0), value=IGNORE)
    columns = {"input_ids": batch.input_ids[0], "labels": labels, "position_ids": batch.position_ids[0]}
    return {name: values.tolist() for name, values in columns.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args(arguments)
    experiment = build_experiment(composed(("run.name=speed", *asked.overrides)), ConfigSources())
    run, stage = experiment.run, experiment.stage
    assert run.max_steps is not None
    data = experiment.data.prepare(
        stage.kind,
        experiment.model.load_tokenizer(),
        seed=run.seed,
        global_batch_size=run.global_batch_size,
        max_steps=run.max_steps,
        epochs=run.epochs,
    )
    loader = data.train_loader(BatchShard(run.global_batch_size, run.micro_batch_size))
    clock = Clock(loader, torch.device(asked.device), run.max_steps)
    PROGRAMS[asked.program](experiment, loader, clock, run.max_steps)
    print(json.dumps(clock.result(experiment)))


if __name__ == "__main__":
    main(sys.argv[1:])
