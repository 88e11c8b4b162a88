"""Every word of the protocol survives the wire, and the generated modules are those of the .proto files beside them."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.protocol import messages as m
from ft.protocol.group import GroupConfig, GroupMachine, plan
from ft.rpc import codec
from ft.rpc.generated import pharos_pb2, torchft_pb2

RPC = Path(__file__).resolve().parents[2] / "ft" / "rpc"
BYTES = {
    "Member": "e27c18a8dbd607a4",
    "Quorum": "df0e36048c5cba7d",
    "Timeouts": "ee5249978524f789",
    "Call": "48f6804e29edd3bd",
    "MemberLost": "2e3f5fa673e82332",
    "GenerationAborted": "c15fbe5922143237",
    "ChangeAnnounced": "c15fbe5922143237",
    "RankCall": "5dc68fc558d43f56",
    "QuorumResult": "b72bb1720c3a635a",
    "Source": "c15fbe5922143237",
    "Vote": "b7e7bf3ed524b30d",
    "Outcome": "2f02064e5bcb2872",
    "Report": "8af1904f04ce656c",
    "Leave": "96ab468e770b496d",
    "Evict": "b6d737304a617570",
    "TakeOver": "e3b0c44298fc1c14",
}
WORDS = tuple(getattr(m, name) for name in BYTES)

st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(str, st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
st.register_type_strategy(float, st.floats(allow_nan=False))
members = st.builds(m.Member)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_word_that_crosses_the_wire_is_the_same_word(data: st.DataObject):
    word = data.draw(st.sampled_from(WORDS).flatmap(st.from_type))
    if isinstance(word, m.Call):
        word = replace(word, kind="pharos")  # whoever speaks this wire is ours
    assert codec.from_bytes(type(word), codec.to_message(word).SerializeToString()) == word


def _example(hint: Any, number: int) -> Any:
    """A value of this type that is not its default, and another one for each number."""
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return args[-1]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{field.name: _example(hints[field.name], number + at) for at, field in enumerate(fields(hint))})
    if get_origin(hint) is tuple:
        inner = args[:1] * 2 if args[-1] is ... else args
        return tuple(_example(one, number + at) for at, one in enumerate(inner))
    if NoneType in args:
        return _example(args[0], number)
    return {int: number + 1, str: f"text {number}", float: number + 0.5, bool: True}[hint]


def test_the_bytes_on_the_wire_are_those_of_earlier_releases():
    """SHA-256 of each message, all fields filled except those of later releases, whose default adds no byte. A process of an earlier
    release may be at the other end: never renew these."""
    added: dict[Any, dict[str, Any]] = {m.Call: {"epoch": ""}, m.Report: {"quorum_id": 0}}
    words = {word.__name__: replace(_example(word, 0), **added.get(word, {})) for word in WORDS}
    found = {
        name: hashlib.sha256(codec.to_message(word).SerializeToString()).hexdigest()[:16]
        for name, word in words.items()
    }
    assert found == BYTES


def test_the_wire_has_every_field_of_every_word():
    missing = {
        (word.__name__, field.name)
        for word in WORDS
        for field in fields(word)
        if field.name
        not in (codec.WIRE_TYPES.get(word) or getattr(pharos_pb2, word.__name__)).DESCRIPTOR.fields_by_name
    }
    assert missing == {("Call", "kind")}


@given(st.sampled_from([m.MemberLost, m.GenerationAborted, m.ChangeAnnounced]).flatmap(st.from_type))
def test_notices(notice: m.Notice):
    data = codec.notice_message(notice).SerializeToString()
    assert codec.notice_from(codec.parse(pharos_pb2.Notice, data)) == notice


@given(st.builds(m.Member, world_size=st.integers(0, 2**64 - 1)))
def test_of_a_member_torchft_knows_nine_fields(member: m.Member):
    known = replace(m.Member(""), **{f.name: getattr(member, f.name) for f in fields(m.Member)[:9]})
    data = codec.torchft_member(member).SerializeToString()
    assert codec.call_from_torchft(codec.parse(torchft_pb2.QuorumMember, data)).member == known


@given(st.builds(m.Call, member=members))
def test_a_word_that_was_read_is_like_one_that_was_made(call: m.Call):
    """A message is decoded without its __init__, which is slow: the result is indistinguishable from a constructed one."""
    call = replace(call, kind="pharos")
    theirs = codec.call_from_torchft(codec.torchft_member(call.member))
    for read in (codec.from_message(m.Call, codec.to_message(call)), theirs):
        made = m.Call(m.Member(**vars(read.member)), **{k: v for k, v in vars(read).items() if k != "member"})
        assert (read, hash(read), repr(read)) == (made, hash(made), repr(made))
        assert vars(read).keys() == vars(made).keys() and vars(read.member).keys() == vars(made.member).keys()
        with pytest.raises(FrozenInstanceError):
            read.member.step = 1  # type: ignore[misc]


def test_texts_are_bounded_each_by_its_own_length():
    long = m.Member("a:1", address="x" * codec.MAX_TEXT, data="x" * codec.MAX_TEXTS["data"])
    assert codec.from_message(m.Member, codec.to_message(long)) == long
    for name in ("address", "data"):
        longer = replace(long, **{name: getattr(long, name) + "x"})
        with pytest.raises(ValueError, match=f"{name}: {len(getattr(longer, name))} characters, legal is up to"):
            codec.from_message(m.Member, codec.to_message(longer))


@pytest.mark.parametrize("reason", ["x" * 5000, "x" * codec.MAX_REASON, "no file caf\udce9"])
def test_a_reason_is_sent_as_it_can_be_read(reason: str):
    """A reason may name a thousand members, or a file whose name is no UTF-8; a vote that is refused for it would end its group."""
    vote = m.Vote(0, "commit", 1, 0, 0, "failed", reason=reason)
    read = codec.from_bytes(m.Vote, codec.to_message(vote).SerializeToString())
    assert read.reason == reason[: codec.MAX_REASON].replace("\udce9", "?")
    machine = GroupMachine(GroupConfig("a:1", 1), 0.0)
    machine.handle(m.RankCall(0, m.Member("")), 0.0)
    machine.handle(m.LighthouseAnswered(m.Quorum(1, (m.Member("a:1"),))), 0.0)
    [outcome] = [x.outcome for x in machine.handle(read, 0.0).effects if isinstance(x, m.AnswerVote)]
    assert codec.from_bytes(m.Outcome, codec.to_message(outcome).SerializeToString()).verdict == "failed"
    notice = codec.notice_message(m.GenerationAborted(1, f"lost ({reason}): returning"))
    assert codec.notice_from(notice).reason.startswith("lost (")
    assert codec.timeline_event_message("commit", 1, reason).text == read.reason[: codec.MAX_LINE]


def test_a_quorum_whose_state_nobody_holds_is_not_believed():
    """Such a quorum has no store to meet at and no source of a heal: its members' servers would end."""
    quorum = _quorum(7)
    assert codec.quorum_from(codec.to_message(quorum)) == quorum
    with pytest.raises(ValueError, match="quorum 4: none of its members has the reference state of step 8"):
        codec.quorum_from(codec.to_message(replace(quorum, reference=(8, 3, "c8"))))


def test_a_rank_can_read_what_the_lighthouse_has_taken():
    """A handle is bounded by one length, in a member and in the QuorumResult that is made of it: else one group could end all others."""
    member = m.Member("b:1", reconfigure_handles=("x" * codec.MAX_TEXTS["reconfigure_handles"],))
    quorum = m.Quorum(1, (m.Member("a:1"), codec.from_message(m.Member, codec.to_message(member))))
    part = plan(quorum, "a:1", 0)
    assert codec.from_message(m.QuorumResult, codec.to_message(part)).handles == part.handles


def _quorum(step: int, names: str = "ab", **same: object) -> m.Quorum:
    state = {"step": step, "commit_quorum_id": 3, "commit_id": f"c{step}", "assigned": 2, "assignment_id": f"d{step}"}
    ours = tuple(m.Member(f"{name}:1", f"http://{name}", **state, **same) for name in names)  # type: ignore[arg-type]
    return m.Quorum(4, ours, (step, 3, f"c{step}"), "epoch", (("layout", "1"),))


def test_a_short_answer_is_the_whole_quorum_to_whoever_holds_its_static_quorum():
    old, new = _quorum(7), replace(_quorum(9), quorum_id=5)
    short = codec.dynamic_part(new)
    assert short is not None and len(short.SerializeToString()) < 40
    static_quorum = codec.StaticQuorum.of(old)
    assert static_quorum.complete(short) == new and static_quorum.id == codec.StaticQuorum.of(new).id
    assert codec.StaticQuorum.of(new, static_quorum) is static_quorum, "kept, not made again"


@pytest.mark.parametrize("change", [{"names": "abc"}, {"names": "ac"}, {"writes_checkpoint": True}, {"restored": 0}])
def test_another_static_quorum_has_another_id(change: dict[str, object]):
    assert codec.StaticQuorum.of(_quorum(7)).id != codec.StaticQuorum.of(_quorum(7, **change)).id  # type: ignore[arg-type]


def test_another_layout_has_another_static_quorum():
    """A holder of the short answer's static quorum must report the job's own layout to the next lighthouse."""
    quorum = _quorum(7)
    static_quorum = codec.StaticQuorum.of(quorum)
    other = replace(quorum, fingerprint=(("layout", "2"),))
    assert (
        codec.StaticQuorum.of(other).id != static_quorum.id
        and codec.StaticQuorum.of(other, static_quorum).fingerprint == other.fingerprint
    )


@pytest.mark.parametrize("change", [{"step": 8}, {"commit_id": "x"}, {"assigned": 1}, {"assignment_id": "x"}])
def test_members_that_differ_have_no_short_form(change: dict[str, object]):
    quorum = _quorum(7)
    odd = replace(quorum.members[1], **change)  # type: ignore[arg-type]
    assert codec.dynamic_part(replace(quorum, members=(quorum.members[0], odd))) is None


def test_what_is_no_message_or_no_known_word_is_told():
    with pytest.raises(ValueError, match=r"not a pharos\.Vote"):
        codec.from_bytes(m.Vote, b"\xff\xff")
    with pytest.raises(ValueError, match="kind = 'maybe': legal is configured, commit, healed"):
        codec.from_message(m.Vote, pharos_pb2.Vote(kind="maybe", verdict="yes"))
    with pytest.raises(ValueError, match="unknown kind"):
        codec.notice_from(pharos_pb2.Notice())
    with pytest.raises(ValueError, match="sorted and unique"):
        codec.quorum_from(codec.to_message(_quorum(1, names="ba")))
    with pytest.raises(ValueError, match="world size"):
        codec.quorum_from(codec.to_message(_quorum(1, world_size=1 << 40)))
    with pytest.raises(ValueError, match="a fingerprint of 257 digests"):
        codec.quorum_from(codec.to_message(replace(_quorum(1), fingerprint=(("layout", "1"),) * 257)))


def test_the_generated_modules_are_of_these_proto_files():
    """Renew them with `make proto`; nothing here needs the generator."""
    for line in (RPC / "generated" / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split()
        assert hashlib.sha256((RPC / name).read_bytes()).hexdigest() == digest, f"{name} has changed: make proto"
    assert len(list(RPC.glob("*.proto"))) == 2


def test_a_protobuf_that_is_too_old_is_told_with_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "protobuf-6.30.2.dist-info").mkdir()
    (tmp_path / "protobuf-6.30.2.dist-info" / "METADATA").write_text("Name: protobuf\nVersion: 6.30.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"protobuf >= 6.31; this Python has 6.30.2"):
        importlib.reload(importlib.import_module("ft.rpc.generated"))
