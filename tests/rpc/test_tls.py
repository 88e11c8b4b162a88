"""TLS and mutual TLS with real handshakes: gRPC and HTTP of the lighthouse, and groups. Certificates are made by openssl here."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ft.config import Environment, FaultTolerance
from ft.protocol import messages as m
from ft.rpc.access import Access, Tls
from ft.rpc.clients import GroupClient, GroupServerProcess, is_torchft_lighthouse
from ft.rpc.group_server import Settings
from tests.rpc.test_abuse import Running
from tests.rpc.wire import WAIT_S, Wire, quorum_of, refused

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make certificates with")


class Papers:
    """An authority with a server's and a client's certificate, and a stranger's authority with a client's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for authority in ("ca", "stranger"):
            self._openssl("req", "-x509", "-days", "2", "-subj", f"/CN={authority}", *self._new_key(authority))
        for name, authority in (("server", "ca"), ("client", "ca"), ("impostor", "stranger")):
            (folder / "names").write_text("subjectAltName = IP:127.0.0.1, DNS:localhost\n")
            self._openssl("req", "-subj", f"/CN={name}", "-out", f"{name}.csr", *self._new_key(name)[:-2])
            issued = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "names"]
            self._openssl("x509", "-req", "-days", "2", "-in", f"{name}.csr", "-out", f"{name}.pem", *issued)

    def _new_key(self, name: str) -> list[str]:
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return [*kind, "-keyout", f"{name}.key", "-out", f"{name}.pem"]

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def tls(self, name: str = "", ca: str = "ca") -> Tls:
        cert, key = (self.folder / f"{name}.pem", self.folder / f"{name}.key") if name else (None, None)
        return Tls(cert, key, self.folder / f"{ca}.pem")

    def flags(self, *, mutual: bool) -> list[str]:
        asks = ["--tls_ca", "ca.pem"] if mutual else []
        return ["--tls_cert", "server.pem", "--tls_key", "server.key", *asks]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module", params=["TLS", "mutual TLS"])
def lighthouse(papers: Papers, request: pytest.FixtureRequest) -> Any:
    one = Running(papers.folder, *papers.flags(mutual=request.param == "mutual TLS"))
    one.mutual = request.param == "mutual TLS"  # type: ignore[attr-defined]
    yield one
    one.close()


WHO = [  # whom the client trusts and what it shows; whether it gets in under TLS, and under mutual TLS
    ("", "ca", True, False),
    ("client", "ca", True, True),
    ("impostor", "ca", True, False),
    ("client", "stranger", False, False),
]


@pytest.mark.parametrize(("name", "ca", "tls", "mutual"), WHO)
def test_grpc(lighthouse: Any, papers: Papers, name: str, ca: str, tls: bool, mutual: bool):
    welcome = mutual if lighthouse.mutual else tls
    wire = Wire(lighthouse.address, tls=papers.tls(name, ca))
    call = wire.pharos(m.Call(m.Member("a:1")))
    if welcome:
        assert quorum_of(call).ids == ("a:1",)
    else:
        assert refused(lambda: call.result(WAIT_S))[0] == "UNAVAILABLE"
    wire.close()


@pytest.mark.parametrize(("name", "ca", "tls", "mutual"), WHO)
def test_http(lighthouse: Any, papers: Papers, name: str, ca: str, tls: bool, mutual: bool):
    context = ssl.create_default_context(cafile=papers.folder / f"{ca}.pem")
    if name:
        context.load_cert_chain(papers.folder / f"{name}.pem", papers.folder / f"{name}.key")
    url = f"https://{lighthouse.page}/status.json"
    if mutual if lighthouse.mutual else tls:
        assert urllib.request.urlopen(url, timeout=WAIT_S, context=context).status == 200
    else:
        # Under TLS 1.3 a client learns that its certificate is not wanted only when it reads: by an alert, or by the end.
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            urllib.request.urlopen(url, timeout=WAIT_S, context=context)


def test_without_tls_nobody_is_heard(lighthouse: Any):
    wire = Wire(lighthouse.address.replace("https", "http"))
    assert refused(lambda: wire.pharos(m.Call(m.Member("a:1"))).result(WAIT_S))[0] == "UNAVAILABLE"
    wire.close()
    assert b"200" not in lighthouse.raw(b"GET /status.json HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize("mutual", [False, True])
def test_a_group_reaches_the_lighthouse_by_its_environment(
    papers: Papers, mutual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its own server has no TLS: its ranks and those of other groups reach it as without. The ranks' working folder has a package `ft`
    of its own, and the files' paths are relative to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ft").mkdir()
    (tmp_path / "ft" / "__init__.py").touch()
    names = {"PHAROS_TLS_CA": "ca.pem"} | (
        {"PHAROS_TLS_CERT": "client.pem", "PHAROS_TLS_KEY": "client.key"} if mutual else {}
    )
    with closing(Running(papers.folder, *papers.flags(mutual=mutual))) as one:
        files = {name: os.path.relpath(papers.folder / file) for name, file in names.items()}
        environment = Environment.read({"TORCHFT_LIGHTHOUSE": one.address, **files})
        environment.check(FaultTolerance(enable=True))
        access = Access(tls=environment.tls)
        assert environment.lighthouse.startswith("https://") and not is_torchft_lighthouse(one.address, access)
        with closing(GroupServerProcess(Settings("g:1", 1, environment.lighthouse, access=access))) as group:
            assert group.address.startswith("http://127.0.0.1:")
            with closing(GroupClient(group.address, 0, access)) as rank:
                assert rank.quorum(m.RankCall(0, m.Member("")), WAIT_S).members == ("g:1",)
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            is_torchft_lighthouse(one.address, Access(tls=papers.tls("client", "stranger")), patience_s=0.0)


def test_what_a_group_cannot_use_is_refused(papers: Papers):
    """Unusable settings are refused before anything is connected."""
    https, ca, cert = "https://head:29510", str(papers.folder / "ca.pem"), str(papers.folder / "client.pem")
    for given, said in (
        ({"TORCHFT_LIGHTHOUSE": https}, "TORCHFT_LIGHTHOUSE = https://head:29510: requires PHAROS_TLS_CA: the file"),
        (
            {"TORCHFT_LIGHTHOUSE": "head:29510", "PHAROS_TLS_CA": ca},
            "TORCHFT_LIGHTHOUSE = http://head:29510: PHAROS_TLS_CA is set, which is for https://; nearest: https://head:29510",
        ),
        ({"PHAROS_TLS_CA": "none"}, "PHAROS_TLS_CA = none: no such file"),
        ({"PHAROS_TLS_CA": __file__}, f"TLS with {__file__}: "),
        ({"PHAROS_TLS_CA": ca, "PHAROS_TLS_CERT": cert}, f"PHAROS_TLS_CERT = {cert}: requires PHAROS_TLS_KEY, too"),
        ({"PHAROS_TLS_CA": ca, "PHAROS_TLS_CERT": cert, "PHAROS_TLS_KEY": ca}, f"TLS with {cert}, {ca}, {ca}: "),
        ({"PHAROS_TLS_CERT": cert, "PHAROS_TLS_KEY": cert}, f"PHAROS_TLS_CERT = {cert}: requires PHAROS_TLS_CA, too"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(said)):
            Environment.read(given).check(FaultTolerance(enable=True))
