import sys
import types

import pytest

from heedful._lazy import attach


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``house`` with a lazy room, a module in it and one beside it."""
    house = tmp_path / "house"
    (house / "room").mkdir(parents=True)
    (house / "__init__.py").write_text("")
    (house / "_beside.py").write_text("outer = 'beside'\n")
    (house / "room" / "inside.py").write_text("inner = 'inside'\nalso = 1\n")
    (house / "room" / "broken.py").write_text("import a_package_that_is_not_there\n")
    (house / "room" / "__init__.py").write_text(
        "from heedful._lazy import attach\n"
        "__getattr__, __dir__, __all__ = attach(\n"
        "    'house.room', {'inside': ['inner', 'also'], '._beside': ['outer'], 'broken': ['never']}\n"
        ")\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "house"
    for name in [name for name in sys.modules if name.split(".")[0] == "house"]:
        del sys.modules[name]


def test_modules_load_on_first_use(package):
    import house.room

    assert "house.room.inside" not in sys.modules
    assert house.room.inner == "inside"
    assert "house._beside" not in sys.modules
    assert house.room.outer == "beside"


def test_names_are_listed_in_order_without_loading(package):
    import house.room

    assert dir(house.room) == house.room.__all__ == ["also", "inner", "never", "outer"]
    assert "house.room.inside" not in sys.modules


def test_from_imports_and_submodules_work(package):
    from house.room import inner, inside

    assert inner == inside.inner
    assert isinstance(inside, types.ModuleType)


def test_a_name_that_does_not_exist_says_which_do(package):
    import house.room

    message = "module 'house.room' has no attribute 'inenr'; it has also, inner, never, outer"
    with pytest.raises(AttributeError, match=f"^{message}$"):
        house.room.inenr  # noqa: B018
    with pytest.raises(ImportError, match="inenr"):
        from house.room import inenr  # noqa: F401


def test_an_import_that_fails_is_not_swallowed(package):
    import house.room

    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        house.room.never  # noqa: B018


def test_attach_gives_fresh_lists():
    _, names, public = attach("anything", {"module": ["b", "a"]})
    names().append("c")
    assert names() == public == ["a", "b"]
