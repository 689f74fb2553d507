"""Where a study lives: opening it from many processes at once, and cleaning up after workers that were killed.

    study, created = open_study(spec, folder, sampler)
    fail_dead_trials(study)            # trials whose worker is gone are failed, and their points queued again

SQLite beside the results is the default; any URL that Optuna takes works (PostgreSQL for many hosts). Creating tables in one
database from several processes is a race that the loser sees as an error about a lock or an existing row: it is tried
again. A trial whose worker was killed stays RUNNING: on this host it is recognised by its process being gone, elsewhere by its
heartbeat having stopped for `GRACE_S`.
"""

from __future__ import annotations

import os
import random
import socket
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from workbench.errors import StudyError
from workbench.tuning.spec import StudySpec

HEARTBEAT_S = 30
# A worker names itself in the first instant of a trial; one that is still unnamed after this was killed in that instant.
UNNAMED_AT_MOST = timedelta(seconds=60)
GRACE_S = 120
RETRY_FOR_S = 60.0
MAX_RETRIES = 2
_DIRECTIONS = {"minimise": StudyDirection.MINIMIZE, "maximise": StudyDirection.MAXIMIZE}
DATABASE_FILE = "study.db"
_PASSING = ("locked", "already exists", "unique constraint", "duplicate key", "no such table", "serializ")

T = TypeVar("T")


def storage_url(spec: StudySpec, folder: str | Path) -> str:
    """The study's database: its own URL, or a SQLite file in `folder`."""
    return spec.storage or f"sqlite:///{Path(folder).resolve() / DATABASE_FILE}"


def open_study(spec: StudySpec, folder: str | Path, sampler: optuna.samplers.BaseSampler) -> tuple[optuna.Study, bool]:
    """The study and whether this call created it. Raises StudyError if the database cannot be used."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # failed trials are told by the study itself, without tracebacks
    url = storage_url(spec, folder)
    if spec.storage is None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    storage = _patiently(lambda: _connect(url), url)
    directions = [_DIRECTIONS[objective.direction] for objective in spec.objectives]

    def create() -> tuple[optuna.Study, bool]:
        try:
            return optuna.create_study(
                study_name=spec.name, storage=storage, sampler=sampler, directions=directions
            ), True
        except DuplicatedStudyError:
            return optuna.load_study(study_name=spec.name, storage=storage, sampler=sampler), False

    study, created = _patiently(create, url)
    if study.directions != directions:
        found = [direction.name.lower() for direction in study.directions]
        raise StudyError(f"study {spec.name!r} in {shown(url)} has the objectives {found}; use another name")
    return study, created


def load_optuna_study(spec: StudySpec, folder: str | Path) -> optuna.Study:
    """The study as it is in its database. Raises StudyError if it was never begun."""
    url = storage_url(spec, folder)
    path = Path(folder) / DATABASE_FILE
    if spec.storage is None and not path.exists():
        raise StudyError(f"{path}: no study there; run it first")
    try:
        return optuna.load_study(study_name=spec.name, storage=_patiently(lambda: _connect(url), url))
    except KeyError:
        raise StudyError(f"{shown(url)}: no study named {spec.name!r}; run it first") from None


def worker_name() -> str:
    """Which process runs a trial: host, process id and the start of that process, so that a reused id is not taken for it."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def fail_dead_trials(study: optuna.Study) -> int:
    """Fail trials of workers that are gone, and queue their points again. Returns how many of this host's there were."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    dead = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _abandoned(trial):
            try:
                study.tell(trial.number, state=TrialState.FAIL)
            except (UpdateFinishedTrialError, ValueError):  # another process was faster
                continue
            requeue(study, trial)
            dead += 1
    return dead


def _abandoned(trial: FrozenTrial) -> bool:
    """Whether a running trial's worker, on this host, is gone, or was killed before it could put its name to the trial."""
    if "worker" not in trial.user_attrs:
        started = trial.datetime_start
        return started is not None and datetime.now() - started > UNNAMED_AT_MOST
    host, _, rest = str(trial.user_attrs["worker"]).rpartition(":")[0].rpartition(":")
    return host == socket.gethostname() and not _alive(int(rest), trial.user_attrs["worker"])


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the point of a trial that ended without a result: once per trial, at most MAX_RETRIES times per point."""
    point = trial.system_attrs.get("fixed_params") or trial.params
    retries = int(trial.user_attrs.get("retries", 0))
    again = any(other.user_attrs.get("retry_of") == trial.number for other in study.get_trials(deepcopy=False))
    if point and retries < MAX_RETRIES and not again:
        kept = {"default": True} if trial.user_attrs.get("default") else {}
        study.enqueue_trial(point, user_attrs={"retries": retries + 1, "retry_of": trial.number, **kept})


def shown(url: str) -> str:
    """A URL without its password."""
    return make_url(url).render_as_string(hide_password=True)


def _connect(url: str) -> RDBStorage:
    sqlite = url.startswith("sqlite")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        storage = RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if sqlite else {},
            heartbeat_interval=HEARTBEAT_S,
            grace_period=GRACE_S,
            heartbeat_stale_trial_callback=requeue,
        )
    if sqlite:
        event.listen(storage.engine, "connect", _write_ahead)
        storage.engine.dispose()
    return storage


def _write_ahead(connection: Any, _: Any) -> None:
    """SQLite with a write-ahead log: commits survive a killed process, wait for no disk, and do not block readers."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _patiently(act: Callable[[], T], url: str) -> T:
    """Do it, again while another process is in the way, for at most RETRY_FOR_S."""
    give_up = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            return act()
        except (SQLAlchemyError, StorageInternalError) as error:
            text = f"{error} {error.__cause__}".lower()
            if time.monotonic() > give_up or not any(sign in text for sign in _PASSING):
                where = url.split("://")[0] if isinstance(error, ArgumentError) else shown(url)
                reason = str(getattr(error, "orig", None) or error).splitlines()[0]
                raise StudyError(f"{where}: the study's database cannot be used ({reason})") from error
            time.sleep(random.uniform(0.02, 0.2))
        except ImportError as error:
            raise StudyError(f"{shown(url)}: the database driver is not installed ({error})") from None


def _alive(pid: int, name: str) -> bool:
    return Path(f"/proc/{pid}").exists() and name.endswith(f":{_started(pid)}") if Path("/proc/self").exists() else True


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot, the 22nd field of its stat line; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
