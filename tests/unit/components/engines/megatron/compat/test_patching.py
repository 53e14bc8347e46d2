"""Every patch of megatron-core is needed, works, and does not affect the rest of the program."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import components.engines.megatron.runtime  # noqa: F401  installs the patches
from components.checkpoint.dcp import save_tensors
from components.engines.megatron.compat import cpu, no_te
from components.engines.megatron.compat import warnings as quiet
from components.engines.megatron.compat.patching import Patch
from components.engines.megatron.runtime.attention import CoreAttention
from tests.distributed.cases import (
    assert_same,
    engine_step,
    fsdp2,
    make_engine,
    next_token,
    plain_step,
    share,
    step,
)
from tests.distributed.megatron_patches_cases import (
    ANY_DEVICE,
    SYMBOLS,
    parts_of_different_sizes,
    sent_while_freed,
    tied_embeddings,
    without,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA exists")


@pytest.fixture
def alone() -> Iterator[None]:
    """Initialise Megatron's process groups with one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


# ---- the use of every symbol in Megatron


def makes_parameters_on_the_cpu() -> None:
    assert linear().weight.device.type == "cpu"


def waits_for_an_exchange() -> None:
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    group = parallel_state.get_pipeline_model_parallel_group()
    communicator = P2PCommunicator(group, ModelParallelConfig(batch_p2p_comm=True))
    communicator._communicate(
        tensor_send_next=None,
        tensor_send_prev=None,
        recv_prev=False,
        recv_next=False,
        tensor_shape=(1,),
    )


def reduces_gradients() -> None:
    chunk = distributed(linear())
    chunk.start_grad_sync()
    chunk.finish_grad_sync()


def seeds_every_stream_of_its_own() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(5)
    first, second, *_ = get_cuda_rng_tracker().get_states().values()
    assert not torch.equal(first, second), "every tracker starts from the same state"


def forks_a_stream() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4), expected), "a fork left the stream where it was"
    assert torch.equal(torch.rand(4), expected), "a fork moved the stream that it left"


def restores_a_stream() -> None:
    state = torch.cuda.get_rng_state()
    expected = F.dropout(torch.ones(64))
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(64)), expected), "the stream was not restored"


def makes_an_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    optimizer = FP32Optimizer(
        torch.optim.SGD([nn.Parameter(torch.ones(2))]), OptimizerConfig(), lambda *_: None
    )
    assert optimizer.get_loss_scale().item() == 1


def runs_a_schedule() -> None:
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    model = nn.Linear(2, 1)
    model.config = transformer_config(calculate_per_token_loss=True)
    model.model_type = ModelType.encoder_or_decoder
    model.set_input_tensor = lambda _: None
    forward_backward_no_pipelining(
        forward_step_func=lambda _, m: (m(torch.ones(2)), lambda y: (y.sum(), torch.ones((), dtype=int), {})),
        data_iterator=iter(()),
        model=model,
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=1,
    )
    assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))


def cuts_positions_for_context_parallelism() -> None:
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    class Unpinned:
        """A torch whose tensors can be pinned, as with a GPU."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def tensor(data: Any, **_: Any) -> Tensor:
            return torch.tensor(data)

    table = torch.randn(16, 1, 1, 4)
    for rank in range(2):
        group: Any = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        mine = rotary_pos_embedding.get_pos_emb_on_this_cp_rank(table, 0, group)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rope_utils, "torch", Unpinned())
            patched.setattr(Tensor, "cuda", lambda tensor, **_: tensor)
            expected = rope_utils.get_pos_emb_on_this_cp_rank(table, 0, group)
        assert torch.equal(mine, expected)


def makes_fp32_main_parameters() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([half]), OptimizerConfig(bf16=True), None, lambda *_: None
    )
    assert [main.dtype for group in optimizer.fp32_from_float16_groups for main in group] == [torch.float32]


def shards_an_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
    chunk = distributed(linear(), use_distributed_optimizer=True)
    chained = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
    (optimizer,) = chained.chained_optimizers
    assert [len(group) for group in optimizer.shard_fp32_groups] == [1]


def norms_a_part_of_the_positions() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = transformer_config(sequence_parallel=True, tensor_model_parallel_size=2, normalization="RMSNorm")
    norm: Any = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-6)
    assert type(norm) is nn.RMSNorm
    assert norm.eps == 1e-6
    assert norm.weight.sequence_parallel, "finalize_model_grads would not add its gradients up"
    assert config.sequence_parallel
    plain: Any = WrappedTorchNorm(config=transformer_config(), hidden_size=8)
    assert not plain.weight.sequence_parallel


def has_latents_without_transformer_engine() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    class Plain(MultiLatentAttention):
        def get_query_key_value_tensors(self, *_: Any, **__: Any) -> Any: ...

    config = MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, rope_type="rope")
    config.gradient_accumulation_fusion = False
    layer = get_gpt_layer_local_spec(multi_latent_attention=True)
    parts = layer.submodules.self_attention.submodules
    parts.core_attention = CoreAttention
    Plain(config, parts, 1, AttnMaskType.causal, "self")


def linear() -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(4, 4, config=transformer_config(), init_method=nn.init.zeros_, bias=False)


def distributed(module: nn.Module, **options: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(transformer_config(), DistributedDataParallelConfig(**options), module)


def transformer_config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes, gradient_accumulation_fusion=False, **options)


def sends_tokens() -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    MoEAlltoAllTokenDispatcher(2, [0, 1], expert_config(), get_default_pg_collection())


def overlaps_shared_experts() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    SharedExpertMLP(expert_config(), parts, gate=False, pg_collection=get_default_pg_collection())


def expert_config() -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=2,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_overlap=True,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
    )


def reads_split_sizes() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not isinstance(sizes, Tensor), "no numbers"


CORE = "megatron.core"
MOE = f"{CORE}.transformer.moe"
RANDOM = f"{CORE}.tensor_parallel.random"
PROBES: dict[str, tuple[Callable[[], None], str]] = {
    "torch.cuda.current_device": (makes_parameters_on_the_cpu, "CUDA|NVIDIA"),
    "torch.cuda.synchronize": (waits_for_an_exchange, "CUDA|NVIDIA"),
    "torch.cuda.current_stream": (reduces_gradients, "CUDA|NVIDIA"),
    "torch.cuda.get_rng_state": (seeds_every_stream_of_its_own, "CUDA|NVIDIA"),
    "torch.cuda.random.get_rng_state": (forks_a_stream, "CUDA|NVIDIA"),
    "torch.cuda.set_rng_state": (restores_a_stream, "was not restored"),
    "torch.cuda.manual_seed": (seeds_every_stream_of_its_own, "from the same state"),
    f"{RANDOM}._set_cuda_rng_state": (forks_a_stream, "a fork left"),
    f"{CORE}.optimizer.optimizer.torch": (makes_an_optimizer, "CUDA|NVIDIA"),
    f"{CORE}.pipeline_parallel.schedules.torch": (runs_a_schedule, "CUDA|NVIDIA"),
    f"{CORE}.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank": (
        cuts_positions_for_context_parallelism,
        "pin",
    ),
    f"{CORE}.optimizer.optimizer.Float16OptimizerWithFloat16Params.__init__": (
        makes_fp32_main_parameters,
        "torch.cuda.FloatTensor",
    ),
    f"{CORE}.optimizer.distrib_optimizer.DistributedOptimizer.__init__": (
        shards_an_optimizer,
        "torch.cuda.FloatTensor",
    ),
    f"{CORE}.transformer.torch_norm.WrappedTorchNorm.__new__": (
        norms_a_part_of_the_positions,
        "sequence parallel not supported",
    ),
    f"{MOE}.token_dispatcher.torch": (sends_tokens, "CUDA"),
    f"{MOE}.shared_experts.torch": (overlaps_shared_experts, "CUDA"),
    f"{MOE}.token_dispatcher.maybe_move_tensor_to_cpu": (reads_split_sizes, "no numbers"),
    f"{CORE}.transformer.multi_latent_attention.HAVE_TE": (
        has_latents_without_transformer_engine,
        "must be a type",
    ),
}
"""Symbol -> a function in which Megatron uses it, and the error of this function without the patch."""
P2P = f"{CORE}.pipeline_parallel.p2p_communication._p2p_ops"
LANGUAGE = f"{CORE}.models.common.language_module.language_module"
TIED = f"{LANGUAGE}.LanguageModule.setup_embeddings_and_output_layer"
UNEVEN = f"{CORE}.tensor_parallel.mappings._gather_along_first_dim"
TWO_RANKS = {P2P, TIED, UNEVEN}
OPTIMIZERS = {f"{CORE}.optimizer.{name}" for name in ("SGD", "USING_PYTORCH_OPTIMIZER")}
"""Symbols that are different without the patch only where transformer-engine or Apex is installed."""


@pytest.mark.parametrize("symbol", [symbol for symbol in SYMBOLS if symbol not in TWO_RANKS | OPTIMIZERS])
@pytest.mark.usefixtures("alone")
def test_megatron_works_with_the_patch_and_not_without(symbol: str) -> None:
    probe, message = PROBES[symbol]
    probe()
    with without(symbol), pytest.raises((AssertionError, RuntimeError, TypeError), match=message):
        probe()


def test_every_symbol_has_a_test() -> None:
    patched = [symbol for patch in (*cpu.PATCHES, *ANY_DEVICE) for symbol in patch.symbols]
    assert sorted(patched) == sorted(PROBES.keys() | TWO_RANKS | OPTIMIZERS)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.usefixtures("alone")
def test_updates_need_no_gpu_where_transformer_engine_is_installed(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def fused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No CUDA GPUs are available")

    def make() -> Any:
        config = OptimizerConfig(optimizer=kind, lr=1e-3)
        return get_megatron_optimizer(config, [distributed(linear())], use_gloo_process_groups=False)

    for name, theirs in {"Adam": fused, "SGD": fused, "USING_PYTORCH_OPTIMIZER": False}.items():
        monkeypatch.setattr(f"{CORE}.optimizer.{name}", theirs)
    with pytest.raises(RuntimeError, match="No CUDA"):
        make()
    for patch in no_te.PATCHES:
        if OPTIMIZERS.issuperset(patch.symbols):
            replace(patch, originals={}).install()
    make()


def test_stages_agree_on_tied_embeddings(megatron_pair: Ranks) -> None:
    first, last = megatron_pair.run(tied_embeddings, None)
    assert first.abs().sum() > 0
    assert torch.equal(first, last)
    assert all("CUDA" in error or "NVIDIA" in error for error in megatron_pair.run(tied_embeddings, TIED))


def test_what_is_sent_outlives_what_the_schedule_frees(megatron_pair: Ranks) -> None:
    assert megatron_pair.run(sent_while_freed, None) == [True, True]
    assert megatron_pair.run(sent_while_freed, P2P) == [True, False]
    assert P2P in {symbol for patch in ANY_DEVICE for symbol in patch.symbols}


def test_parts_of_different_sizes_are_exchanged(megatron_pair: Ranks) -> None:
    gathered = [0.0, 1.0, 1.0, 1.0]
    first, second = megatron_pair.run(parts_of_different_sizes, None)
    assert first == (gathered, [[3.0, 3.0]])
    assert second == (gathered, [[3.0, 3.0]] * 3)
    assert all("invalid" in error for error in megatron_pair.run(parts_of_different_sizes, UNEVEN))


# ---- the patches themselves


def test_a_symbol_that_is_gone_is_named() -> None:
    from importlib.metadata import version

    for symbol in ("torch.cuda.gone", "megatron.core.gone.function", "megatron.core.jit.Gone.method"):
        with pytest.raises(AttributeError, match=f"{symbol} .* megatron-core {version('megatron-core')} "):
            Patch((symbol,), "", lambda original: original).install()


def test_a_patch_keeps_to_its_releases() -> None:
    assert not Patch((), "", lambda original: original, versions="<0.16").applies
    assert Patch((), "", lambda original: original, versions=">=0.16").applies


def test_installing_again_changes_nothing() -> None:
    before = torch.cuda.current_device
    cpu.install()
    assert torch.cuda.current_device is before


@pytest.mark.parametrize(
    ("gpu", "compiles", "expected"),
    [(True, True, []), (True, False, ["uncompiled"]), (False, True, ["uncompiled", "patched"])],
)
def test_a_gpu_without_a_compiler_compiles_nothing(
    gpu: bool, compiles: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("components.engines.shared.generated_kernels.can_compile", lambda: compiles)
    monkeypatch.setattr(cpu, "import_uncompiled", lambda: done.append("uncompiled"))
    monkeypatch.setattr(cpu, "install_patches", lambda _: done.append("patched"))
    cpu.install.__wrapped__()
    assert done == expected


def test_every_replacement_is_an_object_of_its_own() -> None:
    replacements = [patch.replace(lambda: None) for patch in cpu.PATCHES for _ in range(2)]
    assert len(set(map(id, replacements))) == len(replacements)


def test_a_replacement_during_a_call_ends_with_it() -> None:
    original = Tensor.type

    def fails(tensor: Tensor) -> None:
        raise ValueError(tensor.type())

    from components.engines.megatron.compat.patching import during

    with pytest.raises(ValueError, match=r"torch\.cuda\.BFloat16Tensor"):
        during(Tensor, "type", cpu.name_cuda_type)(fails)(torch.ones(1, dtype=torch.bfloat16))
    assert Tensor.type is original
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_a_replacement_during_a_call_is_for_its_own_thread() -> None:
    """A replacement does not affect other threads, such as a save in which torch converts and names types."""
    found: list[object] = []

    def call(tensor: Tensor) -> str:
        other = Thread(target=lambda: found.extend([tensor.type(), tensor.type(torch.uint8).dtype]))
        other.start()
        other.join()
        return tensor.type()

    from components.engines.megatron.compat.patching import during

    assert during(Tensor, "type", cpu.name_cuda_type)(call)(torch.ones(1)) == "torch.cuda.FloatTensor"
    assert found == ["torch.FloatTensor", torch.uint8]


# ---- the rest of the program


def test_nothing_of_megatron_is_compiled() -> None:
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.jit import jit_fuser

    assert not hasattr(swiglu, "_torchdynamo_orig_callable")
    assert jit_fuser(swiglu) is swiglu
    assert hasattr(torch.compile(lambda x: x), "_torchdynamo_orig_callable")


def test_fsdp2_computes_what_it_computed() -> None:
    assert_same(engine_step("qwen3", "packed", 2, next_token(), fsdp2()), plain_step("qwen3", "token"))


def test_fsdp2_writes_and_reads_checkpoints(tmp_path: Path) -> None:
    engine = make_engine()
    batches = share(engine, "packed", 2)
    step(engine, batches, next_token())
    save_tensors(tmp_path / "saved", engine.tensors())
    expected = step(engine, batches, next_token()).loss
    engine.load(tmp_path / "saved")
    assert step(engine, batches, next_token()).loss == expected
    engine.close()


def test_torch_is_what_it_was_for_everyone_else() -> None:
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        assert torch.tensor(1.0).is_meta
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1).cuda()


def test_compiled_functions_still_trace() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() + torch.zeros(3) + torch.tensor(2.0)

    x = torch.rand(3)
    torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


def test_a_start_of_megatron_prints_nothing() -> None:
    """The start needs its own process, because warnings are printed only at the first import."""
    code = (
        "import components.engines.megatron.runtime.engine\n"
        "from tests.distributed.cases import make_engine, megatron, next_token, share, step\n"
        "layout = megatron(distributed_optimizer=True, activation_checkpointing='selective')\n"
        "engine = make_engine(on=layout)\n"
        "step(engine, share(engine, 'packed', 2), next_token())\n"
        "engine.close()\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout + answer.stderr) == (0, "")


def test_other_messages_of_megatron_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    quiet.install()
    logging.getLogger(RANDOM).warning("CPU RNG state changed within GPU RNG context")
    logging.getLogger(RANDOM).warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]
    with warnings.catch_warnings(record=True) as caught:
        quiet.install.__wrapped__()
        for message in ("Apex is not installed. Falling back to Torch Norm", "Apex is broken"):
            warnings.warn_explicit(message, UserWarning, "backends.py", 1, module="megatron.core.models")
    assert [str(warning.message) for warning in caught] == ["Apex is broken"]
