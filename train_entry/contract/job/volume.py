"""What tensor parallelism sends, by counting its sums over ranks. Nothing is measured here."""

from __future__ import annotations

import math

from train_entry.contract.job.spec import ModelShape, Plan
from train_entry.contract.shared.words import Precision

# Sums over tensor ranks in a transformer block for one micro-batch, each of micro_batch x seq_len x hidden
# elements. Those of a llama were counted on two and four ranks (torch 2.13, DeepSpeed 0.19, not compiled).
FORWARD = 2  # behind attention and behind the feed-forward layer
BACKWARD = (
    2  # before both of them: Shoeybi et al. 2019, arXiv 1909.08053, section 3; train_entry/model/split.py
)
# DeepSpeed's own splitting, in use without a pipeline, sums once for each matrix that is split by columns:
# query, key, value, gate and up (deepspeed/module_inject/layers.py, ColumnParallel).
BACKWARD_WITHOUT_PIPELINE = 5
RECOMPUTED = (
    1  # torch ends recomputing before the sum behind the feed-forward layer, which nothing needs again
)


def tensor_volume_bytes(plan: Plan, model: ModelShape) -> int:
    """What one rank sends to those that share its matrices, in one optimizer step.

    By a ring, in which a sum over t ranks sends 2 (t - 1) / t times its size. Embedding, head and the norm
    of the gradient are left out: the logits that are gathered for the loss, without a pipeline, are as large
    as vocab / hidden such sums a micro-batch.
    """
    blocks = model.layers // plan.pipeline
    recomputed = math.ceil(blocks / plan.checkpoint_every) if plan.checkpoint_every else 0
    backward = BACKWARD if plan.pipeline > 1 else BACKWARD_WITHOUT_PIPELINE
    sums = (blocks * (FORWARD + backward) + recomputed * RECOMPUTED) * plan.grad_accum
    element_bytes = 4 if plan.precision is Precision.FP32 else 2
    sum_bytes = plan.micro_batch * plan.seq_len * model.hidden * element_bytes
    return sums * 2 * (plan.tensor - 1) * sum_bytes // plan.tensor
