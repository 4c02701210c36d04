import os
import threading

import pytest

from strata_coord.ipc import memory_policy
from strata_coord.ipc.memory_policy import MPOL_BIND, MPOL_DEFAULT, MPOL_PREFERRED


@pytest.fixture
def in_thread():
    """Runs a call in a thread of its own: policy and affinity belong to threads and must not leak out."""

    def run(call):
        results: list = []
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        thread.join()
        return results[0]

    return run


needs_policy = pytest.mark.skipif(
    isinstance(memory_policy.memory_policy(), str), reason="this container forbids memory policy calls"
)


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0\n", {0}), ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5-5", {5})]
)
def test_kernel_lists_are_parsed(text, cpus):
    assert memory_policy.parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["x", "1-x", "-"])
def test_other_text_is_no_list(text):
    with pytest.raises(ValueError, match="invalid literal"):
        memory_policy.parse_cpu_list(text)


def test_this_host_has_a_node_and_only_real_nodes_have_cpus():
    assert memory_policy.online_nodes()
    assert memory_policy.node_cpus(999) == frozenset()


def test_a_thread_is_bound_and_others_are_not(in_thread):
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    assert in_thread(lambda: (memory_policy.bind_cpus(one), os.sched_getaffinity(0))) == (None, one)
    assert os.sched_getaffinity(0) == before


def test_cpus_that_are_not_allowed_are_a_reason(in_thread):
    reason = in_thread(lambda: memory_policy.bind_cpus(frozenset({100_000})))
    assert "none of the 1 CPUs" in reason


@needs_policy
@pytest.mark.parametrize("mode", [MPOL_BIND, MPOL_PREFERRED])
def test_a_policy_reads_back_as_set(in_thread, mode):
    node = min(memory_policy.online_nodes())

    def call():
        return memory_policy.set_memory_policy(mode, frozenset({node})), memory_policy.memory_policy()

    assert in_thread(call) == (None, (mode, frozenset({node})))
    assert memory_policy.memory_policy() == (MPOL_DEFAULT, frozenset())


@needs_policy
def test_a_node_that_is_not_there_is_a_reason(in_thread):
    assert "refused" in in_thread(lambda: memory_policy.set_memory_policy(MPOL_BIND, frozenset({900})))
    assert "above" in in_thread(lambda: memory_policy.set_memory_policy(MPOL_BIND, frozenset({5000})))


@needs_policy
def test_binding_to_a_node_sets_cpus_and_memory(in_thread):
    node = min(memory_policy.online_nodes())
    cpus = memory_policy.node_cpus(node) or frozenset(os.sched_getaffinity(0))

    def bind():
        refused = [
            memory_policy.bind_cpus(cpus),
            memory_policy.set_memory_policy(MPOL_BIND, frozenset({node})),
        ]
        return refused, memory_policy.memory_policy(), os.sched_getaffinity(0)

    refused, policy, bound = in_thread(bind)
    assert (refused, policy) == ([None, None], (MPOL_BIND, frozenset({node})))
    assert bound <= cpus


@needs_policy
def test_memory_from_a_node_restores_the_policy(in_thread):
    node = min(memory_policy.online_nodes())

    def call():
        with memory_policy.memory_from_node(node) as refused:
            inside = memory_policy.memory_policy()
        return refused, inside, memory_policy.memory_policy()

    refused, inside, after = in_thread(call)
    assert (refused, inside[0], after) == (None, MPOL_PREFERRED, (MPOL_DEFAULT, frozenset()))


def test_a_refusal_is_one_line_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(memory_policy, "_CALLS", {})
    with memory_policy.memory_from_node(0) as refused:
        assert "no call number" in refused
    with memory_policy.memory_from_node(-1) as refused:
        assert refused is None
