"""The engine for DeepSpeed's pipeline. Its schedule is 1F1B: stages alternate forward and backward passes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from train_entry.contract import Plan
from train_entry.engines.base import Held, Lap, Part
from train_entry.engines.deepspeed import join_ranks, norm_of, rate_of
from train_entry.model import split
from train_entry.model.sharding import copies_of
from train_entry.model.stages import Stage

__all__ = ["join_ranks", "open_engine"]

PARTS = {
    schedule.LoadMicroBatch: Part.FETCH,
    schedule.ForwardPass: Part.FORWARD,
    schedule.BackwardPass: Part.BACKWARD,
    schedule.SendActivation: Part.EXCHANGE,
    schedule.RecvActivation: Part.EXCHANGE,
    schedule.SendGrad: Part.EXCHANGE,
    schedule.RecvGrad: Part.EXCHANGE,
    schedule.ReduceTiedGrads: Part.UPDATE,
    schedule.ReduceGrads: Part.UPDATE,
    schedule.OptimizerStep: Part.UPDATE,
}
SHARED = "embedding"


def open_engine(
    model: Any, plan: Plan, ds_config: Mapping[str, Any], device: torch.device
) -> PipelinedEngine:
    """Wrap this rank's stage. `model` holds only what stages.py left for this rank."""
    return PipelinedEngine(model, plan, ds_config)


class PipelinedEngine:
    """The pipeline engine: one call runs all micro-batches of a step. Implements base.TrainEngine."""

    def __init__(self, model: Any, plan: Plan, ds_config: Mapping[str, Any]) -> None:
        self._plan = plan
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints each stage's layers
            stages = Stages(model, plan)
        self._engine = deepspeed.initialize(model=stages, config=dict(ds_config))[0]
        if plan.compile:
            self._engine.compile()

    def step(self, batches: Iterator[torch.Tensor], lap: Lap) -> torch.Tensor:
        self._engine._INSTRUCTION_MAP = timed_instructions(type(self._engine)._INSTRUCTION_MAP, lap)
        # The first stage takes the inputs, the last one the labels; the others take nothing.
        loss: torch.Tensor = self._engine.train_batch((batch, batch) for batch in batches)
        lap(Part.UPDATE)  # after the update, the last stage's loss is broadcast to all ranks
        return loss

    def lr(self) -> float:
        return rate_of(self._engine)

    def grad_norm(self) -> float | None:
        return norm_of(self._engine)

    def held(self) -> list[Held]:
        parameters = self._engine.module.parameters()
        return [
            Held(parameter.detach().clone(), copies_of(parameter, self._plan)) for parameter in parameters
        ]


class Stages(PipelineModule):  # type: ignore[misc]
    """A DeepSpeed pipeline of one layer per stage: the model is already cut into stages."""

    def __init__(self, model: Any, plan: Plan) -> None:
        stage = Stage(model)
        object.__setattr__(self, "_stage", stage)  # not as a submodule: it already is one, as a layer
        super().__init__(
            layers=[stage] * plan.pipeline,  # each rank builds only its own
            topology=PipeModelDataParallelTopology(
                num_pp=plan.pipeline, num_dp=plan.data, num_mp=plan.tensor
            ),
            loss_fn=stage.loss,
            partition_method="uniform",
        )
        self._count_once(plan.coordinates(self.global_rank).tensor)
        if plan.tensor > 1:
            split.join(model, self._grid.get_slice_parallel_group())

    def _count_once(self, tensor_rank: int) -> None:
        """Mark the parameters of which this rank has the first copy, for the norm of the whole gradient.

        At stage 0 in fp32 DeepSpeed counts the parameters of a pipeline's first rank, and elsewhere only
        marked ones. Without these marks it clips too little (deepspeed/runtime/utils.py, clip_grad_norm_).
        """
        for parameter in self.parameters():
            is_first_part = tensor_rank == 0 or getattr(parameter, "tensor_model_parallel", False)
            parameter.model_parallel = is_first_part and not parameter.ds_pipe_replicated

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Let the first and the last stage sum their gradients of a tied embedding, which is also the head.

        DeepSpeed finds tied weights only in its own kind of layers, which these are not.
        """
        shared: dict[str, dict[str, Any]] = {}
        if not self._stage.shares_embedding:
            return shared
        for stages in self._topo.get_axis_comm_lists("pipe"):
            ends = [stages[0], stages[-1]]
            group = dist.new_group(ends)  # every rank must create every group
            if self.global_rank in ends:
                owner = self._stage.embedding_or_head()
                self.tied_modules[SHARED] = owner
                shared[SHARED] = {"ranks": ends, "group": group, "weight_attr": ["weight"], "module": owner}
                owner.weight.ds_pipe_replicated = self.global_rank != ends[0]  # count it once in the norm
        return shared


def timed_instructions(
    instructions: Mapping[type, Callable[..., None]], lap: Lap
) -> dict[type, Callable[..., None]]:
    """Return the schedule's instructions, each followed by a lap."""

    def timed(run: Callable[..., None], part: Part) -> Callable[..., None]:
        def run_and_lap(engine: Any, **arguments: Any) -> None:
            run(engine, **arguments)
            lap(part)

        return run_and_lap

    return {instruction: timed(run, PARTS[instruction]) for instruction, run in instructions.items()}
