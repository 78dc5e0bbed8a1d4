"""Time, waiting, randomness, threads, and the bounds and intervals of the engine: one object that is handed in.

All code that reads a clock, waits, polls, draws a random number or starts a thread does so by a :class:`Clock` that its
owner passed to it, so that a test can hand in another: with shorter bounds, with a time that only the test moves, or
with threads that take turns. Bounds that are passed to torch, boto3 or the kernel are kept by them, in real
time.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: A restart waits so long for a durable tier that does not answer, seconds; then it restores from node memory.
DURABLE_TIMEOUT_S = 15
#: A save waits so long for a durable tier that does not answer, seconds; then its checkpoint stays in memory.
PENDING_TIMEOUT_S = 30
#: Bound of every wait for the durable tier, seconds: longer than the upload of a large checkpoint.
WAIT_TIMEOUT_S = 1_800
#: The sweep removes an unnamed save that was not written to for so long, seconds: no live drain is silent for an hour.
SWEEP_AGE_S = 3_600


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and bounds of the engine's waits: seconds, each with its reason."""

    #: A request that fails for so long has failed: longer than a server's restart, shorter than an operator's patience.
    retry_deadline_s: float = 120.0
    #: Scale of the first wait between two attempts; later ones grow exponentially.
    retry_first_wait_s: float = 0.5
    #: The longest such wait: a server that is back is noticed within it.
    retry_max_wait_s: float = 16.0
    #: Bound of a connection to S3; a server that is there answers within milliseconds.
    s3_connect_s: float = 10.0
    #: Bound of a silence of S3 within a request.
    s3_read_s: float = 60.0
    #: Interval of looks for other credentials while those in use are refused: mostly a read of a file.
    credentials_again_s: float = 2.0
    #: Interval of log lines during a wait for a store that does not answer.
    silence_line_s: float = 5.0
    #: An older unfinished upload, or unlocked temporary file, is a dead process's: no upload of a file takes a day.
    abandoned_s: float = 24 * 3600.0
    #: Bound of a wait for another process of the node that is reserving memory.
    space_wait_s: float = 120.0
    #: Interval of looks during such a wait: it mostly takes milliseconds.
    space_poll_s: float = 0.002
    #: A part's folder is renamed into place within milliseconds; an older one's writer is dead.
    half_made_s: float = 60.0
    #: Interval at which a run that has its lease looks whether another asks for it: one list of a few objects.
    lease_beat_s: float = 15.0
    #: A lease that is asked for, and not renewed for so long, has expired: four looks, so that a late request is none.
    lease_ttl_s: float = 60.0
    #: Interval at which another run's lease is read while it is unknown whether that run is alive.
    lease_poll_s: float = 5.0
    #: Bound of a first save's wait for the first look: a store that is there answers well within.
    lease_first_look_s: float = 5.0
    #: Bound of a wait for the store at the end: a lease that stays there expires.
    lease_close_s: float = 5.0
    #: Time for another job in the same namespace of a node to end: its last process may be about to.
    namespace_wait_s: float = 2.0
    #: Interval of looks for that end.
    namespace_poll_s: float = 0.05
    #: Bound of one request to the store of torch.distributed: it answers at once, or its host is away.
    store_answer_s: float = 10.0
    #: Ranks reach a load within this time of each other, or one of them never will.
    rendezvous_s: float = 600.0
    #: Interval of log lines while training waits for uploads.
    say_wait_s: float = 30.0
    #: Interval of looks at a peer whose connection ended, or which reads a part itself.
    accept_poll_s: float = 0.02
    #: Interval at which the drains of a job ask each other while a save is being replicated; see :meth:`pause_s`.
    replica_poll_s: float = 0.01
    #: A save that is not replicated within this time is given up for a newer one.
    replica_patience_s: float = 120.0
    #: A node that did not answer, and a part that did not come, are asked for again after this time.
    replica_retry_s: float = 2.0
    #: Time for which a drain without trainers stays while replicas make no progress.
    replication_linger_s: float = 10.0
    #: Ranks whose training fails on all of them come to their last save within this time of each other.
    failed_together_s: float = 60.0
    #: Interval at which a rank looks for the end of a local save; see :meth:`pause_s`.
    local_poll_s: float = 0.1
    #: The longest pause between two such looks: well below the time for which an offer is valid.
    store_rest_s: float = 2.0
    #: Bound of a silence of a peer that is read; the longest one of a reader that is served.
    peer_silence_s: float = 10.0
    #: A peer whose connection ended is tried again for so long: its next drain may be starting, on a busy node.
    peer_back_s: float = 30.0
    #: The same for a peer that serves as many readers as it can.
    peer_busy_s: float = 60.0
    #: Bound of a trainer's wait until its node's memory is served: a drain starts within seconds, on a busy node later.
    serve_s: float = 60.0
    #: Interval at which a process looks whether another one has fetched a chunk: mostly a matter of milliseconds.
    chunk_poll_s: float = 0.005
    #: A folder of fetched chunks is removed within milliseconds; a longer wait is useless.
    chunk_folder_s: float = 60.0
    #: Part of the grace time that is left at least for the way out of the interpreter.
    preemption_margin_s: float = 1.0
    #: A last checkpoint stays only in memory if less time is left: no upload is that fast.
    preemption_upload_s: float = 2.0
    #: Bound of the wait for the durable tier at the start of ``fit``: it answers within a second.
    preflight_s: float = 5.0
    #: Bound of Slurm's ``scontrol requeue``.
    requeue_s: float = 10.0
    #: Interval at which the model checkpoint callback looks for outcomes of saves.
    outcome_poll_s: float = 1.0
    #: The future of an asynchronous save is waited for so much longer than ``wait_timeout_s``: it ends by that itself.
    future_slack_s: float = 5.0
    #: A writer of the operation log holds its lock for less than a millisecond, unless it is stopped.
    log_lock_s: float = 30.0
    #: Interval of tries of a writer that waits for that lock.
    log_lock_poll_s: float = 0.0005
    #: Interval of tries of a process that waits for another file lock.
    lock_poll_s: float = 0.02
    #: Interval of looks at parts without a change of the log: a trainer may have been killed between the two.
    full_look_s: float = 2.0
    #: Interval at which an idle drain looks at the log.
    drain_rest_s: float = 0.1
    #: A process that asks whether a drain runs holds its lock for a moment; so long a new drain tries.
    drain_lock_s: float = 0.1
    #: Time for which a drain without trainers continues without any success.
    drain_give_up_s: float = 900.0
    #: A longer cause that keeps the drain from its queue is published to processes that wait.
    drain_trouble_s: float = 3.0
    #: Interval at which the drain writes its progress while it uploads.
    heartbeat_s: float = 0.25
    #: Interval at which the drain writes its progress while it does not upload.
    idle_heartbeat_s: float = 1.0
    #: From the first failure of an operation to its next attempt; doubled at each further one.
    redo_first_s: float = 1.0
    #: The longest such time.
    redo_max_s: float = 30.0
    #: The time for errors that do not go away by retrying.
    redo_permanent_s: float = 60.0
    #: Time for which a refused request is not repeated, such as a delete of a locked object, or a copy: refusals last.
    refused_again_s: float = 3600.0
    #: From the first look for other nodes' parts to the next; doubled at each further one.
    gather_first_s: float = 0.1
    #: The longest such time.
    gather_max_s: float = 2.0
    #: Interval at which a trainer that waits for the drain looks at the log.
    wait_poll_s: float = 0.02
    #: Bound of a trainer's wait for a drain that is about to leave.
    trainers_lock_s: float = 30.0
    #: The shortest time between two starts of a drain that dies; doubled at each.
    respawn_s: float = 1.0
    #: The longest such time.
    respawn_max_s: float = 30.0
    #: A save that waited in node memory for longer counts as older than another run's save under its name.
    left_over_s: float = 60.0

    def pause_s(self, least_s: float, waited_s: float) -> float:
        """Returns the pause before a process is asked again that many others ask.

        The pause is ``least_s``, or a tenth of the wait so far if longer. The wait may end late by one pause.
        """
        return max(least_s, min(self.store_rest_s, waited_s / 10))


@dataclass(frozen=True)
class Clock:
    """The time of this machine."""

    timing: Timing = field(default_factory=Timing)
    #: Source of random numbers and names.
    rng: random.Random = field(default_factory=random.SystemRandom)

    def wall(self) -> float:
        """Returns seconds since the epoch, for people and for comparing machines; it may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Returns seconds from an arbitrary start; never goes back."""
        return time.monotonic()

    def since_boot(self) -> float:
        """Returns seconds as :meth:`monotonic`, with the time of a sleeping machine if the kernel has such a clock."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def wait(self, event: threading.Event | threading.Condition, seconds: float) -> bool:
        """Waits for an event, or a condition that the caller holds, for ``seconds`` at most; whether it came."""
        return event.wait(seconds)

    def start(self, work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread:
        """Starts a thread that does ``work``; a ``daemon`` does not keep its process from ending.

        Raises:
            OSError: The system allows no more threads.
        """
        thread = threading.Thread(target=work, name=name, daemon=daemon)
        try:
            thread.start()
        except RuntimeError as error:
            # By `ulimit -u`, or the limit of a container: an OSError, as if another resource is lacking.
            raise OSError(errno.EAGAIN, str(error)) from error
        return thread

    def join(self, thread: threading.Thread, seconds: float) -> None:
        """Waits for the end of a thread, for ``seconds`` at most."""
        thread.join(seconds)

    def token(self, size: int) -> str:
        """Returns a random name of ``size`` bytes, in hexadecimal digits."""
        return self.rng.randbytes(size).hex()


#: Clock that is used if no other is handed in.
SYSTEM = Clock()
