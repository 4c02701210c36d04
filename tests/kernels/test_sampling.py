import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from strata_coord.kernels.sampling import sample, uniform


def draw(logits: Tensor, **changes: float) -> tuple[int, float]:
    settings = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "position": 0,
        "num_real_tokens": len(logits),
    } | changes
    return sample(logits, **settings)  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([0.0, 2.0, 5.0, 5.0, 5.0])
    token, logprob = draw(logits, temperature=0.0)
    assert token == 2
    assert logprob == pytest.approx(float(torch.log_softmax(logits.double(), 0)[2]))


def test_padding_ids_are_never_drawn_and_have_no_mass() -> None:
    logits = torch.tensor([0.0, 1.0, 50.0, float("nan")])
    token, logprob = draw(logits, temperature=0.0, num_real_tokens=2)
    assert token == 1
    assert logprob == pytest.approx(1.0 - math.log(1 + math.e))
    assert all(draw(logits, num_real_tokens=2, position=i)[0] < 2 for i in range(50))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="1 of 3 logits for position 9 are not finite"):
        draw(torch.tensor([0.0, bad, 1.0]), temperature=0.0, position=9)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    first = [draw(logits, seed=4, position=i)[0] for i in range(40)]
    torch.manual_seed(99)
    assert [draw(logits, seed=4, position=i)[0] for i in reversed(range(40))] == first[::-1]
    assert [draw(logits, seed=5, position=i)[0] for i in range(40)] != first


def test_uniform_is_uniform() -> None:
    values = [uniform(3, position) for position in range(4000)]
    assert all(0.0 <= value < 1.0 for value in values)
    tenths = Counter(int(value * 10) for value in values)
    assert len(tenths) == 10
    assert all(320 <= count <= 480 for count in tenths.values())


def test_frequencies_follow_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    for temperature in (0.5, 1.0, 2.0):
        counts = Counter(draw(logits, temperature=temperature, position=i)[0] for i in range(1500))
        want = torch.softmax(logits / temperature, 0)
        for token in range(3):
            assert counts[token] / 1500 == pytest.approx(float(want[token]), abs=0.05)


def test_top_k_top_p_and_min_p_limit_the_candidates() -> None:
    logits = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05]))

    def seen(**changes: float) -> set[int]:
        return {draw(logits, position=i, **changes)[0] for i in range(300)}

    assert seen() == {0, 1, 2, 3, 4}
    assert seen(top_k=2) == {1, 2}
    assert seen(top_p=0.65) == {1, 2}
    assert seen(top_p=0.75) == {1, 2, 3}
    assert seen(min_p=0.45) == {1, 2, 3}
    assert seen(top_p=0.0) == {1}
    assert seen(min_p=1.0) == {1}
    assert seen(top_k=4, temperature=5.0) == {0, 1, 2, 3}


def test_logprob_is_of_the_unscaled_distribution() -> None:
    logits = torch.tensor([0.0, 3.0])
    token, logprob = draw(logits, temperature=0.1, top_k=1)
    assert token == 1
    assert logprob == pytest.approx(float(torch.log_softmax(logits.double(), 0)[1]))


def test_a_tiny_temperature_is_almost_greedy() -> None:
    logits = torch.tensor([1.0, 1.5, 1.4])
    assert {draw(logits, temperature=1e-6, position=i)[0] for i in range(20)} == {1}
