"""`/api`: a page that lists the routes from the API's description and sends requests; `/api/openapi.json`: that description.

The page is three files of ours, with nothing from elsewhere and no inline script, so that its policy can be strict.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import orjson
from apiflask import APIBlueprint, APIFlask
from flask import Response, current_app

from horde.api.answers import JSON_TYPE

explorer = APIBlueprint("explorer", __name__, enable_openapi=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "explorer.js": "text/javascript; charset=utf-8",
    "explorer.css": "text/css; charset=utf-8",
}
_HERE = Path(__file__).parent
_DESCRIPTION = "horde.openapi"


@explorer.get("/api")
@explorer.get("/api/")
def page() -> Response:
    """The page."""
    return _file("page.html")


@explorer.get("/api/explorer.js")
def script() -> Response:
    """Its script."""
    return _file("explorer.js")


@explorer.get("/api/explorer.css")
def style() -> Response:
    """Its looks."""
    return _file("explorer.css")


@explorer.get("/api/openapi.json")
def description() -> Response:
    """The description, made once per process."""
    app = cast("APIFlask", current_app)
    if _DESCRIPTION not in app.extensions:
        app.extensions[_DESCRIPTION] = orjson.dumps(app.spec, option=orjson.OPT_INDENT_2)
    return Response(app.extensions[_DESCRIPTION], content_type=JSON_TYPE)


def _file(name: str) -> Response:
    return Response(
        (_HERE / name).read_bytes(),
        content_type=_FILES[name],
        headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"},
    )
