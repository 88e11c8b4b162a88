"""The words of ft.protocol.messages <-> the messages of pharos.proto and torchft.proto.

Ours need no line each: a word and its message have the same name and the same fields, so one function goes by the type hints of the
word. torchft's differ, and are written out. What arrives is checked here for form (lengths, ranges, known words) and by
lighthouse.absurd for sense; both raise ValueError, which a server turns into INVALID_ARGUMENT.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from ft.protocol import messages as m
from ft.protocol.lighthouse import MAX_STEP, absurd
from ft.protocol.plan import TorchftReply
from ft.rpc.generated import pharos_pb2, torchft_pb2

W = TypeVar("W")
P = TypeVar("P", bound=Message)

MAX_TEXT = 512  # characters of an id, an address, a digest
MAX_TEXTS = {"reason": 16 << 10, "data": 64 << 10, "checkpoint_metadata": 64 << 10, "reconfigure_handles": 64 << 10}
NOTICES = {m.MemberLost: "member_lost", m.Abandoned: "abandoned", m.ChangeAnnounced: "change_announced"}


def parse(message_type: type[P], data: bytes) -> P:
    """Raises ValueError where `data` is not such a message."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a {message_type.DESCRIPTOR.full_name}: {error}") from None


# ------------------------------------------------------------------------------------------------ ours


def to_message(word: Any) -> Any:
    """The message of the same name. Raises ValueError for what it cannot hold: a number of more than 64 bits, half a character."""
    message = _message_type(type(word))()
    _fill(message, word)
    return message


def from_message(word_type: type[W], message: Message, **given: Any) -> W:
    """The word that `message` says. given: fields that the wire leaves out. Raises ValueError."""
    return word_type(**{name: decode(getattr(message, name), message) for name, _, decode in _plan(word_type)}, **given)


def from_bytes(word_type: type[W], data: bytes, **given: Any) -> W:
    """Raises ValueError."""
    return from_message(word_type, parse(_message_type(word_type), data), **given)


def report_from(message: pharos_pb2.Report) -> m.Report:
    """What a group beats with: its figures go to people, and into the machine's sums. Raises ValueError."""
    if len(message.phase) > MAX_TEXT:
        raise ValueError(f"phase: {len(message.phase)} characters, legal is up to {MAX_TEXT}")
    for name in ("median_step_s", "goodput_s", "wall_s", "healed_bytes"):
        if not 0 <= getattr(message, name) < math.inf:
            raise ValueError(f"{name} = {getattr(message, name)}: must be finite and not below 0")
    for name in ("step", "settled", "commit_quorum_id"):
        if not m.VOID <= getattr(message, name) <= MAX_STEP:
            raise ValueError(f"{name} = {getattr(message, name)}: legal is {m.VOID} to {MAX_STEP}")
    return from_message(m.Report, message)


def notice_message(notice: m.Notice) -> Any:
    return pharos_pb2.Notice(**{NOTICES[type(notice)]: to_message(notice)})


def notice_from(message: pharos_pb2.Notice) -> m.Notice:
    """Raises ValueError for a kind of notice that is not known here."""
    which = message.WhichOneof("notice")
    for word_type, name in NOTICES.items():
        if name == which:
            return from_message(word_type, getattr(message, name))
    raise ValueError("a notice of no known kind")


def quorum_from(message: pharos_pb2.Quorum) -> m.Quorum:
    """As a group reports it. Raises ValueError for what no honest one does."""
    quorum = from_message(m.Quorum, message)
    for member in quorum.members:
        if problem := absurd(m.Call(member, known=quorum.quorum_id)):
            raise ValueError(problem[1])
    if quorum.quorum_id < 0 or list(quorum.ids) != sorted(set(quorum.ids)):
        raise ValueError(f"quorum {quorum.quorum_id} of members that are not in order, each once")
    return quorum


def _message_type(word_type: type[Any]) -> type[Any]:
    return getattr(pharos_pb2, word_type.__name__)


_PLANS: dict[type[Any], list[tuple[str, Any, Any]]] = {}


def _plan(word_type: type[Any]) -> list[tuple[str, Any, Any]]:
    if word_type not in _PLANS:
        _PLANS[word_type] = _make_plan(word_type)
    return _PLANS[word_type]


def _make_plan(word_type: type[Any]) -> list[tuple[str, Any, Any]]:
    """(field, how to put it into a message, how to read it), for each field that the message has."""
    there = _message_type(word_type).DESCRIPTOR.fields_by_name
    hints = get_type_hints(word_type)
    return [(field.name, *_ways(field.name, hints[field.name])) for field in fields(word_type) if field.name in there]


def _fill(message: Any, word: Any) -> None:
    for name, put, _ in _plan(type(word)):
        value = getattr(word, name)
        if value is not None:
            put(message, value)


def _ways(name: str, hint: Any) -> tuple[Any, Any]:
    """put(message, value) and decode(value of the field, its message)."""
    origin, args = get_origin(hint), get_args(hint)
    if hint == m.State:
        return _put_state(name), lambda x, _: (x.step, x.commit_quorum_id, _text("commit_id", x.commit_id))
    if origin is Literal:
        return _put_scalar(name), lambda value, _: _one_of(name, value, args)
    if origin in (Union, UnionType):
        [there] = [arg for arg in args if arg is not NoneType]
        put, decode = _ways(name, there)
        return put, lambda value, message: decode(value, message) if message.HasField(name) else None
    if origin is tuple and is_dataclass(args[0]):
        inner: Any = args[0]
        return _put_words(name), lambda value, _: tuple(from_message(inner, one) for one in value)
    if origin is tuple and get_origin(args[0]) is tuple:  # (what, digest)
        return _put_pairs(name), lambda value, _: tuple((_text(name, x.what), _text(name, x.digest)) for x in value)
    if origin is tuple and args[0] is str:
        return _put_many(name), lambda value, _: tuple([_text(name, one) for one in value])
    if origin is tuple:
        return _put_many(name), lambda value, _: tuple(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return _put_word(name), lambda value, _: from_message(hint, value)
    if hint is str:
        return _put_scalar(name), lambda value, _: _text(name, value)
    return _put_scalar(name), lambda value, _: value


def _put_scalar(name: str) -> Any:
    return lambda message, value: setattr(message, name, value)


def _put_many(name: str) -> Any:
    return lambda message, value: getattr(message, name).extend(value)


def _put_word(name: str) -> Any:
    def put(message: Any, value: Any) -> None:
        getattr(message, name).SetInParent()
        _fill(getattr(message, name), value)

    return put


def _put_words(name: str) -> Any:
    def put(message: Any, value: Any) -> None:
        for one in value:
            _fill(getattr(message, name).add(), one)

    return put


def _put_pairs(name: str) -> Any:
    def put(message: Any, value: Any) -> None:
        for what, digest in value:
            getattr(message, name).add(what=what, digest=digest)

    return put


def _put_state(name: str) -> Any:
    def put(message: Any, value: m.State) -> None:
        step, commit_quorum_id, commit_id = value
        getattr(message, name).CopyFrom(
            pharos_pb2.State(step=step, commit_quorum_id=commit_quorum_id, commit_id=commit_id)
        )

    return put


def _text(name: str, value: str) -> str:
    """Bounded: what a group says of itself is kept, and goes to all the others."""
    if len(value) > MAX_TEXT and len(value) > MAX_TEXTS.get(name, MAX_TEXT):
        raise ValueError(f"{name}: {len(value)} characters, legal is up to {MAX_TEXTS.get(name, MAX_TEXT)}")
    return value


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ValueError(f"{name} = {value[:80]!r}: legal is {', '.join(legal)}")
    return value


# ------------------------------------------------------------------------------------------------ short answers


@dataclass(frozen=True)
class Roster:
    """A quorum without its members' states and deals: what stays the same from one quorum to the next while nobody comes or goes."""

    members: tuple[m.Member, ...] = ()
    id: str = ""

    @staticmethod
    def of(quorum: m.Quorum) -> Roster:
        members = tuple(
            replace(x, step=0, commit_quorum_id=0, commit_id="", dealt=0, deal_id="") for x in quorum.members
        )
        return Roster(members, hashlib.sha256(repr(members).encode()).hexdigest()[:32])

    def complete(self, same: pharos_pb2.SameRoster) -> m.Quorum:
        """The quorum that `same` stands for, to whoever holds this roster."""
        step, commit_quorum_id, commit_id = state = (
            same.reference.step,
            same.reference.commit_quorum_id,
            same.reference.commit_id,
        )
        members = tuple(
            replace(
                x,
                step=step,
                commit_quorum_id=commit_quorum_id,
                commit_id=commit_id,
                dealt=same.dealt,
                deal_id=same.deal_id,
            )
            for x in self.members
        )
        return m.Quorum(same.quorum_id, members, state, same.epoch)


def same_roster(quorum: m.Quorum) -> Any | None:
    """The short form of `quorum`. None where the members differ in state or deal."""
    first = quorum.members[0]
    if any((x.state, x.dealt, x.deal_id) != (quorum.reference, first.dealt, first.deal_id) for x in quorum.members):
        return None
    short = pharos_pb2.SameRoster(
        quorum_id=quorum.quorum_id, epoch=quorum.epoch, dealt=first.dealt, deal_id=first.deal_id
    )
    _put_state("reference")(short, quorum.reference)
    return short


# ------------------------------------------------------------------------------------------------ torchft's


def torchft_member(member: m.Member) -> Any:
    message = torchft_pb2.QuorumMember()
    for name in _TORCHFT_FIELDS:
        setattr(message, name, getattr(member, name))
    message.reconfigure_handles.extend(member.reconfigure_handles)
    return message


def member_from_torchft(message: torchft_pb2.QuorumMember) -> m.Member:
    handles = tuple(message.reconfigure_handles)
    return m.Member(**{name: getattr(message, name) for name in _TORCHFT_FIELDS}, reconfigure_handles=handles)


def torchft_quorum(quorum: m.Quorum, created_s: float) -> Any:
    """created_s: seconds since 1970."""
    message = torchft_pb2.Quorum(quorum_id=quorum.quorum_id, participants=map(torchft_member, quorum.members))
    message.created.FromNanoseconds(int(created_s * 1e9))
    return message


def quorum_from_torchft(message: torchft_pb2.Quorum) -> m.Quorum:
    return m.Quorum(message.quorum_id, tuple(map(member_from_torchft, message.participants)))


def torchft_reply_message(reply: TorchftReply) -> Any:
    return torchft_pb2.ManagerQuorumResponse(
        **{field.name: getattr(reply, field.name) for field in fields(reply) if getattr(reply, field.name) is not None}
    )


_TORCHFT_FIELDS = (
    "replica_id",
    "address",
    "store_address",
    "step",
    "world_size",
    "shrink_only",
    "data",
    "commit_failures",
)
