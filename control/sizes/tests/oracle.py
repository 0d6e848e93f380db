"""A second implementation of placement, written from Microsoft's rules and not from ours: answers a grid of questions.

  oracle.py TABLE    one line for each question and size:
                     os full trusted places generation temp_left vcpus memory today size = place taken temp nvme_disks nvme iops bps

Sizes are in GiB. A field is '-' if it is unknown; a size that holds nothing has the place '-' alone.
"""
import csv
import itertools
import sys
from fractions import Fraction

NAMES = {"cache": "CacheDisk", "temp": "ResourceDisk", "nvme": "NvmeDisk"}


def number(row, column):
    return Fraction(row[column]) if row[column] != "" else None


def nvme_disks(row):
    """The size of each disk; none are published for most sizes that have none."""
    return [number(row, "nvme_gib_each")] * int(row["nvme_disks"] or 0)


def boots(row, generation, trusted, vcpus, memory, today):
    generations = row["hyperv_generations"].split("|")
    if trusted and "2" not in generations:
        return False
    if generation != "-" and generation not in generations:
        return False
    if row["architecture"] == "arm64" or (row["retired"] and row["retired"] <= today):
        return False
    return int(row["vcpus_available"]) >= vcpus and number(row, "memory_gib") >= memory


def remaining(row, place, os, full, trusted):
    """What a machine on this place leaves: (taken, temp, [nvme]), or None if the place cannot be had."""
    temp, disks = number(row, "temp_gib"), nvme_disks(row)
    if place == "managed":
        return (0, temp, disks) if os <= 4095 and not full else None
    if row["ephemeral"] == "no" or NAMES[place] not in row["placements"].split("|") or os > 2040:
        return None
    # "VMs using trusted launch by default reserve 1 GiB"; "the available local storage is reduced by 2x the OS disk size".
    room = {"cache": number(row, "cache_gib"), "temp": temp, "nvme": sum(disks) if disks else None}[place]
    if room is None:
        return None
    if trusted:
        room -= 1
    if full:
        # "must be greater than (2 x OS disk size + 1 GiB)"
        if not room > 2 * os + 1 or row["full_caching"] != "yes" or int(row["vcpus"]) < 8:
            return None
        uses = 2 * os
    else:
        # "should be less than or equal"
        if os > room:
            return None
        uses = os
    uses += 1 if trusted else 0
    if place == "cache":
        return uses, temp, disks
    if place == "temp":
        return uses, temp - uses, disks
    # "the minimum number of disks required"
    whole = list(disks)
    taken = 0
    while taken < uses:
        taken += whole.pop()
    return taken, temp, whole


def rates(row, place, disks_before, disks_after):
    if place in ("cache", "temp"):
        return number(row, "cached_temp_iops"), number(row, "cached_temp_mbps")
    if place == "managed":
        return number(row, "uncached_iops"), number(row, "uncached_mbps")
    # "it provides the IOPS of NVMe disks being used"
    used = Fraction(disks_before - disks_after, disks_before)
    both = number(row, "nvme_read_iops"), number(row, "nvme_read_mbps")
    return tuple(value * used if value is not None else None for value in both)


def answer(row, question):
    os, full, trusted, places, generation, temp_left, vcpus, memory, today = question
    if not boots(row, generation, trusted, vcpus, memory, today):
        return "-"
    candidates = []
    for place in ("managed", "nvme", "temp", "cache"):
        if place not in places:
            continue
        after = remaining(row, place, os, full, trusted)
        if after is None:
            continue
        taken, temp, disks = after
        if temp_left > max(temp or 0, sum(disks)):
            continue
        iops, mbps = rates(row, place, len(nvme_disks(row)), len(disks))
        bps = mbps * 1_000_000 if mbps is not None else None
        figures = [taken, temp, len(disks), sum(disks), iops and int(iops), bps and int(bps)]
        candidates.append((places.index(place), place, figures))
    if not candidates:
        return "-"
    _, place, figures = min(candidates)
    return " ".join([place] + ["-" if figure is None else str(figure) for figure in figures])


def questions():
    grid = itertools.product(
        [1, 30, 31, 64, 74, 75, 110, 127, 128, 172, 256, 440, 2040, 2041, 4095, 4096],
        [False, True],
        [False, True],
        [["cache", "temp", "nvme", "managed"], ["cache", "temp", "nvme"], ["nvme", "temp", "cache"], ["temp"], ["managed", "cache"]],
        ["-", "1", "2"],
        [0, 30],
        [0],
        [0],
        ["2026-11-28"],
    )
    need = itertools.product(
        [127], [False, True], [False], [["cache", "temp", "nvme", "managed"]], ["-"], [0, 400], [2, 3, 8, 65], [0, 218, 219], ["2023-09-05", "2023-09-06", "2026-09-29", "2026-09-30"]
    )
    for question in itertools.chain(grid, need):
        os, full, trusted, places, generation = question[:5]
        # These two are refused as questions.
        if not (trusted and generation == "1") and not (full and places == ["managed"]):
            yield question


def main():
    with open(sys.argv[1], encoding="ascii") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    out = []
    for question in questions():
        os, full, trusted, places, *rest = question
        words = [str(os), str(int(full)), str(int(trusted)), ",".join(places)] + [str(word) for word in rest]
        asked = " ".join(words)
        out.extend(f"{asked} {row['size']} = {answer(row, question)}\n" for row in rows)
    sys.stdout.writelines(out)


main()
