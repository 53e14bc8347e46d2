"""Process groups of one rank, in which the other ranks do not exist."""

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg


def install(rank: int, world_size: int, received: object) -> None:
    """Replace rendezvous and groups by torch's fake ones; peers broadcast the object ``received``."""
    distributed: Any = dist
    initialize: Callable[..., None] = dist.init_process_group

    def init_process_group(*_: object, **__: object) -> None:
        initialize("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world_size)

    def broadcast_object_list(objects: list[object], *_: object, **__: object) -> None:
        if objects[0] is None:
            objects[0] = copy.deepcopy(received)

    distributed.init_process_group = init_process_group
    distributed.rendezvous = lambda *_, **__: iter([(dist.HashStore(), rank, world_size)])
    distributed.distributed_c10d._set_pg_timeout = lambda *_, **__: None
    distributed.broadcast_object_list = broadcast_object_list
