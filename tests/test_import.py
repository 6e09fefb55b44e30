import subprocess
import sys

import pytest

import heedful

HEAVY = ("torch", "sklearn", "scipy", "pandas", "matplotlib", "ray", "mlflow", "pyarrow")


def loaded_by(code):
    """Which heavy packages a fresh process has loaded after running ``code``."""
    report = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-W", "error", "-c", f"{code}\n{report}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import heedful; dir(heedful); heedful.__version__",
        "import heedful; heedful.optim; heedful.calibrate; dir(heedful.optim); heedful.calibrate.__all__",
        "import heedful.errors, heedful.catalog; heedful.errors.ParameterError",
    ],
)
def test_what_needs_no_arrays_loads_none(code):
    assert loaded_by(code) == []


def test_a_name_of_a_room_loads_what_it_needs():
    assert "torch" in loaded_by("import heedful; heedful.optim.TiltedSAM")


def test_every_module_of_the_core_imports_without_an_extra():
    """In one process, with the extras hidden: a module may import ray, mlflow or pyarrow only where it uses them."""
    code = """
import importlib, pkgutil, sys
import heedful
sys.modules |= dict.fromkeys(("ray", "mlflow", "pyarrow"))
def fail(name):
    raise
names = [module.name for module in pkgutil.walk_packages(heedful.__path__, "heedful.", onerror=fail)]
assert {"heedful.optim.tsam", "heedful.calibrate.isotonic"} < set(names), names
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
for extra in ("ray", "mlflow", "pyarrow"):
    del sys.modules[extra]
"""
    assert not {"ray", "mlflow", "pyarrow"} & set(loaded_by(code))


def test_every_public_name_resolves():
    for name in heedful.__all__:
        assert getattr(heedful, name) is not None
    for room in ("optim", "calibrate", "evidence", "data"):
        module = getattr(heedful, room)
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert list(module.__all__) == sorted(module.__all__)


def test_a_name_that_does_not_exist_says_which_do():
    with pytest.raises(AttributeError, match=r"^module 'heedful' has no attribute 'optimizers'; it has Event, .*optim"):
        heedful.optimizers  # noqa: B018


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("heedful").joinpath("py.typed").is_file()
