"""Each node has its own copy of the compiled operators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sweeps.cluster.node.operators import SOURCE, SOURCE_CPU, TORCH, cpu_signature, local_ops


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSWEEP_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One compiled operator, with a lock that a dead rank left."""
    folder = tmp_path / "shared" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "cpu_adam.so").write_text("code")
    (folder / "lock").touch()
    os.utime(folder / "cpu_adam.so", (1000, 1000))
    return folder.parent


def test_nothing_is_done_where_no_source_is_named() -> None:
    with local_ops({}, print) as found:
        assert found == {}


def test_a_copy_has_the_library_and_its_time_but_no_lock(source: Path) -> None:
    with local_ops({SOURCE: str(source)}, print) as found:
        copied = Path(found[TORCH]) / "cpu_adam"
        assert [path.name for path in copied.iterdir()] == ["cpu_adam.so"]
        assert (copied / "cpu_adam.so").stat().st_mtime == 1000


def test_a_dead_ranks_lock_is_removed_and_a_living_ones_is_left(source: Path) -> None:
    """Another supervisor of this node is at work, as always when trials overlap."""
    environ = {SOURCE: str(source)}
    with local_ops(environ, print) as found:
        dead = Path(found[TORCH]) / "cpu_adam" / "lock"
        dead.touch()
        living = Path(found[TORCH]) / "async_io" / "lock"
        living.parent.mkdir()
        with living.open("x"), local_ops(environ, print):
            assert (dead.exists(), living.exists()) == (False, True)


def test_on_another_kind_of_processor_nothing_is_copied_and_the_log_says_so(source: Path) -> None:
    told: list[str] = []
    with local_ops({SOURCE: str(source), SOURCE_CPU: "another"}, told.append) as found:
        assert list(Path(found[TORCH]).iterdir()) == []
        assert "another kind of CPU" in told[0]
        compiled = Path(found[TORCH])
    with local_ops({SOURCE: str(source), SOURCE_CPU: cpu_signature()}, told.append) as found:
        assert Path(found[TORCH]) == compiled, "this processor's own directory"
        assert [path.name for path in compiled.iterdir()] == ["cpu_adam"]
    assert len(told) == 2


def test_what_is_compiled_anew_is_copied_anew(source: Path) -> None:
    with local_ops({SOURCE: str(source)}, print):
        pass
    (source / "cpu_adam" / "cpu_adam.so").write_text("newer")
    with local_ops({SOURCE: str(source)}, print) as found:
        assert (Path(found[TORCH]) / "cpu_adam" / "cpu_adam.so").read_text() == "newer"


def test_processors_with_other_instructions_differ(tmp_path: Path) -> None:
    texts = ("model name\t: A\nflags\t\t: fma avx2\n", "model name\t: A\nflags\t\t: fma avx2 avx512f\n")
    files = [tmp_path / str(number) for number in range(2)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    assert cpu_signature(files[0]) != cpu_signature(files[1])
