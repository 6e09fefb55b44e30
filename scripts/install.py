"""Install heedful from this checkout into ./.venv, with the pins of constraints.txt.

    python3 scripts/install.py [EXTRA ...]

torch comes first: the CPU build unless an NVIDIA GPU is there, since on Linux the default build brings several
gigabytes of CUDA libraries. Standard library only: this runs before anything is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
CONSTRAINTS = ROOT / "constraints.txt"


def run(*command, check: bool = True, quiet: bool = False) -> bool:
    """Whether the command succeeded."""
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(part) for part in command], check=check, stdout=sink, stderr=sink).returncode == 0


def pip(*arguments, **options) -> bool:
    return run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments, **options)


def install_torch(version: str) -> None:
    """The CPU build where there is no GPU, from wherever pip or uv can get it; else whatever pip installs by default."""
    if run(PYTHON, "-c", "import torch", check=False, quiet=True):
        return
    if sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        if pip(f"torch=={version}+cpu", check=False, quiet=True):
            return
        # uv knows where PyTorch's own builds are; pip does not.
        if pip("uv", check=False, quiet=True) and run(
            PYTHON, "-m", "uv", "pip", "install", "--torch-backend", "cpu", f"torch=={version}", check=False, quiet=True
        ):
            return
        print("No CPU build of torch was found; installing the default one, which is large.", file=sys.stderr)
    pip(f"torch=={version}")


def main(extras: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (this runs with whatever Python there is)
        sys.exit(
            f"heedful needs Python 3.11 or later; this is {sys.version.split()[0]}. Run: make PYTHON=python3.12 ..."
        )
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", VENV)
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line and line[0] != "#")
    print("installing torch ...", flush=True)
    install_torch(pins["torch"])
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    print(f"installing heedful{f' with {chr(44).join(extras)}' if extras else ''} ...", flush=True)
    pip("--constraint", CONSTRAINTS, "--editable", target)


if __name__ == "__main__":
    main(sys.argv[1:])
