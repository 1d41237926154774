"""PyTorch memory snapshots read: from a file nobody vouches for to lifetimes that can be packed.

``unpickle`` → plain containers, ``read`` → segments and events, ``replay`` → lifetimes of blocks and what does not add
up, ``figures`` → what a report says, ``problem`` → an allocation problem. None of it imports torch.
"""

from planner.snapshot.figures import DeviceFigures, device_figures
from planner.snapshot.problem import as_problem, write_problem
from planner.snapshot.read import read_snapshot
from planner.snapshot.records import DeviceRecord, Event, Finding, Segment, SegmentBlock, Snapshot
from planner.snapshot.replay import Block, Replay, replay

__all__ = [
    "Block",
    "DeviceFigures",
    "DeviceRecord",
    "Event",
    "Finding",
    "Replay",
    "Segment",
    "SegmentBlock",
    "Snapshot",
    "as_problem",
    "device_figures",
    "read_snapshot",
    "replay",
    "write_problem",
]
