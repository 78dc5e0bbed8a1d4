"""Time, waiting, randomness, and the bounds and intervals of the engine: one object that is handed in.

Whatever reads a clock, waits, polls or draws a random number does so by a :class:`Clock` that its owner passed to
it, so that a test can hand in another: with shorter bounds, or with a time that only the test moves. Bounds that are
passed to torch, boto3 or the kernel are kept by them, in real time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """How often the engine looks, and how long it waits: seconds, each field with its reason.

    Attributes:
        retry_deadline_s: A request that still fails this long after its first failure has failed: longer than a
            server's restart, shorter than an operator's patience.
        retry_first_wait_s: Scale of the first wait between two attempts; later ones grow exponentially.
        retry_max_wait_s: The longest such wait: a server that is back is noticed within it.
        s3_connect_s: Bound of a connection to S3; a server that is there answers within milliseconds.
        s3_read_s: Bound of a silence of S3 within a request.
        abandoned_s: An unfinished upload, or a temporary file on a file system without locks, that is older belongs to
            a dead process: no upload of one file takes a day.
        space_wait_s: How long to wait for another process of the node that is reserving memory.
        space_poll_s: How often to look whether it is done: it mostly takes milliseconds.
        half_made_s: A part's folder is renamed into place within milliseconds; an older one's writer is dead.
        lease_beat_s: How often a lease is written again: one small request, rare enough to cost nothing.
        lease_ttl_s: A lease that was not renewed for so long has expired: four beats, so that one late request is none.
        lease_poll_s: How often another run's lease is read while it is unknown whether that run is alive.
        lease_first_look_s: How long a first save waits for the first look: a store that is there answers well within.
        lease_close_s: How long to wait for the store at the end: a lease that stays there expires.
        namespace_wait_s: How long another job in the same namespace of a node has to end: its last process may be
            about to.
        namespace_poll_s: How often to look whether it has.
        store_answer_s: Bound of one request to the store of torch.distributed: it answers at once, or its host is away.
        rendezvous_s: Ranks reach a load within this time of each other, or one of them never will.
        message_s: Bound of one message between ranks, mostly a chunk of 16 MiB.
        accept_s: Bound of the wait for a peer to accept an offer: one that is alive accepts within a second, one that
            is busy after another rank's part.
        accept_again_s: The same for a peer that has failed before; it may have come back.
        accept_poll_s: How often to look whether it has accepted: this ends a wait of the sender.
        offer_poll_s: How often a rank looks for offers, and for saves that are complete on all peers.
        offer_retry_s: The same while the store of torch.distributed is away: the network may come back.
        replication_linger_s: How long a rank that is done still receives what its sources send.
        replication_release_s: Bound of the wait for replicas at the end of a process that did not close its session.
        local_patience_s: Ranks begin a local load within this time of each other, or are not waited for.
        local_poll_s: How often a rank looks whether it is asked for a part, or whether there is news.
        local_taken_s: A rank that is asked for a part sees it within this time, unless it is busy sending.
        local_linger_s: How long a rank that ends still serves parts to others.
        chunk_poll_s: How often it looks whether another one has fetched a chunk: mostly a matter of milliseconds.
        chunk_folder_s: A folder of fetched chunks is removed within milliseconds; there is nothing to wait for beyond.
        preemption_margin_s: Of the grace time, what is left at least for the way out of the interpreter.
        preemption_upload_s: A last checkpoint is left to memory alone where less time is left: no upload fits into it.
        requeue_s: Bound of Slurm's ``scontrol requeue``.
        outcome_poll_s: How often the model checkpoint callback looks what became of saves.
        future_slack_s: How much longer than ``wait_timeout_s`` to wait for the future of an asynchronous save: it
            ends by that bound itself, and reports afterwards.
        log_lock_s: A writer of the operation log holds its lock for less than a millisecond, unless it is stopped.
        log_lock_poll_s: How often a writer that waits for that lock tries.
        lock_poll_s: How often who waits for another file lock tries.
        full_look_s: Without a change of the log, parts in memory are looked at this often: a trainer may have been
            killed between a part and its ring.
        drain_rest_s: How often a drain with nothing to do looks at the log.
        drain_lock_s: Who asks whether a drain runs holds its lock for a moment; so long a new drain tries.
        drain_give_up_s: How long a drain without trainers tries on without any success.
        drain_trouble_s: What keeps the drain from its queue for longer is published to those who wait.
        heartbeat_s: How often the drain writes its progress while it uploads.
        idle_heartbeat_s: How often it does so while it does not.
        redo_first_s: From the first failure of an operation to its next attempt; doubled at each further one.
        redo_max_s: The longest such time.
        redo_permanent_s: The time for errors that do not go away by retrying.
        gather_first_s: From the first look for other nodes' parts to the next; doubled at each further one.
        gather_max_s: The longest such time.
        wait_poll_s: How often a trainer that waits for the drain looks at the log.
        trainers_lock_s: How long a trainer waits for a drain that is about to leave.
        respawn_s: The shortest time between two starts of a drain that dies; doubled at each.
        respawn_max_s: The longest such time.
        stalled_s: A drain that moves nothing for so long is not waited for: its store's own deadline has passed.
        reap_s: How long a closing trainer waits for a drain with nothing to do to leave.
        left_over_s: A save that waited in node memory for longer is no newer than what another run has put under its
            name since.
    """

    retry_deadline_s: float = 120.0
    retry_first_wait_s: float = 0.5
    retry_max_wait_s: float = 16.0
    s3_connect_s: float = 10.0
    s3_read_s: float = 60.0
    abandoned_s: float = 24 * 3600.0
    space_wait_s: float = 120.0
    space_poll_s: float = 0.002
    half_made_s: float = 60.0
    lease_beat_s: float = 15.0
    lease_ttl_s: float = 60.0
    lease_poll_s: float = 5.0
    lease_first_look_s: float = 5.0
    lease_close_s: float = 5.0
    namespace_wait_s: float = 2.0
    namespace_poll_s: float = 0.05
    store_answer_s: float = 10.0
    rendezvous_s: float = 600.0
    message_s: float = 30.0
    accept_s: float = 120.0
    accept_again_s: float = 5.0
    accept_poll_s: float = 0.02
    offer_poll_s: float = 0.25
    offer_retry_s: float = 2.0
    replication_linger_s: float = 10.0
    replication_release_s: float = 10.0
    local_patience_s: float = 60.0
    local_poll_s: float = 0.1
    local_taken_s: float = 30.0
    local_linger_s: float = 10.0
    chunk_poll_s: float = 0.005
    chunk_folder_s: float = 60.0
    preemption_margin_s: float = 1.0
    preemption_upload_s: float = 2.0
    requeue_s: float = 10.0
    outcome_poll_s: float = 1.0
    future_slack_s: float = 5.0
    log_lock_s: float = 30.0
    log_lock_poll_s: float = 0.0005
    lock_poll_s: float = 0.02
    full_look_s: float = 2.0
    drain_rest_s: float = 0.1
    drain_lock_s: float = 0.1
    drain_give_up_s: float = 900.0
    drain_trouble_s: float = 3.0
    heartbeat_s: float = 0.25
    idle_heartbeat_s: float = 1.0
    redo_first_s: float = 1.0
    redo_max_s: float = 30.0
    redo_permanent_s: float = 60.0
    gather_first_s: float = 0.1
    gather_max_s: float = 2.0
    wait_poll_s: float = 0.02
    trainers_lock_s: float = 30.0
    respawn_s: float = 1.0
    respawn_max_s: float = 30.0
    stalled_s: float = 300.0
    reap_s: float = 2.0
    left_over_s: float = 60.0


@dataclass(frozen=True)
class Clock:
    """The time of this machine.

    Attributes:
        timing: The bounds and intervals that go with it.
        rng: Where random numbers and names come from.
    """

    timing: Timing = field(default_factory=Timing)
    rng: random.Random = field(default_factory=random.SystemRandom)

    def wall(self) -> float:
        """Seconds since the epoch, for people and for comparing machines; it may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        return time.monotonic()

    def since_boot(self) -> float:
        """As :meth:`monotonic`, and goes on while the machine sleeps, where the kernel tells that."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def wait(self, event: threading.Event | threading.Condition, seconds: float) -> bool:
        """Waits for an event, or a condition that the caller holds, for ``seconds`` at most; whether it came."""
        return event.wait(seconds)

    def wait_for(self, condition: threading.Condition, is_so: Callable[[], object], seconds: float) -> bool:
        """Waits until ``is_so``, under a condition that the caller holds, for ``seconds`` at most; whether it is."""
        return bool(condition.wait_for(is_so, seconds))

    def join(self, thread: threading.Thread, seconds: float) -> None:
        """Waits for the end of a thread, for ``seconds`` at most."""
        thread.join(seconds)

    def token(self, size: int) -> str:
        """A random name of ``size`` bytes, in hexadecimal digits."""
        return self.rng.randbytes(size).hex()


#: What is used where nothing else is handed in.
SYSTEM = Clock()
