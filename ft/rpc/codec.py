"""The words of ft.protocol.messages <-> the messages of pharos.proto and torchft.proto.

Ours need no line each: a word and its message have the same name and the same fields, so one function goes by the type hints of the
word. torchft's differ, and are written out. What arrives is checked here for form (lengths, ranges, known words) and by
lighthouse.absurd for sense; both raise ValueError, which a server turns into INVALID_ARGUMENT.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from ft.protocol import messages as m
from ft.protocol.plan import TorchftReply
from ft.protocol.rules import MAX_STEP, validate_request
from ft.rpc.generated import pharos_pb2, torchft_pb2

W = TypeVar("W")
P = TypeVar("P", bound=Message)

MAX_TEXT = 512  # characters of an id, an address, a digest
MAX_REASON = 4 << 10
MAX_TEXTS = {"reason": MAX_REASON, "data": 64 << 10, "checkpoint_metadata": 64 << 10}
MAX_TEXTS |= dict.fromkeys(("reconfigure_handles", "handles"), 64 << 10)  # a member's, and the same in a rank's part
MAX_DIGESTS = 256  # one for each key that groups must have alike
MAX_NAMED = 65_536  # members blamed by one call or report
MAX_WORDS = 500  # characters of what is told to people
LANES = (
    "commit",
    "corruption",
    "storage",
)  # of the page's timeline, for what ranks have seen: a step that failed, weights that differ, files that cannot be written
ORDERS = ("drain", "kill")
NOTICES = {
    m.MemberLost: "member_lost",
    m.Abandoned: "abandoned",
    m.ChangeAnnounced: "change_announced",
    m.Finished: "finished",
}


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
    plan = _plan(word_type)
    word, values = _blank(word_type)
    values.update(plan.unsaid, **given)
    values.update(zip(plan.names, plan.read(message), strict=True))
    for name in plan.texts:
        if len(values[name]) > MAX_TEXT:
            _check_text(name, values[name])
    for name, decode in plan.decode:
        values[name] = decode(values[name], message)
    return word


def from_bytes(word_type: type[W], data: bytes, **given: Any) -> W:
    """Raises ValueError."""
    return from_message(word_type, parse(_message_type(word_type), data), **given)


def report_from(message: pharos_pb2.Report) -> m.Report:
    """What a group beats with: its figures go to people, and into the machine's sums. Raises ValueError."""
    if len(message.phase) > MAX_TEXT:
        raise ValueError(f"phase: {len(message.phase)} characters, legal is up to {MAX_TEXT}")
    for name in ("median_step_s", "phase_limit_s", "goodput_s", "wall_s", *_HEALED):
        if not 0 <= getattr(message, name) < math.inf:
            raise ValueError(f"{name} = {getattr(message, name)}: must be finite and not below 0")
    for name in ("step", "settled", "commit_quorum_id", "launched"):
        if not m.VOID <= getattr(message, name) <= MAX_STEP:
            raise ValueError(f"{name} = {getattr(message, name)}: legal is {m.VOID} to {MAX_STEP}")
    if len(message.blame) > MAX_NAMED:
        raise ValueError(f"blame: {len(message.blame)} members, legal is up to {MAX_NAMED}")
    return from_message(m.Report, message)


_HEALED = ("healed_bytes", "heal_done_bytes", "heal_total_bytes")


def words(text: str, most: int) -> str:
    """`text` as it can be sent and will be read: a reason may quote a file's name that is no UTF-8, or name a thousand members."""
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def happened_message(lane: str, step: int, text: str) -> pharos_pb2.Happened:
    return pharos_pb2.Happened(lane=lane, step=step, text=words(text, MAX_WORDS))


def check_happened(message: pharos_pb2.Happened) -> pharos_pb2.Happened:
    """Raises ValueError."""
    _one_of("lane", message.lane, LANES)
    if not m.VOID <= message.step <= MAX_STEP or len(message.text) > MAX_WORDS:
        raise ValueError(
            f"step {message.step}, {len(message.text)} characters: legal is {m.VOID} to {MAX_STEP}, {MAX_WORDS}"
        )
    return message


def notice_message(notice: m.Notice) -> Any:
    return pharos_pb2.Notice(**{NOTICES[type(notice)]: to_message(notice)})


def notice_from(message: pharos_pb2.Notice) -> m.Notice:
    """Raises ValueError for a kind of notice that is not known here."""
    which = message.WhichOneof("notice")
    for word_type, name in NOTICES.items():
        if name == which:
            return from_message(word_type, getattr(message, name))
    raise ValueError("a notice of no known kind")


def refused_from(message: pharos_pb2.Refused) -> m.LighthouseRefused:
    """Raises ValueError for a code that is not known here."""
    code: Any = _one_of("code", message.code, get_args(m.Refusal))
    return m.LighthouseRefused(message.replica_id, code, message.reason)


def quorum_from(message: pharos_pb2.Quorum) -> m.Quorum:
    """As a group reports it. Raises ValueError for what no honest one does."""
    if len(message.shape) > MAX_DIGESTS:
        raise ValueError(f"a shape of {len(message.shape)} digests: legal is up to {MAX_DIGESTS}")
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


def _blank(word_type: type[W]) -> tuple[W, dict[str, Any]]:
    """A word, and where its fields are to be put: all of them. The __init__ of a frozen dataclass sets them one by one through
    object.__setattr__: of a call that comes in, that alone would be a tenth of the cost."""
    word = object.__new__(word_type)
    return word, word.__dict__


def _message_type(word_type: type[Any]) -> type[Any]:
    return getattr(pharos_pb2, word_type.__name__)


@dataclass(frozen=True)
class _Plan:
    """How a word and its message are made of each other. Only fields that are not simply the same cost a call of ours."""

    names: tuple[str, ...]  # of the fields that the message has
    unsaid: dict[str, Any]  # of the others, with their defaults
    read: Callable[[Any], tuple[Any, ...]]  # the values of `names`
    texts: tuple[str, ...]  # those that are text, and bounded
    decode: tuple[tuple[str, Any], ...]  # those whose value says something else, and how to read it
    put: tuple[tuple[str, Any], ...]


def _plan(word_type: type[Any]) -> _Plan:
    return _PLANS.get(word_type) or _PLANS.setdefault(word_type, _make_plan(word_type))


_PLANS: dict[type[Any], _Plan] = {}


def _make_plan(word_type: type[Any]) -> _Plan:
    there = _message_type(word_type).DESCRIPTOR.fields_by_name
    hints = get_type_hints(word_type)
    names = tuple(field.name for field in fields(word_type) if field.name in there)
    unsaid = {x.name: x.default for x in fields(word_type) if x.name not in there and x.default is not MISSING}
    ways = {name: _ways(name, hints[name]) for name in names}
    read = attrgetter(*names) if len(names) > 1 else lambda message: tuple(getattr(message, name) for name in names)
    texts = tuple(name for name in names if hints[name] is str)
    decode = tuple((name, decode) for name, (_, decode) in ways.items() if decode)
    return _Plan(names, unsaid, read, texts, decode, tuple((name, put) for name, (put, _) in ways.items()))


def _fill(message: Any, word: Any) -> None:
    for name, put in _plan(type(word)).put:
        value = getattr(word, name)
        if value is not None:
            put(message, value)


def _ways(name: str, hint: Any) -> tuple[Any, Any]:
    """put(message, value) and decode(value of the field, its message); None where it is the value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint == m.State:
        return _put_state(name), lambda x, _: (x.step, x.commit_quorum_id, _text("commit_id", x.commit_id))
    if origin is Literal:
        return _put_scalar(name), lambda value, _: _one_of(name, value, args)
    if origin in (Union, UnionType):
        [there] = [arg for arg in args if arg is not NoneType]
        put, decode = _ways(name, there)
        return put, lambda value, x: (decode(value, x) if decode else value) if x.HasField(name) else None
    if origin is tuple and is_dataclass(args[0]):
        inner: Any = args[0]
        return _put_words(name), lambda value, _: tuple(from_message(inner, one) for one in value)
    if origin is tuple and get_origin(args[0]) is tuple:  # (what, digest)
        pairs = _put_pairs(name)
        return (
            pairs,
            lambda value, _: tuple([(_text(name, x.what), _text(name, x.digest)) for x in value]) if value else (),
        )
    if origin is tuple and args[0] is str:
        return _put_many(name), lambda value, _: tuple([_text(name, one) for one in value]) if value else ()
    if origin is tuple:
        return _put_many(name), lambda value, _: tuple(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return _put_word(name), lambda value, _: from_message(hint, value)
    return _put_scalar(name), None


def _put_scalar(name: str) -> Any:
    if name == "reason":
        return lambda message, value: setattr(message, name, words(value, MAX_REASON))
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
    if len(value) > MAX_TEXT:
        _check_text(name, value)
    return value


def _check_text(name: str, value: str) -> None:
    if len(value) > MAX_TEXTS.get(name, MAX_TEXT):
        raise ValueError(f"{name}: {len(value)} characters, legal is up to {MAX_TEXTS.get(name, MAX_TEXT)}")


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ValueError(f"{name} = {value[:80]!r}: legal is {', '.join(legal)}")
    return value


# ------------------------------------------------------------------------------------------------ short answers


@dataclass(frozen=True)
class Roster:
    """A quorum without its members' states and deals: what stays the same from one quorum to the next while nobody comes or goes."""

    members: tuple[m.Member, ...] = ()  # with states and deals of some quorum, which mean nothing here
    shape: m.Shape = ()
    id: str = ""
    lasting: tuple[tuple[Any, ...], ...] = ()  # what `id` names, of each member

    @staticmethod
    def of(quorum: m.Quorum, before: Roster | None = None) -> Roster:
        """before: returned if it is the same."""
        lasting = tuple(map(_lasting, quorum.members))
        if before and before.lasting == lasting and before.shape == quorum.shape:
            return before
        named = repr((lasting, quorum.shape)).encode()
        return Roster(quorum.members, quorum.shape, hashlib.sha256(named).hexdigest()[:32], lasting)

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
        return m.Quorum(same.quorum_id, members, state, same.epoch, self.shape)


_PASSING = ("step", "commit_quorum_id", "commit_id", "dealt", "deal_id")
_passing = attrgetter(*_PASSING)
_lasting = attrgetter(*(field.name for field in fields(m.Member) if field.name not in _PASSING))


def same_roster(quorum: m.Quorum) -> Any | None:
    """The short form of `quorum`. None where the members differ in state or deal."""
    first = quorum.members[0]
    if set(map(_passing, quorum.members)) != {(*quorum.reference, first.dealt, first.deal_id)}:
        return None
    short = pharos_pb2.SameRoster(
        quorum_id=quorum.quorum_id, epoch=quorum.epoch, dealt=first.dealt, deal_id=first.deal_id
    )
    _put_state("reference")(short, quorum.reference)
    return short


# ------------------------------------------------------------------------------------------------ torchft's


def torchft_member(member: m.Member, message: Any = None) -> Any:
    """message: an empty one that is to be filled."""
    message = torchft_pb2.QuorumMember() if message is None else message
    message.replica_id = member.replica_id
    message.address = member.address
    message.store_address = member.store_address
    message.step = member.step
    message.world_size = member.world_size
    message.shrink_only = member.shrink_only
    message.data = member.data
    message.commit_failures = member.commit_failures
    if member.reconfigure_handles:
        message.reconfigure_handles.extend(member.reconfigure_handles)
    return message


def member_from_torchft(message: torchft_pb2.QuorumMember) -> m.Member:
    member, values = _blank(m.Member)
    values.update(_NOT_TORCHFTS)
    values.update(zip(_TORCHFT_FIELDS, _torchft_fields(message), strict=True))
    if message.reconfigure_handles:
        values["reconfigure_handles"] = tuple(message.reconfigure_handles)
    return member


def call_from_torchft(message: torchft_pb2.QuorumMember) -> m.Call:
    call, values = _blank(m.Call)
    values.update(_TORCHFT_CALL, member=member_from_torchft(message))
    return call


def torchft_quorum(quorum: m.Quorum, created_s: float) -> Any:
    """created_s: seconds since 1970."""
    message = torchft_pb2.Quorum(quorum_id=quorum.quorum_id)
    for member in quorum.members:
        torchft_member(member, message.participants.add())
    message.created.seconds, message.created.nanos = divmod(int(created_s * 1e9), 10**9)
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
_torchft_fields = attrgetter(*_TORCHFT_FIELDS)
_NOT_TORCHFTS = {x.name: x.default for x in fields(m.Member) if x.name not in _TORCHFT_FIELDS}
_TORCHFT_CALL = {x.name: x.default for x in fields(m.Call) if x.name != "member"} | {"kind": "torchft"}
