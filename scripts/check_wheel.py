"""Install the wheel of ./dist into an empty environment and use the command from there.

What a user without any extra meets: help, list, a quick study, and an error that names the extra that is missing.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from install import CONSTRAINTS, ROOT


def main() -> None:
    (wheel,) = (ROOT / "dist").glob("heedful-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        pins = dict(
            line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line and line[0] != "#"
        )
        import install

        install.PYTHON = python
        install.install_torch(pins["torch"])
        install.pip("--constraint", CONSTRAINTS, wheel)

        def heedful(*arguments: str, status: int = 0) -> str:
            command = [python.parent / "heedful", *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode != status:
                sys.exit(f"heedful {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return done.stdout + done.stderr

        assert "study" in heedful("--help")
        assert "isotonic" in heedful("list")
        assert "report.html" in heedful("study", "isotonic", "--quick", "--quiet", "--store", "trials.sqlite")
        missing = heedful("study", "isotonic", "--quick", "--engine", "ray", status=1)
        assert 'pip install "heedful[ray]"' in missing, missing
    print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
