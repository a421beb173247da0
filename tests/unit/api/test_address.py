"""Whose address counts, and who shares a limit."""

from __future__ import annotations

import pytest
from apiflask import APIFlask

from horde.api.address import client_address, limit_key
from horde.api.broker import broker_of


def seen(app: APIFlask, peer: str, forwarded: str | None = None, *, proxies: int = 0) -> tuple[str, str]:
    broker_of(app).context.settings.trusted_proxies = proxies
    headers = {"X-Forwarded-For": forwarded} if forwarded is not None else {}
    with app.test_request_context("/", headers=headers, environ_base={"REMOTE_ADDR": peer}):
        return client_address(), limit_key()


@pytest.mark.parametrize(
    "forwarded", ["1.2.3.4", "127.0.0.1", "1.2.3.4, 5.6.7.8", "garbage", ", ".join(["9.9.9.9"] * 100)]
)
def test_without_trusted_proxies_a_forwarded_address_is_not_believed(app: APIFlask, forwarded: str) -> None:
    assert seen(app, "10.0.0.1", forwarded)[0] == "10.0.0.1"


def test_with_one_proxy_the_last_entry_counts_and_what_the_client_wrote_does_not(app: APIFlask) -> None:
    assert seen(app, "10.0.0.1", "6.6.6.6, 1.2.3.4", proxies=1)[0] == "1.2.3.4"


def test_with_two_proxies_the_second_last_entry_counts(app: APIFlask) -> None:
    assert seen(app, "10.0.0.1", "6.6.6.6, 1.2.3.4, 10.0.0.2", proxies=2)[0] == "1.2.3.4"


@pytest.mark.parametrize("forwarded", ["garbage", "", "1.2.3.4.5", "<script>", "1.2.3.4, "])
def test_a_forwarded_value_that_is_no_address_falls_back_to_the_peer(app: APIFlask, forwarded: str) -> None:
    assert seen(app, "10.0.0.1", forwarded, proxies=1)[0] == "10.0.0.1"


def test_fewer_hops_than_trusted_ones_fall_back_to_the_peer(app: APIFlask) -> None:
    assert seen(app, "10.0.0.1", "1.2.3.4", proxies=2)[0] == "10.0.0.1"


def test_one_ipv6_site_shares_a_limit_and_another_does_not(app: APIFlask) -> None:
    first, second = seen(app, "2001:db8:1:2::1"), seen(app, "2001:db8:1:2:ffff::9")
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert seen(app, "2001:db8:1:3::1")[1] != first[1]


def test_ipv4_in_ipv6_notation_is_ipv4(app: APIFlask) -> None:
    assert seen(app, "::ffff:10.1.2.3") == ("10.1.2.3", "10.1.2.3")
