"""The requests that a healing server takes: HTTP/1.1 without bodies, read by a parser that believes nothing; and the heads of replies.

    GET  /heal/QUORUM_ID/STEP/header     the manifest, its digest, the seal
    GET  /heal/QUORUM_ID/STEP/body       with `Range: chunks=FIRST-LAST`: those chunks, each followed by its digest; the seal
    GET  /heal/QUORUM_ID/STEP/digests    of all chunks, their digest, the seal: what a joiner with two sources compares
    POST /heal/QUORUM_ID/STEP/done       the joiner has verified all of it

Every request carries `Authorization: Bearer TOKEN` if the job has a token, `Reader: NAME` (the joiner's own, for all its connections)
and, with the body, `Lacks: FIRST-LAST,...`: all chunks that the joiner has not verified, from wherever it means to get them. Chunks are
a range unit of our own (RFC 9110, 14.1), so a range cannot begin inside a digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_HEAD_BYTES = 16 << 10
MAX_RANGES = 512  # of Lacks
MAX_FIELDS = 64
_REQUEST = re.compile(r"(GET|POST) (/[!-~]{0,255}) HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\t -~]*?)[ \t]*")
_PATH = re.compile(r"/heal/(\d{1,18})/(\d{1,18})/(header|body|digests|done)")
_RANGE = re.compile(r"(\d{1,12})-(\d{1,12})")
_READER = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class BadRequest(ValueError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Request:
    """A head that is HTTP. Field names are in lower case."""

    method: str
    path: str
    fields: tuple[tuple[str, str], ...]

    def field(self, name: str) -> str:
        return next((value for key, value in self.fields if key == name), "")


@dataclass(frozen=True)
class Asked:
    """A request that means something. For a body: chunks first..last, and what the joiner lacks."""

    what: str
    quorum_id: int
    step: int
    reader: str
    first: int = 0
    last: int = -1
    lacks: tuple[tuple[int, int], ...] = ()


def parse_head(data: bytes) -> Request:
    """A request's head, up to and without its empty line. Raises BadRequest."""
    if len(data) > MAX_HEAD_BYTES:
        raise BadRequest(431, f"a head of more than {MAX_HEAD_BYTES} bytes")
    try:
        first, *lines = data.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise BadRequest(400, "no ASCII") from None
    if len(lines) > MAX_FIELDS:
        raise BadRequest(431, f"more than {MAX_FIELDS} fields")
    request = _REQUEST.fullmatch(first)
    found = [_FIELD.fullmatch(line) for line in lines]
    if not request or not all(found):
        raise BadRequest(400, "no HTTP request")
    fields = tuple((field[1].lower(), field[2]) for field in found if field)
    if len({name for name, _ in fields}) != len(fields):
        raise BadRequest(400, "a field stands twice")
    if any(name == "transfer-encoding" or (name == "content-length" and value != "0") for name, value in fields):
        raise BadRequest(413, "a request has no body here")
    return Request(request[1], request[2], fields)


def parse_request(request: Request) -> Asked:
    """Raises BadRequest."""
    path = _PATH.fullmatch(request.path)
    if not path:
        raise BadRequest(404, "no such page")
    what = path[3]
    if request.method != ("POST" if what == "done" else "GET"):
        raise BadRequest(405, f"{what} is not for {request.method}")
    reader = request.field("reader")
    if not _READER.fullmatch(reader):
        raise BadRequest(400, "Reader: a name of at most 128 letters, digits and .:_-")
    quorum_id, step = int(path[1]), int(path[2])
    if what != "body":
        return Asked(what, quorum_id, step, reader)
    unit, _, text = request.field("range").partition("=")
    ranges = parse_ranges(text)
    if unit != "chunks" or len(ranges) != 1:
        raise BadRequest(416, "Range: chunks=FIRST-LAST")
    lacks = parse_ranges(request.field("lacks"))
    if not any(first <= ranges[0][0] and ranges[0][1] <= last for first, last in lacks):
        raise BadRequest(400, "Lacks: FIRST-LAST,..., and Range inside one of them")
    return Asked(what, quorum_id, step, reader, *ranges[0], lacks)


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """FIRST-LAST,FIRST-LAST: ascending, not touching each other's chunks. Raises BadRequest."""
    if text.count(",") >= MAX_RANGES:
        raise BadRequest(431, f"more than {MAX_RANGES} ranges")
    found = [_RANGE.fullmatch(part) for part in text.split(",")]
    ranges = tuple((int(part[1]), int(part[2])) for part in found if part)
    if len(ranges) != len(found) or any(first > last for first, last in ranges):
        raise BadRequest(400, "ranges are FIRST-LAST,FIRST-LAST")
    if any(one[1] >= other[0] for one, other in zip(ranges, ranges[1:], strict=False)):
        raise BadRequest(400, "ranges ascend and do not overlap")
    return ranges


def ranges_of(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted chunk numbers as (first, last) ranges."""
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk - 1:
            ranges[-1] = (ranges[-1][0], chunk)
        else:
            ranges.append((chunk, chunk))
    return ranges


def bounded_ranges(ranges: list[tuple[int, int]]) -> str:
    """The value of Lacks. Of too many ranges the last are joined over their gaps: more is asked for than needed, never less."""
    if len(ranges) > MAX_RANGES:
        ranges = [*ranges[: MAX_RANGES - 1], (ranges[MAX_RANGES - 1][0], ranges[-1][1])]
    return ",".join(f"{first}-{last}" for first, last in ranges)


def request_head(method: str, path: str, fields: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


_WORDS = {200: "OK", 206: "Partial Content", 401: "Unauthorized", 404: "Not Found", 410: "Gone"}


def reply_head(status: int, length: int, chunks: str = "") -> bytes:
    fields = f"Content-Range: {chunks}\r\n" if chunks else "WWW-Authenticate: Bearer\r\n" if status == 401 else ""
    return f"HTTP/1.1 {status} {_WORDS.get(status, 'Refused')}\r\nContent-Length: {length}\r\n{fields}\r\n".encode()


_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})(?: [ -~]{0,100})?")


def parse_reply(data: bytes) -> tuple[int, int]:
    """Status and Content-Length of a reply's head. Raises ValueError."""
    first, *lines = data.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    lengths = [line.partition(b":")[2].strip() for line in lines if line.lower().startswith(b"content-length:")]
    if not status or len(lengths) != 1 or not re.fullmatch(rb"\d{1,15}", lengths[0]):
        raise ValueError("no reply of a healing server")
    return int(status[1]), int(lengths[0])
