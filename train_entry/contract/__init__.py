"""The words, types and files that the orchestrator and a job share. Read this first.

It imports only the standard library, so a job, a supervisor or a report loads it in milliseconds.

A *study* is one search. It consists of numbered *trials*; each trial is one configuration. An *attempt* is
one launch of a trial and owns a directory that is never used twice. An attempt runs as one *job* of `ranks`
processes. A *plan* says what should run, a *measurement* what was seen, a *failure* why nothing was seen.
Names of numbers carry their unit; sizes are bytes, times are seconds, batches are sequences.
"""

from train_entry.contract.job.files import AttemptDir
from train_entry.contract.job.results import (
    DeviceHealth,
    Failure,
    Heartbeat,
    JobRecord,
    Measurement,
    MemoryPeak,
    Outcome,
    RankExit,
    RankMeasurement,
    RankOutcome,
    SchedulerWord,
    StepMetrics,
    StepSplit,
    Submission,
)
from train_entry.contract.job.scratch import delete_abandoned_scratch, lock_scratch, scratch_prefix
from train_entry.contract.job.spec import (
    AioPlan,
    Coordinates,
    DataSpec,
    DdpPlan,
    Expected,
    LossScalePlan,
    MeasureSpec,
    ModelShape,
    OffloadPlan,
    OptimizerPlan,
    Plan,
    SchedulePlan,
    TimeLimits,
    TrialSpec,
    ZeroPlan,
)
from train_entry.contract.job.volume import tensor_volume_bytes
from train_entry.contract.shared.codec import ContractError, dump, load
from train_entry.contract.shared.files import append_line, read_document, read_lines, write_atomic
from train_entry.contract.shared.text import GIB, KIB, MIB, counted, digits, gib, short, size_text, typed
from train_entry.contract.shared.words import (
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
    Purpose,
    Scalar,
    Schedule,
    State,
    TimingEnd,
)
from train_entry.contract.study.estimate import Advice, Estimate, Reason
from train_entry.contract.study.files import StudyDir, TrialDir, read_trial
from train_entry.contract.study.goals import GOALS, Figures, Goal
from train_entry.contract.study.ranking import Ranking, launch_noise, on_front, undrifted
from train_entry.contract.study.records import Standing, StudyRecord, Winner
from train_entry.contract.study.trial import INFEASIBLE, Attempt, Closing, Elapsed, Trial, state_of
