"""Build models for ZeRO-3: each parameter is sharded when its module is made, and gathered to be written."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import deepspeed
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ZeroInit:
    """Shards on the device, in host memory or on NVMe, as ds_config says. Implements sharding.Sharding."""

    def __init__(self, ds_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._ds_config = ds_config
        self._device = device

    @contextlib.contextmanager
    def construct(self) -> Iterator[None]:
        # If an earlier model's engine has set these, they would keep parts of this model on the device.
        deepspeed.zero.Init.apply_param_persistence = False
        deepspeed.zero.Init.num_persisted_elements = 0
        # Without zero.Init's overrides of dtype and device: they would also reduce the precision of buffers,
        # such as the frequencies of rotary embeddings, and break modules imported meanwhile (torch._dynamo).
        init = deepspeed.zero.Init(config_dict_or_path=dict(self._ds_config), tensor_overrides=[])
        # Parameters refer to themselves here, so one that a tied parameter replaces keeps its shard until it
        # is garbage-collected. Collect it at the end, and skip the objects that the imports created.
        gc.freeze()
        try:
            with self._device, init:
                yield
            gc.collect()
        finally:
            gc.unfreeze()

    def place(self, model: PreTrainedModel) -> None:
        pass  # zero.Init sharded each parameter when its module was made

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        return values

    @contextlib.contextmanager
    def whole(self, parameter: torch.nn.Parameter) -> Iterator[bool]:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            yield deepspeed.comm.get_rank() == 0
