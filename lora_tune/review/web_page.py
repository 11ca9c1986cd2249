"""What is changed in optuna-dashboard's answers on their way to the browser, and the style that its page lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

STYLE = b"""<style>
a:not([class]) { color: #2196f3; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table:not([class]) { border-spacing: 0; }
table:not([class]) :is(th, td) { padding: 2px 14px 2px 0; text-align: left; vertical-align: top; }
main, main div { min-width: 0; }
@media (max-width: 600px) {
  main div:has(> .MuiDivider-vertical) { flex-direction: column; }
  main div:has(> .MuiDivider-vertical) > :first-child { width: 100%; max-height: 25vh; flex-shrink: 0; }
  main div:has(> .MuiDivider-vertical) > :last-child { width: 100%; }
  table:not([class]) { display: block; overflow-x: auto; }
}
[aria-label="delete study"], [aria-label="rename study"] { display: none; }
</style>
"""
"""Notes are Markdown, which optuna-dashboard leaves to the browser: links are seen on dark too, commands wrap, tables
have room, and a trial's page is as wide as the window: on a phone the list of trials stands above the trial. And no
buttons for what is refused."""

_END_OF_HEAD = b"</head>"


def rewritten(
    application: Application,
    environ: dict[str, Any],
    start_response: Callable[..., Any],
    change: Callable[[bytes], bytes],
) -> list[bytes]:
    """What ``application`` answers, the body of a success as ``change`` makes it."""
    started: list[Any] = []
    body = b"".join(application(environ, lambda *arguments: started.append(arguments)))
    status, headers, *rest = started[0]
    if not status.startswith("200"):
        start_response(status, headers, *rest)
        return [body]
    body = change(body)
    kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
    start_response(status, [*kept, ("Content-Length", str(len(body)))], *rest)
    return [body]


def with_style(application: Application) -> Application:
    """``application`` with STYLE at the end of each page's head."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].startswith("/dashboard"):
            return application(environ, start_response)
        return rewritten(application, environ, start_response, _styled)

    return answer


def _styled(page: bytes) -> bytes:
    return page.replace(_END_OF_HEAD, STYLE + _END_OF_HEAD, 1)
