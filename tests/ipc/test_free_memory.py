import pytest

from strata_coord.ipc import free_memory

GIB = 1 << 30


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A fake cgroup tree: write(group, **files) and member(lines) fill it."""

    class Tree:
        root = tmp_path / "cgroup"
        membership = tmp_path / "self"

        def write(self, group, **files):
            folder = self.root / group
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")

        def rooms(self, lines):
            self.membership.write_text(lines)
            return list(free_memory._cgroup_rooms(self.root, self.membership))

    return Tree()


def test_this_host_has_some_memory():
    room = free_memory.available_bytes()
    assert room is not None
    assert room > 1 << 20


def test_every_limit_above_the_process_counts(cgroups):
    cgroups.write(
        "a", memory_max=4 * GIB, memory_current=GIB, memory_stat="anon 5\ninactive_file 100\nactive_file 7"
    )
    cgroups.write("a/b", memory_max="max", memory_current=GIB)
    cgroups.write("a/b/c", memory_max=2 * GIB, memory_current=GIB, memory_stat="")
    assert cgroups.rooms("0::/a/b/c\n") == [GIB, 3 * GIB + 107]


def test_inside_a_container_the_root_is_the_limit(cgroups):
    cgroups.write("", memory_max=GIB, memory_current=0)
    assert cgroups.rooms("0::/not/mounted/here\n") == [GIB]


def test_version_one_has_its_own_files_and_a_number_for_no_limit(cgroups):
    folder = cgroups.root / "memory" / "x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.usage_in_bytes").write_text("24\n")
    (cgroups.root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (cgroups.root / "memory" / "memory.usage_in_bytes").write_text("24\n")
    assert cgroups.rooms("5:cpu,memory:/x\n3:pids:/y\n") == [GIB - 24]


def test_files_that_are_missing_or_strange_are_no_limit(cgroups):
    cgroups.write("a", memory_max="soon")
    assert cgroups.rooms("0::/a\n") == []


def test_the_tightest_room_decides_and_is_never_negative(monkeypatch):
    monkeypatch.setattr(free_memory, "_host_room", lambda: 500)
    monkeypatch.setattr(free_memory, "_cgroup_rooms", lambda: iter([300, 400]))
    assert free_memory.available_bytes() == 300
    monkeypatch.setattr(free_memory, "_cgroup_rooms", lambda: iter([-5]))
    assert free_memory.available_bytes() == 0
    monkeypatch.setattr(free_memory, "_host_room", lambda: None)
    monkeypatch.setattr(free_memory, "_cgroup_rooms", lambda: iter([]))
    assert free_memory.available_bytes() is None
