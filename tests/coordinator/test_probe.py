import os

from strata_coord.coordinator.probe import measured_copy_rate, memory_limit, probe_rig


def test_the_probe_finds_this_host():
    rig = probe_rig(measure=False)
    assert rig.num_cpus >= 1
    assert {cpu for node in rig.nodes for cpu in node.cpus} <= os.sched_getaffinity(0)
    assert rig.available_bytes > 0
    assert rig.rates.copy_bytes_per_s.source == "assumed"


def test_a_measured_rate_says_so():
    assert probe_rig().rates.copy_bytes_per_s.source == "measured"
    assert measured_copy_rate() > 1e7


def test_the_least_limit_of_all_parent_groups_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/memory.max").write_text("max\n")
    (tmp_path / "a/memory.max").write_text("1000\n")
    (tmp_path / "a/memory.current").write_text("700\n")
    (tmp_path / "a/memory.stat").write_text("anon 5\ninactive_file 300\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory_limit(tmp_path, own) == (1000, 400)


def test_the_first_version_of_cgroups_is_read_too(tmp_path):
    own = tmp_path / "own"
    own.write_text("5:cpu,memory:/x\n3:pids:/x\n")
    (tmp_path / "memory/x").mkdir(parents=True)
    (tmp_path / "memory/x/memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "memory/x/memory.usage_in_bytes").write_text("500\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path, own) == (2000, 500)


def test_no_limit_is_none(tmp_path):
    assert memory_limit(tmp_path, tmp_path / "none") == (None, 0)
