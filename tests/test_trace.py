from __future__ import annotations

import json
import math
import os
import stat

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_hetero import TraceError, TraceWarning, load_trace
from zeus_hetero.bundled import BUNDLED_GPUS, BUNDLED_WORKLOADS, bundled_trace

RECORD = {"power_limit": 300, "energy": 23.4, "time": 0.25}


@pytest.fixture
def write(tmp_path):
    def to_file(content, name="trace.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


def test_reads_the_original_json_per_step(write):
    path = write({"64": [RECORD], "32": [{**RECORD, "steps": 5}, {**RECORD, "power_limit": 350}]})
    trace = load_trace(path, steps=10)
    assert trace.batch_size.tolist() == [32, 32, 64]
    assert trace.power_limit.tolist() == [350, 300, 300]
    assert trace.time.tolist() == pytest.approx([0.025, 0.05, 0.025])
    assert trace.energy.tolist() == pytest.approx([2.34, 4.68, 2.34])
    assert trace.steps.tolist() == [10, 5, 10]
    assert trace.batch_sizes == (32, 64)
    assert trace.power_limits == (350, 300)
    assert load_trace(path).time[2] == 0.25


def test_arrays_cannot_be_changed(aws):
    with pytest.raises(ValueError, match="read-only"):
        aws["cifar100"]["A10"].time[0] = 1


def test_extra_fields_are_kept(write, tmp_path):
    path = write({"32": [{**RECORD, "driver": "550", "spread": [1, {"a": None}]}]})
    trace = load_trace(path)
    trace.save(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["32"][0]["driver"] == "550"
    assert again["32"][0]["spread"] == [1, {"a": None}]
    assert trace.to_frame()["driver"].tolist() == ["550"]


def test_names_come_from_the_records_or_the_caller(write):
    path = write({"32": [{**RECORD, "gpu": "A10", "dataset": "cifar100", "arch": "resnet18"}]})
    trace = load_trace(path)
    assert (trace.gpu, trace.workload) == ("A10", "cifar100/resnet18")
    assert load_trace(path, gpu="other").gpu == "other"


def test_saved_file_is_what_the_original_parser_reads(aws, tmp_path):
    path = tmp_path / "saved.json"
    aws["imagenet"]["T4"].save(path)
    for batch, records in json.loads(path.read_text()).items():
        assert int(batch) > 0
        for record in records:
            assert record["power_limit"] in (70, 65, 60)
            assert record["energy"] / record["time"] < 80  # average power, W
    saved = json.loads(path.read_text())["32"][0]
    assert saved["time"] == pytest.approx(3.562418)
    assert saved["steps"] == 40


points = st.dictionaries(
    st.tuples(st.integers(1, 10**6), st.integers(1, 1000)),
    st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 1000)),
    min_size=1,
    max_size=12,
)


@pytest.mark.filterwarnings("ignore::zeus_hetero.errors.TraceWarning")
@settings(max_examples=60, deadline=None)
@given(points)
def test_save_and_load_round_trip(tmp_path_factory, table):
    frame = pd.DataFrame(
        [
            {"batch_size": b, "power_limit": p, "time": t, "energy": e, "steps": s}
            for (b, p), (t, e, s) in table.items()
        ]
    )
    trace = load_trace(frame)
    path = tmp_path_factory.mktemp("round") / "trace.json"
    trace.save(path)
    for again in (load_trace(path), load_trace(trace.to_frame())):
        assert again.batch_size.tolist() == trace.batch_size.tolist()
        assert again.power_limit.tolist() == trace.power_limit.tolist()
        assert again.steps.tolist() == trace.steps.tolist()
        np.testing.assert_allclose(again.time, trace.time, rtol=1e-12)
        np.testing.assert_allclose(again.energy, trace.energy, rtol=1e-12)
    order = list(zip(trace.batch_size, -trace.power_limit))
    assert order == sorted(order)


def test_saving_leaves_an_old_file_whole_when_the_disk_is_full(aws, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        aws["cifar100"]["T4"].save(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_saved_files_can_be_read_by_others(aws, tmp_path):
    path = tmp_path / "trace.json"
    aws["cifar100"]["T4"].save(path)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


CSV = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
cifar100,shufflenetv2,1024,adadelta,100,20,90
cifar100,shufflenetv2,512,adadelta,100,30,80
squad,bert,8,adamw,100,1000,95
"""


def test_reads_zeus_power_traces_per_step(write):
    path = write(CSV, "summary.csv")
    trace = load_trace(path, dataset="cifar100", dataset_size=50_000)
    assert trace.workload == "cifar100/shufflenetv2"
    # An epoch has 50,000 / 512 steps.
    assert trace.time.tolist() == pytest.approx([30 * 512 / 50_000, 20 * 1024 / 50_000])
    assert trace.average_power.tolist() == pytest.approx([80, 90])
    assert not trace.relative


def test_zeus_power_traces_without_a_data_set_size_are_relative(write, tmp_path):
    trace = load_trace(write(CSV, "summary.csv"), dataset="squad")
    assert trace.relative
    assert trace.average_power.tolist() == pytest.approx([95])
    with pytest.raises(TraceError, match=r"relative units cannot be saved.*dataset_size"):
        trace.save(tmp_path / "x.json")


def test_several_workloads_in_a_csv_must_be_told_apart(write):
    path = write(CSV, "summary.csv")
    with pytest.raises(TraceError, match=r"summary.csv.*dataset is one of cifar100, squad"):
        load_trace(path)
    with pytest.raises(TraceError, match=r"no dataset 'mnist' here; expected one of cifar100"):
        load_trace(path, dataset="mnist")


def test_csv_with_the_columns_of_a_frame(write):
    path = write("batch_size,power_limit,time,energy\n32,100,0.5,20\n", "own.csv")
    assert load_trace(path).time.tolist() == [0.5]


def test_csv_errors_name_the_line(write):
    path = write(CSV + "squad,bert,16,adamw,100,-3,95\n", "summary.csv")
    with pytest.raises(TraceError, match=r"summary.csv: line 5: time is -.*positive number of sec"):
        load_trace(path, dataset="squad", dataset_size=100)
    with pytest.raises(TraceError, match="no column average_power"):
        load_trace(write("batch_size,power_limit,time_per_epoch\n8,100,5\n", "short.csv"))


def test_a_trace_is_its_own_trace(aws):
    assert load_trace(aws["cifar100"]["A10"]) is aws["cifar100"]["A10"]


def test_duplicates_are_averaged_by_their_windows():
    frame = pd.DataFrame(
        {"batch_size": 32, "power_limit": 100, "time": [1.0, 6.0], "energy": [50.0, 300.0],
         "steps": [10, 30]}
    )  # fmt: skip
    with pytest.warns(TraceWarning, match="batch size 32 at 100 W was measured 2 times"):
        trace = load_trace(frame)
    assert len(trace) == 1
    assert trace.time[0] == pytest.approx(7 / 40)


def test_a_batch_size_that_stands_twice_in_the_file_loses_nothing(write):
    line = json.dumps(RECORD)
    other = json.dumps({**RECORD, "time": 0.35})
    path = write(f'{{"32": [{line}], "32": [{other}]}}')
    with pytest.warns(TraceWarning, match="measured 2 times"):
        assert load_trace(path).time[0] == pytest.approx(0.3)


def test_power_far_above_the_limit_is_warned_about(write):
    path = write({"32": [{"power_limit": 100, "energy": 50, "time": 0.25}]})
    with pytest.warns(TraceWarning, match=r"32 at 100 W: the average power is 200 W, far above"):
        load_trace(path)


def test_simulated_measurements_say_so(write):
    trace = load_trace(write({"32": [{**RECORD, "simulated": True}]}))
    assert trace.simulated
    assert "simulated" in str(trace)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"not valid JSON \(line 1"),
        ("[1]", r"top level is a list; expected \{"),
        ("{}", r"holds no records"),
        ({"32": []}, r"holds no records"),
        ({"32": {"a": 1}}, r"batch size 32: is \{'a': 1\}; expected a list of records"),
        ({"32": [5]}, r"batch size 32, record 1: is 5; expected \{"),
        ({"x": [RECORD]}, r"batch size is 'x'; expected a positive whole number"),
        ({"0": [RECORD]}, r"batch size is 0"),
        ({"-32": [RECORD]}, r"batch size is '-32'"),
        ({"32.5": [RECORD]}, r"batch size is '32.5'"),
        ({"32": [{"power_limit": 300, "time": 1}]}, r"32, record 1: no energy; expected power_l"),
        ({"32": [RECORD, {**RECORD, "time": -0.31}]}, r"32, record 2: time is -0.31; expected a p"),
        ({"32": [{**RECORD, "time": 0}]}, r"time is 0"),
        ({"32": [{**RECORD, "time": math.nan}]}, r"time is nan"),
        ({"32": [{**RECORD, "energy": math.inf}]}, r"energy is inf; expected .* joules"),
        ({"32": [{**RECORD, "energy": "5"}]}, r"energy is '5'"),
        ({"32": [{**RECORD, "energy": True}]}, r"energy is True"),
        ({"32": [{**RECORD, "energy": None}]}, r"energy is None"),
        ({"32": [{**RECORD, "power_limit": 0}]}, r"power_limit is 0; expected .* W"),
        ({"32": [{**RECORD, "power_limit": 99.5}]}, r"power_limit is 99.5"),
        ({"32": [{**RECORD, "steps": 0}]}, r"steps is 0"),
        (
            {"32": [{**RECORD, "gpu": "A10"}, {**RECORD, "power_limit": 100, "gpu": "T4"}]},
            r"records of different gpu: A10, T4",
        ),
        (
            {"32": [{**RECORD, "dataset": "a"}, {**RECORD, "power_limit": 100, "dataset": "b"}]},
            r"records of different dataset: a, b",
        ),
    ],
)
def test_bad_json_is_named_with_its_file_and_record(write, content, message):
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(write(content))
    assert "trace.json" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_missing_files_folders_and_binary_files(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere.json: no such file"):
        load_trace(tmp_path / "nowhere.json")
    with pytest.raises(TraceError, match=r"is a folder; expected a trace file"):
        load_trace(tmp_path)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"x.json: cannot be read"):
        load_trace(tmp_path / "x.json")


@pytest.mark.parametrize("source", [None, 5, [1], {"32": []}])
def test_other_sources_are_refused(source):
    with pytest.raises(TraceError, match="expected a Trace, a path or a pandas DataFrame"):
        load_trace(source)


def test_bad_frames():
    with pytest.raises(TraceError, match="DataFrame: no column energy"):
        load_trace(pd.DataFrame({"batch_size": [1], "power_limit": [1], "time": [1]}))
    frame = pd.DataFrame({"batch_size": [8], "power_limit": [9], "time": [1], "energy": [-1]})
    with pytest.raises(TraceError, match="row 1: energy is -1"):
        load_trace(frame)
    with pytest.raises(TraceError, match="steps is 0"):
        load_trace(frame, steps=0)


@pytest.mark.parametrize("workload", BUNDLED_WORKLOADS)
@pytest.mark.parametrize("gpu", BUNDLED_GPUS)
def test_bundled_traces_are_the_raw_measurements(shared_data, gpu, workload):
    stem = {"cifar100": "cifar", "imagenet": "imagenet"}[workload]
    raw = json.loads((shared_data / "trace_aws" / f"{stem}_{gpu.lower()}.json").read_text())
    ours = json.loads((REPOSITORY / "trace_aws" / f"{stem}_{gpu.lower()}.json").read_text())
    assert list(ours) == list(raw)
    for batch, records in raw.items():
        for record, transcribed in zip(records, ours[batch]):
            assert transcribed["power_limit"] == record["power_limit"]
            assert transcribed["energy"] == pytest.approx(record["energy"], abs=5e-4)
            assert transcribed["time"] == pytest.approx(record["time"], abs=5e-7)
            assert transcribed["steps"] == {"cifar100": 10, "imagenet": 40}[workload]


def test_bundled_traces_are_known_by_name():
    trace = bundled_trace("a10", "ImageNet")
    assert (trace.gpu, trace.workload) == ("A10", "imagenet")
    assert len(trace) == 25
    with pytest.raises(TraceError, match="no bundled trace of GPU 'H100'"):
        bundled_trace("H100")


def test_wait_power_that_was_measured():
    records = {"batch_size": [8, 16], "power_limit": [100, 100]}
    records = {**records, "time": [1.0, 2.0], "energy": [80.0, 150.0]}
    assert load_trace(pd.DataFrame(records)).wait_power is None
    measured = load_trace(pd.DataFrame({**records, "wait_power": [40.0, 44.0]}))
    assert measured.wait_power == 42.0
