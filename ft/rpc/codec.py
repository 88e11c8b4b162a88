"""Translates the dataclasses of ft.protocol.messages to the messages of pharos.proto and torchft.proto, and back.

A dataclass and its message in pharos.proto have the same fields and the same name (pharos.proto lists the exceptions), so one converter per
dataclass is made from its type hints. torchft's messages differ and have functions of their own. Lengths, ranges and legal values are
checked here, consistency by rules.request_problem; both lead to ValueError, which a server turns into INVALID_ARGUMENT.
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
from ft.protocol.rules import MAX_STEP, MAX_TEXT, request_problem
from ft.rpc.generated import pharos_pb2, torchft_pb2

T = TypeVar("T")
P = TypeVar("P", bound=Message)

WIRE_TYPES: dict[type[Any], Any] = {m.Timeouts: pharos_pb2.Times, m.LighthouseRefused: pharos_pb2.Refused}
MAX_REASON = 4 << 10
MAX_TEXTS = {"reason": MAX_REASON, "data": 64 << 10, "checkpoint_metadata": 64 << 10}  # by field
MAX_TEXTS |= dict.fromkeys(("reconfigure_handles", "handles"), 64 << 10)  # each string of a Member, of a QuorumResult
MAX_DIGESTS = 256  # digests in a fingerprint
MAX_NAMED = 65_536  # members blamed by one request or report
MAX_LINE = 500  # characters of a line that the dashboard shows
# legal TimelineEvent.lane: a failed step, divergent weights, a failed write, changed settings
CLIENT_LANES = ("commit", "corruption", "storage", "settings")
ORDERS = ("drain", "kill")  # legal Order.kind
HAS_LEFT = "the group has left"  # start of Ended.reason after a Leave: no error
REPORT_BYTES = ("healed_bytes", "heal_done_bytes", "heal_total_bytes")
NOTICES = {field.name: getattr(m, field.message_type.name) for field in pharos_pb2.Notice.DESCRIPTOR.fields}


def parse(message_type: type[P], data: bytes) -> P:
    """Parses a message. Raises ValueError if `data` is no message of that type."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a {message_type.DESCRIPTOR.full_name}: {error}") from None


def to_message(value: Any) -> Any:
    """Returns a dataclass as a message. Raises ValueError for a value that no message can have: an integer above 64 bits, a surrogate."""
    converter = _converter_of(type(value))
    return converter.fill(converter.message_type(), value)


def from_message(value_type: type[T], message: Message) -> T:
    """Returns the dataclass of a message. Raises ValueError."""
    return _converter_of(value_type).decode(message)


def from_bytes(value_type: type[T], data: bytes) -> T:
    """Parses a message and returns its dataclass. Raises ValueError."""
    converter = _converter_of(value_type)
    return converter.decode(parse(converter.message_type, data))


class _Converter:
    """Converts between a dataclass and its message. Only fields whose types differ cost a function call."""

    def __init__(self, value_type: type[Any], message_type: Any = None) -> None:
        """`message_type`: by default the one of pharos.proto."""
        wire_type: Any = WIRE_TYPES.get(value_type) or getattr(pharos_pb2, value_type.__name__, None)
        self.value_type, self.message_type = value_type, message_type or wire_type
        on_wire, hints = self.message_type.DESCRIPTOR.fields_by_name, get_type_hints(value_type)
        self.names = tuple(x.name for x in fields(value_type) if x.name in on_wire)
        others = [x for x in fields(value_type) if x.name not in on_wire and x.default is not MISSING]
        self.defaults = {x.name: x.default for x in others}
        self.read: Callable[[Any], tuple[Any, ...]] = lambda x: tuple(getattr(x, name) for name in self.names)
        if len(self.names) > 1:  # attrgetter of one name would return no tuple
            self.read = attrgetter(*self.names)
        self.texts = tuple(name for name in self.names if hints[name] is str)
        self.optional = tuple(name for name in self.names if NoneType in get_args(hints[name]))
        self.choices = tuple((name, get_args(hints[name])) for name in self.names if get_origin(hints[name]) is Literal)
        pairs = {name: _field_pair(name, hints[name]) for name in self.names}
        self.fillers = {name: fill for name, (fill, _) in pairs.items() if fill}
        self.decoders = tuple((name, decode) for name, (_, decode) in pairs.items() if decode)
        self.plain = tuple(x for x in self.names if x not in self.fillers and x not in self.optional and x != "reason")
        self.others = tuple(x for x in self.names if x not in self.plain)

    def fill(self, message: Any, value: Any) -> Any:
        """Fills an empty message. Fields with proto3's default are not set."""
        values = vars(value)
        for name in self.plain:  # a loop of its own: a quarter less time for a member of a quorum
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
        value = object.__new__(self.value_type)  # as in _make, without the cost of its call
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
        for name, decode in self.decoders:  # fields that are messages or lists; lists are mostly empty
            values[name] = decode(item) if (item := values[name]) else ()
        return value


_converter_of: Callable[[Any], _Converter] = cache(_Converter)


def _make(value_type: type[T], *values: Any) -> T:
    """Makes a frozen dataclass without its __init__, which calls object.__setattr__ for each field: saves a tenth of a request's time."""
    made = object.__new__(value_type)
    for some in values:
        made.__dict__.update(some)
    return made


def _field_pair(name: str, hint: Any) -> tuple[Callable[[Any, Any], object] | None, Callable[[Any], Any] | None]:
    """Returns functions that write a value into a field's message or list, and that read it; None: the value is copied as it is."""
    args = get_args(hint)
    if hint == m.State:
        return _fill_state, _state_from
    if hint == m.Fingerprint:
        return (
            lambda field, pairs: [field.add(what=what, digest=digest) for what, digest in pairs],
            lambda field: tuple([(_check_text(name, x.what), _check_text(name, x.digest)) for x in field]),
        )
    if is_dataclass(hint) or (args and is_dataclass(args[0])):
        inner = _converter_of(args[0] if args else hint)
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
    """Checks the length of a string, since the lighthouse stores it and sends it to all other groups. Raises ValueError."""
    if len(value) > MAX_TEXT and len(value) > (most := MAX_TEXTS.get(name, MAX_TEXT)):
        raise ValueError(f"{name}: {len(value)} characters, legal is up to {most}")
    return value


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ValueError(f"{name} = {value[:80]!r}: legal is {', '.join(legal)}")
    return value


def report_from(message: pharos_pb2.Report) -> m.Report:
    """Returns a report whose numbers have been checked, since the machine and the dashboard compute with them. Raises ValueError."""
    _check_text("phase", message.phase)
    for name in (*REPORT_BYTES, "median_step_s", "phase_limit_s", "goodput_s", "wall_s"):
        if not 0 <= getattr(message, name) < math.inf:
            raise ValueError(f"{name} = {getattr(message, name)}: must be finite and not below 0")
    for name in ("step", "settled", "commit_quorum_id", "launched", "quorum_id"):
        if not m.VOID <= getattr(message, name) <= MAX_STEP:
            raise ValueError(f"{name} = {getattr(message, name)}: legal is {m.VOID} to {MAX_STEP}")
    if len(message.blame) > MAX_NAMED:
        raise ValueError(f"blame: {len(message.blame)} members, legal is up to {MAX_NAMED}")
    return from_message(m.Report, message)


def shorten(text: str, most: int) -> str:
    """Returns the first `most` characters of `text`, valid as UTF-8: a reason may quote a file name that is not."""
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def timeline_event_message(lane: str, step: int, text: str) -> pharos_pb2.TimelineEvent:
    return pharos_pb2.TimelineEvent(lane=lane, step=step, text=shorten(text, MAX_LINE))


def check_timeline_event(message: pharos_pb2.TimelineEvent) -> pharos_pb2.TimelineEvent:
    """Returns the message if it is valid. Raises ValueError."""
    _one_of("lane", message.lane, CLIENT_LANES)
    if not m.VOID <= message.step <= MAX_STEP or len(message.text) > MAX_LINE:
        raise ValueError(
            f"step {message.step}, {len(message.text)} characters: legal is {m.VOID} to {MAX_STEP}, up to {MAX_LINE}"
        )
    return message


def notice_message(notice: m.Notice) -> Any:
    [name] = [name for name, notice_type in NOTICES.items() if notice_type is type(notice)]
    return pharos_pb2.Notice(**{name: to_message(notice)})


def notice_from(message: pharos_pb2.Notice) -> m.Notice:
    """Returns the notice in a message. Raises ValueError for a kind that this version does not know."""
    name = message.WhichOneof("notice")
    if name not in NOTICES:
        raise ValueError("a notice of an unknown kind")
    return from_message(NOTICES[name], getattr(message, name))


def quorum_from(message: pharos_pb2.Quorum) -> m.Quorum:
    """Returns a quorum that a group reports. Raises ValueError for one that no lighthouse can have issued."""
    if len(message.fingerprint) > MAX_DIGESTS:
        raise ValueError(f"a fingerprint of {len(message.fingerprint)} digests: legal is up to {MAX_DIGESTS}")
    quorum = from_message(m.Quorum, message)
    for member in quorum.members:
        if problem := request_problem(m.Call(member, known=quorum.quorum_id)):
            raise ValueError(problem)
    if quorum.quorum_id < 1 or not quorum.members or list(quorum.ids) != sorted(set(quorum.ids)):
        raise ValueError(f"quorum {quorum.quorum_id}: its {len(quorum.members)} members must be sorted and unique")
    if not quorum.holders:
        raise ValueError(
            f"quorum {quorum.quorum_id}: none of its members has the reference state of step {m.describe_step(quorum.reference[0])}"
        )
    return quorum


_DYNAMIC = ("step", "commit_quorum_id", "commit_id", "assigned", "assignment_id")
_dynamic = attrgetter(*_DYNAMIC)
_static = attrgetter(*(x.name for x in fields(m.Member) if x.name not in _DYNAMIC))


@dataclass(frozen=True)
class StaticQuorum:
    """Static part of a quorum, without states and assignments. It changes when a group joins, leaves or restarts, and after a failed
    generation, a restored checkpoint or a change of the writer (fields of Member): so between quorums of a steady job it is the same."""

    members: tuple[m.Member, ...] = ()  # their states and assignments are of some quorum, and not used
    fingerprint: m.Fingerprint = ()
    id: str = ""  # hash of the static part; static_quorum_id in QuorumRequest
    static: tuple[tuple[Any, ...], ...] = ()  # static fields of each member

    @staticmethod
    def of(quorum: m.Quorum, before: StaticQuorum | None = None) -> StaticQuorum:
        """Returns the static part of `quorum`: `before`, if that is equal."""
        static = tuple(map(_static, quorum.members))
        if before and before.static == static and before.fingerprint == quorum.fingerprint:
            return before
        hashed = repr((static, quorum.fingerprint)).encode()
        return StaticQuorum(quorum.members, quorum.fingerprint, hashlib.sha256(hashed).hexdigest()[:32], static)

    def complete(self, part: pharos_pb2.DynamicQuorum) -> m.Quorum:
        """Returns the quorum that has this static part and the dynamic part `part`."""
        state = _state_from(part.reference)
        dynamic = dict(zip(_DYNAMIC, (*state, part.assigned, part.assignment_id), strict=True))
        members = tuple([_make(m.Member, vars(member), dynamic) for member in self.members])
        return m.Quorum(part.quorum_id, members, state, part.epoch, self.fingerprint)


def dynamic_part(quorum: m.Quorum) -> Any | None:
    """Returns the dynamic part of `quorum` as a DynamicQuorum; None if its members differ in state or assignment."""
    first = quorum.members[0]
    if set(map(_dynamic, quorum.members)) != {(*quorum.reference, first.assigned, first.assignment_id)}:
        return None
    return pharos_pb2.DynamicQuorum(
        quorum_id=quorum.quorum_id,
        epoch=quorum.epoch,
        reference=_fill_state(pharos_pb2.State(), quorum.reference),
        assigned=first.assigned,
        assignment_id=first.assignment_id,
    )


_TORCHFT_MEMBER = _Converter(m.Member, torchft_pb2.QuorumMember)
_TORCHFT_MEMBER.texts = ()  # lighthouse_service.py bounds the strings of torchft's members
_TORCHFT_MEMBER.decoders = (("reconfigure_handles", tuple),)
_TORCHFT_CALL = vars(m.Call(m.Member(""), "torchft"))


def torchft_member(member: m.Member) -> Any:
    return _TORCHFT_MEMBER.fill(torchft_pb2.QuorumMember(), member)


def call_from_torchft(message: torchft_pb2.QuorumMember) -> m.Call:
    call = object.__new__(m.Call)
    call.__dict__.update(_TORCHFT_CALL, member=_TORCHFT_MEMBER.decode(message))
    return call


def torchft_quorum(quorum: m.Quorum, created_s: float) -> Any:
    """Returns torchft's message of a quorum. `created_s`: seconds since 1970."""
    message = torchft_pb2.Quorum(quorum_id=quorum.quorum_id)
    add, fill = message.participants.add, _TORCHFT_MEMBER.fill  # looked up once: a sixth of the time
    for member in quorum.members:
        fill(add(), member)
    message.created.seconds, message.created.nanos = divmod(int(created_s * 1e9), 10**9)
    return message


def quorum_from_torchft(message: torchft_pb2.Quorum) -> m.Quorum:
    return m.Quorum(message.quorum_id, tuple(map(_TORCHFT_MEMBER.decode, message.participants)))
