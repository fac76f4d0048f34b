"""What the orchestrator and a job share: the words, the types, the files. Read this first.

Standard library only, so that a job, a supervisor and a report can import it in milliseconds.

A *study* is one search. It numbers *trials*, one configuration each. An *attempt* is one launch of a
trial and owns a directory that is never used twice. An attempt runs as one *job* of `ranks` processes.
A *plan* is what we intend, a *measurement* what we saw, a *failure* why we saw nothing.
Numbers carry their unit in their name; sizes are bytes, times are seconds, batches are sequences.
"""

from train_entry.contract.codec import (
    ContractError,
    dump,
    load,
)
from train_entry.contract.files import (
    AttemptDir,
    StudyDir,
    TrialDir,
    append_line,
    read_document,
    read_lines,
    write_atomic,
)
from train_entry.contract.intent import (
    AioPlan,
    DataSpec,
    DdpPlan,
    LossScalePlan,
    MeasureSpec,
    ModelShape,
    OffloadPlan,
    OptimizerPlan,
    Place,
    Plan,
    SchedulePlan,
    TimeLimits,
    TrialSpec,
    ZeroPlan,
)
from train_entry.contract.records import (
    Advice,
    Estimate,
    Reason,
    Scalar,
    StudyRecord,
    Trial,
)
from train_entry.contract.scratch import delete_abandoned_scratch, lock_scratch, scratch_prefix
from train_entry.contract.seen import (
    Failure,
    Heartbeat,
    JobRecord,
    Measurement,
    MemoryPeak,
    Outcome,
    RankExit,
    RankMeasurement,
    RankOutcome,
    StepMetrics,
    StepSplit,
)
from train_entry.contract.volume import tensor_volume_bytes
from train_entry.contract.words import (
    AttemptKind,
    Attention,
    Engine,
    ExitReason,
    FailureKind,
    Fit,
    MemoryKind,
    Offload,
    Origin,
    Phase,
    Precision,
    Schedule,
    State,
)

__all__ = [
    "Advice",
    "AioPlan",
    "AttemptDir",
    "AttemptKind",
    "Attention",
    "ContractError",
    "DataSpec",
    "DdpPlan",
    "Engine",
    "Estimate",
    "ExitReason",
    "Failure",
    "FailureKind",
    "Fit",
    "Heartbeat",
    "JobRecord",
    "LossScalePlan",
    "MeasureSpec",
    "Measurement",
    "MemoryKind",
    "MemoryPeak",
    "ModelShape",
    "Offload",
    "OffloadPlan",
    "OptimizerPlan",
    "Origin",
    "Outcome",
    "Phase",
    "Place",
    "Plan",
    "Precision",
    "RankExit",
    "RankMeasurement",
    "RankOutcome",
    "Reason",
    "Scalar",
    "Schedule",
    "SchedulePlan",
    "State",
    "StepMetrics",
    "StepSplit",
    "StudyDir",
    "StudyRecord",
    "TimeLimits",
    "Trial",
    "TrialDir",
    "TrialSpec",
    "ZeroPlan",
    "append_line",
    "delete_abandoned_scratch",
    "dump",
    "load",
    "lock_scratch",
    "read_document",
    "read_lines",
    "scratch_prefix",
    "tensor_volume_bytes",
    "write_atomic",
]
