from __future__ import annotations

import types

import pytest

from zeus_hetero import device_order
from zeus_hetero.device_order import Device, check_visible_devices, compare_order
from zeus_hetero.errors import DeviceError

A10 = Device("NVIDIA A10", (0, 0x65, 0))
T4 = Device("Tesla T4", (0, 0x1E, 0))


def test_equal_numbering_passes():
    compare_order([T4, A10], [T4, A10], [0, 1])


def test_swapped_cards_stop_with_the_fix():
    with pytest.raises(DeviceError) as caught:
        compare_order([A10, T4], [T4, A10], [0])
    text = str(caught.value)
    assert "GPU 0 is NVIDIA A10 at PCI 0000:65:00 for CUDA" in text
    assert "Tesla T4 at PCI 0000:1e:00" in text
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in text


def test_equal_models_at_other_addresses_are_told_apart():
    one, other = Device("Tesla T4", (0, 1, 0)), Device("Tesla T4", (0, 2, 0))
    with pytest.raises(DeviceError, match="PCI_BUS_ID"):
        compare_order([one, other], [other, one], [1])


def test_without_addresses_names_decide():
    compare_order([Device("NVIDIA A10")], [A10], [0])
    with pytest.raises(DeviceError, match="PCI_BUS_ID"):
        compare_order([Device("NVIDIA A10")], [Device("Tesla T4")], [0])


def test_a_gpu_that_cuda_does_not_see_is_reported():
    with pytest.raises(DeviceError, match="CUDA sees 1 GPUs only"):
        compare_order([A10], [A10, T4], [1])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "is a UUID.*nvidia-smi -L"),
        ("0,GPU-8932f937", "GPU-8932f937 is a UUID"),
        ("MIG-GPU-8932/1/0", "is a MIG slice"),
        ("0,MIG-8932", "MIG-8932 is a MIG slice"),
        ("", "hides every GPU"),
        ("0,", "'' is no GPU number"),
        ("-1", "'-1' is no GPU number"),
        ("all", "'all' is no GPU number"),
    ],
)
def test_visible_devices_that_zeus_cannot_read_are_explained(value, message):
    with pytest.raises(DeviceError, match=message):
        check_visible_devices({"CUDA_VISIBLE_DEVICES": value})


def test_numbers_and_no_variable_pass():
    check_visible_devices({})
    check_visible_devices({"CUDA_VISIBLE_DEVICES": "0, 2"})


def test_cuda_devices_are_read_with_their_addresses(monkeypatch):
    properties = types.SimpleNamespace(
        name="Tesla T4", pci_domain_id=0, pci_bus_id=30, pci_device_id=0
    )
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
    )
    monkeypatch.setitem(device_order.sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert device_order.cuda_devices() == [T4]
    old = types.SimpleNamespace(name="Tesla T4")  # torch before 2.5
    cuda.get_device_properties = lambda index: old
    assert device_order.cuda_devices() == [Device("Tesla T4")]


def test_a_process_without_torch_has_no_cuda_devices(monkeypatch):
    monkeypatch.delitem(device_order.sys.modules, "torch", raising=False)
    assert device_order.cuda_devices() == []
