"""An installation of transformer-engine is recognised by its library for torch."""

import sys
from pathlib import Path

import pytest

from components.engines.megatron.te_install import has_transformer_engine

PACKAGE = "transformer_engine/__init__.py"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), False),
        (("transformer_engine/__init__.py",), False),
        (("transformer_engine/__init__.py", "transformer_engine/transformer_engine_jax.so"), False),
        (("transformer_engine/__init__.py", "transformer_engine_torch.cpython-311.so"), True),
        (("transformer_engine/__init__.py", "transformer_engine/transformer_engine_torch.so"), True),
        (
            ("transformer_engine/__init__.py", "transformer_engine/wheel_lib/transformer_engine_torch.so"),
            True,
        ),
    ],
)
def test_the_library_for_torch_counts(
    files: tuple[str, ...], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "elsewhere"))
    assert has_transformer_engine() is found
