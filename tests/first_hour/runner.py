"""Runs one command of a story: in a process that has imported torch and Lightning already, otherwise as a new one would.

The story's own folder replaces ``/dev/shm``: other tests, and other people's, run on the same machine.
"""

import atexit
import inspect
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path

SHM = "/dev/shm"


def main(job):
    for name in () if job["is_rank"] else ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.chdir(job["folder"])
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.clocks import hurry

    hurry(**job["hurry"])
    sys.path.pop(0)
    # The output is as at a terminal.
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave = os._exit

    def end(status):
        Path(job["answer"]).write_text(json.dumps(status))
        leave(0)

    # A command may leave so by itself.
    os._exit = end
    from tiered_checkpoint_io.model.config import TieredCheckpointConfig

    check = TieredCheckpointConfig.__post_init__

    def here(config):
        # The default, and what a file of configuration says by its name.
        if config.memory_dir == SHM:
            object.__setattr__(config, "memory_dir", job["memory_dir"])
        check(config)

    TieredCheckpointConfig.__post_init__ = here
    program, *arguments = job["command"]
    try:
        if program == "tiered-ckpt":
            command_line(arguments, job["memory_dir"])
        else:
            sys.argv = [program, *arguments]
            runpy.run_path(program, init_globals=names_of(job["prelude"]), run_name="__main__")
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    end(status)


def names_of(prelude):
    """Returns the names that a block of a document may use without an import."""
    names = {"__name__": "prelude"}
    exec(compile(prelude, "prelude", "exec"), names)
    return {name: value for name, value in names.items() if not name.startswith("__")}


def command_line(arguments, memory_dir):
    from tiered_checkpoint_io import cli

    for command in cli.app.registered_commands:
        said = inspect.signature(command.callback, eval_str=True)
        here = [each.replace(default=memory_dir) if each.default == SHM else each for each in said.parameters.values()]
        command.callback.__signature__ = said.replace(parameters=here)
    sys.argv = ["tiered-ckpt", *arguments]
    cli.main()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
