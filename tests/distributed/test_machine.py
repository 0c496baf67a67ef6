"""Promise: ranks are on one machine only where all can tell, and no link may be between them."""

import pytest

from tritonrec.distributed import RankPool, machine


def of_rank(communicators):
    return communicators.machines


def test_processes_of_this_machine_are():
    assert machine.machine()
    with RankPool([2]) as pool:
        assert pool.run(of_rank, 2) == [1, 1]


@pytest.mark.parametrize("missing", ["BOOT", "NETWORK"])
def test_without_a_name_none_are(missing, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, missing, tmp_path / "none")
    assert machine.machine() == ""
    assert machine.count_machines([machine.machine()] * 2) == 0


def test_another_boot_or_network_is_another_machine(monkeypatch, tmp_path):
    names = [machine.machine()]
    monkeypatch.setattr(machine, "BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("another")
    names.append(machine.machine())
    monkeypatch.setattr(machine, "NETWORK", tmp_path / "net")
    (tmp_path / "net").symlink_to("net:[1]")
    names.append(machine.machine())
    for name in names:
        assert machine.count_machines([name, name]) == 1
    assert machine.count_machines([*names, *names]) == 3
