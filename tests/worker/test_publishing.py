"""Publishing a model to a broker: once, whatever happens on the way, and never in the way of serving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from tests.worker.played_broker import PATIENCE, REGISTRY, Answer, Fault
from worker.backoff import Pace
from worker.broker import BrokerClient
from worker.manifest import Manifest
from worker.publishing import Publication, Publisher

PROBE = {"prompt": "p", "token_ids": [1], "output_token_ids": [2]}
MANIFEST = Manifest("model-1", "tok", 512, 16, 100, 64)
PUBLICATION = Publication("family/model x", MANIFEST, b'{"tokenizer":{}}', 2048, PROBE)
TOKENIZER, MODEL = "/api/v2/tokenizers/tok", "/api/v2/models/family/model x/revisions/model-1"


@pytest.fixture
def publish(broker) -> Iterator[Callable[[], Publisher]]:
    made: list[Publisher] = []

    def start() -> Publisher:
        client = BrokerClient(broker.url, "key", "agent:1:x")
        made.append(Publisher(client, PUBLICATION, pace=Pace(first_retry=0.01, longest_retry=0.02)))
        made[-1].start()
        return made[-1]

    yield start
    for publisher in made:
        publisher.stop()
        publisher.join(PATIENCE)
        assert not publisher.is_alive()


def test_tokenizer_and_revision_are_published_once(broker, publish):
    publish().join(PATIENCE)
    assert broker.published == {
        TOKENIZER: {"tokenizer": {}},
        MODEL: {
            "context_length": 2048, "block_size": 16, "kv_bytes_per_token": 64, "tokenizer_revision": "tok",
            "capabilities": [], "probe": PROBE,
        },
    }  # fmt: skip
    puts = [call for call in broker.calls if call.method == "PUT"]
    assert {call.headers["Content-Type"] for call in puts} == {"application/json"}
    publish().join(PATIENCE)
    assert len([call for call in broker.calls if call.method == "PUT"]) == 2


@pytest.mark.parametrize("fault", [Answer(503), Fault.RESET, Fault.LOST, Answer(429)])
def test_an_outage_is_waited_out(broker, publish, fault):
    broker.fail(REGISTRY, fault, fault, fault)
    publish().join(PATIENCE)
    assert set(broker.published) == {TOKENIZER, MODEL}


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        (Answer(403, {"message": "Only trusted workers publish", "rc": "NotTrusted"}), logging.INFO),
        (Answer(422, {"message": "another hash", "rc": "Mismatch"}), logging.WARNING),
        (Answer(413, {"message": "too large"}), logging.WARNING),
    ],
)
def test_a_refusal_is_told_and_the_end_of_it(broker, publish, caplog, answer, level):
    caplog.set_level(logging.INFO, "worker.publishing")
    broker.fail(REGISTRY, Answer(404, {"message": "not here", "rc": "NotFound"}), answer)
    publish().join(PATIENCE)
    assert broker.published == {}
    assert len(broker.calls) == 2
    [record] = caplog.records
    assert (record.levelno, answer.body["message"] in record.getMessage()) == (level, True)


def test_a_broker_without_a_register_is_sent_nothing(broker, publish):
    broker.native = False
    publish().join(PATIENCE)
    assert [call.method for call in broker.calls] == ["GET"]


def test_it_stops_within_an_outage(broker, publish):
    broker.fail(REGISTRY, *[Answer(503, {}, {"Retry-After": "3600"})] * 9)
    publisher = publish()
    broker.wait_until(lambda: bool(broker.calls))
    publisher.stop()
    publisher.join(PATIENCE)
    assert not publisher.is_alive()
    assert broker.published == {}
