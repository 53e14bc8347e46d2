"""The private names of torch, transformers and peft that we use exist: a release without one fails here."""

import ast
import tomllib
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import debug
from transformers import PreTrainedModel

from components.engines.shared import torch_private
from components.models import ModelSpec, hf_private
from tests.unit.components.models.test_models import TINY

ROOT = Path(__file__).parents[2]
KEPT = {
    "components/checkpoint/async_save.py": {"_spec"},  # torch's, outside of the engines
    "components/checkpoint/flat_shard.py": {"_C", "_disabled_torch_function_impl"},
    "components/engines/fsdp2/engine.py": {"_foreach_div_"},
    "components/engines/shared/loss_accumulator.py": {"_foreach_mul_", "_foreach_norm"},
    "components/engines/megatron/compat/packed_rope.py": {"_apply_rotary_pos_emb_bshd"},  # Megatron's
    "components/engines/megatron/runtime/optimizer.py": {"_get_model_param_range_map"},  # Megatron's
    "components/data/records/hub_records.py": {"_fingerprint"},  # of datasets, which has no public one
    "components/data/store/reference_logps.py": {"_values"},  # our own
    # torch's: a rehearsal stands in for CUDA.
    "components/rehearsal/arithmetic.py": {"_overloadpacket", "_scaled_mm", "_schema"},
    "components/rehearsal/call_site.py": {"_getframe"},
    "components/rehearsal/fake_cuda.py": {
        "_C",
        "_cuda_getCurrentRawStream",
        "_scaled_dot_product_efficient_attention",
        "_set_only_lift_cpu_tensors",
    },
    "components/rehearsal/fake_groups.py": {"_set_pg_timeout"},
    "components/rehearsal/fake_tensors.py": {"_fused_rms_norm"},
    "components/rehearsal/host_values.py": {"_cdata", "_schema", "_to_copy"},
    "components/rehearsal/host_waits.py": {"_schema"},
    "components/rehearsal/kernel_rules.py": {"_schema"},
    "components/rehearsal/live_memory.py": {"_cdata"},
    "components/rehearsal/memory_components.py": {"_schema"},
    "components/rehearsal/mode.py": {"_C", "_current_graph_task_id", "_resolve_process_group", "_schema"},
    "components/rehearsal/pinned_memory.py": {"_schema"},
    "components/rehearsal/traffic.py": {"_getframe", "_schema", "_type"},
}
"""Private attributes of other objects that are read outside of the two files for them."""


@pytest.mark.parametrize(
    ("package", "versions"), [("torch", torch_private.CHECKED), *hf_private.CHECKED.items()]
)
def test_the_installed_release_was_checked(package: str, versions: str) -> None:
    installed = version(package).partition("+")[0]
    assert SpecifierSet(versions, prereleases=True).contains(installed), f"read {package} {installed} again"


@pytest.mark.parametrize(("package", "versions"), hf_private.CHECKED.items())
def test_only_checked_releases_are_installed(package: str, versions: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{package}{versions}" in project["dependencies"], f"the range of {package} in pyproject.toml"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch, "_assert_async"),
        (torch, "_foreach_div_"),
        (torch, "_foreach_mul_"),
        (torch, "_foreach_norm"),
        (torch._C, "_disabled_torch_function_impl"),
        (torch.distributed.device_mesh.DeviceMesh, "_flatten"),
        (FSDPModule, "_get_fsdp_state"),
        (dist.distributed_c10d._world, "pg_map"),
        (dist.distributed_c10d, "_set_pg_timeout"),
        (PreTrainedModel, "_init_weights"),
        (PreTrainedModel, "_supports_attention_backend"),
        (PreTrainedModel, "_is_stateful"),
        (PreTrainedModel, "_no_split_modules"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_private_name_is_there(owner: object, name: str) -> None:
    assert hasattr(owner, name)


def test_torch_has_a_cache_of_dtensors_to_clear() -> None:
    assert any("sharding_prop_cache" in name for name in vars(debug))
    torch_private.clear_dtensor_caches()


def test_parameters_that_are_initialized_are_skipped() -> None:
    model = ModelSpec(architecture=TINY).meta_model
    linear = nn.Linear(4, 4)
    before = linear.weight.detach().clone()
    with hf_private.initialized(linear.parameters()):
        hf_private.init_weights(model, linear)
    assert torch.equal(linear.weight, before)
    hf_private.init_weights(model, linear)
    assert not torch.equal(linear.weight, before)


def test_a_model_says_what_its_blocks_are_and_which_buffers_it_computes() -> None:
    model = ModelSpec(architecture=TINY).meta_model
    assert hf_private.block_names(model) == {"Qwen3DecoderLayer"}
    assert hf_private.uses_attention_interface(model)
    assert "inv_freq" in hf_private.computed_buffers(model.model.rotary_emb)


def test_adapters_are_off_while_the_context_lasts() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    plain = model(torch.ones(1, 4))
    inject_adapter_in_model(LoraConfig(target_modules=["0"], init_lora_weights=False), model)
    layer = model[0]
    assert isinstance(layer, BaseTunerLayer)
    with hf_private.adapters_off(model):
        assert layer.disable_adapters
        assert torch.equal(model(torch.ones(1, 4)), plain)
    assert not torch.equal(model(torch.ones(1, 4)), plain)


def test_the_timeouts_of_all_groups_are_set() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch_private.set_group_timeouts(timedelta(seconds=7))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_no_other_file_reads_private_attributes() -> None:
    """Private attributes are read only from self, cls and super(), except those in ``KEPT``."""
    for path in sorted((ROOT / "components").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if path.name in ("torch_private.py", "hf_private.py"):
            continue
        found = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and ast.unparse(node.value) not in {"self", "cls", "super()", "os"}
        }
        assert found <= KEPT.get(name, set()), name
