"""Settings of a broker, read once from the environment (prefix `HORDE_`) and passed down; nothing else reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def default_data_dir() -> Path:
    """`/var/lib/horde` as root, else `$XDG_DATA_HOME/horde` (XDG_DATA_HOME defaults to `~/.local/share`)."""
    if os.geteuid() == 0:
        return Path("/var/lib/horde")
    xdg = os.environ.get("XDG_DATA_HOME")
    return (Path(xdg) if xdg else Path.home() / ".local" / "share") / "horde"


class Settings(BaseSettings):
    """One value per knob; durations are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="HORDE_", extra="ignore")

    database_url: str | None = Field(None, description="PostgreSQL URL; without it `horde up` starts its own server")
    data_dir: Path = Field(default_factory=default_data_dir, description="where `horde up` keeps data and keys")
    host: str = Field("127.0.0.1", description="address the broker listens on")
    port: int = Field(7001, ge=0, le=65535, description="port the broker listens on")

    job_ttl_seconds: float | None = Field(None, gt=0, description="a fixed lease for every job, instead of the formula")
    request_expiry_seconds: float = Field(1200, gt=0, description="how long a request waits before it is cancelled")
    retention_seconds: float = Field(1200, gt=0, description="how long a done request stays readable")
    maintenance_interval_seconds: float = Field(10, gt=0, description="time between two maintenance passes")
    fold_interval_seconds: float = Field(1, gt=0, description="time between two folds of events into the figures")
    max_aborts_per_hour: int = Field(20, ge=1, description="aborts in an hour after which a worker is paused")

    rate_limits: Literal["on", "off"] = Field("on", description="off also lifts the limits on worker counts")
    rate_limit_storage: str = Field("memory://", description="Flask-Limiter storage: memory:// or redis://...")
    trusted_proxies: int = Field(0, ge=0, description="hops of X-Forwarded-For to believe")

    threads: int = Field(256, ge=18, description="waitress threads; 16 of them are kept for short requests")
    connection_limit: int = Field(1024, ge=1, description="open connections waitress accepts")
    database_pool: int = Field(16, ge=2, description="database connections of one broker process")
    database_pool_wait_seconds: float = Field(5, gt=0, description="wait for a free database connection before a 503")

    redis_url: str | None = Field(None, description="Redis through which brokers wake each other, instead of NOTIFY")

    log_format: Literal["console", "json"] = Field("console", description="how log lines look")
    log_level: str = Field("INFO", description="lowest level that is logged")

    @property
    def max_waiting_polls(self) -> int:
        """Long polls and streams that may hold a thread at once."""
        return self.threads - 16
