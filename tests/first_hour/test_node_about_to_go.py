"""The node of a dead trainer is about to go: what an engineer sees, and does, at 3 a.m."""

import re

from support.supporting import supported


def weights(output):
    return re.search(r"^weights (\w+)$", output, re.MULTILINE)[1]


def test_the_last_step_in_memory_is_saved_from_a_node_that_goes(story):
    with supported(drain="thread"):
        uninterrupted = weights(story.python("lives.py", "dirpath=s3://bucket/whole", "namespace=whole")[0])
    story.sections.clear()
    run = ("dirpath=s3://bucket/run", "namespace=run")
    for step in (13, 28):
        assert story.python("lives.py", *run, f"kill={step}")[1] is None
        story.drained()
    # Steps: 20 on S3, 20 and 25 in this node's memory.
    story.tiered_ckpt("ls", "s3://bucket/run")
    story.tiered_ckpt("status", "--namespace", "run")
    (root,) = [each for each in story.roots() if each.name == "run"]
    (held,) = root.glob("saves/*/rank-00000/step=20.ckpt")
    with open(held, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    output, status = story.tiered_ckpt("verify", "s3://bucket/run")
    assert status == 1
    (line,) = [line for line in output.splitlines() if line.startswith("DAMAGED")]
    assert line.startswith(f"DAMAGED\tmemory\tstep=20.ckpt\t0\town\t{held}: ")
    assert story.tiered_ckpt("flush", "--namespace", "run")[1] == 0
    story.tiered_ckpt("ls", "s3://bucket/run")
    story.loses_memory()
    output, status = story.python("lives.py", *run)
    assert status == 0
    assert "Step 25: loading memory/epoch=0-step=25.ckpt (durable" in output
    assert weights(output) == uninterrupted
    for command, lines in story.sections:
        if command.startswith(("tiered-ckpt status", "tiered-ckpt verify")):
            # How long memory keeps step 10 depends on how soon step 20 is durable.
            lines[:] = [line for line in lines if "step=10.ckpt" not in line]
        elif command.startswith("python"):
            # A killed trainer may have learnt of its uploads, or not.
            lines[:] = [line for line in lines if "is durable on S3" not in line]
    story.shown("node_about_to_go")
