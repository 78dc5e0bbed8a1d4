"""The environments of the libraries that we are compared with.

Each is a folder of its own below ``.venv-peers`` with what its constraints name, installed without dependencies, over
the environment that runs this: torch is not installed again, and no library alters what another one needs.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent / ".venv-peers"
#: NeMo pins much of what the others share: it has the environment that ``make test-nemo`` makes.
NEMO = HERE.parent / ".venv-nemo"
#: Contenders that need more than torch and Lightning, by the name of their constraints.
ENVIRONMENTS = {
    "s3torchconnector, Lightning": "s3torchconnector",
    "s3torchconnector, DCP, async": "s3torchconnector",
    "nvidia-resiliency-ext": "nvidia-resiliency-ext",
    "DLRover Flash Checkpoint": "dlrover",
    "amzn-sagemaker-checkpointing, S3 tier, async": "sagemaker",
    "obstore": "obstore",
}


def python_for(contender: str) -> str:
    """The Python that runs a contender: its environment's if it has one that is made, else this one."""
    name = ENVIRONMENTS.get(contender)
    path = (NEMO if contender.startswith("NeMo") else ROOT / str(name)) / "bin" / "python"
    return str(path) if path.exists() else sys.executable


def make(name: str) -> None:
    """Makes one environment, unless it is there."""
    folder = ROOT / name
    if (folder / ".installed").exists():
        return
    venv.create(folder, with_pip=False, clear=True)
    below = sysconfig.get_paths()["purelib"]
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "base.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    requirements = HERE / f"constraints-{name}.txt"
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "-r", str(requirements)], check=True, timeout=600)
    (folder / ".installed").touch()


def main() -> None:
    for name in sorted(set(ENVIRONMENTS.values())):
        try:
            make(name)
        except (subprocess.SubprocessError, OSError) as error:
            # The table says of each contender that it could not run; the others can.
            print(f"no environment for {name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
