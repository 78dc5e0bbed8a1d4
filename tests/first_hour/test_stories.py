"""The first hour with this package: each story's output is in ``expected/``, and is read by people.

``TIERED_UPDATE_EXPECTED=1 make test AREA=first_hour`` records the texts again.
"""

import os
import re
import socket
import time
from pathlib import Path

import fsspec
import torch
from support.fault_proxy import FaultProxy
from support.first_hour import FOLDER
from support.launch import free_port
from support.supporting import supported


def test_what_is_mistyped(story):
    story.python("mistakes.py")
    story.python("defaults.py")
    story.shown("mistakes")


def test_no_credentials(story, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    story.python("train.py")
    story.tiered_ckpt("ls", "s3://bucket/run")
    story.shown("no_credentials")


def test_where_trainer_save_checkpoint_saves(story):
    with supported(drain="thread"):
        story.python("save_checkpoint.py")
    story.tiered_ckpt("ls", "s3://bucket/run")
    story.shown("save_checkpoint")


def test_ctrl_c_and_the_only_copy(story):
    story.python("train.py", "interrupt=37")
    story.drained()
    story.tiered_ckpt("status", "--namespace", "first")
    # Steps 10 to 30 are only in memory.
    story.tiered_ckpt("clean", "--namespace", "first")
    story.shown("interrupted")


def test_a_server_that_is_silent(story, monkeypatch):
    port, server = free_port(), os.environ["AWS_ENDPOINT_URL_S3"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    with FaultProxy(server, port=port):
        story.python("train.py", "max_steps=30", "save_on_train_end=false")
        story.drained()
    limits = supported(durable_timeout_s=1, pending_timeout_s=1, wait_timeout_s=5)
    with socket.create_server(("127.0.0.1", port)), limits:
        # Connections are made, and never answered.
        story.python("train.py", "max_steps=40", "save_on_train_end=false", preflight_s=1.0)
    story.shown("silent_server")


def test_what_its_owner_deletes_moves_and_edits(story):
    bucket = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    for step in (10, 20):
        story.python("train.py", f"max_steps={step}", "s3_every_n_train_steps=10")
        story.drained()
    # Everything of the newest step; and then a lifecycle rule takes the files, but not what is in `.tiered/`.
    bucket.rm([each for each in bucket.find("bucket/run") if "step=20" in each])
    story.python("train.py", "max_steps=20", "s3_every_n_train_steps=10")
    story.tiered_ckpt("ls", "s3://bucket/run")
    bucket.rm("bucket/run/step=20.ckpt")
    story.tiered_ckpt("ls", "s3://bucket/run")
    story.tiered_ckpt("verify", "s3://bucket/run")
    story.tiered_ckpt("flush", "step=20.ckpt", "--namespace", "first")
    story.tiered_ckpt("ls", "s3://bucket/run")
    state = torch.load(bucket.open("bucket/run/step=20.ckpt"), weights_only=False)
    state["state_dict"] = {key: torch.zeros_like(value) for key, value in state["state_dict"].items()}
    time.sleep(2.1)
    with bucket.open("bucket/run/step=20.ckpt", "wb") as file:
        torch.save(state, file)
    bucket.cp("bucket/run/step=20.ckpt", "bucket/run/edited.ckpt")
    for name in ("step=20.ckpt", "edited.ckpt"):
        story.python("train.py", "max_steps=30", "s3_every_n_train_steps=10", f"resume=s3://bucket/run/{name}")
    story.shown("owner")


def test_every_text_belongs_to_a_story():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    stories = set(re.findall(r"story\.shown\(\"(\w+)\"\)", tests))
    assert {path.stem for path in (FOLDER / "expected").glob("*.txt")} == stories
    scripts = set(re.findall(r"story\.python\(\"(\w+\.py)\"", tests))
    assert {path.name for path in (FOLDER / "scripts").glob("*.py")} <= scripts
