from dataclasses import replace

import pytest
from planning_fakes import fake_device, fake_rig

from strata_coord.coordinator.rig import Limits, Rate, rig_from_toml, rig_to_toml
from strata_coord.ipc.errors import ConfigError

TEXT = 'name = "r"\navailable_bytes = 1000\n[[node]]\nnode = 0\ncpus = [0]\nmemory_bytes = 2000\n'


def test_a_rig_file_is_read_back_unchanged():
    rig = fake_rig(cpus=((0, 1), (), (2,)))
    rates = replace(rig.rates, copy_bytes_per_s=Rate(value=1.25e10, source="measured"))
    rig = replace(rig, name='a "b"\n', rates=rates, limits=Limits(memory_bytes=5, memlock_bytes=None))
    assert rig_from_toml(rig_to_toml(rig), name="x") == rig


def test_the_gpus_of_a_rig_file_are_read_back_unchanged():
    measured = Rate(value=5.53e10, source="measured")
    devices = (fake_device(peers=(1,)), fake_device(1, numa_node=-1, bus_id="", link_bytes_per_s=measured))
    rig = fake_rig(devices=devices)
    assert rig_from_toml(rig_to_toml(rig), name="x") == rig
    none = fake_rig(no_devices='no NVIDIA driver: "x"')
    assert rig_from_toml(rig_to_toml(none), name="x") == none


def test_rates_that_a_file_leaves_out_are_assumed():
    rig = rig_from_toml(TEXT, name="x")
    assert rig.rates.flops_per_s.source == "assumed"
    assert rig.num_cpus == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name = ", "rig.toml: not valid TOML"),
        (TEXT.replace('"r"', "1"), "rig.toml: name: expected a text, got 1"),
        (
            TEXT.replace("1000", "0"),
            "rig.toml: available_bytes: expected a whole number of at least 1, got 0",
        ),
        (TEXT.replace("[0]", '["a"]'), r"rig.toml: node\.0\.cpus: expected an array of whole numbers"),
        (TEXT.replace("[0]", "[]"), "at least one .* with one CPU is needed, got 0"),
        (TEXT + "[[device]]\ndevice = 0\n", r"rig.toml: device\.0\.\w+: missing"),
        (
            rig_to_toml(fake_rig(devices=(fake_device(),))).replace("[8, 9]", "[8]"),
            r"device\.0\.compute_capability: expected two numbers, such as \[9, 0\], got \[8\]",
        ),
        (
            rig_to_toml(fake_rig(devices=(fake_device(),))).replace("peers", "pears"),
            r"device\.0\.pears: expected no such key",
        ),
        (TEXT + "speed = 3\n", r"rig.toml: node\.0\.speed: expected no such key, got 3"),
        (TEXT.replace("node = 0\n", ""), r"rig.toml: node\.0\.node: missing"),
        (TEXT + "[rates]\ncall_s = 3\n", r"rig.toml: rates\.call_s: expected a table, got 3"),
        (TEXT + "[rates]\ncall_s = {value = 0, source = 'measured'}\n", r"rates\.call_s\.value: .* above 0"),
        (TEXT + "[rates]\ncall_s = {value = 1, source = 'guess'}\n", r"rates\.call_s\.source: expected"),
        (TEXT + "[rates]\nhops = 3\n", r"rates\.hops: expected no such key"),
    ],
)
def test_a_wrong_rig_file_is_one_line(text, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        rig_from_toml(text, name="rig.toml")
    assert "\n" not in str(caught.value)
