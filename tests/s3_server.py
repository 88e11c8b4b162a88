"""An S3 server on this machine (moto), and faults between it and its clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import s3fs
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

BUCKET = "bucket"
_ERRORS = {"full": ("507 Insufficient Storage", "QuotaExceeded"), "denied": ("403 Forbidden", "AccessDenied")}


class S3Server:
    """`env`: for clients. `fault`: "full" (no object more), "denied", "broken" (connections are reset), or "slow" (until `lets_go`)."""

    def __init__(self) -> None:
        self.fault, self.lets_go, self.met = "", threading.Event(), threading.Event()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._between, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3", daemon=True)
        self._thread.start()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def _between(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        fault = self.fault
        if fault == "full" and environ["REQUEST_METHOD"] not in ("PUT", "POST"):
            fault = ""
        if fault:
            self.met.set()
        if fault == "broken":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if fault in _ERRORS:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, code = _ERRORS[fault]
            body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if fault == "slow":
            assert self.lets_go.wait(50)
        return self._app(environ, start_response)

    def close(self) -> None:
        self.lets_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for backend in s3_backends[DEFAULT_ACCOUNT_ID].values():  # objects live as long as the process
            backend.reset()


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file system of this process for the server, with its bucket."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    file_system = s3fs.S3FileSystem(use_listings_cache=False)
    if not file_system.exists(BUCKET):
        file_system.mkdir(BUCKET)
    return file_system
