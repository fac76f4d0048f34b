"""shardsweep: which parallel configuration trains a model fastest, fits in memory and still trains well.

    python sweep.py -m                               a study over the chosen space
    python sweep.py -m dry_run=true                  its plans with their estimates; launches nothing
    python sweep.py strategy=zero2 micro_batch=4     that one configuration, as one trial

The only entry point, and the only place where the parts are put together.
Exit status: 0 a winner, 1 error, 2 bad configuration, 3 no feasible trial, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from analysis.load import load_study
from analysis.ranking import winner as find_winner
from analysis.table import show, write_csv
from analysis.trial import show_trial
from sweeps.cluster.choose import Target, close_cluster, find_target, open_cluster
from sweeps.cluster.node.devices import find_gpus
from sweeps.config.compose import (
    CONFIG_ERRORS,
    Composer,
    describe,
    register_resolvers,
    register_schema,
)
from sweeps.config.inputs import require_inputs
from sweeps.config.models import model_shape
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError, SweepError, TrackingError
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import require_room, room_of
from sweeps.paths import HYDRA_PLUGINS
from sweeps.plan.planner import Planner
from sweeps.search.gate import Gate
from sweeps.search.proposer import make_proposer, rules_for
from sweeps.search.pruning import Pruning
from sweeps.search.sampler import Sampler, require_searchable
from sweeps.show.display import Display, make_display
from sweeps.show.dry_run import list_plans
from sweeps.show.dry_run_file import require_target, write_listing
from sweeps.show.dry_run_view import show_listing
from sweeps.show.estimates import basis
from sweeps.show.observer import StudyObserver
from sweeps.space.dimensions import Point
from sweeps.space.grammar import Request, pinned_values, read_request, without_inactive
from sweeps.space.points import Settings
from sweeps.study.earlier import earlier_trials
from sweeps.study.export import write_best
from sweeps.study.ledger import Ledger, exclusive, open_study
from sweeps.study.limits import Limits, StopReason
from sweeps.study.loop import StudyLoop
from sweeps.study.record import collection_name, comparable, joined_record, study_record
from sweeps.tracking.background import BackgroundTracker, NoTracker, Tracker
from sweeps.tracking.location import artifact_root, default_uri, is_server, ui_command
from sweeps.tracking.mlflow import MlflowTracker, shown_attempt
from train_entry.contract import Ranking, State, StudyDir, StudyRecord, read_document

sys.path.append(str(HYDRA_PLUGINS))  # so that Hydra finds the sweeper; see the plugin itself
os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors, and we print one line, not ten

OK, ERROR, BAD_CONFIG, NO_FEASIBLE_TRIAL, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The inputs and parts that one start of a study works with."""

    config: SweepConfig
    request: Request
    target: Target  # where trials run
    record: StudyRecord
    directory: StudyDir
    planner: Planner
    estimator: Estimator
    single: Point | None  # the only point to measure, even if it was measured before; None: search


register_schema()
register_resolvers(lambda: bool(find_gpus()))


@hydra.main(config_path="conf", config_name="sweep", version_base="1.3")
def run_single(_: DictConfig) -> None:
    """Run the composed configuration as one trial."""
    arguments = list(HydraConfig.get().overrides.task)
    loader = GlobalHydra.instance().config_loader()
    # SystemExit, because Hydra prints lines of its own for any other exception.
    raise SystemExit(exit_status(lambda: run(arguments, loader, single=True)))


def run_sweep(arguments: Sequence[str], loader: ConfigLoader) -> None:
    """Run a study. The sweeper plugin calls this for `-m`."""
    raise SystemExit(exit_status(lambda: run(arguments, loader, single=False)))


def run(arguments: Sequence[str], loader: ConfigLoader, single: bool) -> int:
    """Check everything, then search. Return the exit status."""
    session = prepare(arguments, loader, single)
    if session.config.dry_run:
        return list_only(session)
    display = make_display(sys.stdout)
    with exclusive(session.directory):
        study = open_study(session.directory, session.record, session.config.accept_versions)
        tracker, browser = open_tracker(session, study)
        ledger = Ledger(session.directory)
        known = work_on_record(ledger)
        ranking = Ranking(ledger.trials, session.record.goal)
        for trial in ledger.trials:  # an earlier start may have missed some; recording again costs little
            if trial.state.is_closed:
                folder = session.directory.trial(trial.number)
                tracker.record(trial, shown_attempt(folder, trial), ranking.drift(trial))
        reason = search(session, ledger, display, tracker)
        tracker.close()
        return report(session, ledger, reason, browser, fresh=work_on_record(ledger) > known)


def prepare(arguments: Sequence[str], loader: ConfigLoader, single: bool) -> Session:
    """Check the whole command line before anything is launched, and put the session together."""
    request = read_request([*arguments, *(["space=none"] if single else [])], Composer(loader))
    config = request.composer.compose()
    require_inputs(config)
    target = find_target(config)
    machine = target.machine
    settings = Settings(request.composer, machine)
    request = without_inactive(request, settings.is_active)
    require_searchable(request.space, config.search)
    model = model_shape(config.model)
    flat = request.composer.flat()
    record = study_record(config, flat, request.space, model, machine, arguments)
    point: Point | None = None
    if single:
        record, point = single_trial(record, request, config)
        point = {key: value for key, value in point.items() if settings.is_active(key, point)}
    planner = Planner(request.composer, model, machine, record.name)
    room, hardware = room_of(config.cluster, config.gate, machine), hardware_for(machine)
    require_room(room, hardware)
    estimator = Estimator(model, hardware, room, config.gate)
    if config.gate.earlier_studies:
        estimator.learn(earlier_trials(Path(config.studies_dir), record))
    if not config.dry_run:  # a dry run itself reports that no plan is legal, and why
        planner.require_legal(request.space)
    return Session(
        config=config,
        request=request,
        target=target,
        record=record,
        directory=StudyDir(Path(config.studies_dir).absolute() / record.name),
        planner=planner,
        estimator=estimator,
        single=point,
    )


def list_only(session: Session) -> int:
    """Print each plan of the space with its estimate, or why it is illegal. Launch nothing."""
    planner, estimator, config = session.planner, session.estimator, session.config
    to = Path(config.dry_run_to) if config.dry_run_to else None
    if to is not None:
        require_target(to)
    estimator.learn(Ledger(session.directory).trials)
    listing = list_plans(
        session.request.space,
        planner.plan,
        planner.is_active,
        config.search.seed,
        estimator.estimate,
        session.record.goal,
        basis(hardware_for(session.target.machine), estimator.room, config.gate, estimator.observations),
    )
    if to is not None:
        write_listing(listing, to)
    try:
        show_listing(listing, sys.stdout)
        if to is not None:
            print(f"written to {to}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
    return OK if listing.legal else NO_FEASIBLE_TRIAL


def single_trial(asked: StudyRecord, request: Request, config: SweepConfig) -> tuple[StudyRecord, Point]:
    """Return the study that a single trial joins, and the trial's point.

    The study is the one that is named, or else the model's collection of single trials.
    """
    name = config.study or collection_name(asked)
    known = read_document(StudyDir(Path(config.studies_dir) / name).record, StudyRecord)
    point = pinned_values(request.composer.fixed, request.composer)
    if known is None:
        return dataclasses.replace(asked, name=name, asked=comparable(asked.asked), overrides=()), point
    flat = request.composer.flat()
    columns = {key: flat[key] for key in known.dimensions if key in flat}
    return joined_record(known, asked), columns | point


def open_tracker(session: Session, study: StudyRecord) -> tuple[Tracker, list[str]]:
    """Return the tracker, and lines that say how to view it in a browser. Raises TrackingError."""
    if session.config.tracking.kind == "none":
        return NoTracker(), []
    studies = session.directory.path.parent
    studies.mkdir(parents=True, exist_ok=True)
    uri = session.config.tracking.uri or default_uri(studies)
    tracker = MlflowTracker(uri, artifact_root(studies), study, session.directory)
    tracker.open()
    look = [f"in a browser:       {tracker.runs_url()}"]
    if not is_server(uri):
        look.insert(0, f"start MLflow:       {ui_command(uri)}")
    return BackgroundTracker(tracker, session.directory.path), look


def search(session: Session, ledger: Ledger, display: Display, tracker: Tracker) -> StopReason:
    """Run the loop until it ends or Ctrl-C interrupts it."""
    config = session.config
    machine = session.target.machine
    parallel = config.cluster.parallel or machine.nodes
    limits = limits_of(config)
    planner, space = session.planner, session.request.space
    points = 0 if session.single is not None else space.size(planner.is_active)
    goals = session.record.goals
    observer = StudyObserver(ledger, goals[0], limits, display, tracker, parallel, points)
    sampler = Sampler(space, config.search, len(ledger.trials), planner.is_active, len(goals))
    gate = Gate(session.estimator, config.gate.enabled, config.gate.borderline, config.search.dominance)
    rules = rules_for(config, goals, machine, points)
    cluster = open_cluster(session.target, parallel, session.directory, display.message)
    loop = StudyLoop(
        study=session.record,
        planner=planner,
        proposer=make_proposer(rules, space, planner, sampler, gate),
        cluster=cluster,
        ledger=ledger,
        gate=gate,
        limits=limits,
        observer=observer,
        cancel_on_interrupt=config.cluster.on_interrupt == "cancel",
        check_best=config.check.best,
        confirm=config.confirm,
        futility=config.measure.futility,
        pruning=Pruning(sampler, goals[0]) if config.search.pruner != "none" else None,
        interrupted=Interrupt(),
    )
    display.start(session.record)
    try:
        return loop.run(session.single)
    finally:
        display.stop()
        for problem in close_cluster(cluster):
            print(problem, file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C may cut the rest short


def limits_of(config: SweepConfig) -> Limits:
    asked = config.limits
    return Limits(
        trials=asked.trials,
        hours=asked.hours,
        retries=asked.retries,
        gpu_hours=asked.gpu_hours,
        cost=asked.cost,
        price_per_gpu_hour=config.cluster.price_per_gpu_hour or 0.0,
        failures=asked.failures,
        patience=asked.patience,
    )


class Interrupt:
    """A flag that Ctrl-C sets. The first Ctrl-C ends the study in an orderly way, the second at once.

    The signal handler prints nothing: it may have interrupted a write to the same terminal.
    """

    def __init__(self) -> None:
        self._requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def __call__(self) -> bool:
        return self._requested

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True


def work_on_record(ledger: Ledger) -> int:
    """Return a count that grows whenever a trial is opened or launched."""
    return sum(1 + len(trial.attempts) for trial in ledger.trials)


def report(session: Session, ledger: Ledger, reason: StopReason, browser: list[str], fresh: bool) -> int:
    """Print the results, write table.csv and best/, and return the exit status."""
    study = load_study(session.directory)
    write_csv(study)
    if session.single is not None:
        row = study.rows[-1]
        show_trial(ledger[row.number], row, sys.stdout)
        won = row.state is State.MEASURED
    else:
        show(study, sys.stdout)
        print(f"\nended: {reason}")
        if not fresh:
            print(f"nothing was launched; to measure again, use another name: study={session.record.name}-2")
        winner = find_winner(study)
        if won := winner is not None:
            print(f"best configuration in: {write_best(session.directory, ledger[winner.number])}")
    print(f"study directory: {session.directory.path}")
    for line in browser:
        print(line)
    if reason is StopReason.INTERRUPTED:
        print("the same command resumes this study")
        return INTERRUPTED
    return OK if won else NO_FEASIBLE_TRIAL


def exit_status(work: Callable[[], int]) -> int:
    """Run `work` and return its exit status. Errors that the user can mend become lines of text."""
    try:
        return work()
    except (ConfigError, TrackingError) as error:
        print(error, file=sys.stderr)
        return BAD_CONFIG
    except CONFIG_ERRORS as error:
        print(describe(error), file=sys.stderr)
        return BAD_CONFIG
    except SweepError as error:
        print(error, file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        text = "interrupted: running trials continue; run the same command again to collect them"
        print(text, file=sys.stderr)
        return INTERRUPTED


def main() -> int:
    run_single()  # raises SystemExit, also for -m; returns only after --help, --cfg and the like
    return OK


if __name__ == "__main__":
    sys.exit(exit_status(main))
