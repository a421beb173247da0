"""The application factory: one Flask application around one context."""

from __future__ import annotations

import logging
import sys

import structlog
from apiflask import APIFlask
from werkzeug.routing import BaseConverter

from horde import __version__
from horde.api.broker import EXTENSION, Broker
from horde.api.documents import TITLE, describe_api
from horde.api.edge import Edge
from horde.api.errors import install_error_handlers
from horde.api.explorer import explorer
from horde.api.horde_v2.chat import chat
from horde.api.horde_v2.chat_work import chat_work
from horde.api.horde_v2.progress import progress
from horde.api.horde_v2.registry import registry
from horde.api.horde_v2.status import status
from horde.api.horde_v2.text import text
from horde.api.horde_v2.users import users
from horde.api.horde_v2.workers import workers
from horde.api.library_logs import take_library_logs
from horde.api.limits import install_limits
from horde.api.openai_v1.chat import openai_chat
from horde.api.openai_v1.completions import openai_completions
from horde.api.openai_v1.models import openai_models
from horde.api.request_log import install_request_log
from horde.settings import Settings
from horde.usecases.context import Context


class AnyText(BaseConverter):
    """The rest of a path, slashes at its beginning included, which `path` would not take."""

    # A line break too.
    regex = r"(?s:.+)"
    part_isolating = False
    weight = 200


def create_app(settings: Settings, context: Context | None = None) -> APIFlask:
    """The WSGI application of a broker.

    Args:
        context: made from `settings` when it is not given; whoever serves the application closes it.

    Raises:
        ValueError: `settings` name no database.
    """
    configure_logging(settings)
    # Its own pages and error bodies are off: assets from elsewhere, and another dialect.
    app = APIFlask(
        "horde",
        title=TITLE,
        version=__version__,
        spec_path=None,
        docs_path=None,
        json_errors=False,
        static_folder=None,  # type: ignore[arg-type]
    )
    describe_api(app.config)
    # A slash too many is another address, and a name with two of them is a name.
    app.url_map.merge_slashes = False
    app.url_map.strict_slashes = True
    app.url_map.converters["any_text"] = AnyText
    broker = Broker(context or Context.create(settings), node=f"{settings.host}:{settings.port}:{__version__}")
    app.extensions[EXTENSION] = broker
    for blueprint in (
        text,
        chat,
        chat_work,
        progress,
        status,
        workers,
        users,
        registry,
        explorer,
        openai_chat,
        openai_completions,
        openai_models,
    ):
        app.register_blueprint(blueprint)
    install_error_handlers(app)
    install_limits(app, settings)
    install_request_log(app, logs_all=settings.log_level.upper() == "DEBUG")
    app.wsgi_app = Edge(app.wsgi_app, broker)  # type: ignore[method-assign]
    return app


def configure_logging(settings: Settings) -> None:
    """Log to stderr as `settings` say, in one line an event."""
    level = logging.getLevelNamesMapping().get(settings.log_level.upper(), logging.INFO)
    renderer = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    take_library_logs()
