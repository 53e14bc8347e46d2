"""Data and templates of LLaMA-Factory."""

from runner.commands.importing.shared_data import check_template, held_out_share, write_alpaca
from runner.commands.importing.translation import Translation, as_list, as_number


def dataset_info(work: Translation) -> None:
    """Translate LLaMA-Factory's options of data."""
    names, evaluated = work.take("dataset"), work.take("eval_dataset")
    work.words |= {"data": "llamafactory", "data.dataset_info": work.take("dataset_dir")}
    limit = work.given.get("max_samples")
    if limit and (evaluated or work.given.get("val_size")):  # there it also limits the data of evaluations
        work.words["data.max_eval_samples"] = limit
    for key, given in (("data.dataset", names), ("data.eval_dataset", evaluated)):
        every = [name.strip() for text in as_list(given) for name in str(text).split(",")]
        if every:
            work.words[key] = every[0] if len(every) == 1 else every
    interleaving(work, len(as_list(work.words.get("data.dataset"))))
    if work.words["stage"] not in ("pt", "sft"):
        for name in ("packing", "neat_packing"):
            work.skip(name, "it is not read in this stage")
    neat, packing = work.take("neat_packing"), work.take("packing")
    if work.words["stage"] == "pt":
        work.words["data.packing"] = "none" if work.given.get("packing") is False else "concat"
    else:
        work.words["data.packing"] = "bfd" if neat or packing else "none"
        if packing and not neat:
            work.checks["data.packing"] = "without neat_packing, attention crosses samples there; never here"
    held_out_share(work, "val_size")


def interleaving(work: Translation, number: int) -> None:
    """Translate how the ``number`` data sets are mixed: without ``interleave_probs``, in equal shares."""
    if number == 1:
        for name in ("mix_strategy", "interleave_probs"):
            work.skip(name, "there is one data set")
    elif work.given.get("mix_strategy") in ("interleave_under", "interleave_over"):
        given = [word for text in as_list(work.take("interleave_probs")) for word in str(text).split(",")]
        shares = [as_number("interleave_probs", word) for word in given]
        work.words["data.shares"] = shares or [1.0] * number
        if work.words["stage"] == "pt":
            work.checks["data.shares"] = "they are shares of tokens here, and of documents in LLaMA-Factory"
    elif work.given.get("mix_strategy") == "interleave_once":
        for name in ("mix_strategy", "interleave_probs"):
            work.skip(name, "an epoch has every sample once without data.shares, too")
        if work.given.get("disable_shuffling"):
            work.checks["data.shuffle"] = "one data set follows another here; LLaMA-Factory interleaves them"


def choose_template(work: Translation) -> None:
    """Translate ``template``, of which the tokenizer's own chat template is the usual equivalent."""
    name = work.given.get("template")
    if name in ("alpaca", "chatml", "llama3"):
        work.skip("enable_thinking", f"the template {name} does not read it")
    elif "enable_thinking" in work.left:
        work.checks["data.chat_template_kwargs"] = (
            "leave it out if the template does not read enable_thinking"
        )
    if name == "alpaca":
        work.take("template")
        write_alpaca(work, "LLaMA-Factory puts an empty line after an answer, and this template one newline")
    elif name in ("llama3", "chatml"):
        check_template(work)
    elif name is not None:
        work.skip("template", "the template of the tokenizer is used; compare it, see docs/data.md")
