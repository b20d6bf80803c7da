"""Weights go to a hub with a card that says what they are; a local server stands for the hub."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
import yaml

from subquad.suite.runner import execute
from subquad.suite.store import storage
from subquad.suite.store.card import model_card
from tests.suite.toy import make_run

pytest.importorskip("huggingface_hub", reason="`huggingface_hub` is not installed (extra `hub`)")


class Hub(BaseHTTPRequestHandler):
    """Answers what a push asks, and keeps the files of its commits."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append((self.path, self.headers.get("authorization")))
        if self.headers.get("authorization") != "Bearer secret":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(content))
            self.answer({"url": f"{self.server.address}/me/parity", "name": "me/parity"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(content)["files"]
            self.answer(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
            )
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in content.splitlines()]
            files = (line["value"] for line in lines if line["key"] == "file")
            self.server.files.update({one["path"]: base64.b64decode(one["content"]) for one in files})
            self.answer({"commitUrl": f"{self.server.address}/me/parity/commit/1", "commitOid": "1"})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self):
        self.answer({"id": "me/parity", "sha": "0", "siblings": []})

    def answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.calls, server.made, server.files = [], [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    # the library reads the variable when it is imported, which another test of this process may have done
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_URL_HOSTS", frozenset({"127.0.0.1"}), raising=False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def trained(tmp_path):
    run = make_run(train={"epochs": 1})
    execute(run, tmp_path / "results", torch.device("cpu"), keep_weights=True)
    return run, tmp_path / "results"


def test_a_hub_gets_weights_settings_and_a_card(hub, trained, command_line):
    run, results = trained
    done = command_line("weights", "push", run.run_id[:8], "me/parity", "--private", "--results", results)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"pushed {run.run_id}.weights to {hub.address}/me/parity\n"
    (made,) = hub.made
    assert (made["name"], made["organization"]) == ("parity", "me")
    # versions of the library say it in two ways
    assert made.get("private") or made.get("visibility") == "private"
    place = storage.weights_path(results, run.experiment, run.scale, run.run_id)
    assert hub.files["model.weights"] == place.read_bytes()
    assert json.loads(hub.files["settings.json"]) == run.resolved
    _, head, text = hub.files["README.md"].decode().split("---\n", 2)
    rows = storage.load(storage.result_path(results, run.experiment, run.scale, run.run_id)).to_pylist()
    tested = {row["metric"]: row["value"] for row in rows if row["split"] == "test" and not row["slice"]}
    (model,) = yaml.safe_load(head)["model-index"]
    (result,) = model["results"]
    assert {metric["type"]: metric["value"] for metric in result["metrics"]} == tested
    assert 'model, task = load(hf_hub_download("me/parity", "model.weights"))' in text
    assert "- `train.lr` = `0.01`" in text


def test_a_hub_that_refuses_is_named_in_one_line(hub, trained, command_line, monkeypatch):
    run, results = trained
    monkeypatch.setenv("HF_TOKEN", "wrong")
    done = command_line("weights", "push", run.run_id, "me/parity", "--results", results)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: weights push me/parity: ")
    assert "401" in line
    assert not hub.files


def test_a_name_without_an_owner_is_refused_before_the_hub_is_asked(hub, command_line):
    done = command_line("weights", "push", "abc", "parity")
    assert done.returncode == 2
    assert "weights push parity: expected OWNER/NAME" in done.stderr
    assert not hub.calls


def test_a_card_names_the_plugin_that_the_weights_need():
    resolved = {"task": {"name": "t"}, "model": {"name": "m"}, "plugins": {"model": "my_mixer sha256 0123"}}
    text = model_card("me/m", resolved, [], "model.weights")
    assert ', plugins="my_mixer.py")' in text
    assert "The model is in the plugin `my_mixer sha256 0123`" in text
    assert "No rows are stored of the run" in text
