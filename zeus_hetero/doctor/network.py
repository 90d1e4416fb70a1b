"""What the doctor checks of the network."""

from __future__ import annotations

import socket

from zeus_hetero.doctor.finding import FAILED, OK, TRAIN, Finding

_CONNECT_SECONDS = 5.0


def check_rendezvous(address: str, timeout: float = _CONNECT_SECONDS) -> Finding:
    """Whether another node's rendezvous can be reached.

    Args:
        address: HOST:PORT, as for ``torchrun --rdzv_endpoint``.
        timeout: s.
    """
    name = f"rendezvous {address}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return Finding(
            name, FAILED, "no address", "Give HOST:PORT, such as --rendezvous 10.0.0.5:29500.",
            (TRAIN,),
        )  # fmt: skip
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout):
            return Finding(name, OK, "reachable")
    except socket.gaierror as error:
        detail = f"the name cannot be resolved ({error.strerror})"
        remedy = "Use the node's address instead of its name."
    except ConnectionRefusedError:
        detail = "the node answers, but nobody listens on this port"
        remedy = (
            "Start torchrun on that node first (it waits for the others), with the same "
            "--rdzv_endpoint."
        )
    except (TimeoutError, socket.timeout):
        detail = f"no answer in {timeout:g} s"
        remedy = (
            f"Open port {port} between the nodes (security group, firewall); in containers use "
            "--network host."
        )
    except OSError as error:
        detail = str(error.strerror or error)
        remedy = (
            "Check the network; several interfaces: export GLOO_SOCKET_IFNAME=eth0 "
            "NCCL_SOCKET_IFNAME=eth0"
        )
    return Finding(name, FAILED, detail, remedy, (TRAIN,))
