"""Promise: the memory that is left is that of the tightest of machine, cgroups and the given limit."""

import mmap
import os

import pytest

from tritonrec.capacity import memory_left, resident_bytes

PAGE = os.sysconf("SC_PAGE_SIZE")
GIB = 1 << 30


def machine(root, cgroup="0::/", **files):
    """A file system in which a process of 7 pages sees what `files` say, by path with dots."""
    files = {
        "proc/meminfo": "MemTotal: 4194304 kB\nMemFree: 5 kB\nMemAvailable: 3145728 kB\nHugePages_Total: 0\n",
        "proc/self/statm": "900 7 3 1 0 2 0\n",
        "proc/self/cgroup": f"{cgroup}\n",
        **files,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(folder, limit, used, inactive, active=5):
    stat = f"anon 5\ninactive_file {inactive}\nactive_file {active}\nfile_mapped 6\n"
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}memory.stat": stat,
    }


def test_of_the_machine(tmp_path):
    room = memory_left(root=machine(tmp_path))
    assert (room.left, room.limit, room.of, room.own) == (3 * GIB, 4 * GIB, "the machine", False)


@pytest.mark.parametrize("pod", [2 * GIB, "max"])
def test_of_a_cgroup_and_those_above_it(tmp_path, pod):
    inner = version_2("pod/main/", 5 * GIB // 2, 3 * GIB // 2, GIB // 4)
    outer = version_2("pod/", pod, 3 * GIB // 2, 0)
    room = memory_left(root=machine(tmp_path, "0::/pod/main", **inner, **outer))
    if pod == "max":
        assert (room.left, room.limit) == (5 * GIB // 4, 5 * GIB // 2)
        assert room.of.endswith("pod/main")
    else:
        assert (room.left, room.limit) == (GIB // 2, 2 * GIB)
        assert room.of.endswith("pod")


def test_of_a_container_that_sees_its_cgroup_as_the_root(tmp_path):
    here = version_2("", GIB, GIB // 8, 1, active=10)
    assert memory_left(root=machine(tmp_path, "0::/kubepods/abc", **here)).left == GIB - GIB // 8 + 1 + 4


@pytest.mark.parametrize("limit", [GIB, 9223372036854771712])
def test_of_version_1(tmp_path, limit):
    folder = "sys/fs/cgroup/memory/docker/"
    totals = "inactive_file 9", "active_file 70", "mapped_file 20"
    files = {
        f"{folder}memory.limit_in_bytes": f"{limit}\n",
        f"{folder}memory.usage_in_bytes": f"{GIB // 2}\n",
        f"{folder}memory.stat": "inactive_file 3\n" + "".join(f"total_{each}\n" for each in totals),
    }
    room = memory_left(root=machine(tmp_path, "4:memory:/docker\n9:name=systemd:/\n0::/", **files))
    assert room.left == (GIB // 2 + 59 if limit == GIB else 3 * GIB)


def test_of_this_process(tmp_path):
    root = machine(tmp_path)
    assert resident_bytes(root) == 7 * PAGE
    room = memory_left(10 * PAGE, root)
    assert (room.left, room.limit, room.own) == (3 * PAGE, 10 * PAGE, True)


def test_a_kernel_that_does_not_tell(tmp_path):
    with pytest.raises(OSError, match="does not tell"):
        memory_left(root=machine(tmp_path, **{"proc/meminfo": "MemTotal: 4194304 kB\n"}))


def test_here():
    assert 0 < memory_left().left <= memory_left().limit
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # of its own: other tests leave freed memory behind
        block[::PAGE] = bytes(len(block) // PAGE)
        assert resident_bytes() - before > 48 << 20
