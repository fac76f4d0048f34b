"""Communication volume of tensor parallelism, computed by counting its all-reduces. Nothing is measured."""

from __future__ import annotations

import math

from train_entry.contract.job.spec import ModelShape, Plan
from train_entry.contract.shared.words import Precision

# All-reduces over tensor ranks per transformer block and micro-batch, each of micro_batch x seq_len x hidden
# elements. Counted for a llama on two and four ranks (torch 2.13, DeepSpeed 0.19, not compiled).
FORWARD = 2  # after attention and after the feed-forward layer
BACKWARD = (
    2  # before each of them: Shoeybi et al. 2019, arXiv 1909.08053, section 3; train_entry/model/split.py
)
# Without a pipeline DeepSpeed splits the model itself, with one all-reduce per matrix split by columns:
# query, key, value, gate and up (deepspeed/module_inject/layers.py, ColumnParallel).
BACKWARD_WITHOUT_PIPELINE = 5
RECOMPUTED = (
    1  # torch stops recomputing before the all-reduce after the feed-forward layer: its result is not needed
)


def tensor_volume_bytes(plan: Plan, model: ModelShape) -> int:
    """Return the bytes that one rank sends to the other tensor ranks of its group in one optimizer step.

    A ring all-reduce over t ranks sends 2 (t - 1) / t times the tensor's size. Embedding, head and gradient
    norm are left out; without a pipeline, the logits gathered for the loss add about vocab / hidden such
    all-reduces per micro-batch.
    """
    blocks = model.layers // plan.pipeline
    recomputed = math.ceil(blocks / plan.checkpoint_every) if plan.checkpoint_every else 0
    backward = BACKWARD if plan.pipeline > 1 else BACKWARD_WITHOUT_PIPELINE
    sums = (blocks * (FORWARD + backward) + recomputed * RECOMPUTED) * plan.grad_accum
    element_bytes = 4 if plan.precision is Precision.FP32 else 2
    sum_bytes = plan.micro_batch * plan.seq_len * model.hidden * element_bytes
    return sums * 2 * (plan.tensor - 1) * sum_bytes // plan.tensor
