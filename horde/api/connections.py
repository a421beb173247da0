"""The connections of clients, on top of waitress: whose turn to leave it is, and who has left already.

A request that does not arrive within a minute (a large one: at a decent pace), an answer that is read too slowly and a
connection that is idle for two minutes are closed. Where there are too many connections, in all or from one address, the
one that has been of no use for longest gives way to the new one. A client that is told "too large" gets to read that. A
client that hangs up while its request runs is noticed at once, whatever of it is still to be read or written.

Everything here runs in the server's loop, except for what is said to run in a request's thread.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer

from horde.api.address import site_of
from horde.api.errors import describe
from horde.api.exchange import Exchange, JsonRefusal, Remedy, StrictParser

RECEIVE_SECONDS, STALL_SECONDS, IDLE_SECONDS = 60.0, 30.0, 120.0
# An answer may stay for `STALL_SECONDS` and the time that it takes at this pace.
SLOWEST_BYTES_PER_SECOND = 16 << 10
# And a request may take `RECEIVE_SECONDS` and the time for what has arrived at this one.
SLOWEST_UPLOAD = 128 << 10
LINGER_SECONDS, LINGER_BYTES = 5.0, 64 << 20
LOOK_SECONDS = 5.0
_READ_BYTES = 64 << 10
# Left to itself the kernel takes megabytes for a client that does not read, and what it has taken counts as sent.
KERNEL_BUFFER_BYTES = 256 << 10
# For a stream less, so that with what waits here (the server's watermark) it is never more than 256 KiB behind.
STREAM_KERNEL_BUFFER_BYTES = 96 << 10
# Linux tells that the other side has hung up even while input of it is unread; elsewhere only a reset is seen.
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
_READ = select.POLLIN | select.POLLPRI
log = structlog.get_logger("horde.connections")


class Channel(HTTPChannel):  # type: ignore[misc]
    """One connection."""

    parser_class = StrictParser
    task_class = Exchange
    error_task_class = JsonRefusal
    request_since: float | None = None
    will_close: bool
    _refused = False
    _lingers_until: float | None = None
    _discarded = 0
    _sent = 0
    _cut_off_unsent = False
    # When the answers that are being read began to wait, and how much had been sent by then.
    _unread_since: tuple[float, int] | None = None

    def __init__(self, server: Any, connection: socket.socket, address: Any, adj: Any, map: Any = None) -> None:  # noqa: A002 waitress names it
        self.site = site_of(address[0])
        self._remedies: list[tuple[int, Callable[[], None]]] = []
        # Held while a callback runs, so that none runs once its request is over. Reentrant: one may leave another.
        self._gone_lock = threading.RLock()
        self._gone = False
        self._on_gone: list[Callable[[], None]] = []
        super().__init__(server, connection, address, adj, map=map)

    def check_client_disconnected(self) -> bool:
        """Whether the client has hung up. Runs in a request's thread. The socket itself is asked: the loop may not
        have come to it yet."""
        if not self.connected:
            return True
        try:
            poller = select.poll()
            poller.register(self.socket.fileno(), _HUNG_UP)
            return bool(poller.poll(0))
        except (OSError, ValueError, AttributeError):
            # The loop has just closed it.
            return True

    def if_gone(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client hangs up before the running request is over; at once when it has.
        Runs in a request's thread."""
        with self._gone_lock:
            if not self._gone:
                self._on_gone.append(callback)
                return
        callback()

    def over(self) -> None:
        """The running request is over: nobody waits for a hang-up any more. Runs in a request's thread."""
        with self._gone_lock:
            self._on_gone.clear()

    def narrow(self) -> None:
        """A stream begins. Runs in a request's thread."""
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_KERNEL_BUFFER_BYTES)
        except (OSError, AttributeError):
            # The loop has just closed it, and the next write says so.
            return

    def received(self, data: bytes) -> bool:
        """Take input; notes when the current request began to arrive."""
        if self.request is None:
            self.request_since = time.time()
        taken = bool(super().received(data))
        if self.request is None:
            self.request_since = None
        if any(request.error for request in self.requests):
            self._refused = True
        return taken

    def send(self, data: bytes, do_close: bool = True) -> int:
        """Hand bytes to the socket; how many it took."""
        sent = int(super().send(data, do_close=do_close))
        self._sent += sent
        return sent

    def answered(self, remedies: Iterable[Callable[[], None]], *, cut_off: bool) -> None:
        """An answer has been written, and maybe not sent yet. Runs in the request's thread.

        Args:
            remedies: what to do should the answer never be sent whole.
            cut_off: whether it was not even taken.
        """
        with self.outbuf_lock:
            if not cut_off and not self._cut_off_unsent:
                end = self._sent + self.total_outbufs_len
                self._remedies = [entry for entry in self._remedies if entry[0] > self._sent]
                if self.total_outbufs_len:
                    self._remedies.extend((end, remedy) for remedy in remedies)
                return
        for remedy in remedies:
            self.server.add_task(Remedy(remedy))

    def handle_close(self) -> None:
        """Close. After a refusal read on for a moment first: closing with input unread would reset the connection,
        and the client would never see why."""
        # Without `will_close` it is not we who end it: the client has hung up, or the connection is broken.
        if not self._refused or not self.will_close or self._lingers_until is not None or not self.connected:
            self._close()
            return
        self._lingers_until = time.time() + LINGER_SECONDS
        self.will_close = False
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._close()

    def _close(self) -> None:
        with self.outbuf_lock:
            # An answer that is just being written has its last bytes in the buffer, so what is lost is of it.
            self._cut_off_unsent = self._cut_off_unsent or bool(self.total_outbufs_len)
            due = [remedy for end, remedy in self._remedies if end > self._sent]
            self._remedies.clear()
            super().handle_close()
        for remedy in due:
            self.server.add_task(Remedy(remedy))
        self._tell_gone()

    def _tell_gone(self) -> None:
        with self._gone_lock:
            self._gone = True
            callbacks, self._on_gone = self._on_gone, []
            for callback in callbacks:
                try:
                    callback()
                except Exception as error:  # noqa: BLE001 the loop has others to serve
                    log.warning("callback_failed", error=describe(error))

    @property
    def busy(self) -> bool:
        """Whether a request runs here."""
        return self.connected and bool(self.requests)

    def cut_off(self) -> None:
        """End it, whatever runs here or is left to write."""
        self._close()

    def interest(self) -> int:
        """What the loop should wait for, as flags of a poll; 0: nothing. Asked of every connection in every round, so written out
        here rather than put together of waitress's `readable` and `writable`."""
        if not self.connected:
            return 0
        hang_up = _HUNG_UP if self.requests else 0
        if self._lingers_until is not None:
            return hang_up | _READ | (select.POLLOUT if time.time() > self._lingers_until else 0)
        if self.total_outbufs_len or self.will_close or self.close_when_flushed:
            return hang_up | select.POLLOUT
        return hang_up | (0 if len(self.requests) > self.adj.channel_request_lookahead else _READ)

    def handle_write(self) -> None:
        """Write, or end the lingering."""
        if self._lingers_until is not None:
            self.handle_close()
            return
        super().handle_write()

    def _flush_some(self, do_close: bool = True) -> bool:
        """Hand the socket what it takes. Runs in the loop and in a request's thread."""
        flushed = bool(super()._flush_some(do_close=do_close))
        if not self.total_outbufs_len:
            self._unread_since = None
        return flushed

    def handle_read(self) -> None:
        """Read, or discard while lingering."""
        if self._lingers_until is None:
            super().handle_read()
            return
        try:
            self._discarded += len(self.recv(_READ_BYTES))
        except OSError:
            self.handle_close()
            return
        if self._discarded > LINGER_BYTES:
            self.handle_close()

    def overdue(self, now: float) -> bool:
        """Whether this connection has had its time."""
        if self._lingers_until is not None:
            return now > self._lingers_until
        if self.total_outbufs_len:
            since, sent = self._unread_since = self._unread_since or (now, self._sent)
            return now - since > STALL_SECONDS + (self._sent - sent) / SLOWEST_BYTES_PER_SECOND
        self._unread_since = None
        if self.requests:
            return False
        if self.request_since is not None:
            arrived = 0 if self.request is None else self.request.body_bytes_received
            return now - self.request_since > RECEIVE_SECONDS + arrived / SLOWEST_UPLOAD
        return bool(now - self.last_activity > IDLE_SECONDS)

    def end(self) -> None:
        """Close what is overdue."""
        self.will_close = True
        if self.total_outbufs_len:
            # The loop closes what it can write to, which is what does not come about here.
            self._close()

    @property
    def at_rest(self) -> bool:
        """Whether nothing runs here and nothing is left to write."""
        return not self.requests and not self.total_outbufs_len

    @property
    def of_no_use_since(self) -> float:
        """Since when it is idle or its request incomplete (seconds since the epoch)."""
        return self.request_since or float(self.last_activity)


class Rounds:
    """The loop: waitress's own, except that it hears of a client that hangs up while its request runs also where nothing is read:
    because more of its requests wait, or it has something to read first itself.

    Args:
        sockets: listeners, channels and triggers by file descriptor; changes as they come and go.
    """

    def __init__(self, sockets: dict[int, Any]) -> None:
        self._sockets = sockets
        # Kept from round to round: of many connections few change what they wait for.
        self._poller = select.poll()
        self._waited_for: dict[int, int] = {}

    def run_once(self, seconds: float) -> None:
        """One round; waits `seconds` for an event at most."""
        self._register()
        for number, flags in self._poller.poll(int(1000 * seconds)):
            member = self._sockets.get(number)
            if member is None:
                continue
            if flags & _HUNG_UP and isinstance(member, Channel) and member.busy:
                member.cut_off()
            else:
                wasyncore.readwrite(member, flags)

    def _register(self) -> None:
        wanted = {}
        for number, member in list(self._sockets.items()):
            flags = member.interest() if isinstance(member, Channel) else _interest(member)
            if flags:
                wanted[number] = flags
        if wanted == self._waited_for:
            return
        for number in self._waited_for.keys() - wanted.keys():
            self._poller.unregister(number)
        for number, flags in wanted.items():
            if self._waited_for.get(number) != flags:
                self._poller.register(number, flags)
        self._waited_for = wanted


def _interest(member: Any) -> int:
    """What a listener or a trigger waits for."""
    flags = _READ if member.readable() else 0
    return flags | select.POLLOUT if member.writable() and not member.accepting else flags


class Listener(TcpWSGIServer):  # type: ignore[misc]
    """One listening socket.

    Attributes:
        most: connections at most, those of other listeners in the same loop included.
        most_of_one_site: connections at most from one IPv4 address or one IPv6 /64.
    """

    channel_class = Channel
    most = 1024
    most_of_one_site = 512
    next_channel_cleanup = 0.0

    def readable(self) -> bool:
        """Whether the loop should accept: always, since room is made where there is none."""
        now = time.time()
        if now >= self.next_channel_cleanup:
            self.next_channel_cleanup = now + LOOK_SECONDS
            self.maintenance(now)
        return bool(self.accepting)

    def set_socket_options(self, connection: socket.socket) -> None:
        """Prepare the socket of a new connection."""
        super().set_socket_options(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)

    def maintenance(self, now: float) -> None:
        """Close what is overdue."""
        for channel in list(self.active_channels.values()):
            if channel.overdue(now):
                channel.end()

    def handle_accept(self) -> None:
        """Take a connection, and end another one where that is too many."""
        try:
            accepted = self.accept()
        except OSError:
            # No file descriptor is left.
            self._end_one(self._channels())
            return
        if accepted is None:
            return
        connection, address = accepted
        try:
            self.set_socket_options(connection)
            newcomer = self.channel_class(self, connection, self.fix_addr(address), self.adj, map=self._map)
        except OSError:
            connection.close()
            return
        if len(self._map) > min(self.most, self.most_of_one_site):
            self._make_room(newcomer)

    def _make_room(self, newcomer: Channel) -> None:
        channels = self._channels()
        neighbours = [channel for channel in channels if channel.site == newcomer.site]
        for crowd, most in ((neighbours, self.most_of_one_site), (channels, self.most)):
            if len(crowd) > most:
                self._end_one([channel for channel in crowd if channel is not newcomer], newcomer)
                return

    def _channels(self) -> list[Channel]:
        """The connections of all listeners of this loop, without those that are about to be closed."""
        return [channel for channel in self._map.values() if isinstance(channel, Channel) and not channel.will_close]

    @staticmethod
    def _end_one(crowd: list[Channel], newcomer: Channel | None = None) -> None:
        # Closed in the loop's next round: another connection must not get its number while this round knows it.
        resting = [channel for channel in crowd if channel.at_rest]
        leaving = min(resting, key=lambda channel: channel.of_no_use_since, default=newcomer)
        if leaving is not None:
            leaving.will_close = True
