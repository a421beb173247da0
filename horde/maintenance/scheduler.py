"""APScheduler in every broker: the heartbeat in all of them, passes and folds in the one that leads."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy.exc import SQLAlchemyError

from horde.errors import HordeError
from horde.lifecycle.outages import BEAT_EVERY, beat
from horde.maintenance.folds import fold
from horde.maintenance.leader import Leadership
from horde.maintenance.passes import record_run, run_pass
from horde.statistics.totals import read_performance
from horde.usecases.context import Context

log = structlog.get_logger(__name__)

RENEW_EVERY = 4


class Maintenance:
    """The timers of one broker process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._leadership = Leadership()
        self._scheduler = BackgroundScheduler(timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1})

    def start(self) -> None:
        """Start the timers; the first heartbeat and the first bid for leadership happen before this returns."""
        settings = self._context.settings
        self.beat()
        self.renew()
        self._every(BEAT_EVERY, self.beat)
        self._every(RENEW_EVERY, self.renew)
        self._every(settings.maintenance_interval_seconds, self.run_pass)
        self._every(settings.fold_interval_seconds, self.run_fold)
        self._scheduler.start()

    def stop(self) -> None:
        """Finish what runs, then let another process lead."""
        # Without its jobs first, one that falls due meanwhile meets an executor that takes nothing more.
        self._scheduler.remove_all_jobs()
        self._scheduler.shutdown(wait=True)
        self._guarded(lambda: self._context.database.write_one(self._leadership.give_up))

    def beat(self) -> None:
        """Advance the heartbeat and look at the horde, for whoever asks how it is."""
        vitals = self._context.vitals

        def look() -> None:
            ended = self._context.database.run(beat)
            if ended.outage:
                log.warning("maintenance.outage_recorded", seconds=round(ended.outage))
            row = self._context.database.read(read_performance)
            vitals.queue = row.queued_requests + row.queued_text_requests
            vitals.threads = int(row.thread_count + row.text_thread_count)
            vitals.active_count = row.processing

        vitals.database_answers = self._guarded(look)

    def renew(self) -> None:
        """Bid for leadership, or hold it."""
        self._guarded(lambda: self._context.database.write_one(self._leadership.take_or_renew))

    def run_pass(self) -> None:
        """A maintenance pass, if this process leads."""
        self._led("pass", lambda: run_pass(self._context, may_go_on=self._leadership.holds).total())

    def run_fold(self) -> None:
        """A fold, if this process leads."""
        self._led("fold", lambda: fold(self._context))

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        self._scheduler.add_job(work, IntervalTrigger(seconds=seconds))

    def _led(self, job: str, work: Callable[[], int]) -> None:
        if not self._leadership.holds():
            return

        def run() -> None:
            started = time.monotonic()
            did = work()
            seconds = time.monotonic() - started
            if did or job == "pass":
                self._context.database.write_one(lambda tx: record_run(tx, job, seconds, did))

        self._guarded(run)

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Run a step; one that the database fails, for whatever reason, is logged and tried again with the next tick."""
        try:
            work()
        except HordeError as error:
            log.warning("maintenance.step_failed", error=error.message)
            return False
        except SQLAlchemyError as error:
            # The type only: what PostgreSQL says of a refused row may hold somebody's prompt.
            log.warning("maintenance.step_failed", error=type(error).__name__)
            return False
        return True
