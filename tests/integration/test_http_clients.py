"""Clients that exist, as they really behave: SillyTavern, KoboldAI Lite in a browser, koboldcpp's and AI Horde's own
bridges, and the models of horde-sdk, which read every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from horde_sdk.ai_horde_api.apimodels import (
    AIHordeHeartbeatResponse,
    AllWorkersDetailsResponse,
    HordePerformanceResponse,
    HordeStatusModelsAllResponse,
    ModifyWorkerResponse,
    SingleWorkerDetailsResponse,
    UserDetailsResponse,
)
from horde_sdk.ai_horde_api.apimodels.generate.text._async import (
    TextGenerateAsyncDryRunResponse,
    TextGenerateAsyncResponse,
)
from horde_sdk.ai_horde_api.apimodels.generate.text._pop import TextGenerateJobPopResponse
from horde_sdk.ai_horde_api.apimodels.generate.text._status import TextGenerateStatusResponse
from horde_sdk.generic_api.apimodels import RequestErrorResponse

from tests.support.chat import chat_broker
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker

ORIGIN = {"Origin": "https://lite.example.org"}


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def worker_key(broker: LiveBroker) -> str:
    return broker.user("Owner").api_key


def preflight(broker: LiveBroker, method: str, path: str, *wanted: str) -> None:
    """Ask as a browser does before such a call, and check what it checks."""
    answer = broker.call(
        "OPTIONS",
        path,
        headers={
            **ORIGIN,
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": ",".join(wanted),
        },
    )
    assert answer.status_code in {200, 204}
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert method in [name.strip() for name in answer.headers["Access-Control-Allow-Methods"].split(",")]
    allowed = {name.strip().lower() for name in answer.headers["Access-Control-Allow-Headers"].split(",")}
    assert {name.lower() for name in wanted} <= allowed
    assert "Access-Control-Allow-Credentials" not in answer.headers


def test_silly_tavern_gets_its_text(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key)
    agent = {"Client-Agent": "SillyTavern:UNKNOWN:Cohee#1207"}
    assert broker.call("GET", "status/heartbeat", headers=agent).ok
    models = broker.call("GET", "status/models?type=text", headers=agent).json()
    assert {"name", "count", "performance", "queued", "eta"} <= set(models[0])
    workers = broker.call("GET", "workers?type=text", headers=agent).json()
    assert {"models", "max_length", "max_context_length", "trusted"} <= set(workers[0])
    asked = broker.call(
        "POST",
        "generate/text/async",
        key=ANONYMOUS,
        headers=agent,
        json={
            "prompt": "You: hi\nBot:",
            "params": {
                "prompt": "You: hi\nBot:", "gui_settings": False, "use_world_info": False, "streaming": True,
                "can_abort": True, "mirostat": 0, "mirostat_tau": 5, "grammar": "", "sampler_seed": -1, "api_server": "x",
                "max_context_length": 1024, "max_length": 64, "rep_pen": 1.1, "rep_pen_range": 600, "rep_pen_slope": 0,
                "temperature": 0.7, "tfs": 1, "top_a": 0, "top_k": 0, "top_p": 0.92, "min_p": 0, "typical": 1, "n": 1,
                "sampler_order": [6, 0, 1, 3, 4, 2, 5], "singleline": False, "stop_sequence": ["\nYou:"],
                "frmtadsnsp": False, "frmtrmblln": False, "frmtrmspch": False, "frmttriminc": False,
                "use_default_badwordsids": True,
            },
            "trusted_workers": False,
            "models": ["m"],
        },
    )  # fmt: skip
    assert asked.status_code == 202
    request_id = asked.json()["id"]
    job = None
    for poll in range(5):
        status = broker.call("GET", f"generate/text/status/{request_id}", headers=agent).json()
        assert status["faulted"] is not True
        assert status["is_possible"] is not False
        if status["done"]:
            break
        if poll == 1:
            job = broker.pop_job(worker_key)
        if poll == 2 and job is not None:
            broker.submit(worker_key, job["id"], generation=" hello")
    assert status["done"]
    assert status["generations"][0]["text"] == " hello"
    assert {"worker_name", "model"} <= set(status["generations"][0])


def test_silly_tavern_streams_a_chat_as_from_any_openai_compatible_server(database_url: str) -> None:
    with chat_broker(database_url) as chat:
        bearer = {"Authorization": f"Bearer {chat.client.api_key}"}
        models = chat.live.session.get(f"{chat.live.url}/v1/models", headers=bearer, timeout=30).json()["data"]
        messages = [
            {"role": "system", "content": "Write Bot's next reply in a fictional chat between Bot and You."},
            {"role": "system", "content": "[Start a new Chat]"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "hi"},
        ]
        stream = chat.open(
            messages, model=models[0]["id"], temperature=1, max_tokens=300, presence_penalty=0, frequency_penalty=0, top_p=1,
            top_k=0, stop=["\nYou:"], logit_bias={}, seed=7, logprobs=True, top_logprobs=10,
        )  # fmt: skip
        job = chat.worker.take()
        assert (job.seed, job.payload["stop"], job.payload["logprobs"]) == (7, ["\nYou:"], 10)
        job.say("Good day")
        chat.worker.finish(job, logprobs=[[token, -0.5, [[token, -0.5]]] for token in job.token_ids])
        told = chat.read(stream)
        assert (told.text, told.finish_reason) == ("Good day", "stop")


def test_lite_generates_and_aborts_from_another_origin(broker: LiveBroker, worker_key: str) -> None:
    broker.pop(worker_key)
    preflight(broker, "POST", "generate/text/async", "apikey", "client-agent", "content-type")
    asked = broker.ask(
        {"prompt": "Hi", "params": {"max_length": 50, "max_context_length": 1024}, "models": ["m"], "workers": []},
        headers={**ORIGIN, "Client-Agent": "KoboldAiLite:17"},
    )
    assert asked.headers["Access-Control-Allow-Origin"] == "*"
    path = f"generate/text/status/{asked.json()['id']}"
    # Polls and the abort carry neither key nor agent.
    status = broker.call("GET", path, headers=ORIGIN).json()
    assert status.get("message") is None
    assert {"done", "queue_position", "processing", "wait_time", "kudos"} <= set(status)
    preflight(broker, "DELETE", path)
    aborted = broker.call("DELETE", path, headers=ORIGIN)
    assert aborted.status_code == 200
    assert aborted.headers["Access-Control-Allow-Origin"] == "*"
    assert broker.pop(worker_key).json()["id"] is None
    preflight(broker, "PUT", "workers/x", "apikey", "content-type")
    (worker,) = broker.call("GET", "workers?type=text", headers=ORIGIN).json()
    assert {
        "name", "models", "max_length", "max_context_length", "performance", "uptime", "requests_fulfilled", "info",
        "maintenance_mode", "trusted", "id",
    } <= set(worker)  # fmt: skip
    assert isinstance(worker["performance"], str)


def test_errors_can_be_read_from_another_origin(broker: LiveBroker) -> None:
    for answer in (
        broker.ask({"prompt": 5}, headers=ORIGIN),
        broker.ask(key="nobody", headers=ORIGIN),
        broker.call("GET", "nothing", headers=ORIGIN),
        broker.call("PATCH", "find_user", headers=ORIGIN),
        broker.ask({"prompt": "x" * 1_100_000}, headers=ORIGIN),
        broker.ask({"prompt": "x" * 3_000_000}, headers=ORIGIN),
    ):
        assert answer.status_code >= 400
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert isinstance(answer.json()["message"], str)


def test_koboldcpp_works(broker: LiveBroker, worker_key: str) -> None:
    body = {
        "name": "kcpp", "models": ["koboldcpp/m"], "max_length": 512, "max_context_length": 4096, "priority_usernames": [],
        "softprompts": [], "bridge_agent": "KoboldCppEmbedWorker:2:https://github.com/LostRuins/koboldcpp",
    }  # fmt: skip
    headers = {"Client-Agent": "KoboldCppEmbedWorker:2"}

    def pop() -> Any:
        return broker.call("POST", "generate/text/pop", key=worker_key, headers=headers, json=body)

    nothing = pop()
    assert nothing.status_code == 200
    assert nothing.json()["id"] is None
    broker.request(models=["koboldcpp/m"], params={"max_length": 80, "stop_sequence": ["\n"]})
    job = pop().json()
    assert isinstance(job["payload"]["max_length"], int)
    reward = broker.submit(worker_key, job["id"], generation="hi").json()["reward"]
    assert isinstance(reward, int | float)


def test_aihordes_own_bridge_gets_json_for_everything(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    job = broker.pop_job(worker_key, bridge_agent="AI Horde Worker~aphrodite~oai:24:https://github.com/x")
    fault = {"generation": "faulted", "state": "faulted", "seed": -1}
    assert broker.submit(worker_key, job["id"], **fault).json()["reward"] == 0
    late = broker.submit(worker_key, job["id"], **fault)
    assert late.status_code == 400
    assert late.json()["message"]
    assert "Horde-Node" in late.headers
    gone = broker.submit(worker_key, request_id)
    assert gone.status_code == 404
    assert gone.json()["message"]


def test_horde_sdk_reads_every_answer(broker: LiveBroker, worker_key: str) -> None:
    TextGenerateJobPopResponse.model_validate(broker.pop(worker_key).json())
    TextGenerateAsyncDryRunResponse.model_validate(broker.ask({"prompt": "x", "dry_run": True}).json())
    asked = TextGenerateAsyncResponse.model_validate(broker.ask({"prompt": "x", "params": {"n": 2}}).json())
    TextGenerateAsyncResponse.model_validate(broker.ask({"prompt": "x", "models": ["none"]}).json())
    request_id = str(asked.id_)
    TextGenerateStatusResponse.model_validate(broker.status(request_id))
    popped = TextGenerateJobPopResponse.model_validate(broker.pop_job(worker_key, amount=2))
    assert len(popped.ids) == 2
    note = {"type": "censorship", "value": "csam"}
    broker.submit(worker_key, str(popped.ids[0]), gen_metadata=[note])
    broker.submit(worker_key, str(popped.ids[1]), state="faulted")
    TextGenerateStatusResponse.model_validate(broker.status(request_id))
    broker.submit(worker_key, broker.pop_job(worker_key)["id"], state="rejected", error_code="unsupported_parameter")
    status = TextGenerateStatusResponse.model_validate(broker.status(request_id))
    assert status.faulted
    assert len(status.generations) == 1
    TextGenerateStatusResponse.model_validate(broker.call("DELETE", f"generate/text/status/{request_id}").json())

    UserDetailsResponse.model_validate(broker.call("GET", "find_user", key=worker_key).json())
    AIHordeHeartbeatResponse.model_validate(broker.call("GET", "status/heartbeat").json())
    HordePerformanceResponse.model_validate(broker.call("GET", "status/performance").json())
    HordeStatusModelsAllResponse.model_validate(broker.call("GET", "status/models?type=text").json())
    listed = AllWorkersDetailsResponse.model_validate(broker.call("GET", "workers?type=text").json())
    worker_id = listed.root[0].id_
    SingleWorkerDetailsResponse.model_validate(broker.call("GET", f"workers/{worker_id}", key=worker_key).json())
    changed = broker.call("PUT", f"workers/{worker_id}", key=worker_key, json={"maintenance": True})
    ModifyWorkerResponse.model_validate(changed.json())


def test_horde_sdk_reads_every_error(broker: LiveBroker, worker_key: str) -> None:
    job = None
    broker.request()
    job = broker.pop_job(worker_key)["id"]
    broker.submit(worker_key, job)
    broker.call(
        "PUT",
        f"workers/{broker.call('GET', 'workers').json()[0]['id']}",
        key=worker_key,
        json={"maintenance": True},
    )
    errors = {
        400: [
            broker.ask({"prompt": ""}),
            broker.ask({"prompt": 5}),
            broker.submit(worker_key, job),
            broker.ask(key=None),
        ],
        401: [broker.ask(key="nobody"), broker.call("GET", "find_user")],
        403: [broker.pop(worker_key), broker.pop(ANONYMOUS)],
        404: [
            broker.submit(worker_key, "x"),
            broker.call("GET", "workers/x"),
            broker.call("GET", "find_user", key="no"),
        ],
        405: [broker.call("PATCH", "find_user")],
        413: [broker.ask({"prompt": "x" * 1_100_000})],
        415: [broker.call("POST", "generate/text/async", key=ANONYMOUS, data="x")],
    }
    for status, answers in errors.items():
        for answer in answers:
            assert answer.status_code == status
            RequestErrorResponse.model_validate(answer.json())
