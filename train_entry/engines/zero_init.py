"""ZeRO-3's parameters are cut up as soon as their module is made, and whole one at a time to be written."""

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
    """Shards go where ds_config wants them: the device, host memory or NVMe. See engine.Sharding."""

    def __init__(self, ds_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._ds_config = ds_config
        self._device = device

    @contextlib.contextmanager
    def construct(self) -> Iterator[None]:
        # Set by an earlier model's engine, they would keep parts of this one on the device.
        deepspeed.zero.Init.apply_param_persistence = False
        deepspeed.zero.Init.num_persisted_elements = 0
        # Without its own overrides of dtype and device: they would also cut the precision of buffers, as the
        # frequencies of rotary embeddings, and break what is imported meanwhile (torch._dynamo).
        init = deepspeed.zero.Init(config_dict_or_path=dict(self._ds_config), tensor_overrides=[])
        # Parameters refer to themselves here, so one that is replaced by a tied one keeps its shard until it
        # is collected: now, and without looking at all that the imports left.
        gc.freeze()
        try:
            with self._device, init:
                yield
            gc.collect()
        finally:
            gc.unfreeze()

    def place(self, model: PreTrainedModel) -> None:
        pass  # zero.Init has cut up each parameter as its module was made

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        return values

    @contextlib.contextmanager
    def whole(self, parameter: torch.nn.Parameter) -> Iterator[bool]:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            yield deepspeed.comm.get_rank() == 0
