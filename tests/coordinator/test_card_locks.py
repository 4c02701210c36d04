import contextlib
import os
import subprocess
import sys

import pytest
from planning_fakes import fake_config

from strata_coord.coordinator.card_locks import exclusive_cards, lock_cards
from strata_coord.ipc.errors import AlreadyRunningError

A, B = "GPU-aaaa1111-2222", "GPU-bbbb3333-4444"

HOLD = """
import contextlib, sys
from planning_fakes import fake_config
from strata_coord.coordinator.card_locks import lock_cards
with contextlib.ExitStack() as locks:
    lock_cards(locks, fake_config(boundaries=(), budget_mib=None), [sys.argv[1]])
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def config(*budgets: int | None):
    return fake_config(boundaries=tuple(range(1, len(budgets))), budget_mib=budgets)


def test_a_card_is_shared_only_where_every_stage_on_it_names_its_budget():
    assert exclusive_cards(config(None, None, None), [B, "", A]) == (A, B)
    assert exclusive_cards(config(100, 100), [A, A]) == ()
    assert exclusive_cards(config(100, None), [A, A]) == (A,)
    assert exclusive_cards(config(100, None), [A, B]) == (B,)
    assert exclusive_cards(config(None), [""]) == ()


def test_a_second_launch_on_a_card_is_refused_until_the_first_has_ended():
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, A],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with contextlib.ExitStack() as locks:
            with pytest.raises(
                AlreadyRunningError, match=rf"in use by another launch \(pid {child.pid}\)"
            ) as one:
                lock_cards(locks, config(None), [A])
            assert "set stage.N.vram_budget_mib for every stage" in str(one.value)
            assert lock_cards(locks, config(None), [B])  # another card is free
            assert not lock_cards(locks, config(100), [A])  # and this one may be shared on purpose
        child.kill()
    with contextlib.ExitStack() as locks:
        assert lock_cards(locks, config(None), [A])


def test_no_card_stays_locked_where_one_is_refused(tmp_path):
    with contextlib.ExitStack() as outer:
        lock_cards(outer, config(None), [B])
        with pytest.raises(AlreadyRunningError), contextlib.ExitStack() as inner:
            lock_cards(inner, config(None, None), [A, B])
        with contextlib.ExitStack() as again:
            assert lock_cards(again, config(None), [A])
    assert not list((tmp_path / "strata-coord").iterdir())
