from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_hetero.objective import Independent, Synchronous

figures = st.floats(0, 1e3)


def test_synchronous_step_by_hand():
    goal = Synchronous(
        energy_price=0.5, time_prices=(0.5 * 300, 0.5 * 70), wait_power=(60, 40), sync_time=0.1
    )
    step = goal.step([2.0, 3.0], [100.0, 90.0], [150, 70])
    assert step.time == pytest.approx(3.1)
    # The first GPU waits 1.1 s at 60 W, the second 0.1 s at 40 W.
    assert step.energy == pytest.approx(100 + 90 + 66 + 4)
    assert step.cost == pytest.approx(0.5 * 260 + 0.5 * 370 * 3.1)


def test_independent_step_by_hand():
    step = Independent(eta=0.25).step([2.0, 3.0], [100.0, 90.0], [150, 70])
    assert step.time == 3.0
    assert step.energy == 190.0
    assert step.cost == pytest.approx(0.25 * 190 + 0.75 * (150 * 2 + 70 * 3))


@given(
    st.floats(0, 1),
    st.lists(st.tuples(figures, figures, figures), min_size=1, max_size=4),
    st.floats(0, 5),
)
def test_separable_form_adds_up_to_the_cost(eta, gpus, sync_time):
    times, energies, waits = zip(*gpus)
    limits = [100] * len(gpus)
    for goal in (
        Synchronous(eta, [(1 - eta) * 500] * len(gpus), waits, sync_time),
        Independent(eta),
    ):
        separable = sum(
            float(goal.separable_cost(i, np.float64(t), np.float64(e), np.float64(100)))
            for i, (t, e) in enumerate(zip(times, energies))
        )
        whole = separable + goal.makespan_price * max(times) + goal.constant
        assert whole == pytest.approx(goal.step(times, energies, limits).cost, rel=1e-9, abs=1e-6)
