from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra plot")

from matplotlib.colors import to_hex

import zeus_hetero
from zeus_hetero import plotting
from zeus_hetero.allocator import plans_by_method


@pytest.fixture(scope="module")
def plans(aws):
    return plans_by_method(aws["cifar100"], 4096)[0]


def test_model_has_a_colour_per_power_limit_and_units_on_its_axes(aws):
    figure = plotting.plot_model(zeus_hetero.fit(aws["cifar100"]["A10"]), "A10")
    time, power = figure.axes
    assert time.get_ylabel() == "time per training step (s)"
    assert power.get_ylabel() == "average power (W)"
    assert time.get_xlabel() == power.get_xlabel() == "batch size (samples)"
    points = [line for line in power.lines if line.get_marker() == "o"]
    curves = [line for line in power.lines if line.get_marker() == "None"]
    assert len(points) == len(curves) == 5
    assert len({to_hex(line.get_color()) for line in points}) == 5
    assert [to_hex(p.get_color()) for p in points] == [to_hex(c.get_color()) for c in curves]
    labels = [text.get_text() for text in power.get_legend().get_texts()]
    assert labels == ["300 W", "250 W", "200 W", "150 W", "100 W"]


def test_curves_pass_through_the_points_they_fit(aws):
    trace = aws["imagenet"]["T4"]
    figure = plotting.plot_model(zeus_hetero.fit(trace), "T4")
    curve = next(line for line in figure.axes[0].lines if line.get_marker() == "None")
    assert curve.get_xdata()[-1] == 512
    assert curve.get_ydata()[-1] == pytest.approx(trace.time[-3])


def test_simulated_measurements_are_marked(aws, plans):
    trace = aws["cifar100"]["A10"]
    simulated = dataclasses.replace(trace, extra=({"simulated": True},) * len(trace))
    figure = plotting.plot_model(zeus_hetero.fit(simulated), "A10")
    assert "simulated" in figure.get_suptitle()
    marked = {name: dataclasses.replace(plan, simulated=True) for name, plan in plans.items()}
    assert "simulated" in plotting.plot_methods(marked).get_suptitle()
    assert "simulated" not in plotting.plot_methods(plans).get_suptitle()


def test_methods_show_time_and_energy_of_every_gpu_in_its_colour(plans):
    figure = plotting.plot_methods(plans)
    time, energy = figure.axes
    assert time.get_xlabel() == "time of a step (s); hatched: waiting"
    assert energy.get_xlabel() == "energy of a step (J), waiting included"
    rows = [label.get_text() for label in time.get_yticklabels()]
    assert rows == [name.replace("_", " ") for name in plans]
    colours = {to_hex(bar.get_facecolor()) for bar in energy.patches}
    assert len(colours) == 2
    busy = {to_hex(bar.get_facecolor()) for bar in time.patches if not bar.get_hatch()}
    assert busy == colours
    # Bars of a method add up to its energy.
    first = sum(bar.get_width() for bar in energy.patches[:2])
    assert first == pytest.approx(plans["optimal"].step_energy)


def test_pareto_front_and_methods_share_a_picture(aws, plans):
    front = zeus_hetero.pareto_front(aws["cifar100"], 4096)
    figure = plotting.plot_pareto(front, plans)
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["Pareto front", "knee"]
    assert labels[2:] == [name.replace("_", " ") for name in plans]
    assert axes.get_xlabel() == "time of a step (s)"
    assert axes.get_ylabel() == "energy of a step (J)"
