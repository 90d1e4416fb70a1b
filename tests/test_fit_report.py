from __future__ import annotations

import numpy as np
import pytest
from synthetic import GPUS, changed

from zeus_hetero import AllocationError, TraceError, report_fit
from zeus_hetero.fit_report import draw_fit
from zeus_hetero.uncertainty import subset


@pytest.fixture(scope="module")
def report():
    return report_fit(changed(GPUS["usual"].trace(noise=0.01), 256, 150, 1.6))


def test_has_a_row_per_power_limit_with_errors_of_left_out_points(report):
    assert list(report.table.power_limit) == [250, 225, 200, 175, 150, 125, 100]
    assert set(report.table.points) == {8}
    assert np.all(report.table.time_median <= report.table.time_p90)
    assert np.all(report.table.energy_median <= report.table.energy_p90)
    assert report.left_out == 6 * 7


def test_flags_the_bad_point_and_shows_its_residual(report):
    assert [(o.batch_size, o.power_limit) for o in report.outliers] == [(256, 150)]
    residual = report.table.set_index("power_limit").largest_time_residual
    assert residual[150] == pytest.approx(1 - 1 / 1.6, abs=0.05)
    assert residual.drop(150).max() < 0.08


def test_prints_table_verdict_and_outliers(report):
    text = str(report)
    assert "auto model of imaginary" in text
    assert "outlier: batch size 256 at 150 W: time" in text
    assert report.verdict in text.replace("\n", " ")
    for limit in (250, 100):
        assert str(limit) in text


def test_outliers_are_flagged_whatever_the_model():
    trace = changed(GPUS["usual"].trace(noise=0.01), 256, 150, 1.6)
    report = report_fit(trace, "interpolated")
    assert report.model.name == "interpolated"
    assert len(report.outliers) == 1


def test_verdict_follows_the_errors():
    calm, noisy = (report_fit(GPUS["strong"].trace(noise=n)) for n in (0.002, 0.25))
    assert calm.verdict.startswith(("good", "fair"))
    assert noisy.verdict.startswith("poor")
    assert calm.time_median < noisy.time_median


def test_too_few_batch_sizes_say_so():
    trace = GPUS["usual"].trace()
    report = report_fit(subset(trace, np.isin(trace.batch_size, [8, 512])))
    assert report.left_out == 0
    assert "too few batch sizes" in str(report)
    assert "no outliers" in str(report)


def test_reads_a_file(aws, tmp_path):
    path = tmp_path / "trace.json"
    aws["imagenet"]["T4"].save(path)
    assert report_fit(path).table.power_limit.tolist() == [70, 65, 60]


def test_bad_input_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        report_fit(tmp_path / "none.json")
    with pytest.raises(AllocationError, match="model is 'cubic'"):
        report_fit(GPUS["usual"].trace(), "cubic")


def test_picture_rings_the_outlier(report, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = draw_fit(report)
    rings = [line for line in figure.axes[0].lines if line.get_label() == "_outlier"]
    assert [line.get_xdata()[0] for line in rings] == [256]
    figure.savefig(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 1000
