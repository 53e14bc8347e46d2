"""Checks that a layout can split the experts of a model."""

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.errors import ConfigError
from components.engines.shared.parallel_dims import divisors, suggest_sizes
from components.models.experts import ExpertList, moe_blocks


def check(model: PreTrainedModel, *, ep: int, tp: int, ranks: int, adapter: LoRA | None) -> None:
    """Check that the experts of ``model`` can be split over ``ep``, ``tp`` and ``ranks``.

    ``ranks`` is the number of ranks that shard a copy of the parameters, dp / dp_replicate x cp.

    Raises:
        ConfigError: if ``ep`` is above 1 and ``model`` has no experts; if ``ep`` or ``tp`` cannot split them;
            if ``ranks`` cannot shard the parts; if only some experts of a layer are trained; or if the
            adapter of experts is not supported.
    """
    found = [module for module in model.modules() if isinstance(module, ExpertList)]
    if not found:
        if ep > 1:
            raise ConfigError(
                f"parallelism.ep: {ep} ranks would share out experts, but {model.config.model_type} has none;"
                " use parallelism.ep=1, or model=moe_tiny."
            )
        return
    for experts in found:
        check_expert_sizes(experts, ep=ep, tp=tp, ranks=ranks)
    check_trained(model)
    if adapter is not None and adapter.expert_targets(model):
        check_expert_adapter(adapter, model, found[0], tp=tp, ep=ep, shards=ranks // ep)


def check_expert_adapter(
    adapter: LoRA, model: PreTrainedModel, experts: ExpertList, *, tp: int, ep: int, shards: int
) -> None:
    """Raise ConfigError if ``tp``, ``shards`` or ``modules_to_save`` does not suit an adapter of experts.

    ``shards`` must divide the number of experts of a rank or their ``moe_intermediate_size``.
    """
    if tp > 1:
        raise ConfigError(
            f"parallelism.tp: {tp} ranks would split the experts in adapter.target_modules, which "
            "parallelism=fsdp2 does not adapt; use parallelism.tp=1 (parallelism.ep shares them out), or "
            "adapter.target_modules=attention."
        )
    if adapter.modules_to_save and len(adapter.expert_targets(model)) == len(adapter.targets(model)):
        raise ConfigError(
            "adapter.modules_to_save: is not read by parallelism=fsdp2 if adapter.target_modules has "
            "only experts; use adapter.target_modules=all-linear, or leave it out."
        )
    rows = len(experts[0].get_parameter("gate_proj.weight"))
    if rows % shards and len(experts) // ep % shards:
        raise ConfigError(
            f"parallelism.dp: {shards} ranks (dp / dp_replicate x cp / ep) cannot share out adapters of "
            f"experts of moe_intermediate_size = {rows}; let these be "
            f"{suggest_sizes(shards, divisors(rows))}, or use adapter.target_modules=attention."
        )


def check_expert_sizes(experts: ExpertList, *, ep: int, tp: int, ranks: int) -> None:
    number, (rows, hidden) = len(experts), experts[0].get_parameter("gate_proj.weight").shape
    fitting = [size for size in divisors(number) if ranks % size == 0]
    if ranks % ep:
        raise ConfigError(
            f"parallelism.ep: {ep} does not divide the {ranks} ranks (dp / dp_replicate x cp) that "
            f"share out experts; use {suggest_sizes(ep, fitting)}."
        )
    if number % ep:
        raise ConfigError(
            f"parallelism.ep: {ep} does not divide the {number} experts of a layer; use "
            f"{suggest_sizes(ep, fitting)}."
        )
    if rows % tp:
        raise ConfigError(
            f"parallelism.tp: {tp} does not divide moe_intermediate_size = {rows} of this model; use "
            f"{suggest_sizes(tp, divisors(rows))}."
        )
    shards = ranks // ep
    if number // ep % shards and hidden % shards:
        fitting = [n for n in range(1, number * hidden + 1) if number // ep % n == 0 or hidden % n == 0]
        raise ConfigError(
            f"parallelism.dp: {shards} ranks (dp / dp_replicate x cp / ep) divide neither the {number // ep} "
            f"experts of each of them nor hidden_size = {hidden}; use {suggest_sizes(shards, fitting)}."
        )


def check_trained(model: PreTrainedModel) -> None:
    """Raise ConfigError if some experts of a layer are trained and others are not.

    The experts of a layer are stacked in two tensors, one of all down projections and one of all gate and up
    projections. Each tensor is trained entirely or not at all.
    """
    for name, block in moe_blocks(model).items():
        experts = list(block.get_submodule("experts").children())
        for leaves in (("gate_proj", "up_proj"), ("down_proj",)):
            wanted = {getattr(e, leaf).weight.requires_grad for e in experts for leaf in leaves}
            if len(wanted) > 1:
                raise ConfigError(
                    f"model.freeze, model.train_only: matches some of {name}.experts.*.{leaves[0]} and "
                    "the like, and parallelism=fsdp2 trains all of a layer or none; use a pattern like "
                    '"*.mlp.experts.*".'
                )
