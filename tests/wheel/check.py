"""Builds wheel and sdist from a clean clone, and tries the wheel with the sources gone; ``make dist`` calls it.

On the Python that runs this: a training that resumes, the command line and the types of a script, with the pins of
constraints.txt. On each Python from 3.10 to 3.13 that is installed: the pip that comes with it finds versions that fit
without any constraint. On each other Python, and with the lowest versions that the wheel declares: all of the package
compiles, and the command line verifies the checkpoints of tests/data/format_1. Verifying needs no torch, whose only
builds for another Python are those for GPUs, of gigabytes.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Modules that only a trainer, or some kinds of configuration and URLs, import.
HEAVY = {"torch", "lightning", "omegaconf", "s3fs", "aiobotocore"}
TIMEOUT_S = 900
RESOLVE_S = 300


def run(*command, cwd="/", timeout_s=TIMEOUT_S, **options):
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def build(scratch, out):
    """Builds wheel and sdist of the commit; the wheel is made of the sdist, and holds only the package.

    The checkout has no symbolic links: a file system may have none, and neither has GitHub's zip archive.
    """
    clone = scratch / "clone"
    run("git", "clone", "--quiet", "--no-hardlinks", "-c", "core.symlinks=false", ROOT, clone)
    tracked = set(run("git", "-C", clone, "ls-files", "tiered_checkpoint_io").split())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, clone)
    shutil.rmtree(clone)
    made = sorted(out.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    (wheel,) = [each for each in made if each.suffix == ".whl"]
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (entry_points,) = (name for name in held if name.endswith("entry_points.txt"))
        assert archive.read(entry_points).count(b"callbacks_factory]") == 1
    assert {name for name in held if ".dist-info/" not in name} == tracked, held ^ tracked
    return wheel


def interpreters():
    """Returns the other Pythons that are installed, by version: on the path, or of pyenv."""
    found = {}
    for version in VERSIONS:
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        # A shim of pyenv's is there for versions that are not chosen.
        on_path = [each for each in [shutil.which(f"python{version}")] if each and "shims" not in each]
        if version != OWN and (pyenv or on_path):
            found[version] = str([*on_path, *pyenv][0])
    return found


def required(wheel):
    """Returns the wheel's requirements without extras: the whole line, by name."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("METADATA")]
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    return {re.match(r"[\w.-]+", line)[0]: line for line in lines if "extra ==" not in line}


def venv(python, folder, *requirements):
    run(python, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
    return folder / "bin"


def resolves(python, version, wheel, scratch):
    """Has this Python's pip find versions for all requirements of the wheel; prints the time, and some versions.

    An empty wheel replaces torch, whose builds for GPUs have gigabytes: an older pip downloads all that it has found.
    """
    (scratch / "stub").mkdir(exist_ok=True)
    about = "torch-2.999.dist-info"
    with zipfile.ZipFile(scratch / "stub/torch-2.999-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.999\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    run(python, "-m", "venv", scratch / "env")
    report, began = scratch / "report.json", time.monotonic()
    options = ("--dry-run", "--ignore-installed", "--find-links", scratch / "stub", "--report", report)
    run(scratch / "env/bin/python", "-m", "pip", "install", "-q", *options, wheel, timeout_s=RESOLVE_S)
    shutil.rmtree(scratch / "env")
    chosen = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    found = {each["name"].lower(): each["version"] for each in chosen}
    shown = ", ".join(f"{name} {found[name]}" for name in ("lightning", "boto3", "aiobotocore", "s3fs"))
    print(f"python={version} without constraints: {shown}, in {time.monotonic() - began:.0f} s", flush=True)


def looks_right(bin_folder, scratch):
    """Modules import as far as they need no torch, and the command line verifies what format 1 holds."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    package = Path(run(bin_folder / "python", "-c", where).strip()) / "tiered_checkpoint_io"
    run(bin_folder / "python", "-m", "compileall", "-q", package)
    run(bin_folder / "python", "-I", scratch / "modules.py")
    output = run(bin_folder / "tiered-ckpt", "verify", scratch / "data")
    assert output.count("intact") == 3, output


def trains(bin_folder, scratch, memory_dir):
    """Tries a run, and one that resumes it; then the command line, and the types of a script."""
    dirpath = scratch / "run"
    for first, steps in ((0, 10), (10, 15)):
        output = run(bin_folder / "python", "-I", scratch / "train.py", dirpath, memory_dir, steps, cwd=scratch)
        assert f"starts at step {first}" in output, output
    assert "end_of_training.ckpt" in run(bin_folder / "tiered-ckpt", "verify", dirpath)
    shutil.rmtree(dirpath)


def is_typed(bin_folder, scratch):
    options = ("--strict", "--cache-dir", scratch / "mypy", "--config-file", os.devnull)
    run(
        sys.executable,
        "-m",
        "mypy",
        *options,
        "--python-executable",
        bin_folder / "python",
        scratch / "typed.py",
        cwd=scratch,
    )


def main():
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tiered-dist-") as folder:
        scratch = Path(folder)
        wheel = build(scratch, out)
        print(f"built {wheel.name}, and the sdist", flush=True)
        for name in ("train.py", "typed.py", "modules.py"):
            shutil.copy(HERE / name, scratch)
        shutil.copytree(ROOT / "tests/data/format_1", scratch / "data")
        needs = required(wheel)
        light = [line for name, line in needs.items() if name not in HEAVY]
        lowest = [re.sub(r">=([\d.]+).*", r"==\1", line) for line in light]

        def looked_at(python, version, what, *requirements):
            bin_folder = venv(python, scratch / "env", *requirements)
            run(bin_folder / "python", "-m", "pip", "install", "-q", "--no-deps", wheel)
            looks_right(bin_folder, scratch)
            shutil.rmtree(scratch / "env")
            print(f"python={version} {what}, without torch: imports, verifies", flush=True)

        for version, python in {OWN: sys.executable, **interpreters()}.items():
            resolves(python, version, wheel, scratch)
        with tempfile.TemporaryDirectory(prefix="tiered-dist-", dir="/dev/shm") as memory_dir:
            bin_folder = venv(sys.executable, scratch / "env", "-c", ROOT / "constraints.txt", wheel)
            trains(bin_folder, scratch, memory_dir)
            looks_right(bin_folder, scratch)
            is_typed(bin_folder, scratch)
        shutil.rmtree(scratch / "env")
        print(f"python={OWN} constraints.txt: trains, resumes, verifies", flush=True)
        looked_at(sys.executable, OWN, "lowest declared versions", *lowest)
        for version, python in interpreters().items():
            looked_at(python, version, "constraints.txt", "-c", ROOT / "constraints.txt", *light)


if __name__ == "__main__":
    main()
