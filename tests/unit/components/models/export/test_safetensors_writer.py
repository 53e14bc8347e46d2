"""Files are written tensor by tensor, and tensors of a checkpoint are read in parts."""

import errno
import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.checkpoint.dcp import save_tensors
from components.checkpoint.reader import StoredTensors
from components.contracts.errors import ConfigError
from components.models import ModelSpec, export_folder, named_shapes, stream_folder
from components.models.checkpoint_weights import check_shapes
from components.models.export.hf_folder import write_configs, write_safetensors
from components.models.export.safetensors_writer import stored_tensors, stream_file
from components.models.generate import load_model, load_with_weights
from tests.distributed.cases import spec

NAMES = {"model.layers.10.b": (3, 2), "model.layers.2.a": (5,), "ü": (7, 1), "lm_head.weight": (4, 4)}


class Source:
    """The weights of a model; ``most`` is the largest number of tensors that existed at once."""

    def __init__(self, model: ModelSpec) -> None:
        self.weights, self.alive, self.most = model.weights(0), 0, 0

    def __call__(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        tensor = self.weights(name, index)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_is_that_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in NAMES.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    stream_file(tmp_path / "ours", shapes, lambda name, _=(): tensors[name], dtype)
    save_file({n: t.to(dtype) for n, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("limit", [2**30, 20_000])
def test_a_folder_is_that_of_a_run_and_takes_the_memory_of_a_tensor(tmp_path: Path, limit: int) -> None:
    model, dtype = spec("llama"), torch.bfloat16
    shapes, source = named_shapes(model.build(model.config())), Source(spec("llama"))
    gc.disable()
    stream_folder(model, shapes, source, tmp_path / "ours", dtype, shard_bytes=limit)
    gc.enable()
    assert source.most <= 2  # a tensor is freed after the next one is created
    tensors = ((name, source(name).to(dtype)) for name in shapes)
    export_folder(model, tensors, tmp_path / "theirs", dtype, shard_bytes=limit)
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    assert (len([name for name in files if name.endswith(".safetensors")]) > 1) == (limit < 2**30)
    for name in files:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
        if name.endswith(".safetensors"):
            assert load_file(tmp_path / "ours" / name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek"])
def test_a_model_in_memory_is_that_of_its_files(tmp_path: Path, family: str) -> None:
    """transformers stacks the weights of experts, and the correction of a router's scores stays in fp32."""
    model, dtype = spec(family), torch.bfloat16
    shapes, drawn = named_shapes(model.build(model.config())), model.weights(0)

    def source(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return drawn(name, index) + 1 / 3  # corrections are 0 at first

    stream_folder(model, shapes, source, tmp_path / "files", dtype)
    write_configs(model, tmp_path / "none", dtype)
    model.add_tokenizer(tmp_path / "files")
    model.add_tokenizer(tmp_path / "none")
    theirs = load_model(tmp_path / "files", False)
    ours = load_with_weights(tmp_path / "none", False, stored_tensors(model, shapes, source, dtype))
    assert not [*(tmp_path / "none").glob("*.safetensors*")]
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert ours.generation_config is not None
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    named = {"_name_or_path": None}
    assert ours.config.to_dict() | named == theirs.config.to_dict() | named


@pytest.mark.parametrize(
    "index", [(), (slice(1, 4),), (slice(0, 6), slice(2, 3)), (slice(3, 3), slice(0, 5))]
)
def test_a_part_of_a_stored_tensor(tmp_path: Path, index: tuple[slice, ...]) -> None:
    whole = torch.arange(30.0).reshape(6, 5)
    save_tensors(tmp_path, {"model/w": whole, "exp_avg/w": -whole, "optimizer_step": torch.ones(1)})
    stored = StoredTensors(tmp_path)
    assert stored.shapes("model") == {"w": whole.shape}
    assert torch.equal(stored.read("model/w", index), whole[index])


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        StoredTensors(tmp_path)


WANTED = {"a": torch.Size([2, 3]), "b": torch.Size([2])}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"a": torch.Size([2, 3])}, ["lacks b", "model.path=RUN/export"]),
        (WANTED | {"c": torch.Size([1])}, ["has the unexpected c", "model options of its run"]),
        (WANTED | {"a": torch.Size([3, 2])}, ["a is [3, 2]", "needs [2, 3]"]),
        ({"x.lora_A.weight": torch.Size([1, 2])}, ["adapter.path=RUN/export"]),
    ],
)
def test_tensors_of_another_model_are_named(
    stored: dict[str, torch.Size], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.init_from: ") as caught:
        check_shapes(tmp_path, stored, WANTED, "checkpoint.init_from")
    assert all(word in str(caught.value) for word in words)
    check_shapes(tmp_path, WANTED, WANTED, "checkpoint.init_from")


def test_a_refusal_of_the_disk_is_an_oserror_with_the_name_of_the_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / 'a'}'") as caught:
            write_safetensors({"a": torch.zeros(1 << 16)}, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
