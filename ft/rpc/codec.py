"""Translates the dataclasses of ft.protocol.messages to the messages of pharos.proto and torchft.proto, and back.

A dataclass of ours and its message have the same name and the same fields, so one converter per dataclass is made from its type hints,
once. torchft's messages have other fields, and are written out. Form is checked here (lengths, ranges, known values), sense by
rules.validate_request; both raise ValueError, which a server turns into INVALID_ARGUMENT.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from ft.protocol import messages as m
from ft.protocol.rules import MAX_STEP, validate_request
from ft.rpc.generated import pharos_pb2, torchft_pb2

T = TypeVar("T")
P = TypeVar("P", bound=Message)

MAX_TEXT = 512  # characters of an id, an address, a digest
MAX_REASON = 4 << 10
MAX_TEXTS = {"reason": MAX_REASON, "data": 64 << 10, "checkpoint_metadata": 64 << 10}
# a member's, and the same in a rank's QuorumResult
MAX_TEXTS |= dict.fromkeys(("reconfigure_handles", "handles"), 64 << 10)
MAX_DIGESTS = 256  # one for each key that groups must have alike
MAX_NAMED = 65_536  # members blamed by one call or report
MAX_LINE = 500  # characters of a text for people
# Of the page's timeline: a failed step, weights that differ, files that cannot be written
LANES = ("commit", "corruption", "storage")
ORDERS = ("drain", "kill")
REPORT_BYTES = ("healed_bytes", "heal_done_bytes", "heal_total_bytes")
NOTICES = {field.name: getattr(m, field.message_type.name) for field in pharos_pb2.Notice.DESCRIPTOR.fields}


def parse(message_type: type[P], data: bytes) -> P:
    """Raises ValueError where `data` is not such a message."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a {message_type.DESCRIPTOR.full_name}: {error}") from None


def to_message(value: Any) -> Any:
    """The message of the same name. Raises ValueError for contents it cannot hold: a number of more than 64 bits, half a character."""
    converter = _converter(type(value))
    return converter.fill(converter.message_type(), value)


def from_message(value_type: type[T], message: Message) -> T:
    """The dataclass of the same name. Raises ValueError."""
    return _converter(value_type).decode(message)


def from_bytes(value_type: type[T], data: bytes) -> T:
    """Raises ValueError."""
    converter = _converter(value_type)
    return converter.decode(parse(converter.message_type, data))


class _Converter:
    """Between a dataclass and its message. Only fields that differ between the two cost a call."""

    def __init__(self, value_type: type[Any], message_type: Any = None) -> None:
        """message_type: by default ours, of the same name."""
        self.value_type, self.message_type = value_type, message_type or getattr(pharos_pb2, value_type.__name__)
        on_wire, hints = self.message_type.DESCRIPTOR.fields_by_name, get_type_hints(value_type)
        self.names = tuple(x.name for x in fields(value_type) if x.name in on_wire)
        others = [x for x in fields(value_type) if x.name not in on_wire and x.default is not MISSING]
        self.defaults = {x.name: x.default for x in others}
        self.read: Callable[[Any], tuple[Any, ...]] = lambda x: tuple(getattr(x, name) for name in self.names)
        if len(self.names) > 1:  # of one name it is no tuple
            self.read = attrgetter(*self.names)
        self.texts = tuple(name for name in self.names if hints[name] is str)
        self.optional = tuple(name for name in self.names if NoneType in get_args(hints[name]))
        self.choices = tuple((name, get_args(hints[name])) for name in self.names if get_origin(hints[name]) is Literal)
        ways = {name: _ways(name, hints[name]) for name in self.names}
        self.fillers = {name: fill for name, (fill, _) in ways.items() if fill}
        self.decoders = tuple((name, decode) for name, (_, decode) in ways.items() if decode)
        self.plain = tuple(x for x in self.names if x not in self.fillers and x not in self.optional and x != "reason")
        self.others = tuple(x for x in self.names if x not in self.plain)

    def fill(self, message: Any, value: Any) -> Any:
        """Fills an empty message; a field that has its default needs nothing."""
        values = vars(value)
        for name in self.plain:
            if item := values[name]:
                setattr(message, name, item)
        for name in self.others:
            item = values[name]
            if item or (item is not None and name in self.optional):
                if filler := self.fillers.get(name):
                    filler(getattr(message, name), item)
                else:
                    setattr(message, name, shorten(item, MAX_REASON) if name == "reason" else item)
        return message

    def decode(self, message: Any) -> Any:
        value = object.__new__(self.value_type)  # as _made, without its call
        values = value.__dict__
        values.update(self.defaults)
        values.update(zip(self.names, self.read(message), strict=True))
        for name in self.texts:
            if len(values[name]) > MAX_TEXT:
                _check_text(name, values[name])
        for name, legal in self.choices:
            if values[name] not in legal:
                _one_of(name, values[name], legal)
        for name in self.optional:
            if not message.HasField(name):
                values[name] = None
        for name, decode in self.decoders:  # of a message, or of a list, which is empty most of the time
            values[name] = decode(item) if (item := values[name]) else ()
        return value


_converter: Callable[[Any], _Converter] = cache(_Converter)


def _made(value_type: type[T], *values: Any) -> T:
    """Makes a frozen dataclass without its __init__, whose object.__setattr__ for each field would be a tenth of the cost of a call."""
    made = object.__new__(value_type)
    for some in values:
        made.__dict__.update(some)
    return made


def _ways(name: str, hint: Any) -> tuple[Callable[[Any, Any], object] | None, Callable[[Any], Any] | None]:
    """Functions that fill a field's message or list with a value, and that read its value; None: the value is set and got as it is."""
    args = get_args(hint)
    if hint == m.State:
        return _fill_state, _state_from
    if hint == m.Fingerprint:
        return (
            lambda field, pairs: [field.add(what=what, digest=digest) for what, digest in pairs],
            lambda field: tuple([(_check_text(name, x.what), _check_text(name, x.digest)) for x in field]),
        )
    if is_dataclass(hint) or (args and is_dataclass(args[0])):
        inner = _converter(args[0] if args else hint)
        if not args:
            return inner.fill, inner.decode
        return (
            lambda field, items: [inner.fill(field.add(), item) for item in items],
            lambda field: tuple(map(inner.decode, field)),
        )
    if args == (str, ...):
        return lambda field, items: field.extend(items), lambda field: tuple([_check_text(name, x) for x in field])
    if args == (int, ...):
        return lambda field, items: field.extend(items), tuple
    return None, None


def _fill_state(message: pharos_pb2.State, state: m.State) -> pharos_pb2.State:
    message.step, message.commit_quorum_id, message.commit_id = state
    return message


def _state_from(message: pharos_pb2.State) -> m.State:
    return message.step, message.commit_quorum_id, _check_text("commit_id", message.commit_id)


def _check_text(name: str, value: str) -> str:
    """Bounded: a group's description of itself is kept, and goes to all the others."""
    if len(value) > MAX_TEXT and len(value) > (most := MAX_TEXTS.get(name, MAX_TEXT)):
        raise ValueError(f"{name}: {len(value)} characters, legal is up to {most}")
    return value


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ValueError(f"{name} = {value[:80]!r}: legal is {', '.join(legal)}")
    return value


def report_from(message: pharos_pb2.Report) -> m.Report:
    """A group's beat. Its figures are shown, and enter the machine's sums. Raises ValueError."""
    _check_text("phase", message.phase)
    for name in (*REPORT_BYTES, "median_step_s", "phase_limit_s", "goodput_s", "wall_s"):
        if not 0 <= getattr(message, name) < math.inf:
            raise ValueError(f"{name} = {getattr(message, name)}: must be finite and not below 0")
    for name in ("step", "settled", "commit_quorum_id", "launched"):
        if not m.VOID <= getattr(message, name) <= MAX_STEP:
            raise ValueError(f"{name} = {getattr(message, name)}: legal is {m.VOID} to {MAX_STEP}")
    if len(message.blame) > MAX_NAMED:
        raise ValueError(f"blame: {len(message.blame)} members, legal is up to {MAX_NAMED}")
    return from_message(m.Report, message)


def shorten(text: str, most: int) -> str:
    """The first `most` characters of `text`, fit to be sent: a reason may quote a file name that is not UTF-8."""
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def happened_message(lane: str, step: int, text: str) -> pharos_pb2.Happened:
    return pharos_pb2.Happened(lane=lane, step=step, text=shorten(text, MAX_LINE))


def check_happened(message: pharos_pb2.Happened) -> pharos_pb2.Happened:
    """Raises ValueError."""
    _one_of("lane", message.lane, LANES)
    if not m.VOID <= message.step <= MAX_STEP or len(message.text) > MAX_LINE:
        raise ValueError(
            f"step {message.step}, {len(message.text)} characters: legal is {m.VOID} to {MAX_STEP}, {MAX_LINE}"
        )
    return message


def notice_message(notice: m.Notice) -> Any:
    [name] = [name for name, notice_type in NOTICES.items() if notice_type is type(notice)]
    return pharos_pb2.Notice(**{name: to_message(notice)})


def notice_from(message: pharos_pb2.Notice) -> m.Notice:
    """Raises ValueError for a kind of notice that is not known here."""
    name = message.WhichOneof("notice")
    if name not in NOTICES:
        raise ValueError("a notice of no known kind")
    return from_message(NOTICES[name], getattr(message, name))


refused_from: Callable[[Any], m.LighthouseRefused] = _Converter(m.LighthouseRefused, pharos_pb2.Refused).decode


def quorum_from(message: pharos_pb2.Quorum) -> m.Quorum:
    """Reads a quorum that a group reports. Raises ValueError for one that no honest group reports."""
    if len(message.fingerprint) > MAX_DIGESTS:
        raise ValueError(f"a fingerprint of {len(message.fingerprint)} digests: legal is up to {MAX_DIGESTS}")
    quorum = from_message(m.Quorum, message)
    for member in quorum.members:
        if problem := validate_request(m.Call(member, known=quorum.quorum_id)):
            raise ValueError(problem[1])
    if quorum.quorum_id < 1 or not quorum.members or list(quorum.ids) != sorted(set(quorum.ids)):
        raise ValueError(f"quorum {quorum.quorum_id} of {len(quorum.members)} members, not in order, each once")
    if not quorum.holders:
        raise ValueError(
            f"quorum {quorum.quorum_id}: none of its members holds the state of step {quorum.reference[0]}"
        )
    return quorum


_PASSING = ("step", "commit_quorum_id", "commit_id", "assigned", "assignment_id")
_passing = attrgetter(*_PASSING)
_lasting = attrgetter(*(x.name for x in fields(m.Member) if x.name not in _PASSING))


@dataclass(frozen=True)
class StaticQuorum:
    """A quorum without its members' states and assignments: the part that stays the same while nobody comes or goes."""

    members: tuple[m.Member, ...] = ()  # with states and assignments of some quorum, which mean nothing here
    fingerprint: m.Fingerprint = ()
    id: str = ""
    lasting: tuple[tuple[Any, ...], ...] = ()  # what `id` names, of each member

    @staticmethod
    def of(quorum: m.Quorum, before: StaticQuorum | None = None) -> StaticQuorum:
        """before: returned if it is the same."""
        lasting = tuple(map(_lasting, quorum.members))
        if before and before.lasting == lasting and before.fingerprint == quorum.fingerprint:
            return before
        named = repr((lasting, quorum.fingerprint)).encode()
        return StaticQuorum(quorum.members, quorum.fingerprint, hashlib.sha256(named).hexdigest()[:32], lasting)

    def complete(self, same: pharos_pb2.SameRoster) -> m.Quorum:
        """The quorum that `same` stands for, to the holder of this roster."""
        state = _state_from(same.reference)
        passing = dict(zip(_PASSING, (*state, same.assigned, same.assignment_id), strict=True))
        members = tuple([_made(m.Member, vars(member), passing) for member in self.members])
        return m.Quorum(same.quorum_id, members, state, same.epoch, self.fingerprint)


def same_roster(quorum: m.Quorum) -> Any | None:
    """The short form of `quorum`. None where the members differ in state or assignment."""
    first = quorum.members[0]
    if set(map(_passing, quorum.members)) != {(*quorum.reference, first.assigned, first.assignment_id)}:
        return None
    return pharos_pb2.SameRoster(
        quorum_id=quorum.quorum_id,
        epoch=quorum.epoch,
        reference=_fill_state(pharos_pb2.State(), quorum.reference),
        assigned=first.assigned,
        assignment_id=first.assignment_id,
    )


_TORCHFTS = _Converter(m.Member, torchft_pb2.QuorumMember)
_TORCHFTS.texts = ()  # lighthouse_service.py has bounds for torchft's
_TORCHFTS.decoders = (("reconfigure_handles", tuple),)
_TORCHFT_CALL = vars(m.Call(m.Member(""), "torchft"))


def torchft_member(member: m.Member) -> Any:
    return _TORCHFTS.fill(torchft_pb2.QuorumMember(), member)


def call_from_torchft(message: torchft_pb2.QuorumMember) -> m.Call:
    call = object.__new__(m.Call)
    call.__dict__.update(_TORCHFT_CALL, member=_TORCHFTS.decode(message))
    return call


def torchft_quorum(quorum: m.Quorum, created_s: float) -> Any:
    """created_s: seconds since 1970."""
    message = torchft_pb2.Quorum(quorum_id=quorum.quorum_id)
    for member in quorum.members:
        _TORCHFTS.fill(message.participants.add(), member)
    message.created.seconds, message.created.nanos = divmod(int(created_s * 1e9), 10**9)
    return message


def quorum_from_torchft(message: torchft_pb2.Quorum) -> m.Quorum:
    return m.Quorum(message.quorum_id, tuple(map(_TORCHFTS.decode, message.participants)))
