"""Arrays with a checksum."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.data.store.checked_files import load_array, save_array


def test_threads_read_one_header_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's parser, which numpy calls for a header, fails in two threads at once."""
    path, load, inside, most = tmp_path / "array.npy", np.load, [0], [0]
    save_array(path, np.arange(6))

    def counted(*args: Any, **options: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return load(*args, **options)

    monkeypatch.setattr(np, "load", counted)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(load_array, [path] * 8))
    assert all(np.array_equal(array, np.arange(6)) for array in found)
    assert most == [1]
