"""The page itself: files of this package, the same for every job and every visitor. What a job says comes over /events."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no string that becomes code or markup (Trusted Types), in no frame.
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {  # of every answer
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Pages:
    """Files in memory: a path is looked up, never joined."""

    def __init__(self) -> None:
        files = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
        self._files = {f"/{path.name}": (path.read_bytes(), TYPES[path.suffix]) for path in files}
        self._files["/"] = self._files.pop("/index.html")

    def __contains__(self, path: str) -> bool:
        return path in self._files

    async def get(self, request: web.Request) -> web.Response:
        data, kind = self._files[request.path]
        return web.Response(body=data, headers={"Content-Type": kind})

    def routes(self) -> list[web.RouteDef]:
        return [web.get(path, self.get) for path in self._files]
